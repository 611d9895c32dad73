//! The two endpoints of a `siw-perf` measurement.

use super::{TransferOptions, or_default};
use anyhow::{anyhow, bail};
use std::net::SocketAddr;

/// Location of the two ends of a measurement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PerfEndpoints {
    /// Both ends in this process, on these devices.
    Both {
        /// The initiator's device.
        from: String,
        /// The target's device.
        to: String,
    },
    /// The target, for an initiator in another process, listening at this address.
    Listen(SocketAddr),
    /// The initiator, connecting to a process that listens at `to`.
    Connect {
        /// Address of the target.
        to: SocketAddr,
        /// Device to connect from; `None`: the one that routes to `to`.
        from: Option<String>,
    },
}

impl TransferOptions {
    /// Endpoints that the options name, with the default devices. Several devices are measured one
    /// after the other. Never empty.
    pub fn endpoints(&self) -> anyhow::Result<Vec<PerfEndpoints>> {
        if let Some(address) = self.listen {
            return Ok(vec![PerfEndpoints::Listen(address)]);
        }
        if let Some(to) = self.connect {
            return match &self.from[..] {
                [] => Ok(vec![PerfEndpoints::Connect { to, from: None }]),
                [from] => Ok(vec![PerfEndpoints::Connect {
                    to,
                    from: Some(from.clone()),
                }]),
                _ => Err(anyhow!(
                    "--from: the listening process answers one measurement; name one device"
                )),
            };
        }
        let from = or_default(&self.from, "siw0".to_owned());
        let to = or_default(&self.to, "siw1".to_owned());
        if from.len() != to.len() {
            bail!(
                "--from has {} devices and --to has {}: give equal numbers, with \
                 connected devices at the same position",
                from.len(),
                to.len()
            );
        }
        let pairs = from.into_iter().zip(to);
        Ok(pairs
            .map(|(from, to)| PerfEndpoints::Both { from, to })
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::parse;
    use super::*;

    #[test]
    fn ends_that_contradict_each_other_are_refused() {
        assert!(parse("siw-perf bw --listen 10.77.0.2 --connect 10.77.0.2").is_err());
        assert!(parse("siw-perf bw --listen 10.77.0.2 --to siw1").is_err());
    }

    #[test]
    fn devices_are_measured_pair_by_pair() {
        let ends_of = |line: &str| parse(line).unwrap().options.endpoints();
        let both = |from: &str, to: &str| PerfEndpoints::Both {
            from: from.into(),
            to: to.into(),
        };
        let ends = ends_of("siw-perf bw --from siw0,jumbo0 --to siw1,jumbo1").unwrap();
        assert_eq!(ends, [both("siw0", "siw1"), both("jumbo0", "jumbo1")]);
        let error = ends_of("siw-perf bw --from siw0,jumbo0")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("--from has 2 devices and --to has 1"),
            "{error}"
        );
        let error = ends_of("siw-perf lat --connect 10.77.0.2 --from siw0,siw1")
            .unwrap_err()
            .to_string();
        assert!(error.contains("name one device"), "{error}");
    }

    #[test]
    fn addresses_may_leave_the_port_out() {
        let a = parse("siw-perf lat --connect fd77::2").unwrap();
        let to = "[fd77::2]:7175".parse().unwrap();
        assert_eq!(
            a.options.endpoints().unwrap(),
            vec![PerfEndpoints::Connect { to, from: None }]
        );
        let error = parse("siw-perf lat --connect somewhere")
            .unwrap_err()
            .to_string();
        assert!(error.contains("10.77.0.2:7175"), "{error}");
    }
}
