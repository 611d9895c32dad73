//! Loom explores every interleaving of the steps on the shared-memory rings:
//! `RUSTFLAGS="--cfg loom" cargo test -p siw-lockfree --release`
//! (with a target directory of its own).
#![cfg(loom)]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use siw_lockfree::completion::*;
use siw_lockfree::doorbell::*;
use siw_lockfree::shared_ring::*;
use siw_lockfree::spsc::*;
use siw_lockfree::sync::{AtomicU32, AtomicU64, Ordering};

fn word() -> AtomicU32 {
    AtomicU32::new(0)
}

struct Ring<const N: usize> {
    head: AtomicU32,
    tail: AtomicU32,
    slots: [UnsafeCell<u32>; N],
}

#[test]
fn a_work_queue_delivers_every_request_once_and_in_order() {
    loom::model(|| {
        let r = Arc::new(Ring::<2> {
            head: word(),
            tail: word(),
            slots: std::array::from_fn(|_| UnsafeCell::new(0)),
        });
        let c = r.clone();
        let worker = thread::spawn(move || {
            let mut ring = SpscConsumer::new(2);
            let mut got = Vec::new();
            for _ in 0..3 {
                while ring.available_slots(&c.tail).unwrap() > 0 {
                    // SAFETY: loom checks that the producer is not writing it.
                    got.push(c.slots[ring.slot_index(0) as usize].with(|p| unsafe { *p }));
                    ring.advance_head(1);
                    ring.release_head(&c.head);
                }
                thread::yield_now();
            }
            (got, ring)
        });
        let mut ring = SpscProducer::new(2);
        let mut sent = 0;
        for v in 1..=3 {
            if ring.reserve_slots(1, &r.head) {
                // SAFETY: loom checks that the consumer is not reading it.
                r.slots[ring.slot_index(0) as usize].with_mut(|p| unsafe { *p = v });
                ring.mark_filled(1);
                ring.publish_tail(&r.tail);
                sent = v;
            } else {
                break;
            }
        }
        let (mut got, mut ring) = worker.join().unwrap();
        while ring.available_slots(&r.tail).unwrap() > 0 {
            // SAFETY: the worker thread has ended.
            got.push(r.slots[ring.slot_index(0) as usize].with(|p| unsafe { *p }));
            ring.advance_head(1);
        }
        assert_eq!(got, (1..=sent).collect::<Vec<_>>());
    });
}

struct SharedRing {
    tail: AtomicU32,
    claimed: AtomicU64,
    flags: [AtomicU32; 2],
    slots: [UnsafeCell<u32>; 2],
}

impl SharedRing {
    fn new() -> Arc<SharedRing> {
        Arc::new(SharedRing {
            tail: word(),
            claimed: AtomicU64::new(0),
            flags: [word(), word()],
            slots: [UnsafeCell::new(0), UnsafeCell::new(0)],
        })
    }

    /// Posts up to `n` requests; returns the number of requests that fit.
    fn post(&self, n: u32) -> u32 {
        for p in 0..n {
            let i = (p & 1) as usize;
            if !is_entry_free(&self.flags[i]) {
                return p;
            }
            // SAFETY: loom checks that no worker is reading it.
            self.slots[i].with_mut(|s| unsafe { *s = p + 1 });
            self.flags[i].store(1, Ordering::Relaxed);
            publish_entries(&self.tail, p + 1);
        }
        n
    }

    fn take(&self) -> Option<u32> {
        let (p, _) = claim_entry(&self.claimed, &self.tail, 2).expect("an honest client")?;
        let i = (p & 1) as usize;
        // SAFETY: loom checks that the client is not writing it.
        let v = self.slots[i].with(|s| unsafe { *s });
        release_entry(&self.flags[i]);
        Some(v)
    }
}

#[test]
fn a_shared_receive_queue_gives_each_request_to_one_worker() {
    loom::model(|| {
        let r = SharedRing::new();
        let workers: Vec<_> = (0..2)
            .map(|_| {
                let r = r.clone();
                thread::spawn(move || (r.take(), r.take()))
            })
            .collect();
        let posted = r.post(3);
        let mut got = Vec::new();
        for w in workers {
            let (a, b) = w.join().unwrap();
            assert!(
                a.is_none() || b.is_none() || a < b,
                "each worker takes them in order"
            );
            got.extend(a);
            got.extend(b);
        }
        got.extend(std::iter::from_fn(|| r.take()));
        got.sort_unstable();
        assert_eq!(got, (1..=posted).collect::<Vec<_>>());
    });
}

#[test]
fn a_low_water_mark_is_never_missed() {
    loom::model(|| {
        let r = SharedRing::new();
        r.post(2);
        let limit = Arc::new(word());
        let (w, l) = (r.clone(), limit.clone());
        let worker = thread::spawn(move || {
            let (_, marked) = claim_entry(&w.claimed, &w.tail, 2).unwrap().unwrap();
            marked && take_low_water(&l, count_posted(&w.claimed, &w.tail, 2))
        });
        arm_low_water(&limit, 2, &r.claimed);
        let control_raises = take_low_water(&limit, count_posted(&r.claimed, &r.tail, 2));
        let worker_raises = worker.join().unwrap();
        assert!(control_raises ^ worker_raises, "one event for one arming");
    });
}

struct Cq {
    armed: AtomicU32,
    seq: [AtomicU32; 2],
    entry: [UnsafeCell<u32>; 2],
    events: AtomicU32,
}

impl Cq {
    fn new() -> Arc<Cq> {
        Arc::new(Cq {
            armed: word(),
            seq: [word(), word()],
            entry: [UnsafeCell::new(0), UnsafeCell::new(0)],
            events: word(),
        })
    }

    fn complete(&self, i: usize, solicited: bool) {
        // SAFETY: loom checks that the client is not reading it.
        self.entry[i].with_mut(|p| unsafe { *p = 7 });
        publish_completion(&self.seq[i], 1);
        if take_arm(&self.armed, solicited) {
            self.events.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn poll(&self, i: usize) -> bool {
        if !is_completion(&self.seq[i], 1) {
            return false;
        }
        // SAFETY: loom checks that the worker is not writing it.
        assert_eq!(self.entry[i].with(|p| unsafe { *p }), 7);
        true
    }
}

/// Two laps of a ring of two entries: an entry is reused only after its completion was copied, and a
/// full ring is recognized as full.
#[test]
fn a_completion_ring_delivers_every_completion_once_and_in_order() {
    loom::model(|| {
        let cq = Cq::new();
        let head = Arc::new(word());
        let (c, h) = (cq.clone(), head.clone());
        let worker = thread::spawn(move || {
            let mut pushed = 0u32;
            for n in 1..=3 {
                if pushed - released_completions(&h) >= 2 {
                    // Overflow: nothing more is written.
                    break;
                }
                let i = (n - 1) as usize % 2;
                // SAFETY: loom checks that the client is not reading it.
                c.entry[i].with_mut(|p| unsafe { *p = n });
                publish_completion(&c.seq[i], n);
                pushed = n;
            }
            pushed
        });
        let mut got = 0;
        let mut poll = || {
            let i = got as usize % 2;
            if is_completion(&cq.seq[i], got + 1) {
                got += 1;
                // SAFETY: loom checks that the worker is not writing it.
                assert_eq!(cq.entry[i].with(|p| unsafe { *p }), got);
                release_completions(&head, got);
            }
            got
        };
        for _ in 0..3 {
            poll();
            thread::yield_now();
        }
        let pushed = worker.join().unwrap();
        for _ in 0..3 {
            poll();
        }
        assert_eq!(poll(), pushed);
    });
}

#[test]
fn a_client_that_arms_and_finds_nothing_gets_an_event() {
    for solicited_only in [false, true] {
        loom::model(move || {
            let cq = Cq::new();
            let w = cq.clone();
            let worker = thread::spawn(move || w.complete(0, solicited_only));
            let mut found = cq.poll(0);
            if !found {
                arm_event(
                    &cq.armed,
                    if solicited_only {
                        ARM_SOLICITED
                    } else {
                        ARM_NEXT
                    },
                );
                found = cq.poll(0);
            }
            worker.join().unwrap();
            if !found {
                assert_eq!(cq.events.load(Ordering::Relaxed), 1, "lost wake-up");
                assert!(cq.poll(0));
            }
        });
    }
}

#[test]
fn two_workers_raise_one_event_for_one_arming() {
    loom::model(|| {
        let cq = Cq::new();
        arm_event(&cq.armed, ARM_NEXT);
        let (a, b) = (cq.clone(), cq.clone());
        let a = thread::spawn(move || a.complete(0, false));
        let b = thread::spawn(move || b.complete(1, false));
        a.join().unwrap();
        b.join().unwrap();
        assert_eq!(cq.events.load(Ordering::Relaxed), 1);
    });
}

/// One memory of a completion queue: the arming, and the sequence words of two workers.
struct Rings {
    armed: AtomicU32,
    seq: [AtomicU32; 2],
}

impl Rings {
    fn new() -> Rings {
        Rings {
            armed: word(),
            seq: [word(), word()],
        }
    }

    fn complete(&self, worker: usize, events: &AtomicU32) {
        publish_completion(&self.seq[worker], 1);
        if take_arm(&self.armed, false) {
            events.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn any(&self) -> bool {
        self.seq.iter().any(|s| is_completion(s, 1))
    }
}

#[test]
fn an_arming_survives_a_resize_whoever_completes_meanwhile() {
    // Worker 0 completes before or after it has moved, worker 1 only moves.
    for before in [false, true] {
        loom::model(move || {
            let q = Arc::new((Rings::new(), Rings::new(), word()));
            arm_event(&q.0.armed, ARM_NEXT);
            let (a, b) = (q.clone(), q.clone());
            let a = thread::spawn(move || {
                let (old, new, events) = &*a;
                if before {
                    old.complete(0, events);
                }
                move_arming(&old.armed, &new.armed);
                if !before {
                    new.complete(0, events);
                }
            });
            let b = thread::spawn(move || move_arming(&b.0.armed, &b.1.armed));
            a.join().unwrap();
            b.join().unwrap();
            let (old, new, events) = &*q;
            let raised = (old.any() || new.any()) && disarm_event(&new.armed) != ARM_NONE;
            let told = events.load(Ordering::Relaxed) + u32::from(raised);
            assert_eq!(told, 1, "lost or doubled");
        });
    }
}

struct Bell {
    sq_tail: [AtomicU32; 2],
    pending: [AtomicU32; 2],
    ring_tail: AtomicU32,
    slots: [AtomicU32; 2],
    sleeping: AtomicU32,
    eventfd: AtomicU32,
}

impl Bell {
    fn new() -> Arc<Bell> {
        Arc::new(Bell {
            sq_tail: [word(), word()],
            pending: [word(), word()],
            ring_tail: word(),
            slots: [word(), word()],
            sleeping: word(),
            eventfd: word(),
        })
    }

    fn post(&self, qp: usize, tail: u32) {
        self.sq_tail[qp].store(tail, Ordering::Release);
        if mark_pending(&self.pending[qp]) {
            let i = claim_slot(&self.ring_tail, 1);
            assert!(
                fill_slot(&self.slots[i as usize], qp as u32),
                "as many slots as queues"
            );
            if must_wake(&self.sleeping) {
                self.eventfd.store(1, Ordering::Release);
            }
        }
    }

    fn drain(&self, head: &mut usize, seen: &mut [u32; 2]) {
        while let Some(qp) = take_slot(&self.slots[*head & 1]) {
            *head += 1;
            let qp = qp as usize;
            clear_pending(&self.pending[qp]);
            seen[qp] = self.sq_tail[qp].load(Ordering::Acquire);
        }
    }
}

#[test]
fn a_sleeping_worker_is_always_woken() {
    loom::model(|| {
        let b = Bell::new();
        let c = b.clone();
        let client = thread::spawn(move || c.post(0, 1));
        let (mut head, mut seen) = (0, [0; 2]);
        announce_sleep(&b.sleeping);
        let sleeps = b.slots[0].load(Ordering::Acquire) == 0;
        if !sleeps {
            announce_awake(&b.sleeping);
            b.drain(&mut head, &mut seen);
            assert_eq!(seen[0], 1);
        }
        client.join().unwrap();
        if sleeps {
            assert_eq!(b.eventfd.load(Ordering::Acquire), 1, "lost wake-up");
            b.drain(&mut head, &mut seen);
            assert_eq!(seen[0], 1);
        }
    });
}

#[test]
fn a_post_while_the_worker_drains_is_never_forgotten() {
    loom::model(|| {
        let b = Bell::new();
        let c = b.clone();
        let client = thread::spawn(move || {
            c.post(0, 1);
            c.post(0, 2);
        });
        let (mut head, mut seen) = (0, [0; 2]);
        b.drain(&mut head, &mut seen);
        client.join().unwrap();
        b.drain(&mut head, &mut seen);
        assert_eq!(seen[0], 2);
        assert_eq!(b.slots[0].load(Ordering::Relaxed), 0);
        assert_eq!(b.slots[1].load(Ordering::Relaxed), 0);
    });
}

#[test]
fn no_post_is_forgotten_when_polling_stops() {
    loom::model(|| {
        let b = Bell::new();
        // The worker took the doorbell and left the word set.
        b.pending[0].store(1, Ordering::Relaxed);
        let c = b.clone();
        let client = thread::spawn(move || {
            c.post(0, 1);
            c.post(0, 2);
        });
        clear_pending(&b.pending[0]);
        let mut seen = [b.sq_tail[0].load(Ordering::Acquire), 0];
        announce_sleep(&b.sleeping);
        let sleeps = b.slots[0].load(Ordering::Acquire) == 0;
        client.join().unwrap();
        if sleeps && seen[0] < 2 {
            assert_eq!(b.eventfd.load(Ordering::Acquire), 1, "lost wake-up");
        }
        b.drain(&mut 0, &mut seen);
        assert_eq!(seen[0], 2);
    });
}

#[test]
fn a_full_doorbell_ring_loses_no_number() {
    loom::model(|| {
        let slot = Arc::new(word());
        let client = slot.clone();
        let client = thread::spawn(move || {
            for number in 0..2 {
                while !fill_slot(&client, number) {
                    thread::yield_now();
                }
            }
        });
        let mut taken = Vec::new();
        while taken.len() < 2 {
            match take_slot(&slot) {
                Some(number) => taken.push(number),
                None => thread::yield_now(),
            }
        }
        client.join().unwrap();
        assert_eq!(taken, [0, 1]);
        assert_eq!(take_slot(&slot), None);
    });
}

/// Two threads have claimed the same slot, a lap apart.
#[test]
fn threads_that_claimed_one_doorbell_slot_fill_it_one_after_the_other() {
    loom::model(|| {
        let slot = Arc::new(word());
        let client = slot.clone();
        let client = thread::spawn(move || fill_slot(&client, 1));
        let mine = fill_slot(&slot, 2);
        let theirs = client.join().unwrap();
        assert!(mine ^ theirs, "exactly one finds the slot empty");
        assert_eq!(take_slot(&slot), Some(if mine { 2 } else { 1 }));
    });
}

#[test]
fn two_posting_threads_share_a_doorbell_ring() {
    loom::model(|| {
        let b = Bell::new();
        let c = b.clone();
        let client = thread::spawn(move || c.post(0, 1));
        let d = b.clone();
        let worker = thread::spawn(move || {
            let (mut head, mut seen) = (0, [0; 2]);
            d.drain(&mut head, &mut seen);
            (head, seen)
        });
        b.post(1, 1);
        client.join().unwrap();
        let (mut head, mut seen) = worker.join().unwrap();
        b.drain(&mut head, &mut seen);
        assert_eq!(seen, [1, 1]);
    });
}

/// Laps of the ring: a slot that the worker has emptied is filled by a thread that has not met the
/// worker. Only the claims of the other thread order its number behind the zero.
#[test]
fn a_slot_that_was_emptied_takes_the_number_of_another_thread() {
    loom::model(|| {
        let b = Bell::new();
        let (c, d) = (b.clone(), b.clone());
        let first = thread::spawn(move || {
            c.post(0, 1);
            c.post(0, 2);
        });
        let second = thread::spawn(move || d.post(1, 1));
        // The worker.
        let (mut head, mut seen) = (0, [0; 2]);
        b.drain(&mut head, &mut seen);
        first.join().unwrap();
        second.join().unwrap();
        b.drain(&mut head, &mut seen);
        assert_eq!(seen, [2, 1]);
    });
}
