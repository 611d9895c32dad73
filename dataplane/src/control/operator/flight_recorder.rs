//! The flight recorder: the latest events of each queue pair, kept after its end, for those who ask why it
//! ended. The control thread records the requests that name a queue pair and the workers' reports about
//! its connection. Frames and work requests are not recorded, so the data path does nothing for it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Serialize, Serializer};
use siw_heap::ALLOCATION;
use siw_shm::control::messages as m;
use siw_shm::control::{QpState, Request};

use crate::ids::{ClientId, Qpn};
use crate::worker::messages::ConnectionSnapshot;

/// Ended queue pairs that are kept, and the heap of their recordings in bytes.
const MOST_ENDED: usize = 1024;
const MOST_ENDED_BYTES: usize = 16 << 20;
/// The same of one user, so that a user with many does not displace those of others.
const MOST_ENDED_OF_USER: usize = 256;
const MOST_ENDED_BYTES_OF_USER: usize = 4 << 20;
/// Faults of plans that are counted by themselves for each queue pair.
const MOST_FAULTS: usize = 16;
/// Longest description of an event, in bytes.
const MOST_DETAIL: usize = 200;

/// An event of a queue pair. Successive equal events are one, with their number.
#[derive(Debug, PartialEq, Serialize)]
pub(in crate::control) struct RecordedEvent {
    /// Time of the last of them, seconds since 1970.
    pub time: f64,
    /// Name of a request, or of a report of a worker.
    pub event: &'static str,
    pub count: u32,
    /// A request that the daemon refused, for the reason in `detail`.
    pub refused: bool,
    pub detail: Option<Box<str>>,
}

impl RecordedEvent {
    fn heap_bytes(&self) -> usize {
        let detail = self.detail.as_ref();
        detail.map_or(0, |detail| detail.len() + ALLOCATION)
    }
}

/// An event to record.
#[derive(Debug, Clone, Copy)]
pub(in crate::control) struct NewEvent<'a> {
    /// Name of a request, or of a report of a worker.
    pub name: &'static str,
    pub detail: Option<&'a str>,
    /// The event is a request that was refused.
    pub refused: bool,
}

/// A fault that plans have injected into the connections of a queue pair.
#[derive(Debug, Serialize)]
pub(in crate::control) struct InjectedFault {
    /// The fault, its plan and its kind.
    #[serde(serialize_with = "serialize_text")]
    pub fault: Arc<str>,
    pub count: u64,
    /// Time of the last one, seconds since 1970.
    pub time: f64,
}

fn serialize_text<S: Serializer>(text: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(text)
}

/// Owner of a queue pair, as the recorder names it.
#[derive(Debug, Clone)]
pub(in crate::control) struct Owner {
    pub client: ClientId,
    pub pid: u32,
    pub user: u32,
    pub name: Box<str>,
}

/// Events of a queue pair.
pub(in crate::control) struct Recording {
    pub qpn: Qpn,
    pub owner: Owner,
    pub created: f64,
    /// Time at which the queue pair was destroyed.
    pub ended: Option<f64>,
    /// The latest events, the oldest first.
    pub events: VecDeque<RecordedEvent>,
    /// Number of older events, which are not kept.
    pub dropped: u64,
    /// Faults of plans, at most [`MOST_FAULTS`].
    pub injected: Vec<InjectedFault>,
    /// State of the latest connection at its end.
    pub last_connection: Option<Box<ConnectionSnapshot>>,
    detail_bytes: usize,
}

impl Recording {
    fn new(qpn: Qpn, owner: Owner) -> Recording {
        Recording {
            qpn,
            owner,
            created: now(),
            ended: None,
            events: VecDeque::new(),
            dropped: 0,
            injected: Vec::new(),
            last_connection: None,
            detail_bytes: 0,
        }
    }

    /// Adds an event; of more than `most` the oldest goes.
    fn add(&mut self, most: usize, event: &NewEvent<'_>) {
        let NewEvent { name, refused, .. } = *event;
        let detail = event.detail.map(shorten);
        if let Some(last) = self.events.back_mut()
            && (last.event, last.refused, last.detail.as_deref()) == (name, refused, detail)
        {
            last.time = now();
            last.count = last.count.saturating_add(1);
            return;
        }
        while self.events.len() >= most.max(1) {
            if let Some(oldest) = self.events.pop_front() {
                self.detail_bytes -= oldest.heap_bytes();
                self.dropped += 1;
            }
        }
        let event = RecordedEvent {
            time: now(),
            event: name,
            count: 1,
            refused,
            detail: detail.map(Into::into),
        };
        self.detail_bytes += event.heap_bytes();
        self.events.push_back(event);
    }

    /// Heap of the recording besides its entry in a map.
    fn heap_bytes(&self) -> usize {
        let snapshot = self.last_connection.as_ref();
        self.events.capacity() * size_of::<RecordedEvent>()
            + self.detail_bytes
            + self.injected.capacity() * size_of::<InjectedFault>()
            + self.owner.name.len()
            + snapshot.map_or(0, |_| size_of::<ConnectionSnapshot>() + ALLOCATION)
            + 2 * ALLOCATION
    }
}

/// The beginning of a long description.
fn shorten(detail: &str) -> &str {
    let mut end = detail.len().min(MOST_DETAIL);
    while !detail.is_char_boundary(end) {
        end -= 1;
    }
    &detail[..end]
}

/// Seconds since 1970.
fn now() -> f64 {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    time.map_or(0.0, |time| time.as_micros() as f64 / 1e6)
}

/// Ended recordings of one user, the oldest first.
#[derive(Default)]
struct OfUser {
    numbers: VecDeque<u64>,
    bytes: usize,
}

/// Recordings of all queue pairs.
#[derive(Default)]
pub(in crate::control) struct FlightRecorder {
    live: BTreeMap<Qpn, Recording>,
    /// Those of destroyed queue pairs, in the order of their ends.
    ended: BTreeMap<u64, Recording>,
    users: HashMap<u32, OfUser>,
    bytes: usize,
    last: u64,
}

impl FlightRecorder {
    /// Begins the recording of a new queue pair. Returns its heap in bytes.
    pub fn begin(&mut self, qpn: Qpn, owner: Owner) -> usize {
        let recording = Recording::new(qpn, owner);
        let bytes = recording.heap_bytes();
        self.live.insert(qpn, recording);
        bytes
    }

    /// Changes the recording of a queue pair. Returns its client, and its heap before and after.
    fn change(
        &mut self,
        qpn: Qpn,
        change: impl FnOnce(&mut Recording),
    ) -> Option<(ClientId, usize, usize)> {
        let recording = self.live.get_mut(&qpn)?;
        let before = recording.heap_bytes();
        change(recording);
        Some((recording.owner.client, before, recording.heap_bytes()))
    }

    /// Records an event; of more than `most` the oldest goes. Returns the client of the queue pair, and
    /// the heap of the recording before and after.
    pub fn record(
        &mut self,
        qpn: Qpn,
        most: usize,
        event: &NewEvent<'_>,
    ) -> Option<(ClientId, usize, usize)> {
        self.change(qpn, |recording| recording.add(most, event))
    }

    /// Returns true if a queue pair that is recorded has not had this fault of a plan yet, and has room for it.
    pub fn is_new_fault(&self, qpn: Qpn, fault: &Arc<str>) -> bool {
        self.live.get(&qpn).is_some_and(|recording| {
            let injected = &recording.injected;
            injected.len() < MOST_FAULTS && !injected.iter().any(|known| known.fault == *fault)
        })
    }

    /// Returns true if plans have injected faults into the connections of a queue pair.
    pub fn has_faults(&self, qpn: Qpn) -> bool {
        let recording = self.live.get(&qpn);
        recording.is_some_and(|recording| !recording.injected.is_empty())
    }

    /// Counts a fault that a plan has injected; returns as [`Self::record`].
    pub fn record_fault(
        &mut self,
        qpn: Qpn,
        fault: &Arc<str>,
        count: u64,
    ) -> Option<(ClientId, usize, usize)> {
        self.change(qpn, |recording| {
            let injected = &mut recording.injected;
            if let Some(known) = injected.iter_mut().find(|known| known.fault == *fault) {
                known.count += count;
                known.time = now();
            } else if injected.len() < MOST_FAULTS {
                injected.push(InjectedFault {
                    fault: fault.clone(),
                    count,
                    time: now(),
                });
            }
        })
    }

    /// Keeps the state of a connection at its end; returns as [`Self::record`].
    pub fn keep_connection(
        &mut self,
        qpn: Qpn,
        connection: Box<ConnectionSnapshot>,
    ) -> Option<(ClientId, usize, usize)> {
        self.change(qpn, |recording| {
            recording.last_connection = Some(connection);
        })
    }

    /// Ends the recording of a destroyed queue pair, and keeps it. Returns its client and the heap that
    /// the client is no longer charged for.
    pub fn end(&mut self, qpn: Qpn, most: usize, reason: &str) -> Option<(ClientId, usize)> {
        let mut recording = self.live.remove(&qpn)?;
        let (client, user) = (recording.owner.client, recording.owner.user);
        let charged = recording.heap_bytes();
        let destroyed = NewEvent {
            name: "destroyed",
            detail: Some(reason),
            refused: false,
        };
        recording.add(most, &destroyed);
        recording.ended = Some(now());
        recording.events.shrink_to_fit();
        let bytes = recording.heap_bytes() + size_of::<Recording>();
        self.last += 1;
        self.bytes += bytes;
        self.ended.insert(self.last, recording);
        let of_user = self.users.entry(user).or_default();
        of_user.numbers.push_back(self.last);
        of_user.bytes += bytes;
        while let Some(of_user) = self.users.get(&user)
            && (of_user.numbers.len() > MOST_ENDED_OF_USER
                || of_user.bytes > MOST_ENDED_BYTES_OF_USER)
        {
            self.drop_oldest_of(user);
        }
        while self.ended.len() > MOST_ENDED || self.bytes > MOST_ENDED_BYTES {
            let oldest = self.ended.values().next();
            let Some(user) = oldest.map(|recording| recording.owner.user) else {
                break;
            };
            self.drop_oldest_of(user);
        }
        Some((client, charged))
    }

    /// Removes the oldest ended recording of a user.
    fn drop_oldest_of(&mut self, user: u32) {
        let Some(of_user) = self.users.get_mut(&user) else {
            return;
        };
        let oldest = of_user.numbers.pop_front();
        if let Some(recording) = oldest.and_then(|number| self.ended.remove(&number)) {
            let bytes = recording.heap_bytes() + size_of::<Recording>();
            of_user.bytes -= bytes;
            self.bytes -= bytes;
        }
        if of_user.numbers.is_empty() {
            self.users.remove(&user);
        }
    }

    /// The recording of a queue pair with this number, of a user that `sees` selects: of the present one,
    /// or of the last one that ended.
    pub fn find(&self, qpn: Qpn, sees: impl Fn(u32) -> bool) -> Option<&Recording> {
        let live = self.live.get(&qpn).into_iter();
        let ended = self.ended.values().rev();
        let mut named = live.chain(ended).filter(|recording| recording.qpn == qpn);
        named.find(|recording| sees(recording.owner.user))
    }
}

/// The queue pair that a request changes, and a description of the change.
pub(in crate::control) fn named_queue_pair(request: &Request) -> Option<(Qpn, Option<String>)> {
    let text = |address: m::Addr| {
        let address = address.to_socket_addr();
        address.map_or("no address".to_owned(), |address| address.to_string())
    };
    Some(match request {
        Request::ModifyQp(request) if request.flags == m::MODIFY_ACCESS => {
            (Qpn(request.qp_num), Some("access of the peer".to_owned()))
        }
        Request::ModifyQp(request) => {
            let state = QpState::from_u32(request.state);
            let name = state.map_or(String::new(), |state| format!("{state:?}").to_uppercase());
            (Qpn(request.qp_num), Some(format!("to {name}")))
        }
        Request::Connect(request) => (Qpn(request.qp_num), Some(text(request.dst))),
        Request::Accept(request) => (Qpn(request.qp_num), None),
        Request::PairQp(request) => {
            let peer = request.peer.to_socket_addr().map(|peer| peer.ip());
            let peer = peer.map_or("no address".to_owned(), |peer| peer.to_string());
            let with = format!("queue pair {} of {peer}", request.peer_qp_num);
            (Qpn(request.qp_num), Some(with))
        }
        Request::StartDatagrams(request) => (Qpn(request.qp_num), None),
        Request::Disconnect(request) => (Qpn(request.qp_num), None),
        Request::DestroyQp(request) => (Qpn(request.qp_num), None),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(detail: &str) -> NewEvent<'_> {
        NewEvent {
            name: "event",
            detail: Some(detail),
            refused: false,
        }
    }

    fn owner(user: u32) -> Owner {
        Owner {
            client: ClientId(1),
            pid: 1,
            user,
            name: "test".into(),
        }
    }

    #[test]
    fn the_latest_events_are_kept_after_the_end() {
        let mut recorder = FlightRecorder::default();
        let mut charged = recorder.begin(Qpn(7), owner(1));
        for number in 0..100 {
            let detail = format!("number {number}");
            for _ in 0..3 {
                let (_, before, after) = recorder.record(Qpn(7), 16, &event(&detail)).unwrap();
                assert_eq!(before, charged);
                charged = after;
            }
        }
        assert_eq!(
            recorder.end(Qpn(7), 16, "gone"),
            Some((ClientId(1), charged))
        );
        let kept = recorder.find(Qpn(7), |user| user == 1).unwrap();
        assert_eq!((kept.events.len(), kept.dropped), (16, 85));
        let (first, last) = (&kept.events[0], &kept.events[15]);
        assert_eq!(
            (first.detail.as_deref(), first.count),
            (Some("number 85"), 3)
        );
        assert_eq!(
            (last.event, last.detail.as_deref()),
            ("destroyed", Some("gone"))
        );
        assert!(recorder.find(Qpn(7), |user| user == 2).is_none());
        // Long descriptions are cut between letters.
        recorder.begin(Qpn(8), owner(1));
        recorder.record(Qpn(8), 16, &event(&"ü".repeat(1000)));
        let long = &recorder.find(Qpn(8), |_| true).unwrap().events[0];
        assert_eq!(long.detail.as_ref().unwrap().len(), MOST_DETAIL);
    }

    #[test]
    fn a_user_with_many_recordings_displaces_only_its_own() {
        let mut recorder = FlightRecorder::default();
        recorder.begin(Qpn(1), owner(7));
        recorder.end(Qpn(1), 16, "gone");
        for number in 2..5000 {
            recorder.begin(Qpn(number), owner(8));
            recorder.end(Qpn(number), 16, "gone");
        }
        assert!(recorder.find(Qpn(1), |_| true).is_some());
        assert_eq!(recorder.ended.len(), 1 + MOST_ENDED_OF_USER);
        for user in 100..200 {
            for number in 0..50 {
                recorder.begin(Qpn(number), owner(user));
                recorder.end(Qpn(number), 16, "gone");
            }
        }
        assert_eq!(recorder.ended.len(), MOST_ENDED);
        let kept: usize = recorder.users.values().map(|user| user.numbers.len()).sum();
        assert_eq!(kept, MOST_ENDED);
        let bytes: usize = recorder.users.values().map(|user| user.bytes).sum();
        assert_eq!(bytes, recorder.bytes);
    }
}
