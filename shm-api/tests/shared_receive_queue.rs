//! Shared receive queues over real mappings, with honest and hostile clients and several
//! workers.

use siw_shm::shared_memory::SharedMemory;
use siw_shm::shared_receive_queue::{HEADER, OFF_TAIL, TakenRequest};
use siw_shm::work_queue::PushError;
use siw_shm::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;

struct Rig {
    p: SrqProducer,
    ring: Arc<SrqRing>,
    low: Arc<LowWaterMark>,
    region: Arc<SharedMemory>,
}

fn rig(max_wr: u32, max_sge: u32) -> Rig {
    let g = SrqGeometry::new(max_wr, max_sge).unwrap();
    let region = Arc::new(SharedMemory::new_anonymous(g.len).unwrap());
    Rig {
        p: SrqProducer::new(region.clone(), 0, g, max_wr).unwrap(),
        ring: SrqRing::new(region.clone(), 0, g).unwrap(),
        low: Arc::default(),
        region,
    }
}

impl Rig {
    fn worker(&self) -> SrqConsumer {
        SrqConsumer::new(self.ring.clone(), self.low.clone())
    }

    fn post(&mut self, wr_id: u64) -> Result<(), PushError> {
        let r = self.p.push(&RecvWr { wr_id, sges: &[] });
        self.p.publish_posted();
        r
    }
}

fn take(c: &mut SrqConsumer) -> Option<u64> {
    let mut w = RecvWqe::new();
    c.pop(&mut w).unwrap().map(|_| w.wr_id)
}

#[test]
fn requests_of_every_size_reach_the_workers_in_posting_order() {
    let mut r = rig(5, 16);
    let (mut a, mut b) = (r.worker(), r.worker());
    let mut w = RecvWqe::new();
    for round in 0..100u64 {
        let list: Vec<Sge> = (0..round % 17)
            .map(|i| Sge {
                addr: 64 * i,
                length: i as u32 + 1,
                lkey: 9,
            })
            .collect();
        let d = RecvWr {
            wr_id: round,
            sges: &list,
        };
        r.p.push(&d).unwrap();
        assert_eq!(a.pop(&mut w), Ok(None), "not published yet");
        r.p.publish_posted();
        let c = if round % 2 == 0 { &mut a } else { &mut b };
        assert!(c.pop(&mut w).unwrap().is_some());
        assert_eq!((w.wr_id, w.sges()), (round, &list[..]));
    }
}

#[test]
fn no_more_requests_than_granted_are_taken_in() {
    let mut r = rig(5, 1);
    let mut c = r.worker();
    for round in 0..10 {
        for i in 0..5 {
            r.post(round * 5 + i).unwrap();
        }
        assert_eq!(r.post(99), Err(PushError::Full));
        assert_eq!(take(&mut c), Some(round * 5));
        r.post(round * 5 + 5).unwrap();
        assert_eq!(r.post(99), Err(PushError::Full));
        for i in 1..6 {
            assert_eq!(take(&mut c), Some(round * 5 + i));
        }
        assert_eq!(take(&mut c), None);
    }
    let sges = [Sge::default(); 2];
    let d = RecvWr {
        wr_id: 0,
        sges: &sges,
    };
    assert!(matches!(
        r.p.push(&d),
        Err(PushError::Wqe(WqeError::TooManySge(2)))
    ));
}

#[test]
fn workers_on_several_threads_get_each_request_once() {
    const N: u64 = 40_000;
    let mut r = rig(64, 2);
    let workers: Vec<_> = (0..3)
        .map(|_| {
            let mut c = r.worker();
            std::thread::spawn(move || {
                let mut got = Vec::new();
                loop {
                    match take(&mut c) {
                        Some(u64::MAX) => return got,
                        Some(v) => got.push(v),
                        None => std::thread::yield_now(),
                    }
                }
            })
        })
        .collect();
    let ends = std::iter::repeat_n(u64::MAX, workers.len());
    for v in (0..N).chain(ends) {
        while r.post(v).is_err() {
            std::thread::yield_now();
        }
    }
    let mut all = Vec::new();
    for w in workers {
        let got = w.join().unwrap();
        assert!(got.is_sorted(), "each worker takes them in posting order");
        all.extend(got);
    }
    all.sort_unstable();
    assert_eq!(all, (0..N).collect::<Vec<_>>());
}

#[test]
fn an_impossible_tail_is_told_and_reads_nothing() {
    let r = rig(4, 1);
    let mut c = r.worker();
    let tail = r.region.atomic_u32(OFF_TAIL).unwrap();
    let mut w = RecvWqe::new();
    for bad in [5, u32::MAX, 1 << 31] {
        tail.store(bad, Ordering::Release);
        assert_eq!(c.pop(&mut w), Err(RingError::InvalidIndex));
        assert_eq!(r.ring.count_posted(), 0);
    }
    // Zeroes are no request; the next one is.
    tail.store(1, Ordering::Release);
    assert!(matches!(c.pop(&mut w), Err(RingError::Wqe { .. })));
    assert_eq!(c.pop(&mut w), Ok(None));
}

#[test]
fn a_request_longer_than_its_entry_is_refused() {
    let mut r = rig(2, 1);
    let mut c = r.worker();
    r.post(3).unwrap();
    // num_sge and slots of the header.
    let word = r.region.atomic_u32(HEADER).unwrap();
    word.store(0x0503_0080 | 13 << 16, Ordering::Release);
    let mut w = RecvWqe::new();
    assert!(matches!(
        c.pop(&mut w),
        Err(RingError::Wqe { wr_id: 3, .. })
    ));
}

#[test]
fn a_resize_keeps_the_order_and_lets_the_old_ring_go() {
    let mut old = rig(4, 1);
    let (mut a, mut b) = (old.worker(), old.worker());
    for v in 0..3 {
        old.post(v).unwrap();
    }
    assert_eq!(take(&mut a), Some(0));
    let mut new = rig(2, 1);
    new.post(3).unwrap();
    old.ring.append_ring(new.ring.clone());
    assert_eq!(old.ring.count_posted(), 3);
    assert_eq!(take(&mut b), Some(1));
    b.leave_old_ring();
    assert_eq!(take(&mut a), Some(2));
    assert_eq!(take(&mut a), Some(3));
    assert_eq!(take(&mut a), None);
    b.leave_old_ring();
    assert_eq!(Arc::strong_count(&old.ring), 1, "no worker needs it");
    new.post(4).unwrap();
    assert_eq!(take(&mut b), Some(4));
}

#[test]
fn one_low_water_event_follows_one_arming() {
    let mut r = rig(8, 1);
    let mut c = r.worker();
    let mut w = RecvWqe::new();
    let mut told = |c: &mut SrqConsumer| {
        c.pop(&mut w).unwrap()
            == Some(TakenRequest {
                limit_reached: true,
            })
    };
    for v in 0..6 {
        r.post(v).unwrap();
    }
    assert!(!told(&mut c));
    assert!(!r.low.arm_event(4, &r.ring));
    assert!(!told(&mut c), "four are left");
    assert!(told(&mut c));
    assert_eq!(r.low.armed_limit(), 0);
    assert!(!told(&mut c));
    assert!(r.low.arm_event(3, &r.ring), "two are left already");
    assert!(!r.low.arm_event(0, &r.ring));
}
