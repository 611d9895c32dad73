//! Piecewise registration of an application's existing memory: extents of its arenas, of memory
//! files shared with the daemon, and of its own address space.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use nix::libc;
use siw_memory::{Extent, ExtentMemory, ProcessMemory, RegisteredMemory};
use siw_shm::control::messages as m;
use siw_shm::control::{Request, codec};
use siw_shm::{Access, SharedMemory};

use super::regions::{ArenaOrigin, ClientProcess, MemoryRegion, RegionExtents};
use super::{
    Memory, add_arena, add_region, arena_amounts, check_access, key_amounts, own_arena, own_pages,
};
use crate::config::ProcessMemoryPolicy;
use crate::control::account::heap;
use crate::control::account::quotas::{Charge, Quota};
use crate::control::client::peers::PeerCredentials;
use crate::control::context::Context;
use crate::control::request::deferred::{Deferred, DeferredRequest, Then};
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{EMPTY, Outcome, Served, send_reply};
use crate::control::resources::{Client, Resources};
use crate::control::threads::helpers::{FilePart, FileSource, MemoryOrder, MemorySource};
use crate::ids::{ArenaId, ClientId, PdId};

/// Maximum number of extents of one region: 8 GiB in pieces of 2 MiB.
const MOST_EXTENTS: usize = 4096;

/// Returns whether workers may access memory whose page faults this process can make slow: by a hole
/// that it punches into a long file, by hugepages of 1 GiB, or with its own file system or
/// userfaultfd handler. Processes that could stop the daemon anyway may do that; the configuration can
/// allow more.
fn is_trusted(peer: &PeerCredentials, policy: ProcessMemoryPolicy) -> bool {
    policy == ProcessMemoryPolicy::All || peer.owns_daemon
}

/// Checks that workers may access an arena by another mapping of its file.
fn is_own_file(arena: &Arc<SharedMemory>) -> bool {
    !arena.is_huge() && arena.own_pages().is_ok()
}

/// Outcome of a packet with a descriptor.
pub(in crate::control) enum Received {
    /// No import.
    Nothing,
    /// An import, which is answered or deferred.
    Request,
    /// Another descriptor than one of memory, not for the first time: the client has to be removed.
    WrongDescriptors,
}

impl Memory {
    pub(in crate::control) fn reg_memory(
        &self,
        resources: &mut Resources,
        id: ClientId,
        seq: u32,
        request: &m::RegMemory,
    ) -> Outcome {
        let client = resources.client_mut(id)?;
        let mut extents = std::mem::take(&mut client.next_extents);
        extents.extend_from_slice(used_extents(&request.extents, request.count)?);
        if extents.len() > MOST_EXTENTS {
            return Err(too_many_extents());
        }
        let heap = (extents.len() * heap::EXTENT + request.reason.to_text().len()) as u64;
        let charge = resources.charge(id, key_amounts(heap))?;
        let client = resources.client_mut(id)?;
        let (memory, parts) = check_extents(client, request, &extents)?;
        let stag = self.insert_key(memory)?;
        tracing::debug!(
            client = id.0,
            lkey = stag.0,
            len = request.len,
            arena_bytes = parts.bytes[0],
            remapped_bytes = parts.bytes[1],
            shared_bytes = parts.bytes[2],
            copied_bytes = parts.bytes[3],
            reason = parts.reason,
            "memory of the application registered"
        );
        let mut region = MemoryRegion::in_arena(PdId(request.pd), ArenaId(extents[0].arena));
        region.extents = Some(Box::new(parts));
        add_region(client, stag, charge.of(region));
        let reply = m::MrReply {
            lkey: stag.0,
            rkey: stag.0,
        };
        send_reply::<m::RegMemory>(client, seq, &reply)
    }

    fn import_memory(
        &self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        request: &m::ImportMemory,
        fd: OwnedFd,
    ) -> Outcome {
        if request.kind == m::IMPORT_FILE && SharedMemory::is_memory_file(fd.as_fd()) {
            return self.import_file(context, id, seq, request, fd);
        }
        let client = context.resources.client_mut(id)?;
        let (uid, peer) = (client.account.uid(), client.peer);
        let is_process = request.kind == m::IMPORT_PROCESS;
        let refusal = match is_process.then(|| self.check_process_memory(&peer, &fd)) {
            Some(Ok(())) => return import_process(&mut context.resources, id, seq, fd),
            Some(Err(refusal)) => refusal,
            None => Refusal::new(
                libc::EOPNOTSUPP,
                "only memory files can be mapped: memfd, tmpfs, hugetlbfs",
            ),
        };
        context.helpers.close(uid, fd);
        context.resources.client_mut(id)?.bad_imports += 1;
        Err(refusal)
    }

    fn import_file(
        &self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        request: &m::ImportMemory,
        fd: OwnedFd,
    ) -> Outcome {
        let client = context.resources.client_mut(id)?;
        let (uid, peer) = (client.account.uid(), client.peer);
        // Pages that replace private ones may belong to another context of the same process.
        let arena = context.resources.arena_files.find(&fd, peer);
        let arena = arena.filter(is_own_file);
        if arena.is_none()
            && !is_trusted(&peer, self.process_memory)
            && !SharedMemory::has_short_faults(fd.as_fd())
        {
            context.helpers.close(uid, fd);
            return Err(untrusted());
        }
        let amounts = arena_amounts(request.len, 0);
        let charge = match context.resources.charge(id, amounts) {
            Ok(charge) => charge,
            Err(refusal) => {
                context.helpers.close(uid, fd);
                return Err(refusal);
            }
        };
        // Keeps the file until a helper closes it where the import fails.
        let last = fd.try_clone();
        let part = FilePart {
            source: match arena {
                Some(arena) => FileSource::Arena(arena),
                None => FileSource::Client(fd),
            },
            offset: request.offset,
            len: request.len,
            is_writable: request.writable != 0,
        };
        let imported = self.import_part(context, id, seq, part, (ArenaOrigin::Imported, charge));
        if let (Err(_), Ok(last)) = (&imported, last) {
            context.helpers.close(uid, last);
        }
        imported
    }

    /// Lets a client use memory that another connection of its process has registered.
    pub(in crate::control) fn import_own_file(
        &self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        request: &m::ImportOwnFile,
    ) -> Outcome {
        let peer = context.resources.client_mut(id)?.peer;
        let device =
            nix::sys::stat::makedev(request.device_major.into(), request.device_minor.into());
        let file = (device, request.inode);
        let found = context.resources.arena_files.find_by_id(file, peer);
        let arena = found.filter(is_own_file).ok_or_else(|| {
            Refusal::new(libc::ENOENT, "no connection of this process has the file")
        })?;
        let part = FilePart {
            source: FileSource::Arena(arena),
            offset: request.offset,
            len: request.len,
            is_writable: request.writable != 0,
        };
        let amounts = arena_amounts(request.len, 0);
        let charge = context.resources.charge(id, amounts)?;
        self.import_part(context, id, seq, part, (ArenaOrigin::OwnFile, charge))
    }

    /// Maps a part of a file.
    fn import_part(
        &self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        part: FilePart,
        (origin, charge): (ArenaOrigin, Charge<4>),
    ) -> Outcome {
        // Mapping memory for NICs pins all of its pages.
        if self.ports_use_dma {
            let token = context.workers.next_token(Some(id));
            context.helpers.order_memory(MemoryOrder {
                client: id,
                token,
                source: MemorySource::File(part),
            });
            let then = Then::AddArena { charge, origin };
            return Ok(Served::Deferred(Deferred::new(token, then)));
        }
        let made = part.map(id, &*self.map_arena);
        add_arena(&mut context.resources, id, seq, charge, origin, made)
    }

    /// Receives an import, the only request with a descriptor.
    pub(in crate::control) fn receive_import(
        &self,
        context: &mut Context,
        id: ClientId,
    ) -> Received {
        let Some(client) = context.resources.clients.get_mut(&id) else {
            return Received::Nothing;
        };
        let uid = client.account.uid();
        let helpers = &context.helpers;
        let close = |fd: OwnedFd| helpers.close_duplicate(uid, fd);
        if !client.greeted || !client.conn.is_import_next(close) {
            return Received::Nothing;
        }
        let Ok(packet) = client.conn.recv_packet() else {
            return Received::Nothing;
        };
        let (kind, seq) = codec::peek_header(&packet.bytes).unwrap_or((0, 0));
        let request = Request::decode(&packet.bytes);
        let Some(fd) = packet.fds.into_iter().next() else {
            return Received::Nothing;
        };
        let served = match request {
            Ok((_, Request::ImportMemory(request))) => {
                self.import_memory(context, id, seq, &request, fd)
            }
            _ => {
                context.helpers.close(uid, fd);
                Err(Refusal::new(libc::EPROTO, "invalid request"))
            }
        };
        let Some(client) = context.resources.clients.get_mut(&id) else {
            return Received::Request;
        };
        if let Ok(Served::Deferred(what)) = served {
            client.waiting = Some(DeferredRequest { kind, seq, what });
        } else if let Err(refusal) = served {
            tracing::debug!(client = id.0, "memory not imported: {}", refusal.reason());
            refusal.send(&client.conn, kind, seq);
            // Closing a descriptor other than memory can be slow. A library sends a second one only
            // by mistake.
            if client.bad_imports > 1 {
                return Received::WrongDescriptors;
            }
        }
        Received::Request
    }

    /// Checks that workers may copy from and to a client's address space, and that the descriptor
    /// refers to one.
    fn check_process_memory(&self, peer: &PeerCredentials, fd: &OwnedFd) -> Result<(), Refusal> {
        let policy = self.process_memory;
        if policy == ProcessMemoryPolicy::Never || !is_trusted(peer, policy) {
            return Err(untrusted());
        }
        let path = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        let is_mem = path.is_ok_and(|path| path.ends_with("mem"))
            && nix::sys::statfs::fstatfs(fd)
                .is_ok_and(|status| status.filesystem_type() == nix::sys::statfs::PROC_SUPER_MAGIC);
        if !is_mem {
            return Err(Refusal::new(
                libc::EINVAL,
                "the descriptor does not refer to /proc/self/mem",
            ));
        }
        Ok(())
    }
}

pub(in crate::control) fn add_extents(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    request: &m::AddExtents,
) -> Outcome {
    let more = used_extents(&request.extents, request.count)?;
    let client = resources.clients.get(&id);
    if let Some(client) = client {
        let bytes = size_of_val(more) as u64;
        let ledger = &resources.ledger;
        ledger.check(&client.account, Quota::Heap, bytes)?;
    }
    let client = resources.client_mut(id)?;
    let before = std::mem::take(&mut client.next_extents);
    if before.len() + more.len() > MOST_EXTENTS {
        return Err(too_many_extents());
    }
    // System calls for each arena: those of all extents together would take milliseconds.
    for extent in more {
        own_arena(client, ArenaId(extent.arena))?;
    }
    client.next_extents = before;
    client.next_extents.extend_from_slice(more);
    send_reply::<m::AddExtents>(client, seq, &EMPTY)
}

fn import_process(resources: &mut Resources, id: ClientId, seq: u32, fd: OwnedFd) -> Outcome {
    let charge = resources.charge(id, [(Quota::Descriptors, 1)])?;
    let client = resources.client_mut(id)?;
    let number = ArenaId(client.next_number());
    let memory = Arc::new(ProcessMemory::new(fd));
    let process = charge.of(ClientProcess { memory, mrs: 0 });
    client.processes.insert(number, process);
    let reply = m::IdReply {
        id: number.0,
        reserved: 0,
    };
    send_reply::<m::ImportMemory>(client, seq, &reply)
}

fn untrusted() -> Refusal {
    Refusal::new(
        libc::EPERM,
        "this kind of memory is registered only for root and siwd's user, outside of \
         containers: see [control] process_memory",
    )
}

fn too_many_extents() -> Refusal {
    Refusal::new(
        libc::ENOMEM,
        format!("a region has at most {MOST_EXTENTS} extents"),
    )
}

/// The extents in use of a message.
fn used_extents(
    extents: &[m::MemoryExtent; m::MAX_EXTENTS],
    count: u32,
) -> Result<&[m::MemoryExtent], Refusal> {
    extents.get(..count as usize).ok_or_else(|| {
        let most = m::MAX_EXTENTS;
        Refusal::new(
            libc::EINVAL,
            format!("{count} extents: at most {most} fit in a message"),
        )
    })
}

/// Checks a registration; returns the region and its extents.
fn check_extents(
    client: &Client,
    request: &m::RegMemory,
    extents: &[m::MemoryExtent],
) -> Result<(RegisteredMemory, RegionExtents), Refusal> {
    let access = check_access(request.access)?;
    if !client.pds.contains_key(&PdId(request.pd)) {
        return Err(Refusal::no_such("protection domain", request.pd));
    }
    if extents.is_empty() {
        return Err(Refusal::new(
            libc::EINVAL,
            "a region needs at least one extent",
        ));
    }
    let mut parts = RegionExtents {
        arenas: Vec::new(),
        bytes: [0; 4],
        reason: request.reason.to_text(),
        has_named_reason: false,
    };
    let mut list: Vec<Extent> = Vec::with_capacity(extents.len());
    for extent in extents {
        let number = ArenaId(extent.arena);
        // Most extents are in the arena of the one before.
        let memory = match list.last() {
            Some(before) if parts.arenas.last() == Some(&number) => before.memory.clone(),
            _ => {
                parts.arenas.push(number);
                find_memory(client, number, access)?
            }
        };
        let method = match memory {
            ExtentMemory::Process(_) => m::ExtentMethod::Copy as usize,
            ExtentMemory::Shared(_) => {
                (extent.method as usize).min(m::ExtentMethod::Shared as usize)
            }
        };
        parts.bytes[method] = parts.bytes[method].saturating_add(extent.len);
        list.push(Extent {
            memory,
            offset: extent.offset,
            len: extent.len,
        });
    }
    parts.arenas.sort_unstable();
    parts.arenas.dedup();
    parts.arenas.shrink_to_fit();
    let (len, va) = (request.len, request.va);
    RegisteredMemory::new_scattered(list, len, va, request.pd, access)
        .map(|memory| (memory, parts))
        .map_err(|_| {
            let count = extents.len();
            Refusal::new(
                libc::EINVAL,
                format!("{count} extents are outside their arenas, do not add up to {len} bytes, or wrap"),
            )
        })
}

/// Returns the memory that contains an extent, if it permits the requested access. Its pages are the
/// daemon's then.
fn find_memory(client: &Client, number: ArenaId, access: Access) -> Result<ExtentMemory, Refusal> {
    if let Some(arena) = client.arenas.get(&number) {
        own_pages(arena)?;
        if access.contains(Access::LOCAL_WRITE) && !arena.region.is_writable() {
            return Err(Refusal::new(libc::EFAULT, "the memory is read-only"));
        }
        return Ok(ExtentMemory::Shared(arena.region.clone()));
    }
    let process = client
        .processes
        .get(&number)
        .ok_or_else(|| Refusal::no_such("arena", number.0))?;
    if access.contains(Access::REMOTE_ATOMIC) {
        return Err(Refusal::new(
            libc::EOPNOTSUPP,
            "memory copied by system calls does not support remote atomics",
        ));
    }
    Ok(ExtentMemory::Process(Arc::clone(&process.memory)))
}
