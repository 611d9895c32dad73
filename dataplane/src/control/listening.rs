//! Listeners and the connection requests that came to them. Lookups take the same time however
//! many there are.

use std::collections::HashMap;
use std::net::IpAddr;

use crate::ids::{ClientId, CmChannelId, CmListenerId, ConnectRequestId};
use crate::worker::messages::RequestId;

/// A listener, on all workers of its devices.
pub struct ClientListener {
    pub client: ClientId,
    pub cm_channel: CmChannelId,
    pub cookie: u64,
    /// Device indices.
    pub devices: Vec<usize>,
    pub local: Option<IpAddr>,
    pub port: u16,
}

/// All listeners, by number and by port.
#[derive(Default)]
pub struct Listeners {
    all: HashMap<CmListenerId, ClientListener>,
    by_port: HashMap<u16, Vec<CmListenerId>>,
}

impl Listeners {
    /// Adds a listener.
    pub fn insert(&mut self, number: CmListenerId, listener: ClientListener) {
        self.by_port.entry(listener.port).or_default().push(number);
        self.all.insert(number, listener);
    }

    /// Takes a listener out.
    pub fn remove(&mut self, number: CmListenerId) -> Option<ClientListener> {
        let listener = self.all.remove(&number)?;
        if let Some(same) = self.by_port.get_mut(&listener.port) {
            same.retain(|other| *other != number);
            if same.is_empty() {
                self.by_port.remove(&listener.port);
            }
        }
        Some(listener)
    }

    /// A listener by its number.
    pub fn get(&self, number: CmListenerId) -> Option<&ClientListener> {
        self.all.get(&number)
    }

    /// All listeners, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (CmListenerId, &ClientListener)> {
        self.all.iter().map(|(other, listener)| (*other, listener))
    }

    /// How many listeners there are.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether a listener has the port on one of these devices, at this address or at all of them.
    pub fn is_port_taken(&self, devices: &[usize], local: Option<IpAddr>, port: u16) -> bool {
        let same = self.by_port.get(&port).into_iter().flatten();
        same.filter_map(|other| self.all.get(other))
            .any(|listener| {
                listener
                    .devices
                    .iter()
                    .any(|device| devices.contains(device))
                    && (listener.local.is_none() || local.is_none() || listener.local == local)
            })
    }
}

/// Requests that wait for an answer, by the number that the client knows and by the worker's.
#[derive(Default)]
pub struct ConnectRequests {
    all: HashMap<ConnectRequestId, (RequestId, CmListenerId)>,
    by_worker_request: HashMap<RequestId, ConnectRequestId>,
}

impl ConnectRequests {
    /// Adds a request under both of its names.
    pub fn insert(&mut self, number: ConnectRequestId, request: RequestId, listener: CmListenerId) {
        self.by_worker_request.insert(request, number);
        self.all.insert(number, (request, listener));
    }

    /// The worker's request, and the listener.
    pub fn get(&self, number: ConnectRequestId) -> Option<(RequestId, CmListenerId)> {
        self.all.get(&number).copied()
    }

    /// Takes a request out by the client's number.
    pub fn remove(&mut self, number: ConnectRequestId) -> Option<(RequestId, CmListenerId)> {
        let (request, listener) = self.all.remove(&number)?;
        self.by_worker_request.remove(&request);
        Some((request, listener))
    }

    /// Takes out what the worker says is gone; its number.
    pub fn remove_by_worker_request(&mut self, request: RequestId) -> Option<ConnectRequestId> {
        let number = self.by_worker_request.remove(&request)?;
        self.all.remove(&number);
        Some(number)
    }

    /// Forgets those of a listener that ended.
    pub fn forget_listener(&mut self, listener: CmListenerId) {
        self.all.retain(|_, (_, of)| *of != listener);
        let all = &self.all;
        self.by_worker_request
            .retain(|_, number| all.contains_key(number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_taken_where_its_address_and_a_device_meet_and_free_again_afterwards() {
        let mut all = Listeners::default();
        let one: Option<IpAddr> = Some([10, 0, 0, 1].into());
        let other = Some([10, 0, 0, 2].into());
        let listener = |devices: &[usize], local| ClientListener {
            client: ClientId(1),
            cm_channel: CmChannelId(0),
            cookie: 0,
            devices: devices.to_vec(),
            local,
            port: 7,
        };
        all.insert(CmListenerId(1), listener(&[0, 1], one));
        all.insert(CmListenerId(2), listener(&[0], other));
        assert!(all.is_port_taken(&[1], None, 7) && all.is_port_taken(&[0], one, 7));
        assert!(!all.is_port_taken(&[1], other, 7) && !all.is_port_taken(&[2], one, 7));
        assert!(!all.is_port_taken(&[0], one, 8));
        assert!(all.remove(CmListenerId(1)).is_some() && all.remove(CmListenerId(1)).is_none());
        assert!(!all.is_port_taken(&[1], None, 7) && all.is_port_taken(&[0], None, 7));
        assert_eq!((all.len(), all.iter().count()), (1, 1));
    }

    #[test]
    fn a_request_goes_by_either_name() {
        let mut r = ConnectRequests::default();
        for n in 1..5 {
            let worker_request = RequestId(u64::from(n) + 100);
            r.insert(ConnectRequestId(n), worker_request, CmListenerId(n % 2));
        }
        assert_eq!(
            r.remove_by_worker_request(RequestId(101)),
            Some(ConnectRequestId(1))
        );
        assert_eq!(r.remove_by_worker_request(RequestId(101)), None);
        assert_eq!(
            r.remove(ConnectRequestId(2)),
            Some((RequestId(102), CmListenerId(0)))
        );
        assert_eq!(r.remove_by_worker_request(RequestId(102)), None);
        r.forget_listener(CmListenerId(1));
        assert_eq!(
            (
                r.get(ConnectRequestId(3)),
                r.remove_by_worker_request(RequestId(103))
            ),
            (None, None)
        );
        assert_eq!(
            r.get(ConnectRequestId(4)),
            Some((RequestId(104), CmListenerId(0)))
        );
    }
}
