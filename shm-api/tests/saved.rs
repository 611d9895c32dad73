//! Mappings and rings that are saved, forgotten and restored, as in a live upgrade.

#[path = "common/successor.rs"]
mod successor;

use rustix::fd::{AsRawFd, OwnedFd};
use serde::{Deserialize, Serialize};
use siw_shm::control::event_stream;
use siw_shm::saved::{AdoptError, KeptResources, Restoring, Saving};
use siw_shm::shared_memory::PageSize;
use siw_shm::*;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use successor::{save, succeed};

fn new_memory(len: usize) -> Arc<SharedMemory> {
    Arc::new(SharedMemory::create_memfd("saved", len, PageSize::Normal).unwrap())
}

/// A mapping of the same file, as a client has it.
fn map_for_client(memory: &SharedMemory) -> Arc<SharedMemory> {
    let fd = memory.memfd().unwrap().try_clone_to_owned().unwrap();
    Arc::new(SharedMemory::map_fd(fd, memory.len()).unwrap())
}

#[derive(Serialize, Deserialize)]
struct Shared {
    #[serde(with = "siw_shm::saved")]
    memories: Vec<Arc<SharedMemory>>,
    #[serde(with = "siw_shm::saved")]
    alone: Option<SharedMemory>,
    #[serde(with = "siw_shm::saved")]
    weak: Weak<SharedMemory>,
    #[serde(with = "siw_shm::saved")]
    gone: Weak<SharedMemory>,
    #[serde(with = "siw_shm::saved")]
    channels: Vec<Arc<OwnedFd>>,
    #[serde(with = "siw_shm::saved")]
    file: OwnedFd,
}

#[test]
fn what_was_shared_is_shared_again() {
    let (one, other) = (new_memory(4096), new_memory(8192));
    one.set_io_address(0x7000);
    let client = map_for_client(&one);
    one.own_pages().unwrap();
    let (writer, reader) = event_stream().unwrap();
    let (channel, file) = (Arc::new(writer), std::fs::File::open("/dev/null").unwrap());
    let numbers = (channel.as_raw_fd(), file.as_raw_fd());
    let state = Shared {
        weak: Arc::downgrade(&other),
        gone: Weak::new(),
        alone: Some(SharedMemory::create_read_only_for_others("alone", 1).unwrap()),
        memories: vec![one.clone(), other, one],
        channels: vec![channel.clone(), channel],
        file: file.into(),
    };
    let address = state.memories[0].start_address();
    let (bytes, kept) = save(&state);
    assert_eq!((kept.ranges().len(), kept.descriptors().len()), (3, 5));
    assert!(kept.ranges().contains(&(address..address + 4096)));
    assert!(kept.descriptors().contains(&numbers.0) && kept.descriptors().contains(&numbers.1));
    assert!(bytes.len() < 40, "memories are numbers: {bytes:?}");
    let state = succeed(state);
    let [one, other, again] = &state.memories[..] else {
        panic!("three memories");
    };
    assert!(Arc::ptr_eq(one, again) && !Arc::ptr_eq(one, other));
    assert!(Arc::ptr_eq(&state.weak.upgrade().unwrap(), other));
    assert!(state.gone.upgrade().is_none());
    assert!(Arc::ptr_eq(&state.channels[0], &state.channels[1]));
    let after = (state.channels[0].as_raw_fd(), state.file.as_raw_fd());
    assert_eq!(after, numbers);
    // The mapping is the same one, and writable although its file is sealed.
    assert_eq!((one.start_address(), one.len()), (address, 4096));
    assert_eq!(one.io_address(), 0x7000);
    assert!(SharedMemory::map_fd(one.memfd().unwrap().try_clone_to_owned().unwrap(), 1).is_err());
    one.write(5, b"still there").unwrap();
    let mut read = [0; 11];
    client.read(5, &mut read).unwrap();
    assert_eq!(&read, b"still there");
    rustix::io::write(&*state.channels[0], &[1; 8]).unwrap();
    assert_eq!(rustix::io::read(&reader, &mut [0; 16]), Ok(8));
}

/// In a process of its own: threads of other tests would map and open something else in its place.
#[test]
fn the_last_owner_unmaps_and_closes() {
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "helper_that_drops_what_it_adopted", "--ignored"])
        .status();
    assert!(status.unwrap().success());
}

#[test]
#[ignore = "the process of the test above"]
fn helper_that_drops_what_it_adopted() {
    let state = Shared {
        memories: vec![new_memory(4096)],
        alone: Some(SharedMemory::new_anonymous(4096).unwrap()),
        weak: Weak::new(),
        gone: Weak::new(),
        channels: Vec::new(),
        file: std::fs::File::open("/dev/null").unwrap().into(),
    };
    let (_, kept) = save(&state);
    drop(succeed(state));
    // SAFETY: fails, since nothing of it is there.
    let adopted = unsafe { Restoring::adopt(&kept) };
    assert!(matches!(adopted, Err(AdoptError::Mapping { .. })));
    for number in kept.descriptors() {
        // SAFETY: only asks for flags.
        let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
        assert!(
            rustix::io::fcntl_getfd(borrowed).is_err(),
            "{number} is closed"
        );
    }
}

#[test]
fn nothing_is_saved_or_restored_outside_of_a_scope() {
    let state = Shared {
        memories: vec![new_memory(4096)],
        alone: None,
        weak: Weak::new(),
        gone: Weak::new(),
        channels: Vec::new(),
        file: std::fs::File::open("/dev/null").unwrap().into(),
    };
    assert!(postcard::to_stdvec(&state).is_err());
    let (bytes, _) = save(&state);
    assert!(postcard::from_bytes::<Shared>(&bytes).is_err());
    // A panic ends the scope, too.
    let mut saving = Saving::default();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        saving.run(|| panic!("in the scope"));
    }));
    assert!(panicked.is_err() && postcard::to_stdvec(&state).is_err());
}

#[test]
fn resources_that_are_not_there_are_refused() {
    let memory = new_memory(8192);
    let state = Shared {
        memories: vec![memory],
        alone: None,
        weak: Weak::new(),
        gone: Weak::new(),
        channels: Vec::new(),
        file: std::fs::File::open("/dev/null").unwrap().into(),
    };
    let (_, kept) = save(&state);
    let bytes = postcard::to_stdvec(&kept).unwrap();
    for len in 0..bytes.len() {
        assert!(postcard::from_bytes::<KeptResources>(&bytes[..len]).is_err());
    }
    let changed = |change: &dyn Fn(&mut serde_json::Value)| -> Result<(), AdoptError> {
        let mut value = serde_json::to_value(&kept).unwrap();
        change(&mut value);
        let kept: KeptResources = serde_json::from_value(value).unwrap();
        // SAFETY: fails, and takes nothing over then.
        unsafe { Restoring::adopt(&kept) }.map(drop)
    };
    let start = state.memories[0].start_address();
    for (field, value) in [
        ("address", start + 1),
        ("address", 0),
        ("address", usize::MAX & !4095),
    ] {
        let result = changed(&|kept| kept["mappings"][0][field] = value.into());
        assert!(
            matches!(result, Err(AdoptError::Mapping { .. })),
            "{field} {value:#x}"
        );
    }
    for len in [0, 1, 1 << 40, usize::MAX & !4095] {
        let result = changed(&|kept| kept["mappings"][0]["len"] = len.into());
        assert!(
            matches!(result, Err(AdoptError::Mapping { .. })),
            "{len:#x}"
        );
    }
    let result = changed(&|kept| {
        let first = kept["mappings"][0].clone();
        kept["mappings"].as_array_mut().unwrap().push(first);
    });
    assert!(matches!(result, Err(AdoptError::Mapping { .. })), "twice");
    for number in [-1, 1_000_000, state.file.as_raw_fd()] {
        let result = changed(&|kept| kept["mappings"][0]["descriptor"] = number.into());
        assert!(matches!(result, Err(AdoptError::Descriptor(refused)) if refused == number));
    }
}

/// Offsets of the rings in the memory of a [`Rig`].
const SQ: usize = 0;
const RQ: usize = 8 << 10;
const STATE: usize = 16 << 10;
const CQ: usize = 20 << 10;
const BELLS: usize = 32 << 10;
const SRQ: [usize; 2] = [36 << 10, 40 << 10];
const LEN: usize = 48 << 10;
/// Requests of a work queue, and entries of a completion queue.
const DEPTH: u32 = 8;

/// The daemon's ends of all rings.
#[derive(Serialize, Deserialize)]
struct Daemon {
    sq: SqConsumer,
    rq: RqConsumer,
    cq: CqProducer,
    bells: DoorbellConsumer,
    workers: [SrqConsumer; 2],
    #[serde(with = "siw_shm::saved")]
    ring: Arc<SrqRing>,
    #[serde(with = "siw_shm::saved")]
    low: Arc<LowWaterMark>,
    page: WorkerPage,
}

/// A client's ends of all rings.
struct Client {
    sq: SqProducer,
    rq: RqProducer,
    cq: CqConsumer,
    bells: DoorbellProducer,
    srq: SrqProducer,
    state: work_queue::SqWatch,
    next: u64,
}

fn new_rig() -> (Daemon, Client) {
    let memory = new_memory(LEN);
    let client = map_for_client(&memory);
    let (cq, srq) = (
        CqGeometry::new(DEPTH, 2).unwrap(),
        SrqGeometry::new(DEPTH, 4).unwrap(),
    );
    let slots = 4 * DEPTH;
    let (low, ring) = (
        Arc::<LowWaterMark>::default(),
        SrqRing::new(memory.clone(), SRQ[0], srq),
    );
    let ring = ring.unwrap();
    let sq = SqConsumer::new(memory.clone(), SQ, slots).unwrap();
    let daemon = Daemon {
        sq: sq.with_state_line(memory.clone(), STATE).unwrap(),
        rq: RqConsumer::new(memory.clone(), RQ, slots).unwrap(),
        cq: CqProducer::new(memory.clone(), CQ, cq, 1).unwrap(),
        bells: DoorbellConsumer::new(memory.clone(), BELLS, 16).unwrap(),
        workers: [0, 1].map(|_| SrqConsumer::new(ring.clone(), low.clone())),
        ring,
        low,
        page: WorkerPage::create_sealed(2).unwrap(),
    };
    let sq = SqProducer::new(client.clone(), SQ, slots, DEPTH).unwrap();
    let state = sq.new_watch(client.clone(), STATE).unwrap();
    let client = Client {
        sq,
        state,
        rq: RqProducer::new(client.clone(), RQ, slots, DEPTH).unwrap(),
        cq: CqConsumer::new(client.clone(), CQ, cq).unwrap(),
        bells: DoorbellProducer::new(client.clone(), BELLS, 16).unwrap(),
        srq: SrqProducer::new(client.clone(), SRQ[0], srq, DEPTH).unwrap(),
        next: 0,
    };
    (daemon, client)
}

/// A generator of pseudo-random numbers (xorshift).
struct Rng(u64);

impl Rng {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// One random step of a client or of the daemon; returns all that it observes.
fn take_step(daemon: &mut Daemon, client: &mut Client, rng: &mut Rng) -> String {
    let mut element = (SendWqe::new(), RecvWqe::new());
    let sges = vec![Sge::default(); rng.below(5) as usize];
    client.next += 1;
    let wr_id = client.next;
    match rng.below(11) {
        0 => {
            let pushed = client.sq.push(&SendWr::send(wr_id, SendData::Sges(&sges)));
            format!("sq {pushed:?} {}", client.sq.publish_posted())
        }
        1 => {
            let request = RecvWr { wr_id, sges: &sges };
            let pushed = client.rq.push(&request);
            client.rq.publish_posted();
            format!("rq {pushed:?}")
        }
        2 => {
            let sges = &sges[..sges.len().min(3)];
            let pushed = client.srq.push(&RecvWr { wr_id, sges });
            client.srq.publish_posted();
            format!("srq {pushed:?}")
        }
        3 => {
            client.bells.ring_doorbell(wr_id as u32, || false);
            if rng.below(2) == 0 {
                client.cq.arm_event(rng.below(2) == 0);
            }
            String::new()
        }
        4 => {
            let mut polled = [Wc::default(); 3];
            let count = client.cq.poll(&mut polled);
            let ids = polled[..count].iter().map(|wc| wc.wr_id);
            format!("polled {:?}", ids.collect::<Vec<_>>())
        }
        5 => {
            let popped = daemon.sq.pop(&mut element.0);
            // Slots are released later than they are read.
            let done = match rng.below(3) {
                0 => 0,
                1 => daemon.sq.release_popped(),
                _ => {
                    let count = popped.ok().flatten().map_or(0, |()| 1);
                    daemon.sq.complete_requests(count)
                }
            };
            if rng.below(20) == 0 {
                daemon.sq.note_failed_send();
                daemon.sq.note_failed_receive(&daemon.rq);
            }
            daemon.sq.clear_pending();
            daemon.sq.set_qp_state(wr_id as u32);
            format!("sq {popped:?} {} {done}", element.0.wr_id)
        }
        6 => {
            let popped = daemon.rq.pop(&mut element.1);
            let done = daemon
                .rq
                .complete_requests(popped.ok().flatten().map_or(0, |()| 1));
            format!("rq {popped:?} {} {done}", element.1.wr_id)
        }
        7 => {
            let flags = [WcFlags::NONE, WcFlags::SOLICITED][rng.below(2) as usize];
            let wc = Wc {
                wr_id,
                flags,
                ..Wc::default()
            };
            let (pushed, last) = (daemon.cq.push(&wc), daemon.cq.last_pushed());
            let is_polled = daemon.cq.is_polled(last.wrapping_sub(2));
            let flushed = (rng.below(2) == 0).then(|| daemon.cq.take_event());
            format!(
                "cq {pushed:?} {last} {is_polled} {flushed:?} {}",
                daemon.cq.has_unflushed()
            )
        }
        8 => format!("bell {:?} {}", daemon.bells.pop(), daemon.bells.has_work()),
        9 => {
            let worker = &mut daemon.workers[rng.below(2) as usize];
            let popped = worker.pop(&mut element.1);
            format!(
                "srq {popped:?} {} {}",
                element.1.wr_id,
                daemon.ring.count_posted()
            )
        }
        _ => {
            let flag = daemon.page.sleep_flag(1);
            let slept = flag.as_ref().map(|flag| flag.must_wake());
            flag.into_iter().for_each(|flag| flag.announce_sleep());
            let limit = rng.below(4) as u32;
            let is_low = daemon.low.arm_event(limit, &daemon.ring);
            format!("low {is_low} {} {slept:?}", daemon.low.armed_limit())
        }
    }
}

/// What both ends observe in many random steps, with or without restarts of the daemon.
fn observe(seed: u64, restarts: bool) -> Vec<String> {
    let (mut daemon, mut client) = new_rig();
    let mut rng = Rng(seed);
    let mut seen = Vec::new();
    for step in 0..400 {
        seen.push(take_step(&mut daemon, &mut client, &mut rng));
        let (sends, receives) = (
            client.state.sends_before_failure(),
            client.state.receives_before_failure(),
        );
        let (done, state) = (client.sq.wr_done(), client.state.qp_state());
        seen.push(format!("{sends:?} {receives:?} {done} {state}"));
        if restarts && (step + seed).is_multiple_of(3) {
            daemon = succeed(daemon);
        }
    }
    seen
}

#[test]
fn rings_go_on_where_they_were() {
    let mut kinds = std::collections::HashSet::new();
    for seed in 1..200 {
        let expected = observe(seed, false);
        assert_eq!(observe(seed, true), expected, "seed {seed}");
        let names = expected
            .iter()
            .map(|seen| seen.split(' ').take(2).collect::<String>());
        kinds.extend(names);
    }
    // Full and empty rings, and overflows, were among them.
    for kind in [
        "sqErr(Full)",
        "rqOk(None)",
        "srqErr(Full)",
        "cqErr(CqOverflow)",
        "lowtrue",
    ] {
        assert!(kinds.contains(kind), "{kind}: {kinds:?}");
    }
}

#[test]
fn a_resized_shared_receive_queue_keeps_its_rings() {
    let (mut daemon, mut client) = new_rig();
    let memory = new_memory(LEN);
    for number in 1..=2 {
        let request = RecvWr {
            wr_id: number,
            sges: &[],
        };
        client.srq.push(&request).unwrap();
    }
    client.srq.publish_posted();
    let geometry = SrqGeometry::new(DEPTH, 4).unwrap();
    let of_client = map_for_client(&memory);
    let next = SrqRing::new(memory, SRQ[1], geometry).unwrap();
    let mut producer = SrqProducer::new(of_client, SRQ[1], geometry, DEPTH).unwrap();
    producer
        .push(&RecvWr {
            wr_id: 3,
            sges: &[],
        })
        .unwrap();
    producer.publish_posted();
    daemon.ring.append_ring(next);
    let mut taken = Vec::new();
    for worker in [0, 1, 0, 1] {
        // One worker is in the new ring while the other one is not, and both know the same ring.
        daemon = succeed(daemon);
        let mut element = RecvWqe::new();
        if daemon.workers[worker].pop(&mut element).unwrap().is_some() {
            taken.push(element.wr_id);
        }
    }
    assert_eq!(taken, [1, 2, 3]);
}

#[test]
fn a_client_that_breaks_its_rings_meanwhile_is_found_out() {
    let (daemon, mut client) = new_rig();
    let request = SendWr::send(1, SendData::Sges(&[]));
    client.sq.push(&request).unwrap();
    client.sq.publish_posted();
    let (bytes, kept) = save(&daemon);
    std::mem::forget(daemon);
    let tail = |value| {
        let range = kept.ranges();
        let range = range.iter().find(|range| range.len() == LEN).unwrap();
        // SAFETY: a word of the mapping, which is still there.
        let word =
            unsafe { std::sync::atomic::AtomicU32::from_ptr((range.start + SQ) as *mut u32) };
        word.store(value, std::sync::atomic::Ordering::Release);
    };
    tail(1 << 30);
    // SAFETY: the owners were forgotten.
    let mut restoring = unsafe { Restoring::adopt(&kept) }.unwrap();
    let mut daemon: Daemon = restoring.run(|| postcard::from_bytes(&bytes)).unwrap();
    let popped = daemon.sq.pop(&mut SendWqe::new());
    assert_eq!(popped, Err(RingError::InvalidIndex));
}

#[test]
fn damaged_state_of_rings_is_refused_or_harmless() {
    let (mut daemon, mut client) = new_rig();
    let mut rng = Rng(7);
    for _ in 0..100 {
        take_step(&mut daemon, &mut client, &mut rng);
    }
    let (bytes, kept) = save(&daemon);
    std::mem::forget(daemon);
    let mut refused = 0;
    for damage in 0..bytes.len() * 9 {
        let mut damaged = bytes.clone();
        match damage % 9 {
            8 => damaged.truncate(damage / 9),
            bit => damaged[damage / 9] ^= 1 << bit,
        }
        // SAFETY: the owners were forgotten, as are those of the turns before.
        let mut restoring = unsafe { Restoring::adopt(&kept) }.unwrap();
        let restored: Result<Daemon, _> = restoring.run(|| postcard::from_bytes(&damaged));
        match restored {
            Ok(mut daemon) => {
                for _ in 0..20 {
                    take_step(&mut daemon, &mut client, &mut rng);
                }
                std::mem::forget(daemon);
            }
            Err(_) => refused += 1,
        }
        std::mem::forget(restoring);
    }
    assert!(refused > bytes.len(), "{refused} of {}", bytes.len() * 9);
}
