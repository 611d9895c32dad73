//! Services of the endpoint: the small services of RFC 862 to 864, and others for testing TCP
//! implementations.

use std::str::FromStr;

/// Service on a connection, whichever side opened it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StreamService {
    /// Discards received data; closes after the peer (RFC 863).
    Discard,
    /// Echoes received data; closes after the peer, when all of it is echoed (RFC 862).
    Echo,
    /// Sends the pattern, then closes; discards received data.
    Source,
    /// Compares received data with the pattern; closes after the peer.
    Check,
    /// Source and check together.
    Exchange,
    /// Resets the connection: at once if it opened it, otherwise at the first byte.
    Reset,
}

impl StreamService {
    const NAMES: [(&'static str, StreamService); 6] = [
        ("discard", StreamService::Discard),
        ("echo", StreamService::Echo),
        ("source", StreamService::Source),
        ("check", StreamService::Check),
        ("exchange", StreamService::Exchange),
        ("reset", StreamService::Reset),
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        Self::NAMES
            .iter()
            .find(|named| named.1 == self)
            .map_or("", |named| named.0)
    }

    /// Returns true if the service sends data of its own.
    pub fn sends(self) -> bool {
        matches!(self, StreamService::Source | StreamService::Exchange)
    }

    /// Returns true if the service compares received data.
    pub fn checks(self) -> bool {
        matches!(self, StreamService::Check | StreamService::Exchange)
    }
}

impl FromStr for StreamService {
    type Err = String;

    fn from_str(text: &str) -> Result<StreamService, String> {
        let names: Vec<_> = Self::NAMES.iter().map(|named| named.0).collect();
        Self::NAMES
            .iter()
            .find(|named| named.0 == text)
            .map(|named| named.1)
            .ok_or_else(|| {
                format!(
                    "unknown service {text:?}: write one of {}",
                    names.join(", ")
                )
            })
    }
}

/// A service and its port: `echo:7`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceOffer {
    /// Service on its connections.
    pub service: StreamService,
    /// The TCP port.
    pub port: u16,
}

impl FromStr for ServiceOffer {
    type Err = String;

    fn from_str(text: &str) -> Result<ServiceOffer, String> {
        let (service, port) = text
            .split_once(':')
            .ok_or_else(|| format!("{text:?}: write SERVICE:PORT, for example echo:7"))?;
        Ok(ServiceOffer {
            service: service.parse()?,
            port: port
                .parse()
                .ok()
                .filter(|port| *port != 0)
                .ok_or_else(|| format!("port {port:?}: write a number from 1 to 65535"))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_is_a_service_and_a_port_and_errors_say_so() {
        let o: ServiceOffer = "echo:7".parse().unwrap();
        assert_eq!((o.service, o.port), (StreamService::Echo, 7));
        let e = |s: &str| s.parse::<ServiceOffer>().unwrap_err();
        assert!(e("echo").contains("SERVICE:PORT"));
        assert!(e("ecko:7").contains("discard, echo"));
        assert!(e("echo:0").contains("1 to 65535"));
        assert!(e("echo:70000").contains("1 to 65535"));
    }
}
