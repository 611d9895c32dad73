//! Shared receive queues over real mappings, with honest and hostile clients and several
//! workers.

use siw_shm::shared_memory::SharedMemory;
use siw_shm::shared_receive_queue::{HEADER, OFF_TAIL, TakenRequest};
use siw_shm::work_queue::PushError;
use siw_shm::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;

struct Rig {
    producer: SrqProducer,
    ring: Arc<SrqRing>,
    low: Arc<LowWaterMark>,
    region: Arc<SharedMemory>,
}

fn new_rig(max_wr: u32, max_sge: u32) -> Rig {
    let geometry = SrqGeometry::new(max_wr, max_sge).unwrap();
    let region = Arc::new(SharedMemory::new_anonymous(geometry.len).unwrap());
    Rig {
        producer: SrqProducer::new(region.clone(), 0, geometry, max_wr).unwrap(),
        ring: SrqRing::new(region.clone(), 0, geometry).unwrap(),
        low: Arc::default(),
        region,
    }
}

impl Rig {
    fn new_worker(&self) -> SrqConsumer {
        SrqConsumer::new(self.ring.clone(), self.low.clone())
    }

    fn post_request(&mut self, wr_id: u64) -> Result<(), PushError> {
        let rig = self.producer.push(&RecvWr { wr_id, sges: &[] });
        self.producer.publish_posted();
        rig
    }
}

fn take_wr_id(consumer: &mut SrqConsumer) -> Option<u64> {
    let mut wqe = RecvWqe::new();
    consumer.pop(&mut wqe).unwrap().map(|_| wqe.wr_id)
}

#[test]
fn requests_of_every_size_reach_the_workers_in_posting_order() {
    let mut rig = new_rig(5, 16);
    let (mut first, mut second) = (rig.new_worker(), rig.new_worker());
    let mut wqe = RecvWqe::new();
    for round in 0..100u64 {
        let list: Vec<Sge> = (0..round % 17)
            .map(|i| Sge {
                addr: 64 * i,
                length: i as u32 + 1,
                lkey: 9,
            })
            .collect();
        let request = RecvWr {
            wr_id: round,
            sges: &list,
        };
        rig.producer.push(&request).unwrap();
        assert_eq!(first.pop(&mut wqe), Ok(None), "not published yet");
        rig.producer.publish_posted();
        let consumer = if round % 2 == 0 {
            &mut first
        } else {
            &mut second
        };
        assert!(consumer.pop(&mut wqe).unwrap().is_some());
        assert_eq!((wqe.wr_id, wqe.sges()), (round, &list[..]));
    }
}

#[test]
fn no_more_requests_than_granted_are_taken_in() {
    let mut rig = new_rig(5, 1);
    let mut consumer = rig.new_worker();
    for round in 0..10 {
        for i in 0..5 {
            rig.post_request(round * 5 + i).unwrap();
        }
        assert_eq!(rig.post_request(99), Err(PushError::Full));
        assert_eq!(take_wr_id(&mut consumer), Some(round * 5));
        rig.post_request(round * 5 + 5).unwrap();
        assert_eq!(rig.post_request(99), Err(PushError::Full));
        for i in 1..6 {
            assert_eq!(take_wr_id(&mut consumer), Some(round * 5 + i));
        }
        assert_eq!(take_wr_id(&mut consumer), None);
    }
    let sges = [Sge::default(); 2];
    let request = RecvWr {
        wr_id: 0,
        sges: &sges,
    };
    assert!(matches!(
        rig.producer.push(&request),
        Err(PushError::Wqe(WqeError::TooManySge(2)))
    ));
}

#[test]
fn workers_on_several_threads_get_each_request_once() {
    const N: u64 = 40_000;
    let mut rig = new_rig(64, 2);
    let workers: Vec<_> = (0..3)
        .map(|_| {
            let mut consumer = rig.new_worker();
            std::thread::spawn(move || {
                let mut got = Vec::new();
                loop {
                    match take_wr_id(&mut consumer) {
                        Some(u64::MAX) => return got,
                        Some(wr_id) => got.push(wr_id),
                        None => std::thread::yield_now(),
                    }
                }
            })
        })
        .collect();
    let ends = std::iter::repeat_n(u64::MAX, workers.len());
    for wr_id in (0..N).chain(ends) {
        while rig.post_request(wr_id).is_err() {
            std::thread::yield_now();
        }
    }
    let mut all = Vec::new();
    for worker in workers {
        let got = worker.join().unwrap();
        assert!(got.is_sorted(), "each worker takes them in posting order");
        all.extend(got);
    }
    all.sort_unstable();
    assert_eq!(all, (0..N).collect::<Vec<_>>());
}

#[test]
fn an_impossible_tail_is_told_and_reads_nothing() {
    let rig = new_rig(4, 1);
    let mut consumer = rig.new_worker();
    let tail = rig.region.atomic_u32(OFF_TAIL).unwrap();
    let mut wqe = RecvWqe::new();
    for bad in [5, u32::MAX, 1 << 31] {
        tail.store(bad, Ordering::Release);
        assert_eq!(consumer.pop(&mut wqe), Err(RingError::InvalidIndex));
        assert_eq!(rig.ring.count_posted(), 0);
    }
    // A zeroed slot is not a request; the next one is.
    tail.store(1, Ordering::Release);
    assert!(matches!(consumer.pop(&mut wqe), Err(RingError::Wqe { .. })));
    assert_eq!(consumer.pop(&mut wqe), Ok(None));
}

#[test]
fn a_request_longer_than_its_entry_is_refused() {
    let mut rig = new_rig(2, 1);
    let mut consumer = rig.new_worker();
    rig.post_request(3).unwrap();
    // num_sge and slots of the header.
    let word = rig.region.atomic_u32(HEADER).unwrap();
    word.store(0x0503_0080 | 13 << 16, Ordering::Release);
    let mut wqe = RecvWqe::new();
    assert!(matches!(
        consumer.pop(&mut wqe),
        Err(RingError::Wqe { wr_id: 3, .. })
    ));
}

#[test]
fn a_resize_keeps_the_order_and_lets_the_old_ring_go() {
    let mut old = new_rig(4, 1);
    let (mut first, mut second) = (old.new_worker(), old.new_worker());
    for wr_id in 0..3 {
        old.post_request(wr_id).unwrap();
    }
    assert_eq!(take_wr_id(&mut first), Some(0));
    let mut new = new_rig(2, 1);
    new.post_request(3).unwrap();
    old.ring.append_ring(new.ring.clone());
    assert_eq!(old.ring.count_posted(), 3);
    assert_eq!(take_wr_id(&mut second), Some(1));
    second.leave_old_ring();
    assert_eq!(take_wr_id(&mut first), Some(2));
    assert_eq!(take_wr_id(&mut first), Some(3));
    assert_eq!(take_wr_id(&mut first), None);
    second.leave_old_ring();
    assert_eq!(Arc::strong_count(&old.ring), 1, "no worker needs it");
    new.post_request(4).unwrap();
    assert_eq!(take_wr_id(&mut second), Some(4));
}

#[test]
fn one_low_water_event_follows_one_arming() {
    let mut rig = new_rig(8, 1);
    let mut consumer = rig.new_worker();
    let mut wqe = RecvWqe::new();
    let mut told = |consumer: &mut SrqConsumer| {
        consumer.pop(&mut wqe).unwrap()
            == Some(TakenRequest {
                limit_reached: true,
            })
    };
    for wr_id in 0..6 {
        rig.post_request(wr_id).unwrap();
    }
    assert!(!told(&mut consumer));
    assert!(!rig.low.arm_event(4, &rig.ring));
    assert!(!told(&mut consumer), "four are left");
    assert!(told(&mut consumer));
    assert_eq!(rig.low.armed_limit(), 0);
    assert!(!told(&mut consumer));
    assert!(rig.low.arm_event(3, &rig.ring), "two are left already");
    assert!(!rig.low.arm_event(0, &rig.ring));
}
