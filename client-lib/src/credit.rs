//! Credits from completion queues to queue pairs: the number of polled completions.
//!
//! A work request occupies its slot in the queue until its completion is polled, as with hardware:
//! an application that posts until ENOMEM and polls late cannot overflow a completion queue that is
//! as long as its work queues. An unsignaled request frees its slot when it is done; if it fails,
//! its completion is visible and uses that slot.

use crate::finished::{ReceiveCounts, SendCounts};
use siw_shm::Wc;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Polled completions of one queue pair, modulo 2^32. Each counter is written under the lock of one
/// completion queue.
#[derive(Default)]
pub(crate) struct Credit {
    pub sends: AtomicU32,
    pub receives: AtomicU32,
}

/// Ids of the requests in a queue's slots, for the flush after the daemon has ended.
struct Identifiers(Box<[u64]>);

impl Identifiers {
    fn new(most: u32) -> Identifiers {
        Identifiers(vec![0; (most as usize).max(1).next_power_of_two()].into())
    }

    #[inline]
    fn place(&mut self, request: u32) -> &mut u64 {
        let mask = self.0.len() - 1;
        &mut self.0[request as usize & mask]
    }
}

/// Slots of a receive queue: every request completes visibly.
pub(crate) struct ReceivePlaces {
    wr_ids: Identifiers,
    posted: u32,
    most: u32,
    /// Requests before this one were flushed by [`Self::flush`].
    flushed: u32,
    /// Finished requests, if they are counted.
    pub counts: Option<ReceiveCounts>,
}

impl ReceivePlaces {
    /// Creates an empty queue.
    pub fn new(most: u32, credit: &Credit) -> Self {
        let posted = credit.receives.load(Ordering::Acquire);
        ReceivePlaces {
            wr_ids: Identifiers::new(most),
            posted,
            most,
            flushed: posted,
            counts: None,
        }
    }

    /// Checks that no slot is free.
    #[inline]
    pub fn is_full(&self, credit: &Credit) -> bool {
        let polled = credit.receives.load(Ordering::Acquire);
        self.posted.wrapping_sub(polled) >= self.most
    }

    /// Checks that the completions of all posted requests have been polled.
    pub fn is_idle(&self, credit: &Credit) -> bool {
        self.posted == credit.receives.load(Ordering::Acquire)
    }

    /// Records a posted request.
    #[inline]
    pub fn take_place(&mut self, wr_id: u64) {
        *self.wr_ids.place(self.posted) = wr_id;
        self.posted = self.posted.wrapping_add(1);
    }

    /// Called when the daemon has ended and all its completions are polled: calls `with` for each
    /// remaining request, once.
    pub fn flush(&mut self, credit: &Credit, mut with: impl FnMut(u64)) {
        let polled = credit.receives.load(Ordering::Acquire);
        if self.flushed.wrapping_sub(polled) as i32 <= 0 {
            self.flushed = polled;
        }
        while self.flushed != self.posted {
            with(*self.wr_ids.place(self.flushed));
            self.flushed = self.flushed.wrapping_add(1);
        }
    }
}

/// Slots of a send queue.
pub(crate) struct SendPlaces {
    /// Signaled requests, by slot; the number of bits is a power of two.
    signaled: Box<[u64]>,
    wr_ids: Identifiers,
    posted: u32,
    /// Requests known to be done.
    done: u32,
    /// Signaled requests among `done`.
    done_signaled: u32,
    most: u32,
    /// Slots known to be free.
    free: u32,
    /// Finished requests, if they are counted.
    pub counts: Option<Box<SendCounts>>,
}

impl SendPlaces {
    /// Creates an empty queue.
    pub fn new(most: u32, credit: &Credit) -> Self {
        let words = (most as usize).div_ceil(64).next_power_of_two();
        SendPlaces {
            signaled: vec![0; words].into(),
            wr_ids: Identifiers::new(most),
            posted: 0,
            done: 0,
            done_signaled: credit.sends.load(Ordering::Acquire),
            most,
            free: most,
            counts: None,
        }
    }

    /// Checks that no slot is free. `done` returns the number of requests that the daemon has
    /// finished; it is called only when the slots known to be free are used up.
    #[inline]
    pub fn is_full(&mut self, credit: &Credit, done: impl FnOnce() -> u32) -> bool {
        self.free == 0 && self.refresh_free(credit, done())
    }

    /// Checks that all posted requests are finished, and polled if they complete visibly.
    pub fn is_idle(&mut self, credit: &Credit, done: u32) -> bool {
        self.refresh_free(credit, done);
        self.free == self.most
    }

    fn refresh_free(&mut self, credit: &Credit, done: u32) -> bool {
        // The daemon cannot have finished more requests than were posted.
        let news = done
            .wrapping_sub(self.done)
            .min(self.posted.wrapping_sub(self.done));
        for _ in 0..news {
            let (word, bit) = self.bit_position(self.done);
            self.done_signaled = self
                .done_signaled
                .wrapping_add((self.signaled[word] >> bit & 1) as u32);
            self.done = self.done.wrapping_add(1);
        }
        let polled = credit.sends.load(Ordering::Acquire);
        // After an error unsignaled requests complete too, so `polled` may exceed `done_signaled`.
        let unpolled = (self.done_signaled.wrapping_sub(polled) as i32).max(0) as u32;
        let used = self.posted.wrapping_sub(self.done) + unpolled;
        self.free = self.most.saturating_sub(used);
        self.free == 0
    }

    fn bit_position(&self, request: u32) -> (usize, u32) {
        let bit = request as usize & (self.signaled.len() * 64 - 1);
        (bit / 64, bit as u32 % 64)
    }

    /// Called when the daemon has ended: calls `with` for each unfinished request, once.
    pub fn flush(&mut self, credit: &Credit, done: u32, mut with: impl FnMut(u64)) {
        self.refresh_free(credit, done);
        while self.done != self.posted {
            with(*self.wr_ids.place(self.done));
            self.done = self.done.wrapping_add(1);
            // Every flushed request completes visibly.
            self.done_signaled = self.done_signaled.wrapping_add(1);
        }
    }

    /// Records a posted request, signaled or not.
    #[inline]
    pub fn take_place(&mut self, signaled: bool, wr_id: u64) {
        *self.wr_ids.place(self.posted) = wr_id;
        let (word, bit) = self.bit_position(self.posted);
        let word_bits = &mut self.signaled[word];
        *word_bits = *word_bits & !(1 << bit) | u64::from(signaled) << bit;
        self.posted = self.posted.wrapping_add(1);
        self.free -= 1;
    }
}

impl SendPlaces {
    /// Frees the slots of the last `requests` posted requests.
    pub fn withdraw(&mut self, requests: u32) {
        self.posted = self.posted.wrapping_sub(requests);
        self.free += requests;
        if let Some(counts) = &mut self.counts {
            counts.withdraw(requests);
        }
    }
}

/// Multiplicative hash of a queue pair number: numbers are small and spread, so no stronger hash is
/// needed.
#[derive(Default)]
struct ByNumber(u64);

impl Hasher for ByNumber {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }
    #[inline]
    fn write_u32(&mut self, number: u32) {
        self.0 = u64::from(number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

/// The queue pairs of one completion queue.
#[derive(Default)]
pub(crate) struct Credits {
    by_qp: HashMap<u32, Arc<Credit>, BuildHasherDefault<ByNumber>>,
    /// The queue pair of the last polled completion.
    last: Option<(u32, Arc<Credit>)>,
}

impl Credits {
    /// Adds a queue pair that completes into this queue.
    pub fn attach_qp(&mut self, qp_num: u32, credit: &Arc<Credit>) {
        self.by_qp.insert(qp_num, credit.clone());
        self.last = None;
    }

    /// Removes a destroyed queue pair.
    pub fn detach_qp(&mut self, qp_num: u32) {
        self.by_qp.remove(&qp_num);
        self.last = None;
    }

    /// Counts polled completions. Returns false if some belong to no existing queue pair; see
    /// [`Self::keep_known`].
    #[inline]
    #[must_use]
    pub fn count_polled(&mut self, polled: &[Wc]) -> bool {
        let mut are_known = true;
        for run in polled.chunk_by(|earlier, later| earlier.qp_num == later.qp_num) {
            let number = run[0].qp_num;
            if self.last.as_ref().is_none_or(|(last, _)| *last != number) {
                self.last = self
                    .by_qp
                    .get(&number)
                    .map(|credit| (number, credit.clone()));
            }
            let Some((_, credit)) = &self.last else {
                are_known = false;
                continue;
            };
            let receives = run
                .iter()
                .filter(|completion| completion.opcode.is_receive())
                .count() as u32;
            let add = |counter: &AtomicU32, newly_polled: u32| {
                if newly_polled > 0 {
                    let now = counter.load(Ordering::Relaxed).wrapping_add(newly_polled);
                    counter.store(now, Ordering::Release);
                }
            };
            add(&credit.receives, receives);
            add(&credit.sends, run.len() as u32 - receives);
        }
        are_known
    }

    /// Moves the completions of existing queue pairs to the front and returns their number.
    /// Completions of destroyed queue pairs are discarded (ibv_destroy_qp(3)).
    #[cold]
    pub fn keep_known(&self, polled: &mut [Wc]) -> usize {
        let mut kept = 0;
        for i in 0..polled.len() {
            if self.by_qp.contains_key(&polled[i].qp_num) {
                polled[kept] = polled[i];
                kept += 1;
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wc(qp_num: u32, opcode: siw_shm::WcOpcode) -> Wc {
        Wc {
            qp_num,
            opcode,
            ..Wc::default()
        }
    }

    #[test]
    fn places_are_those_that_a_flush_could_need() {
        let credit = Credit::default();
        for most in [1u32, 3, 64, 100] {
            let mut places = SendPlaces::new(most, &credit);
            let (mut posted, mut done) = (0u32, 0u32);
            let mut queue = std::collections::VecDeque::new();
            let mut unpolled = 0;
            let mut random = 88172645463325252u64;
            for _ in 0..20_000 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                match random % 4 {
                    0 | 1 => {
                        let full = posted - done + unpolled >= most;
                        assert_eq!(places.is_full(&credit, || done), full, "{most}");
                        if !full {
                            let signaled = random & 64 == 0;
                            places.take_place(signaled, posted.into());
                            queue.push_back(signaled);
                            posted += 1;
                        }
                    }
                    2 => {
                        if let Some(signaled) = queue.pop_front() {
                            done += 1;
                            unpolled += u32::from(signaled);
                        }
                    }
                    _ => {
                        if unpolled > 0 {
                            unpolled -= 1;
                            credit.sends.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            }
            credit.sends.fetch_add(unpolled, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_flush_hands_out_what_is_not_done_once() {
        let credit = Credit::default();
        let mut sends = SendPlaces::new(5, &credit);
        let mut receives = ReceivePlaces::new(5, &credit);
        for wr_id in 0..5 {
            sends.take_place(wr_id % 2 == 0, wr_id);
            receives.take_place(10 + wr_id);
        }
        credit.receives.store(2, Ordering::Relaxed);
        let mut flushed = Vec::new();
        for _ in 0..2 {
            sends.flush(&credit, 3, |wr_id| flushed.push(wr_id));
            receives.flush(&credit, |wr_id| flushed.push(wr_id));
        }
        assert_eq!(flushed, [3, 4, 12, 13, 14]);
    }

    #[test]
    fn completions_are_counted_for_their_queue_pair_and_kind() {
        use siw_shm::WcOpcode as O;
        let (first, second) = (Arc::<Credit>::default(), Arc::<Credit>::default());
        let mut all = Credits::default();
        all.attach_qp(1, &first);
        all.attach_qp(2, &second);
        assert!(all.count_polled(&[
            wc(1, O::SEND),
            wc(1, O::RECV),
            wc(2, O::RDMA_READ),
            wc(1, O::RECV),
        ]));
        assert!(!all.count_polled(&[wc(3, O::SEND), wc(2, O::RECV_RDMA_WITH_IMM)]));
        all.detach_qp(2);
        let mut polled = [wc(2, O::SEND), wc(1, O::SEND), wc(2, O::RECV)];
        assert!(!all.count_polled(&polled[..1]));
        assert_eq!(all.keep_known(&mut polled), 1);
        assert_eq!(polled[0].qp_num, 1);
        let read = |credit: &Credit| {
            (
                credit.sends.load(Ordering::Relaxed),
                credit.receives.load(Ordering::Relaxed),
            )
        };
        assert_eq!((read(&first), read(&second)), ((1, 2), (1, 1)));
    }
}
