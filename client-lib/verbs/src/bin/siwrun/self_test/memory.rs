//! Memory of the self-test: regions, windows, shared receive queues.

use super::abi::*;
use super::completions::LibraryPd;
use super::verbs::*;
use std::cell::Cell;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A memory region with its memory.
pub struct LibraryMr {
    pub raw: *mut ibv_mr,
    /// Words, so that atomics are aligned.
    memory: Box<[Cell<u64>]>,
    _pd: Rc<LibraryPd>,
}

/// All access rights of a region.
pub const ALL_ACCESS: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_MW_BIND;

impl LibraryMr {
    /// Registers new memory of `words` times 8 bytes.
    pub fn new(pd: &Rc<LibraryPd>, words: usize, access: u32) -> Result<LibraryMr, String> {
        let memory: Box<[Cell<u64>]> = (0..words).map(|_| Cell::new(0)).collect();
        let (place, length) = (memory.as_ptr(), words * 8);
        // SAFETY: a protection domain; the memory lives as long as the region.
        let raw = unsafe {
            let place = place.cast_mut().cast();
            (verbs().ibv_reg_mr_iova2)(pd.raw, place, length, place as u64, access)
        };
        check_pointer("ibv_reg_mr", raw).map(|raw| LibraryMr {
            raw,
            memory,
            _pd: pd.clone(),
        })
    }

    /// Address of its memory.
    pub fn addr(&self) -> u64 {
        self.memory.as_ptr() as u64
    }

    /// Key for requests of this side.
    pub fn lkey(&self) -> u32 {
        // SAFETY: a region of the library.
        unsafe { (*self.raw).lkey }
    }

    /// Key for the peer.
    pub fn rkey(&self) -> u32 {
        // SAFETY: a region of the library.
        unsafe { (*self.raw).rkey }
    }

    /// Element of `length` bytes from `offset` on.
    pub fn sge(&self, offset: usize, length: usize) -> ibv_sge {
        ibv_sge {
            addr: self.addr() + offset as u64,
            length: length as u32,
            lkey: self.lkey(),
        }
    }

    /// Reads the word at that index, which the peer may have written.
    pub fn word(&self, index: usize) -> u64 {
        // SAFETY: in the slice; a volatile read, because the peer may write it.
        unsafe { self.memory[index].as_ptr().read_volatile() }
    }

    /// Writes the word at that index.
    pub fn set_word(&self, index: usize, value: u64) {
        // SAFETY: in the slice; the peer may read it.
        unsafe { self.memory[index].as_ptr().write_volatile(value) }
    }

    /// Adds to a word atomically, as other threads of the processor do.
    pub fn add_to_word(&self, index: usize, addend: u64) {
        // SAFETY: an aligned word in the slice, which lives as long as the reference.
        let word = unsafe { AtomicU64::from_ptr(self.memory[index].as_ptr()) };
        word.fetch_add(addend, Ordering::Relaxed);
    }

    /// Writes a pattern that depends on the seed.
    pub fn fill_pattern(&self, seed: u64) {
        for index in 0..self.memory.len() {
            self.set_word(index, word_of_pattern(seed, index));
        }
    }

    /// Checks that the first `words` words have the pattern.
    pub fn has_pattern(&self, seed: u64, words: usize) -> Result<(), String> {
        match (0..words).find(|index| self.word(*index) != word_of_pattern(seed, *index)) {
            None => Ok(()),
            Some(index) => Err(format!(
                "word {index} of {words} differs from the data sent"
            )),
        }
    }
}

fn word_of_pattern(seed: u64, index: usize) -> u64 {
    (seed << 32 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Drop for LibraryMr {
    fn drop(&mut self) {
        // SAFETY: registered by `new`.
        note_destroyed("MR", unsafe { (verbs().ibv_dereg_mr)(self.raw) });
    }
}

/// A memory window.
pub struct LibraryMw {
    pub raw: *mut ibv_mw,
    pd: Rc<LibraryPd>,
}

impl LibraryMw {
    /// Allocates a window.
    pub fn new(pd: &Rc<LibraryPd>, kind: ibv_mw_type) -> Result<LibraryMw, String> {
        // SAFETY: a protection domain.
        let raw = unsafe { table_slot((*pd.context.raw).ops.alloc_mw)?(pd.raw, kind) };
        let pd = pd.clone();
        check_pointer("ibv_alloc_mw", raw).map(|raw| LibraryMw { raw, pd })
    }

    /// Key for the peer.
    pub fn rkey(&self) -> u32 {
        // SAFETY: a window of the library.
        unsafe { (*self.raw).rkey }
    }
}

impl Drop for LibraryMw {
    fn drop(&mut self) {
        // SAFETY: its context is open.
        if let Some(dealloc) = unsafe { (*self.pd.context.raw).ops.dealloc_mw } {
            // SAFETY: allocated by `new`.
            note_destroyed("MW", unsafe { dealloc(self.raw) });
        }
    }
}

/// A shared receive queue.
pub struct LibrarySrq {
    pub raw: *mut ibv_srq,
    pd: Rc<LibraryPd>,
}

impl LibrarySrq {
    /// Creates a queue.
    pub fn new(pd: &Rc<LibraryPd>, max_wr: u32, max_sge: u32) -> Result<Rc<LibrarySrq>, String> {
        // SAFETY: a protection domain, and a struct to read and write.
        let raw = unsafe {
            let mut init: ibv_srq_init_attr = zeroed();
            (init.attr.max_wr, init.attr.max_sge) = (max_wr, max_sge);
            (verbs().ibv_create_srq)(pd.raw, &raw mut init)
        };
        let pd = pd.clone();
        check_pointer("ibv_create_srq", raw).map(|raw| Rc::new(LibrarySrq { raw, pd }))
    }

    /// ibv_query_srq(3)
    pub fn query_attributes(&self) -> Result<ibv_srq_attr, String> {
        // SAFETY: a queue, and a struct to write.
        unsafe {
            let mut attr = zeroed();
            let status = (verbs().ibv_query_srq)(self.raw, &raw mut attr);
            check_status("ibv_query_srq", status).map(|()| attr)
        }
    }

    /// ibv_modify_srq(3)
    pub fn modify_attributes(&self, max_wr: u32, limit: u32, mask: u32) -> Result<(), String> {
        let mut attr = ibv_srq_attr {
            max_wr,
            max_sge: 0,
            srq_limit: limit,
        };
        // SAFETY: a queue, and a struct to read.
        let status = unsafe { (verbs().ibv_modify_srq)(self.raw, &raw mut attr, mask as c_int) };
        check_status("ibv_modify_srq", status)
    }

    /// Posts a receive request with these elements.
    pub fn post_receive(&self, sges: &[ibv_sge]) -> Result<(), String> {
        // SAFETY: as in `Qp::receive`.
        unsafe {
            let post = table_slot((*self.pd.context.raw).ops.post_srq_recv)?;
            let (mut request, mut bad) = (receive_request(sges), null_mut());
            let status = post(self.raw, &raw mut request, &raw mut bad);
            check_status("ibv_post_srq_recv", status)
        }
    }
}

impl Drop for LibrarySrq {
    fn drop(&mut self) {
        // SAFETY: its queue pairs are destroyed.
        note_destroyed("SRQ", unsafe { (verbs().ibv_destroy_srq)(self.raw) });
    }
}

/// Builds a receive work request.
///
/// # Safety
/// It must be posted while `sges` exists; posting copies it.
pub unsafe fn receive_request(sges: &[ibv_sge]) -> ibv_recv_wr {
    ibv_recv_wr {
        wr_id: 0,
        next: null_mut(),
        sg_list: sges.as_ptr().cast_mut(),
        num_sge: sges.len() as c_int,
    }
}
