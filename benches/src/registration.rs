//! Cost of registering existing application memory, by size and by the method with which the daemon
//! obtains access to it.

use anyhow::anyhow;
use clap::ValueEnum;
use siw::{Access, Arena, Context, ExtentMethod, Pd};
use siw_shm::SharedMemory;
use siw_shm::shared_memory::{PAGE, PageSize};
use std::time::{Duration, Instant};

/// Kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MemoryKind {
    /// From malloc, never registered before: its pages are replaced.
    Fresh,
    /// From malloc, registered before.
    Again,
    /// A part of an arena.
    Arena,
    /// A shared mapping of a memory file.
    Shared,
    /// On the stack: copied by system calls.
    Stack,
}

/// Maximum size of a stack buffer.
const STACK_BYTES: usize = 64 << 10;

/// Memory to register, allocated while this value lives.
enum Buffer {
    Bytes(Vec<u8>),
    Arena(std::sync::Arc<Arena>),
    Shared(SharedMemory),
}

impl Buffer {
    fn allocate(context: &Context, kind: MemoryKind, size: usize) -> anyhow::Result<Buffer> {
        Ok(match kind {
            MemoryKind::Arena => {
                let arena = Arena::alloc(context, size, false)?;
                Buffer::Arena(arena)
            }
            MemoryKind::Shared => {
                let memory = SharedMemory::create_memfd("siw-figures", size, PageSize::Normal);
                Buffer::Shared(memory?)
            }
            // Long enough that malloc takes fresh pages for it, each of which is written.
            _ => Buffer::Bytes(vec![1; size.max(PAGE * 64)]),
        })
    }

    fn as_mut_ptr(&mut self) -> *mut u8 {
        match self {
            Buffer::Bytes(bytes) => bytes.as_mut_ptr(),
            Buffer::Arena(arena) => arena.as_ptr(),
            Buffer::Shared(memory) => memory.as_ptr(),
        }
    }
}

/// Median time of `count` registrations.
///
/// # Errors
/// The daemon refuses, or uses another access method than this kind of memory is meant to measure.
pub fn registration_time(
    context: &Context,
    kind: MemoryKind,
    size: usize,
    count: usize,
) -> anyhow::Result<Duration> {
    let pd = context.alloc_pd()?;
    let mut times = Vec::with_capacity(count);
    let mut kept = None;
    for _ in 0..count.max(1) {
        if kind == MemoryKind::Stack {
            let mut bytes = [1u8; STACK_BYTES];
            times.push(register_once(
                &pd,
                bytes.as_mut_ptr(),
                size.min(STACK_BYTES),
                kind,
            )?);
            continue;
        }
        let mut buffer = match kept.take() {
            Some(buffer) => buffer,
            None => Buffer::allocate(context, kind, size)?,
        };
        let address = buffer.as_mut_ptr();
        if kind == MemoryKind::Again && times.is_empty() {
            register_once(&pd, address, size, kind)?;
        }
        times.push(register_once(&pd, address, size, kind)?);
        if kind != MemoryKind::Fresh {
            kept = Some(buffer);
        }
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

fn register_once(
    pd: &Pd,
    address: *mut u8,
    size: usize,
    kind: MemoryKind,
) -> anyhow::Result<Duration> {
    let start = Instant::now();
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    // SAFETY: the callers keep the memory until the region is dropped, and no work request uses it.
    let registered = unsafe { pd.reg_memory(address, size, access) };
    let time = start.elapsed();
    let region = registered?;
    let expected = match kind {
        MemoryKind::Fresh | MemoryKind::Again => ExtentMethod::Remap,
        MemoryKind::Arena => ExtentMethod::Arena,
        MemoryKind::Shared => ExtentMethod::Shared,
        MemoryKind::Stack => ExtentMethod::Copy,
    };
    match region.methods()[..] {
        [(method, _)] if method == expected => Ok(time),
        ref other => Err(anyhow!(
            "siwd accesses the memory by {other:?}, not by {expected:?}"
        )),
    }
}
