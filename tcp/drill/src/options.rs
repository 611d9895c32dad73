//! The options of a script: packetdrill's own by their names, and the stack's in `--so_flags`, whose
//! text packetdrill passes unchanged to the shared object.

use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use siw_net::IpCidr;
use siw_tcp::{CongestionControl, Keepalive, StackConfig};

/// The stack under test, its peer, and the tolerance of comparisons.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The stack's configuration, except addresses and gateway.
    pub config: StackConfig,
    /// The stack's address.
    pub local: IpAddr,
    /// The peer's address.
    pub remote: IpAddr,
    /// The port used by `bind` with `...`.
    pub bind_port: u16,
    /// The peer's port used by `connect` with `...`.
    pub connect_port: u16,
    /// Maximum deviation of a packet, or of the end of a blocking call, from its time.
    pub tolerance: Duration,
    /// Maximum number of unacknowledged bytes that a socket accepts.
    pub send_buffer: u32,
    /// The last segment of each `write` carries PSH.
    pub push: bool,
}

/// The stack's Ethernet address.
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// The gateway's address is the stack's with these bits flipped.
const GATEWAY_BITS: u8 = 0xfe;

impl Setup {
    /// Creates a setup with packetdrill's default addresses, IPv6 or IPv4, and timers for wide-area
    /// networks (RTO of at least 200 ms, ACKs delayed by 40 ms), which are far enough apart to be told
    /// apart.
    pub fn new(v6: bool) -> Setup {
        let (local, remote) = if v6 {
            ("fd3d:fa7b:d17d::1", "2001:db8::1")
        } else {
            ("192.168.0.1", "192.0.2.1")
        };
        let parse = |address: &str| IpAddr::from_str(address).expect("an address");
        let mut config = StackConfig::new(MAC, vec![]);
        config.tcp.rto_min = Duration::from_millis(200);
        config.tcp.delayed_ack = Duration::from_millis(40);
        config.tcp.max_connections = 1024;
        // The same sequence numbers and limits in each run.
        config.tcp.isn_key = [0x5a; 16];
        config.tcp.hash_key = [0xa5; 16];
        Setup {
            config,
            local: parse(local),
            remote: parse(remote),
            bind_port: 8080,
            connect_port: 8080,
            tolerance: Duration::from_millis(1),
            send_buffer: 16 << 20,
            push: true,
        }
    }

    /// Returns the stack's configuration with its address and a gateway, behind which the peer is.
    pub(crate) fn stack_config(&self) -> StackConfig {
        let mut config = self.config.clone();
        match self.local {
            IpAddr::V4(address) => {
                let gateway = address.to_bits() ^ u32::from(GATEWAY_BITS);
                config.net.addresses = vec![IpCidr::new(self.local, 24)];
                config.net.gateway_v4 = Some(gateway.into());
            }
            IpAddr::V6(address) => {
                config.net.addresses = vec![IpCidr::new(self.local, 64)];
                config.net.gateway_v6 = Some((address.to_bits() ^ u128::from(GATEWAY_BITS)).into());
            }
        }
        config
    }

    /// Applies one `--name=value` of a script, except `ip_version`.
    pub(crate) fn set_option(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "local_ip" => self.local = parse_value(name, value)?,
            "remote_ip" => self.remote = parse_value(name, value)?,
            "bind_port" => self.bind_port = parse_value(name, value)?,
            "connect_port" => self.connect_port = parse_value(name, value)?,
            "tolerance_usecs" => self.tolerance = parse_micros(name, value)?,
            "mtu" => self.config.net.mtu = parse_value(name, value)?,
            "so_flags" => apply_engine_flags(self, value)?,
            // Options for a kernel, an interface or the speed of the clock have no effect here.
            "gateway_ip" | "netmask_ip" | "so_filename" | "speed" | "non_fatal" | "verbose"
            | "init_scripts" => {}
            _ => return Err(format!("--{name} is not an option of siw-drill")),
        }
        if self.local.is_ipv4() != self.remote.is_ipv4() {
            return Err("local_ip and remote_ip are of different families".into());
        }
        Ok(())
    }
}

/// Parses the value of an option.
fn parse_value<T: FromStr>(name: &str, value: &str) -> Result<T, String> {
    value
        .parse()
        .map_err(|_| format!("{name}={value}: not a value of that option"))
}

fn parse_micros(name: &str, value: &str) -> Result<Duration, String> {
    parse_value(name, value).map(Duration::from_micros)
}

fn parse_switch(name: &str, value: &str) -> Result<bool, String> {
    match value {
        "1" | "on" => Ok(true),
        "0" | "off" => Ok(false),
        _ => Err(format!("{name}={value}: the value must be 1 or 0")),
    }
}

/// Keepalive defaults if only some of its options are set: RFC 1122 section 4.2.3.6 requires at least
/// two hours of idle time; interval and probes are Linux's.
pub(crate) const KEEPALIVE: Keepalive = Keepalive {
    idle: Duration::from_secs(7200),
    interval: Duration::from_secs(75),
    probes: 9,
};

/// Returns the congestion control for a value of `TCP_CONGESTION`.
pub(crate) fn congestion_by_name(name: &str) -> Option<CongestionControl> {
    match name {
        "cubic" => Some(CongestionControl::Cubic),
        "reno" | "newreno" => Some(CongestionControl::NewReno),
        "dctcp" => Some(CongestionControl::Dctcp),
        _ => None,
    }
}

/// Applies the flags of `--so_flags`: `name=value` pairs separated by blanks. Names are fields of
/// [`StackConfig`] (times in microseconds, named `..._usecs`), `local_ip`, `send_buffer`, `push`, and
/// `mss`: the MSS that SYNs offer, which sets the MTU for the family of `local_ip`. An error names the
/// wrong flag and the allowed values.
pub fn apply_engine_flags(setup: &mut Setup, flags: &str) -> Result<(), String> {
    for flag in flags.split_whitespace() {
        let Some((name, value)) = flag.split_once('=') else {
            return Err(format!("{flag:?} is not of the form name=value"));
        };
        let config = &mut setup.config;
        let keepalive = || config.tcp.keepalive.unwrap_or(KEEPALIVE);
        match name {
            "local_ip" => setup.local = parse_value(name, value)?,
            "congestion" => {
                config.tcp.congestion = congestion_by_name(value)
                    .ok_or_else(|| format!("congestion={value}: cubic, newreno or dctcp"))?;
            }
            "mtu" => config.net.mtu = parse_value(name, value)?,
            "mss" => {
                let mss: u16 = parse_value(name, value)?;
                let headers = if setup.local.is_ipv4() { 40 } else { 60 };
                config.net.mtu = mss
                    .checked_add(headers)
                    .ok_or_else(|| format!("mss={value}: larger than any packet"))?;
            }
            "window_scale" => config.tcp.window_scale = parse_value(name, value)?,
            "rto_min_usecs" => config.tcp.rto_min = parse_micros(name, value)?,
            "rto_max_usecs" => config.tcp.rto_max = parse_micros(name, value)?,
            "rto_initial_usecs" => config.tcp.rto_initial = parse_micros(name, value)?,
            "delayed_ack_usecs" => config.tcp.delayed_ack = parse_micros(name, value)?,
            "user_timeout_usecs" => {
                config.tcp.user_timeout = parse_micros(name, value)?;
                config.tcp.orphan_timeout = config.tcp.user_timeout;
            }
            "time_wait_usecs" => config.tcp.time_wait = parse_micros(name, value)?,
            "keepalive_idle_usecs" => {
                config.tcp.keepalive = Some(Keepalive {
                    idle: parse_micros(name, value)?,
                    ..keepalive()
                });
            }
            "keepalive_interval_usecs" => {
                config.tcp.keepalive = Some(Keepalive {
                    interval: parse_micros(name, value)?,
                    ..keepalive()
                });
            }
            "keepalive_probes" => {
                config.tcp.keepalive = Some(Keepalive {
                    probes: parse_value(name, value)?,
                    ..keepalive()
                });
            }
            "recv_window" => config.tcp.recv_window = parse_value(name, value)?,
            "send_buffer" => setup.send_buffer = parse_value(name, value)?,
            "push" => setup.push = parse_switch(name, value)?,
            "max_recv_buffers" => config.tcp.max_recv_buffers = parse_value(name, value)?,
            "max_connections" => config.tcp.max_connections = parse_value(name, value)?,
            "initial_window" => config.tcp.initial_window = parse_value(name, value)?,
            "syn_retries" => config.tcp.syn_retries = parse_value(name, value)?,
            "control_rate" => config.net.control_rate = parse_value(name, value)?,
            "timestamps" => config.tcp.timestamps = parse_switch(name, value)?,
            "sack" => config.tcp.sack = parse_switch(name, value)?,
            "ecn" => config.tcp.ecn = parse_switch(name, value)?,
            "syn_cookies" => config.tcp.syn_cookies = parse_switch(name, value)?,
            _ => return Err(format!("{name:?} is not a setting of the stack")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_flags_configure_the_stack_or_are_refused() {
        let mut s = Setup::new(false);
        apply_engine_flags(
            &mut s,
            "congestion=dctcp rto_min_usecs=5000 keepalive_probes=2 mss=1460 window_scale=8",
        )
        .unwrap();
        assert_eq!(s.config.tcp.congestion, CongestionControl::Dctcp);
        assert_eq!(s.config.tcp.rto_min, Duration::from_millis(5));
        assert_eq!(s.config.tcp.keepalive.unwrap().probes, 2);
        assert_eq!((s.config.net.mtu, s.config.tcp.window_scale), (1500, 8));
        for (bad, says) in [
            ("congestion=vegas", "cubic"),
            ("mss", "name=value"),
            ("mss=65535", "larger"),
            ("speed=9", "not a setting"),
            ("sack=maybe", "1 or 0"),
            ("mtu=big", "mtu=big"),
        ] {
            assert!(
                apply_engine_flags(&mut s, bad).unwrap_err().contains(says),
                "{bad}"
            );
        }
        assert!(s.set_option("remote_ip", "2001:db8::1").is_err());
        assert!(s.set_option("wine", "1").is_err());
    }
}
