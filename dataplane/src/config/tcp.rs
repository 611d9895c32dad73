//! `[device.tcp]` and `[device.neighbours]`: TCP settings and the neighbour table of a device.

use std::net::IpAddr;
use std::ops::Range;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use siw_net::NeighbourConfig;
use siw_tcp::{CongestionControl, Keepalive, TcpConfig};
use toml::Spanned;

use super::{ByteSize, MacAddress};

/// Congestion control by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CongestionName {
    /// RFC 9438.
    Cubic,
    /// RFC 5681 with RFC 6582.
    Newreno,
    /// RFC 8257, for fabrics whose switches mark packets; enables ECN.
    Dctcp,
}

/// `[device.tcp]`
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TcpSettings {
    /// Congestion control.
    pub congestion: CongestionName,
    /// Offer and accept Explicit Congestion Notification (RFC 3168).
    pub ecn: bool,
    /// Offer timestamps (RFC 7323), for an RTT sample per segment and for PAWS.
    pub timestamps: bool,
    /// Offer selective acknowledgements (RFC 2018).
    pub sack: bool,
    /// Minimum retransmission timeout in milliseconds (below the 1 s of RFC 6298, for fabrics).
    #[schemars(with = "u32")]
    pub rto_min_ms: Spanned<u32>,
    /// Retransmission timeout in milliseconds before the first round trip is measured (RFC 6298,
    /// section 2.1).
    #[schemars(with = "u32")]
    pub rto_initial_ms: Spanned<u32>,
    /// Receive window of one connection, at least 128 KiB: an FPDU of any length has to fit. Absent:
    /// 1 MiB, and 256 KiB on a pair, where the round-trip time is short and a larger window only
    /// overflows the processor's cache.
    #[schemars(with = "Option<ByteSize>")]
    pub receive_window: Option<Spanned<ByteSize>>,
    /// Segments that a new connection may send at once (RFC 6928). Absent: 10, and 256 on a pair.
    #[schemars(with = "Option<u32>")]
    pub initial_window: Option<Spanned<u32>>,
    /// Delayed acknowledgement in microseconds, below 500 000.
    #[schemars(with = "u32")]
    pub delayed_ack_us: Spanned<u32>,
    /// Microseconds that the ACK of a message waits for the application's answer, on connections
    /// whose application usually answers within that time; below 1000; 0: the ACK does not wait.
    #[schemars(with = "u32")]
    pub answer_wait_us: Spanned<u32>,
    /// Seconds that data may stay unacknowledged before the connection ends (RFC 9293
    /// section 3.8.3).
    #[schemars(with = "u32")]
    pub user_timeout_s: Spanned<u32>,
    /// Seconds until a released connection is aborted if its peer has not acknowledged all data,
    /// even if the peer still responds.
    #[schemars(with = "u32")]
    pub orphan_timeout_s: Spanned<u32>,
    /// Seconds of silence before a keepalive probe; absent: none.
    #[schemars(with = "Option<u32>")]
    pub keepalive_s: Option<Spanned<u32>>,
    /// Seconds between keepalive probes; absent: `keepalive_s`, but at most 5.
    #[schemars(with = "Option<u32>")]
    pub keepalive_interval_s: Option<Spanned<u32>>,
    /// Unanswered probes before the connection ends.
    #[schemars(with = "u8")]
    pub keepalive_probes: Spanned<u8>,
    /// Retransmissions of a SYN or SYN-ACK.
    pub syn_retries: u8,
    /// Answer SYNs beyond a listener's backlog with SYN cookies (RFC 4987).
    pub syn_cookies: bool,
    /// Seconds in TIME-WAIT.
    pub time_wait_s: u32,
}

impl Default for TcpSettings {
    /// The defaults of [`TcpConfig`], which is the only place that has them. Those that depend
    /// on the device are absent.
    fn default() -> Self {
        let stack = TcpConfig::default();
        TcpSettings {
            congestion: match stack.congestion {
                CongestionControl::Cubic => CongestionName::Cubic,
                CongestionControl::NewReno => CongestionName::Newreno,
                CongestionControl::Dctcp => CongestionName::Dctcp,
            },
            ecn: stack.ecn,
            timestamps: stack.timestamps,
            sack: stack.sack,
            rto_min_ms: default_value(stack.rto_min.as_millis() as u32),
            rto_initial_ms: default_value(stack.rto_initial.as_millis() as u32),
            receive_window: None,
            initial_window: None,
            delayed_ack_us: default_value(stack.delayed_ack.as_micros() as u32),
            answer_wait_us: default_value(stack.answer_wait.as_micros() as u32),
            user_timeout_s: default_value(stack.user_timeout.as_secs() as u32),
            orphan_timeout_s: default_value(stack.orphan_timeout.as_secs() as u32),
            keepalive_s: None,
            keepalive_interval_s: None,
            keepalive_probes: default_value(5),
            syn_retries: stack.syn_retries,
            syn_cookies: stack.syn_cookies,
            time_wait_s: stack.time_wait.as_secs() as u32,
        }
    }
}

/// `[device.neighbours]`: the neighbour table for ARP and NDP.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NeighbourSettings {
    /// Maximum number of entries, resolved or not.
    #[schemars(with = "u32")]
    pub entries: Spanned<u32>,
    /// Seconds that a resolved address is used before it is verified again.
    #[schemars(with = "u32")]
    pub reachable_s: Spanned<u32>,
    /// Milliseconds between solicitations.
    #[schemars(with = "u32")]
    pub retransmit_ms: Spanned<u32>,
    /// Unanswered solicitations before a neighbour counts as unreachable.
    #[schemars(with = "u8")]
    pub probes: Spanned<u8>,
    /// Maximum number of unresolved entries requested by one client; absent: an eighth of
    /// `entries`.
    #[schemars(with = "Option<u32>")]
    pub unresolved_per_client: Option<Spanned<u32>>,
    /// The same for all clients of one user; absent: a quarter of `entries`.
    #[schemars(with = "Option<u32>")]
    pub unresolved_per_user: Option<Spanned<u32>>,
    /// Neighbours with a fixed Ethernet address, for which neither ARP nor NDP is used.
    #[schemars(with = "Vec<PermanentNeighbour>")]
    pub permanent: Spanned<Vec<PermanentNeighbour>>,
}

/// A neighbour with a fixed Ethernet address: `{ address = "10.77.0.9", mac = "02:00:00:00:00:09" }`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PermanentNeighbour {
    /// Address on one of the device's networks.
    pub address: IpAddr,
    /// Ethernet address.
    pub mac: MacAddress,
}

impl Default for NeighbourSettings {
    /// The defaults of [`NeighbourConfig`].
    fn default() -> Self {
        let table = NeighbourConfig::default();
        NeighbourSettings {
            entries: default_value(table.max_entries as u32),
            reachable_s: default_value(table.reachable.as_secs() as u32),
            retransmit_ms: default_value(table.retransmit.as_millis() as u32),
            probes: default_value(table.probes),
            unresolved_per_client: None,
            unresolved_per_user: None,
            permanent: default_value(Vec::new()),
        }
    }
}

/// Wraps a default value, which has no location in the file.
fn default_value<T>(value: T) -> Spanned<T> {
    Spanned::new(0..0, value)
}

fn seconds_of(setting: &Spanned<u32>) -> Duration {
    Duration::from_secs((*setting.get_ref()).into())
}

fn millis_of(ms: &Spanned<u32>) -> Duration {
    Duration::from_millis((*ms.get_ref()).into())
}

type InvalidSetting = (Range<usize>, String);

fn check_range<T: Copy + Into<u64>>(
    name: &str,
    value: &Spanned<T>,
    allowed: std::ops::RangeInclusive<u64>,
) -> Result<(), InvalidSetting> {
    let number = (*value.get_ref()).into();
    if allowed.contains(&number) {
        return Ok(());
    }
    let (least, most) = allowed.into_inner();
    let why = format!("{name} {number}: {least} to {most} are allowed");
    Err((value.span(), why))
}

/// Shortest receive window in bytes. A peer may send an FPDU of 66,060 octets (RFC 5044 sections 4.1 and
/// 4.3: 65,535 of ULPDU, length, pad, CRC and Markers), which is consumed as a whole. TCP opens the window
/// by segments (RFC 9293 section 3.8.6.2.2), so that the FPDU has to fit beside one.
pub(crate) const LEAST_WINDOW: u32 = 128 << 10;

impl TcpSettings {
    pub(super) fn check_ranges(&self) -> Result<(), InvalidSetting> {
        check_range("rto_min_ms", &self.rto_min_ms, 1..=60_000)?;
        check_range("rto_initial_ms", &self.rto_initial_ms, 1..=60_000)?;
        check_range("delayed_ack_us", &self.delayed_ack_us, 0..=499_999)?;
        check_range("answer_wait_us", &self.answer_wait_us, 0..=999)?;
        check_range("user_timeout_s", &self.user_timeout_s, 1..=86_400)?;
        check_range("orphan_timeout_s", &self.orphan_timeout_s, 1..=86_400)?;
        check_range("keepalive_probes", &self.keepalive_probes, 1..=255)?;
        for (name, value) in [
            ("keepalive_s", &self.keepalive_s),
            ("keepalive_interval_s", &self.keepalive_interval_s),
        ] {
            if let Some(setting) = value {
                check_range(name, setting, 1..=86_400)?;
            }
        }
        if let Some(segments) = &self.initial_window {
            check_range("initial_window", segments, 1..=65_535)?;
        }
        if let Some(window_size) = &self.receive_window
            && !(u64::from(LEAST_WINDOW)..=1 << 30).contains(&window_size.get_ref().0)
        {
            let why = format!(
                "receive_window {}: \"128 KiB\" to \"1 GiB\" are allowed; the window has to hold an FPDU",
                window_size.get_ref().0
            );
            return Err((window_size.span(), why));
        }
        Ok(())
    }

    /// Writes the settings into a stack's configuration. `window` (bytes) and `initial_window`
    /// (segments) apply where the file has no value.
    pub(crate) fn apply_to_stack(&self, window: u32, initial_window: u32, config: &mut TcpConfig) {
        config.congestion = match self.congestion {
            CongestionName::Cubic => CongestionControl::Cubic,
            CongestionName::Newreno => CongestionControl::NewReno,
            CongestionName::Dctcp => CongestionControl::Dctcp,
        };
        config.ecn = self.ecn;
        config.timestamps = self.timestamps;
        config.sack = self.sack;
        config.rto_min = millis_of(&self.rto_min_ms);
        config.rto_initial = millis_of(&self.rto_initial_ms);
        config.recv_window = self.receive_window.as_ref().map_or(window, |window_size| {
            u32::try_from(window_size.get_ref().0).unwrap_or(1 << 30)
        });
        if self.receive_window.is_some() {
            config.recv_window_doublings = 0;
        }
        config.initial_window = self
            .initial_window
            .as_ref()
            .map_or(initial_window, |segments| *segments.get_ref());
        config.delayed_ack = Duration::from_micros((*self.delayed_ack_us.get_ref()).into());
        config.answer_wait = Duration::from_micros((*self.answer_wait_us.get_ref()).into());
        config.user_timeout = seconds_of(&self.user_timeout_s);
        config.orphan_timeout = seconds_of(&self.orphan_timeout_s);
        config.keepalive = self.keepalive_s.as_ref().map(|idle| Keepalive {
            idle: seconds_of(idle),
            interval: self
                .keepalive_interval_s
                .as_ref()
                .map_or(seconds_of(idle).min(Duration::from_secs(5)), seconds_of),
            probes: *self.keepalive_probes.get_ref(),
        });
        config.syn_retries = self.syn_retries;
        config.syn_cookies = self.syn_cookies;
        config.time_wait = Duration::from_secs(self.time_wait_s.into());
    }
}

impl NeighbourSettings {
    pub(super) fn check_ranges(&self) -> Result<(), InvalidSetting> {
        check_range("entries", &self.entries, 8..=1 << 20)?;
        check_range("reachable_s", &self.reachable_s, 1..=86_400)?;
        check_range("retransmit_ms", &self.retransmit_ms, 10..=60_000)?;
        check_range("probes", &self.probes, 1..=255)?;
        let entries = (*self.entries.get_ref()).into();
        for (name, value) in [
            ("unresolved_per_client", &self.unresolved_per_client),
            ("unresolved_per_user", &self.unresolved_per_user),
        ] {
            if let Some(setting) = value {
                check_range(name, setting, 1..=entries)?;
            }
        }
        Ok(())
    }

    pub(crate) fn neighbour_config(&self) -> NeighbourConfig {
        let shares = NeighbourConfig::with_entries(*self.entries.get_ref() as usize);
        let limit = |setting: &Option<Spanned<u32>>, share: usize| {
            setting
                .as_ref()
                .map_or(share, |limit| *limit.get_ref() as usize)
        };
        NeighbourConfig {
            reachable: seconds_of(&self.reachable_s),
            retransmit: millis_of(&self.retransmit_ms),
            probes: *self.probes.get_ref(),
            max_unresolved_per_client: limit(
                &self.unresolved_per_client,
                shares.max_unresolved_per_client,
            ),
            max_unresolved_per_user: limit(
                &self.unresolved_per_user,
                shares.max_unresolved_per_user,
            ),
            ..shares
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack(text: &str) -> TcpConfig {
        let s: TcpSettings = toml::from_str(text).unwrap();
        s.check_ranges().unwrap();
        let mut c = TcpConfig::default();
        s.apply_to_stack(1 << 20, 10, &mut c);
        c
    }

    #[test]
    fn every_setting_reaches_the_stack() {
        let c = stack(
            "congestion = \"newreno\"\necn = true\ntimestamps = false\nsack = false\n\
             rto_min_ms = 200\nrto_initial_ms = 3000\nreceive_window = \"128 KiB\"\n\
             initial_window = 4\ndelayed_ack_us = 40000\nuser_timeout_s = 30\n\
             orphan_timeout_s = 40\n\
             keepalive_s = 60\nkeepalive_interval_s = 7\nkeepalive_probes = 9\n\
             syn_retries = 2\nsyn_cookies = false\ntime_wait_s = 1",
        );
        assert_eq!(c.congestion, CongestionControl::NewReno);
        assert!(c.ecn && !c.timestamps && !c.sack && !c.syn_cookies);
        let s = Duration::from_secs;
        assert_eq!((c.rto_min, c.rto_initial), (s(1) / 5, s(3)));
        assert_eq!((c.recv_window, c.recv_window_doublings), (131_072, 0));
        assert_eq!(c.initial_window, 4);
        assert_eq!((c.delayed_ack, c.user_timeout), (s(1) / 25, s(30)));
        assert_eq!(c.orphan_timeout, s(40));
        let (idle, interval, probes) = (s(60), s(7), 9);
        let keepalive = Keepalive {
            idle,
            interval,
            probes,
        };
        assert_eq!(c.keepalive, Some(keepalive));
        assert_eq!((c.syn_retries, c.time_wait), (2, s(1)));
        let n: NeighbourSettings = toml::from_str("entries = 9\nreachable_s = 2").unwrap();
        assert_eq!(
            (
                n.neighbour_config().max_entries,
                n.neighbour_config().reachable
            ),
            (9, s(2))
        );
    }

    #[test]
    fn the_defaults_of_the_stack_are_whole_numbers_of_the_units_of_the_file() {
        let configured = stack("");
        // Each configuration draws its own secrets; the window is set by the caller.
        let expected = TcpConfig {
            recv_window: configured.recv_window,
            isn_key: configured.isn_key,
            hash_key: configured.hash_key,
            ..TcpConfig::default()
        };
        assert_eq!(format!("{configured:?}"), format!("{expected:?}"));
        let n = NeighbourSettings::default().neighbour_config();
        assert_eq!(n, NeighbourConfig::default());
    }

    #[test]
    fn what_the_stack_would_refuse_is_told_with_what_is_allowed() {
        for (bad, says) in [
            ("rto_min_ms = 0", "rto_min_ms 0: 1 to 60000"),
            ("rto_min_ms = 60001", "1 to 60000"),
            ("delayed_ack_us = 500000", "0 to 499999"),
            ("answer_wait_us = 1000", "0 to 999"),
            (
                "receive_window = \"127 KiB\"",
                "\"128 KiB\" to \"1 GiB\" are allowed; the window has to hold an FPDU",
            ),
            ("receive_window = \"2 GiB\"", "\"128 KiB\" to \"1 GiB\""),
            ("keepalive_s = 0", "keepalive_s 0: 1 to"),
            ("keepalive_probes = 0", "1 to 255"),
            ("user_timeout_s = 0", "1 to 86400"),
            ("orphan_timeout_s = 0", "1 to 86400"),
            ("initial_window = 0", "1 to 65535"),
        ] {
            let s: TcpSettings = toml::from_str(bad).unwrap();
            let (place, why) = s.check_ranges().unwrap_err();
            assert!(why.contains(says), "{bad}: {why}");
            assert_eq!(place.end, bad.len(), "{bad}");
        }
        let n: NeighbourSettings = toml::from_str("entries = 1").unwrap();
        assert!(n.check_ranges().unwrap_err().1.contains("8 to"));
        let n: NeighbourSettings =
            toml::from_str("entries = 64\nunresolved_per_user = 65").unwrap();
        let why = n.check_ranges().unwrap_err().1;
        assert!(why.contains("unresolved_per_user 65: 1 to 64"), "{why}");
    }
}
