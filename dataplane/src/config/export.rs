//! A configuration as a file: the text from which a daemon starts with the same settings.

use toml::{Table, Value};

use super::{Config, DeviceConfig};

/// Keys of a device that are written whatever they are.
const DEVICE_KEYS: [&str; 2] = ["name", "addresses"];

impl Config {
    /// The file with all settings that differ from their defaults.
    ///
    /// # Errors
    /// A setting has no form in TOML.
    pub fn to_toml(&self) -> Result<String, Box<dyn std::error::Error>> {
        let mut table = Table::try_from(self)?;
        let plain: Config = toml::from_str("device = []")?;
        let plain_device: DeviceConfig = toml::from_str("name = \"siw\"\naddresses = []")?;
        let plain_device = Table::try_from(&plain_device)?;
        let devices = table.get_mut("device").and_then(Value::as_array_mut);
        for device in devices.into_iter().flatten() {
            if let Value::Table(device) = device {
                remove_defaults(device, &plain_device, &DEVICE_KEYS);
            }
        }
        remove_defaults(&mut table, &Table::try_from(&plain)?, &["device"]);
        Ok(toml::to_string(&table)?)
    }
}

/// Removes the settings that have their default, and tables without any other, except for `kept` keys.
fn remove_defaults(table: &mut Table, plain: &Table, kept: &[&str]) {
    table.retain(|key, value| {
        if kept.contains(&key) {
            return true;
        }
        match (value, plain.get(key)) {
            (Value::Table(inner), Some(Value::Table(plain))) => {
                remove_defaults(inner, plain, &[]);
                !inner.is_empty()
            }
            (value, plain) => plain != Some(value),
        }
    });
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn parse(text: &str) -> Config {
        Config::parse_text(Path::new("x.toml"), text).unwrap()
    }

    #[test]
    fn a_written_configuration_has_the_same_settings_and_names_no_defaults() {
        let files = [
            include_str!("../../../config/reference.toml"),
            include_str!("../../../config/loopback.toml"),
            include_str!("../../../config/tap.toml"),
            include_str!("../../../config/af_packet.toml"),
            include_str!("../../../config/af_xdp.toml"),
            include_str!("../../../config/vhost-user.toml"),
            include_str!("../../../config/pci.toml"),
            include_str!("../../../config/shared-nic.toml"),
        ];
        for file in files {
            let config = parse(file);
            let text = config.to_toml().unwrap();
            assert_eq!(parse(&text).settings(), config.settings(), "{text}");
            let order = |config: &Config| -> Vec<String> {
                let devices = config.devices.iter();
                let names = devices.map(|device| device.get_ref().name.get_ref().0.clone());
                names.collect()
            };
            assert_eq!(order(&parse(&text)), order(&config));
            assert!(!text.contains("reattach"), "{text}");
        }
    }

    #[test]
    fn settings_of_all_kinds_are_written() {
        let text = r#"
[limits]
clients = 7
memory_per_user = "1 GiB"
[control]
mode = "0666"
operators = "adm"
[capture]
file = "/tmp/x.pcapng"
[[device]]
name = "siw0"
devargs = "net_tap0,iface=x"
mac = "02:00:00:00:00:01"
addresses = ["10.77.0.1/24", "fd77::1/64"]
gateway = "10.77.0.254"
gateway6 = "fe80::1"
routes = [{ to = "10.80.0.0/16", via = "10.77.0.253" }]
vlan = 100
[device.mpa]
preset = "siw"
[device.tcp]
receive_window = "1 MiB"
keepalive_s = 60
[device.neighbours]
permanent = [{ address = "10.77.0.9", mac = "02:00:00:00:00:09" }]
"#;
        let config = parse(text);
        let written = config.to_toml().unwrap();
        assert_eq!(parse(&written).settings(), config.settings(), "{written}");
    }
}
