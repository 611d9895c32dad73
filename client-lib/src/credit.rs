//! What a completion queue tells its queue pairs: how many of their completions were polled.
//!
//! A work request occupies its place in the queue until its completion is polled, as with
//! hardware: an application that posts until ENOMEM and polls late cannot overflow a completion
//! queue that is as long as its work queues.

use siw_shm::Cqe;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Completions of one queue pair that were polled, modulo 2^32. Each is written under the lock
/// of one completion queue.
#[derive(Default)]
pub(crate) struct Credit {
    pub sends: AtomicU32,
    pub receives: AtomicU32,
}

impl Credit {
    /// Whether `posted` requests, of which this many completions were polled, fill a queue.
    /// An error completes unsignaled requests too: more than was counted as posted.
    #[inline]
    pub fn is_full(polled: &AtomicU32, posted: u32, most: u32) -> bool {
        posted.wrapping_sub(polled.load(Ordering::Acquire)) as i32 >= most as i32
    }
}

/// Queue pair numbers are small and spread: no other hash is needed.
#[derive(Default)]
struct ByNumber(u64);

impl Hasher for ByNumber {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u32(u32::from(*b));
        }
    }
    #[inline]
    fn write_u32(&mut self, n: u32) {
        self.0 = u64::from(n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

/// The queue pairs of one completion queue.
#[derive(Default)]
pub(crate) struct Credits {
    by_qp: HashMap<u32, Arc<Credit>, BuildHasherDefault<ByNumber>>,
    /// The one whose completion was polled last.
    last: Option<(u32, Arc<Credit>)>,
}

impl Credits {
    pub fn attach(&mut self, qp_num: u32, credit: &Arc<Credit>) {
        self.by_qp.insert(qp_num, credit.clone());
        self.last = None;
    }

    pub fn detach(&mut self, qp_num: u32) {
        self.by_qp.remove(&qp_num);
        self.last = None;
    }

    /// Counts polled completions.
    #[inline]
    pub fn count(&mut self, polled: &[Cqe]) {
        for run in polled.chunk_by(|a, b| a.qp_num == b.qp_num) {
            let number = run[0].qp_num;
            if self.last.as_ref().is_none_or(|(n, _)| *n != number) {
                self.last = self.by_qp.get(&number).map(|c| (number, c.clone()));
            }
            let Some((_, credit)) = &self.last else {
                continue;
            };
            let receives = run.iter().filter(|c| c.opcode.is_receive()).count() as u32;
            let add = |counter: &AtomicU32, n: u32| {
                if n > 0 {
                    let now = counter.load(Ordering::Relaxed).wrapping_add(n);
                    counter.store(now, Ordering::Release);
                }
            };
            add(&credit.receives, receives);
            add(&credit.sends, run.len() as u32 - receives);
        }
    }
}
