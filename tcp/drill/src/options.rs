//! What a script's option lines set: packetdrill's own names, and the engine's through
//! `--so_flags`, which packetdrill hands to the shared object as they are.

use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use siw_tcp::{Congestion, IpCidr, Keepalive, StackConfig};

/// A device, its peer, and how the two are tested.
#[derive(Clone, Debug)]
pub struct Setup {
    pub config: StackConfig,
    pub local: IpAddr,
    pub remote: IpAddr,
    /// `bind` with `...` binds here.
    pub bind_port: u16,
    /// `connect` with `...` goes there.
    pub connect_port: u16,
    /// How far a packet or the end of a call may be from its time.
    pub tolerance: Duration,
    /// Bytes that a socket takes before they are acknowledged.
    pub send_buffer: u32,
    /// The last byte of each `write` ends a message (PSH).
    pub push: bool,
}

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

impl Setup {
    /// packetdrill's addresses; the engine's settings for wide areas, whose timers are far apart.
    pub fn new(v6: bool) -> Setup {
        let (local, remote) = if v6 {
            ("fd3d:fa7b:d17d::1", "2001:db8::1")
        } else {
            ("192.168.0.1", "192.0.2.1")
        };
        let parse = |a: &str| IpAddr::from_str(a).expect("an address");
        let mut config = StackConfig::new(MAC, vec![]);
        config.rto_min = Duration::from_millis(200);
        config.delayed_ack = Duration::from_millis(40);
        config.max_connections = 1024;
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

    /// The stack's configuration: one address, and a gateway to everywhere else.
    pub(crate) fn stack_config(&self) -> StackConfig {
        let mut c = self.config.clone();
        match self.local {
            IpAddr::V4(a) => {
                let gateway = a.to_bits() ^ 0xfe;
                c.addrs = vec![IpCidr::new(self.local, 24)];
                c.gateway_v4 = Some(gateway.into());
            }
            IpAddr::V6(a) => {
                c.addrs = vec![IpCidr::new(self.local, 64)];
                c.gateway_v6 = Some((a.to_bits() ^ 0xfe).into());
            }
        }
        c
    }

    /// One `--name=value` of a script, `ip_version` excepted.
    pub(crate) fn option(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "local_ip" => self.local = value_of(name, value)?,
            "remote_ip" => self.remote = value_of(name, value)?,
            "bind_port" => self.bind_port = value_of(name, value)?,
            "connect_port" => self.connect_port = value_of(name, value)?,
            "tolerance_usecs" => self.tolerance = micros(name, value)?,
            "mtu" => self.config.mtu = value_of(name, value)?,
            "so_flags" => engine_flags(self, value)?,
            // Of no meaning without a kernel, an interface or a clock.
            "gateway_ip" | "netmask_ip" | "so_filename" | "speed" | "non_fatal" | "verbose"
            | "init_scripts" => {}
            _ => return Err(format!("--{name} is no option known here")),
        }
        if self.local.is_ipv4() != self.remote.is_ipv4() {
            return Err("local_ip and remote_ip are of different families".into());
        }
        Ok(())
    }
}

fn value_of<T: FromStr>(name: &str, value: &str) -> Result<T, String> {
    value
        .parse()
        .map_err(|_| format!("{name}={value}: not a value of that option"))
}

fn micros(name: &str, value: &str) -> Result<Duration, String> {
    value_of(name, value).map(Duration::from_micros)
}

fn switch(name: &str, value: &str) -> Result<bool, String> {
    match value {
        "1" | "on" => Ok(true),
        "0" | "off" => Ok(false),
        _ => Err(format!("{name}={value}: say 1 or 0")),
    }
}

/// RFC 1122 section 4.2.3.6: what keepalive means when only parts of it are set.
pub(crate) const KEEPALIVE: Keepalive = Keepalive {
    idle: Duration::from_secs(7200),
    interval: Duration::from_secs(75),
    probes: 9,
};

/// By the names that `TCP_CONGESTION` has.
pub(crate) fn congestion(name: &str) -> Option<Congestion> {
    match name {
        "cubic" => Some(Congestion::Cubic),
        "reno" | "newreno" => Some(Congestion::NewReno),
        "dctcp" => Some(Congestion::Dctcp),
        _ => None,
    }
}

/// `name=value` pairs between blanks: fields of [`StackConfig`], times in microseconds.
pub fn engine_flags(setup: &mut Setup, flags: &str) -> Result<(), String> {
    for flag in flags.split_whitespace() {
        let Some((name, v)) = flag.split_once('=') else {
            return Err(format!("{flag:?} is not of the form name=value"));
        };
        let c = &mut setup.config;
        let keepalive = || c.keepalive.unwrap_or(KEEPALIVE);
        match name {
            "local_ip" => setup.local = value_of(name, v)?,
            "congestion" => {
                c.congestion = congestion(v)
                    .ok_or_else(|| format!("congestion={v}: cubic, newreno or dctcp"))?;
            }
            "mtu" => c.mtu = value_of(name, v)?,
            "rto_min_usecs" => c.rto_min = micros(name, v)?,
            "rto_max_usecs" => c.rto_max = micros(name, v)?,
            "rto_initial_usecs" => c.rto_initial = micros(name, v)?,
            "delayed_ack_usecs" => c.delayed_ack = micros(name, v)?,
            "user_timeout_usecs" => c.user_timeout = micros(name, v)?,
            "time_wait_usecs" => c.time_wait = micros(name, v)?,
            "keepalive_idle_usecs" => {
                c.keepalive = Some(Keepalive {
                    idle: micros(name, v)?,
                    ..keepalive()
                });
            }
            "keepalive_interval_usecs" => {
                c.keepalive = Some(Keepalive {
                    interval: micros(name, v)?,
                    ..keepalive()
                });
            }
            "keepalive_probes" => {
                c.keepalive = Some(Keepalive {
                    probes: value_of(name, v)?,
                    ..keepalive()
                });
            }
            "recv_window" => c.recv_window = value_of(name, v)?,
            "send_buffer" => setup.send_buffer = value_of(name, v)?,
            "push" => setup.push = switch(name, v)?,
            "max_recv_buffers" => c.max_recv_buffers = value_of(name, v)?,
            "max_connections" => c.max_connections = value_of(name, v)?,
            "initial_window" => c.initial_window = value_of(name, v)?,
            "syn_retries" => c.syn_retries = value_of(name, v)?,
            "control_rate" => c.control_rate = value_of(name, v)?,
            "timestamps" => c.timestamps = switch(name, v)?,
            "sack" => c.sack = switch(name, v)?,
            "ecn" => c.ecn = switch(name, v)?,
            "syn_cookies" => c.syn_cookies = switch(name, v)?,
            _ => return Err(format!("{name:?} is no setting of the engine")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_flags_set_the_stack_and_nonsense_is_refused() {
        let mut s = Setup::new(false);
        engine_flags(
            &mut s,
            "congestion=dctcp rto_min_usecs=5000 keepalive_probes=2",
        )
        .unwrap();
        assert_eq!(s.config.congestion, Congestion::Dctcp);
        assert_eq!(s.config.rto_min, Duration::from_millis(5));
        assert_eq!(s.config.keepalive.unwrap().probes, 2);
        for (bad, says) in [
            ("congestion=vegas", "cubic"),
            ("mss", "name=value"),
            ("speed=9", "no setting"),
            ("sack=maybe", "1 or 0"),
            ("mtu=big", "mtu=big"),
        ] {
            assert!(
                engine_flags(&mut s, bad).unwrap_err().contains(says),
                "{bad}"
            );
        }
        assert!(s.option("remote_ip", "2001:db8::1").is_err());
        assert!(s.option("wine", "1").is_err());
    }
}
