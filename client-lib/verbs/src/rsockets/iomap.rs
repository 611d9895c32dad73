//! Memory that the peer writes directly: riomap(3), riounmap(3), riowrite(3).

use super::mappings::MappedMemory;
use super::send::Blocked;
use super::socket::{Attempt, Phase, Rsocket, RsocketState};
use super::stream::Stream;
use super::transfer::moved_or;
use super::vectors::SourceBuffers;
use super::wire::{PeerMapping, PeerWindow};
use crate::rdmacm::devices::Devices;
use crate::status::log_failure;
use crate::waiting::Call;
use siw::Access;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

impl RsocketState {
    /// Tells the peer about memory mapped since the last call.
    pub fn send_mappings(&mut self) -> Result<(), Attempt<Result<usize, c_int>>> {
        if self.mappings.0.iter().all(|mapped| !mapped.is_pending) {
            return Ok(());
        }
        let mut mappings = std::mem::take(&mut self.mappings);
        let sent = self.stream().and_then(|stream| {
            let mut pending = mappings.0.iter_mut().filter(|mapped| mapped.is_pending);
            pending.try_for_each(|mapped| mapped.send(stream))
        });
        self.mappings = mappings;
        sent
    }
}

impl MappedMemory {
    fn send(&mut self, stream: &mut Stream) -> Result<(), Attempt<Result<usize, c_int>>> {
        let Some(index) = self.index else {
            return Ok(());
        };
        let mapping = PeerMapping {
            offset: self.offset,
            memory: PeerWindow {
                address: self.address as u64,
                key: self.region.rkey(),
                length: u32::try_from(self.length).unwrap_or(u32::MAX),
            },
        };
        match stream.send_mapping(index, &mapping) {
            Ok(()) => {
                self.is_pending = false;
                Ok(())
            }
            Err(Blocked::Full) => Err(Attempt::Wait),
            Err(Blocked::Closed) => Err(Attempt::Done(Err(stream.write_error()))),
        }
    }
}

impl Stream {
    /// Finds the peer's memory for an offset.
    fn find_mapping(&self, offset: u64) -> Option<PeerMapping> {
        let all = (0..usize::from(self.peer_written_mappings())).filter_map(|index| {
            let bytes = self.memory.read_mapping(index).ok()?;
            Some(PeerMapping::from_bytes(&bytes))
        });
        all.filter(|mapping| mapping.memory.length > 0)
            .find(|mapping| {
                offset
                    .checked_sub(mapping.offset)
                    .is_some_and(|within| within < mapping.memory.length.into())
            })
    }

    fn peer_written_mappings(&self) -> u16 {
        self.sizes.mappings
    }
}

impl Rsocket {
    /// riomap(3): returns the offset assigned to the memory.
    pub fn map(
        &self,
        address: *mut c_void,
        length: usize,
        protection: c_int,
        offset: i64,
    ) -> Result<i64, c_int> {
        let mut state = self.lock();
        state.progress();
        let Phase::Stream(stream) = &state.phase else {
            return Err(libc::EINVAL);
        };
        let is_written = protection & libc::PROT_WRITE != 0;
        if protection & !(libc::PROT_WRITE | libc::PROT_NONE) != 0 {
            return Err(libc::EINVAL);
        }
        let most = stream.peer_mappings();
        let index = state.mappings.free_index(most);
        if is_written && index.is_none() {
            return Err(libc::ENOMEM);
        }
        let mut access = Access::LOCAL_WRITE;
        if is_written {
            access |= Access::REMOTE_WRITE;
        }
        let offset = if offset == -1 { address as i64 } else { offset };
        let region = Devices::open()
            .and_then(Devices::socket_pd)
            // SAFETY: a C program that maps memory promises to keep it until riounmap(3).
            .and_then(|pd| unsafe { pd.reg_memory(address.cast(), length, access) })
            .map_err(|error| {
                log_failure("riomap", &error);
                error.errno().max(1)
            })?;
        state.mappings.0.push(MappedMemory {
            address: address as usize,
            length,
            offset: offset as u64,
            region,
            index: index.filter(|_| is_written),
            is_pending: is_written,
        });
        Ok(offset)
    }

    /// riounmap(3)
    pub fn unmap(&self, address: *mut c_void, length: usize) -> Result<(), c_int> {
        let mut state = self.lock();
        let found = state
            .mappings
            .0
            .iter()
            .position(|mapped| mapped.address == address as usize && mapped.length == length);
        let mapped = state.mappings.0.remove(found.ok_or(libc::EINVAL)?);
        drop(mapped.region);
        Ok(())
    }

    /// riowrite(3)
    ///
    /// # Safety
    /// The buffer is valid for its length.
    pub unsafe fn write_mapped(
        self: &Arc<Self>,
        call: &mut Call,
        part: &[libc::iovec; 1],
        offset: i64,
        flags: c_int,
    ) -> Result<usize, c_int> {
        // SAFETY: as the caller promised.
        let mut data = unsafe { SourceBuffers::new(part) };
        let length = data.left();
        data.skip(call.moved);
        let outcome = self.attempt(call, self.patience(flags, None), |state| {
            if let Err(attempt) = state.send_mappings() {
                return attempt;
            }
            let stream = match state.stream() {
                Ok(stream) => stream,
                Err(attempt) => return attempt,
            };
            while data.left() > 0 {
                let at = offset as u64 + (length - data.left()) as u64;
                let Some(mapping) = stream.find_mapping(at) else {
                    break;
                };
                match stream.write_mapped(&mut data, &mapping, at) {
                    Ok(_) => {}
                    Err(Blocked::Full) => return Attempt::Wait,
                    Err(Blocked::Closed) => return Attempt::Done(Err(stream.write_error())),
                }
            }
            Attempt::Done(Ok(0))
        });
        call.moved = length - data.left();
        moved_or(call.moved, outcome)
    }
}
