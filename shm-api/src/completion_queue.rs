//! Completion queues: one single-producer single-consumer ring per worker, so
//! that workers never lock; the client polls the rings of those workers that
//! have written.
//!
//! ```text
//!  +0    armed u32                               client arms, a worker takes
//!  +64   workers u64 (bit mask), error u32       written by the daemon
//!  +128  per worker: head u32 (client), pad to 64, entries * 64-byte CQE
//! ```
//! A CQE is valid when its `seq` equals its running number plus one: the client
//! needs no producer index, and touches one line per completion.

use crate::shared_memory::{OutOfBounds, SharedMemory};
use bytemuck::{Pod, Zeroable};
use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use siw_lockfree::rings as lockfree;
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes before the rings.
pub const HEADER: usize = 128;
/// Offset of the arm word.
pub const OFF_ARMED: usize = 0;
/// Offset of the mask of workers that have written.
pub const OFF_WORKERS: usize = 64;
/// Offset of the error word: an errno, 0 when the queue works.
pub const OFF_ERROR: usize = 72;
/// Bytes before the entries of one ring.
pub const RING_HEADER: usize = 64;
/// Most workers: bits of the mask.
pub const MAX_WORKERS: u32 = 64;
/// Most entries of one ring.
pub const MAX_ENTRIES: u32 = 1 << 22;

/// Outcome of a work request; numbers of `enum ibv_wc_status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct WcStatus(pub u8);

impl WcStatus {
    pub const SUCCESS: WcStatus = WcStatus(0);
    pub const LOC_LEN_ERR: WcStatus = WcStatus(1);
    pub const LOC_QP_OP_ERR: WcStatus = WcStatus(2);
    pub const LOC_PROT_ERR: WcStatus = WcStatus(4);
    pub const WR_FLUSH_ERR: WcStatus = WcStatus(5);
    pub const MW_BIND_ERR: WcStatus = WcStatus(6);
    pub const BAD_RESP_ERR: WcStatus = WcStatus(7);
    pub const LOC_ACCESS_ERR: WcStatus = WcStatus(8);
    pub const REM_INV_REQ_ERR: WcStatus = WcStatus(9);
    pub const REM_ACCESS_ERR: WcStatus = WcStatus(10);
    pub const REM_OP_ERR: WcStatus = WcStatus(11);
    pub const RETRY_EXC_ERR: WcStatus = WcStatus(12);
    pub const REM_ABORT_ERR: WcStatus = WcStatus(16);
    pub const FATAL_ERR: WcStatus = WcStatus(19);
    pub const RESP_TIMEOUT_ERR: WcStatus = WcStatus(20);
    pub const GENERAL_ERR: WcStatus = WcStatus(21);

    /// In words, as ibv_wc_status_str does.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SUCCESS => "success",
            Self::LOC_LEN_ERR => "local length error",
            Self::LOC_QP_OP_ERR => "local QP operation error",
            Self::LOC_PROT_ERR => "local protection error",
            Self::WR_FLUSH_ERR => "work request flushed",
            Self::MW_BIND_ERR => "memory window bind error",
            Self::BAD_RESP_ERR => "bad response",
            Self::LOC_ACCESS_ERR => "local access error",
            Self::REM_INV_REQ_ERR => "remote invalid request",
            Self::REM_ACCESS_ERR => "remote access error",
            Self::REM_OP_ERR => "remote operation error",
            Self::RETRY_EXC_ERR => "transport retries exceeded",
            Self::REM_ABORT_ERR => "remote abort",
            Self::FATAL_ERR => "fatal error",
            Self::RESP_TIMEOUT_ERR => "response timeout",
            Self::GENERAL_ERR => "general error",
            _ => "unknown status",
        }
    }
}

/// What completed; numbers of `enum ibv_wc_opcode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct WcOpcode(pub u8);

impl WcOpcode {
    pub const SEND: WcOpcode = WcOpcode(0);
    pub const RDMA_WRITE: WcOpcode = WcOpcode(1);
    pub const RDMA_READ: WcOpcode = WcOpcode(2);
    pub const COMP_SWAP: WcOpcode = WcOpcode(3);
    pub const FETCH_ADD: WcOpcode = WcOpcode(4);
    pub const BIND_MW: WcOpcode = WcOpcode(5);
    pub const LOCAL_INV: WcOpcode = WcOpcode(6);
    pub const RECV: WcOpcode = WcOpcode(128);
    pub const RECV_RDMA_WITH_IMM: WcOpcode = WcOpcode(129);
}

impl WcOpcode {
    /// Whether a receive work request completed.
    #[inline]
    pub fn is_receive(self) -> bool {
        self.0 & Self::RECV.0 != 0
    }
}

impl From<crate::wqe::Opcode> for WcOpcode {
    fn from(o: crate::wqe::Opcode) -> WcOpcode {
        use crate::wqe::Opcode::*;
        match o {
            Write | WriteWithImm => WcOpcode::RDMA_WRITE,
            Read | ReadWithInv => WcOpcode::RDMA_READ,
            Send | SendWithInv | SendWithImm => WcOpcode::SEND,
            FetchAdd => WcOpcode::FETCH_ADD,
            CmpSwap => WcOpcode::COMP_SWAP,
            LocalInv | RegMr => WcOpcode::LOCAL_INV,
            BindMw => WcOpcode::BIND_MW,
        }
    }
}

/// Flags of a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct WcFlags(pub u16);

impl WcFlags {
    pub const NONE: WcFlags = WcFlags(0);
    /// `imm` holds immediate data.
    pub const WITH_IMM: WcFlags = WcFlags(2);
    /// `imm` holds the local key that the peer invalidated.
    pub const WITH_INV: WcFlags = WcFlags(8);
    /// The peer asked for a solicited event.
    pub const SOLICITED: WcFlags = WcFlags(0x100);

    /// Whether all bits of `f` are set.
    #[inline]
    pub fn contains(self, f: WcFlags) -> bool {
        self.0 & f.0 == f.0
    }
}

impl std::ops::BitOr for WcFlags {
    type Output = WcFlags;
    fn bitor(self, o: WcFlags) -> WcFlags {
        WcFlags(self.0 | o.0)
    }
}

/// Completion queue entry, 64 bytes in shared memory.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct Wc {
    pub wr_id: u64,
    pub qp_num: u32,
    pub status: WcStatus,
    pub opcode: WcOpcode,
    pub flags: WcFlags,
    pub byte_len: u32,
    /// Immediate data or the invalidated key, see `flags`.
    pub imm: u32,
    pub vendor_err: u32,
    pub reserved: [u32; 7],
    /// TSC or 0; reserved for extended completion queues.
    pub reserved2: u32,
    /// Written last; owned by the ring code.
    pub seq: u32,
}

const _: () = assert!(size_of::<Wc>() == 64 && offset_of!(Wc, seq) == 60);
const _: () = assert!(offset_of!(Wc, qp_num) == 8 && offset_of!(Wc, byte_len) == 16);

/// The client does not poll: its ring is full. Fatal for the CQ and the QPs that
/// complete into it (CQ_ERR), for nobody else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("completion queue overflow")]
pub struct CqOverflow;

/// Sizes of a completion queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CqGeometry {
    /// Entries of each worker's ring, a power of two.
    pub entries: u32,
    /// Number of rings.
    pub workers_mask: u32,
    /// Bytes of all.
    pub len: usize,
}

impl CqGeometry {
    /// A queue of at least `cqe` entries; None when it is too large.
    pub fn new(cqe: u32, workers: u32) -> Option<CqGeometry> {
        let entries = cqe.max(1).checked_next_power_of_two()?;
        Self::from_exact(entries, workers)
    }

    /// From the numbers in a reply.
    pub fn from_exact(entries: u32, workers: u32) -> Option<CqGeometry> {
        if entries > MAX_ENTRIES
            || !entries.is_power_of_two()
            || workers == 0
            || workers > MAX_WORKERS
        {
            return None;
        }
        let len = HEADER + workers as usize * ring_stride(entries);
        Some(CqGeometry {
            entries,
            workers_mask: workers,
            len,
        })
    }
}

fn ring_stride(entries: u32) -> usize {
    RING_HEADER + entries as usize * size_of::<Wc>()
}

struct CqMem {
    base: NonNull<u8>,
    queue_geometry: CqGeometry,
    _region: Arc<SharedMemory>,
}

// SAFETY: the words are atomics, entries are copied raw; the Arc keeps the
// mapping alive on whatever thread.
unsafe impl Send for CqMem {}

impl CqMem {
    fn new(
        region: Arc<SharedMemory>,
        offset: usize,
        geometry: CqGeometry,
    ) -> Result<Self, OutOfBounds> {
        let checked =
            CqGeometry::from_exact(geometry.entries, geometry.workers_mask).ok_or(OutOfBounds)?;
        if !offset.is_multiple_of(64) || !region.is_writable() {
            return Err(OutOfBounds);
        }
        let p = region.ptr_at(offset, checked.len)?;
        Ok(CqMem {
            base: NonNull::new(p).ok_or(OutOfBounds)?,
            queue_geometry: checked,
            _region: region,
        })
    }

    #[inline]
    fn word_at(&self, off: usize) -> &AtomicU32 {
        // SAFETY: off is a 4-aligned offset inside the checked length.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(off).cast()) }
    }

    #[inline]
    fn workers_mask(&self) -> &AtomicU64 {
        // SAFETY: 8-aligned inside the header.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(OFF_WORKERS).cast()) }
    }

    #[inline]
    fn ring_off(&self, worker: u32) -> usize {
        HEADER + worker as usize * ring_stride(self.queue_geometry.entries)
    }

    #[inline]
    fn entry_off(&self, worker: u32, pos: u32) -> usize {
        let i = (pos & (self.queue_geometry.entries - 1)) as usize;
        self.ring_off(worker) + RING_HEADER + i * size_of::<Wc>()
    }
}

/// One worker's end of a completion queue.
pub struct CqProducer {
    mem: CqMem,
    worker: u32,
    tail: u32,
    head: u32,
    any: bool,
    solicited: bool,
    announced: bool,
}

impl CqProducer {
    /// The ring of `worker` in the queue at `offset`.
    pub fn new(
        region: Arc<SharedMemory>,
        offset: usize,
        geometry: CqGeometry,
        worker: u32,
    ) -> Result<Self, OutOfBounds> {
        let mem = CqMem::new(region, offset, geometry)?;
        if worker >= mem.queue_geometry.workers_mask {
            return Err(OutOfBounds);
        }
        Ok(CqProducer {
            mem,
            worker,
            tail: 0,
            head: 0,
            any: false,
            solicited: false,
            announced: false,
        })
    }

    /// Appends a completion; the client can poll it at once. A nonsensical
    /// consumer index looks like a full ring.
    #[inline]
    pub fn push(&mut self, cqe: &Wc) -> Result<(), CqOverflow> {
        let entries = self.mem.queue_geometry.entries;
        if self.tail.wrapping_sub(self.head) >= entries {
            let head = self.mem.word_at(self.mem.ring_off(self.worker));
            self.head = lockfree::released_completions(head);
            if self.tail.wrapping_sub(self.head) >= entries {
                return Err(CqOverflow);
            }
        }
        if !self.announced {
            self.announced = true;
            self.mem
                .workers_mask()
                .fetch_or(1 << self.worker, Ordering::Release);
        }
        let off = self.mem.entry_off(self.worker, self.tail);
        let seq_off = off + offset_of!(Wc, seq);
        let mut e = *cqe;
        e.seq = self.mem.word_at(seq_off).load(Ordering::Relaxed);
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: off is inside and 64-aligned; the client does not read the entry
        // before `seq` says so, and `seq` is rewritten with its old value here.
        unsafe { self.mem.base.as_ptr().add(off).cast::<Wc>().write(e) };
        lockfree::publish_completion(self.mem.word_at(seq_off), self.tail);
        self.any = true;
        self.solicited |= cqe.status != WcStatus::SUCCESS || cqe.flags.contains(WcFlags::SOLICITED);
        Ok(())
    }

    /// Number of the completion that was pushed last.
    #[inline]
    pub fn last_pushed(&self) -> u32 {
        self.tail.wrapping_sub(1)
    }

    /// Whether the client has taken the completion of that number. Its word for it: a client that
    /// lies about it fools its own share.
    #[inline]
    pub fn is_polled(&self, number: u32) -> bool {
        let head = self
            .mem
            .word_at(self.mem.ring_off(self.worker))
            .load(Ordering::Acquire);
        head.wrapping_sub(number) as i32 > 0
    }

    /// After a batch of pushes: whether this worker has to write the event
    /// channel now.
    #[inline]
    pub fn take_event(&mut self) -> bool {
        if !self.any {
            return false;
        }
        let solicited = self.solicited;
        self.any = false;
        self.solicited = false;
        lockfree::take_arm(self.mem.word_at(OFF_ARMED), solicited)
    }

    /// Hands an arming over to the queue that a resize puts in this one's place.
    pub fn move_arming(&self, to: &CqProducer) {
        lockfree::move_arming(self.mem.word_at(OFF_ARMED), to.mem.word_at(OFF_ARMED));
    }

    /// Whether pushes wait for [`Self::take_event`].
    #[inline]
    pub fn has_unflushed(&self) -> bool {
        self.any
    }

    /// Tells the client that the queue is broken (an errno).
    pub fn set_error(&self, errno: u32) {
        self.mem.word_at(OFF_ERROR).store(errno, Ordering::Release);
    }
}

/// Application's end of a completion queue. One thread at a time (`&mut`).
pub struct CqConsumer {
    mem: CqMem,
    heads: Box<[u32]>,
    next: u32,
}

impl CqConsumer {
    /// The queue at `offset`.
    pub fn new(
        region: Arc<SharedMemory>,
        offset: usize,
        geometry: CqGeometry,
    ) -> Result<Self, OutOfBounds> {
        let mem = CqMem::new(region, offset, geometry)?;
        let heads = vec![0; mem.queue_geometry.workers_mask as usize].into_boxed_slice();
        Ok(CqConsumer {
            mem,
            heads,
            next: 0,
        })
    }

    /// Takes up to `out.len()` completions, starting with another worker's ring
    /// each time.
    #[inline]
    pub fn poll(&mut self, out: &mut [Wc]) -> usize {
        let all = self.mem.workers_mask().load(Ordering::Acquire);
        let mut n = 0;
        // Rings at or above `next` first, then those below.
        let low = (1u64 << self.next) - 1;
        for mut mask in [all & !low, all & low] {
            while mask != 0 && n < out.len() {
                let w = mask.trailing_zeros();
                mask &= mask - 1;
                if w < self.mem.queue_geometry.workers_mask {
                    n += self.poll_ring(w, &mut out[n..]);
                }
            }
        }
        if all & (all.wrapping_sub(1)) != 0 {
            self.next = (self.next + 1) % self.mem.queue_geometry.workers_mask;
        }
        n
    }

    #[inline]
    fn poll_ring(&mut self, worker: u32, out: &mut [Wc]) -> usize {
        let start = self.heads[worker as usize];
        let mut pos = start;
        for slot in out.iter_mut() {
            let off = self.mem.entry_off(worker, pos);
            let expect = pos.wrapping_add(1);
            let seq = self.mem.word_at(off + offset_of!(Wc, seq));
            if !lockfree::is_completion(seq, expect) {
                break;
            }
            // SAFETY: inside and 64-aligned; the worker does not touch the entry
            // before the head below passes it.
            *slot = unsafe { self.mem.base.as_ptr().add(off).cast::<Wc>().read() };
            pos = expect;
        }
        if pos != start {
            self.heads[worker as usize] = pos;
            lockfree::release_completions(self.mem.word_at(self.mem.ring_off(worker)), pos);
        }
        pos.wrapping_sub(start) as usize
    }

    /// Asks for an event with the next completion, or the next solicited one;
    /// poll once more afterwards.
    #[inline]
    pub fn arm_event(&self, solicited_only: bool) {
        let level = if solicited_only {
            lockfree::ARM_SOLICITED
        } else {
            lockfree::ARM_NEXT
        };
        lockfree::arm_event(self.mem.word_at(OFF_ARMED), level);
    }

    /// Takes an arming back. True: there was one.
    pub fn disarm_event(&self) -> bool {
        lockfree::disarm_event(self.mem.word_at(OFF_ARMED)) != lockfree::ARM_NONE
    }

    /// Completions that wait, counted up to `most`.
    pub fn count_waiting(&self, most: usize) -> usize {
        let all = self.mem.workers_mask().load(Ordering::Acquire);
        let mut n = 0;
        for w in (0..self.mem.queue_geometry.workers_mask).filter(|w| all >> w & 1 == 1) {
            let mut pos = self.heads[w as usize];
            while n < most && self.is_filled(w, pos) {
                pos = pos.wrapping_add(1);
                n += 1;
            }
        }
        n
    }

    #[inline]
    fn is_filled(&self, worker: u32, pos: u32) -> bool {
        let seq = self.mem.entry_off(worker, pos) + offset_of!(Wc, seq);
        lockfree::is_completion(self.mem.word_at(seq), pos.wrapping_add(1))
    }

    /// The errno with which the daemon broke the queue; 0 while it works.
    #[inline]
    pub fn error_code(&self) -> u32 {
        self.mem.word_at(OFF_ERROR).load(Ordering::Acquire)
    }

    /// Sizes.
    pub fn queue_geometry(&self) -> CqGeometry {
        self.mem.queue_geometry
    }
}
