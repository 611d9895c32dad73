//! Imports: memory that a client brings, as a file in memory or as its address space, and registers in extents.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use nix::libc;
use siw_shm::SharedMemory;
use siw_shm::control::messages as m;
use siw_shm::control::{Request, codec};

use super::Memory;
use super::client_memory::{ArenaOrigin, ClientProcess, arena_amounts};
use crate::config::ProcessMemoryPolicy;
use crate::control::account::quotas::{Charge, Quota};
use crate::control::client::peers::PeerCredentials;
use crate::control::context::Context;
use crate::control::request::deferred::{Deferred, DeferredRequest, Then};
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{Outcome, Served, send_reply};
use crate::control::resources::Resources;
use crate::control::threads::helpers::{FilePart, FileSource, MemoryOrder, MemorySource};
use crate::ids::{ArenaId, ClientId};

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
        let arena = self.files.find(&fd, peer);
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
        let found = self.files.find_by_id(file, peer);
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
        self.add_arena(&mut context.resources, id, seq, (charge, origin), made)
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

fn import_process(resources: &mut Resources, id: ClientId, seq: u32, fd: OwnedFd) -> Outcome {
    let charge = resources.charge(id, [(Quota::Descriptors, 1)])?;
    let client = resources.client_mut(id)?;
    let number = ArenaId(client.next_number());
    let process = charge.of(ClientProcess::new(fd));
    client.memory.add_process(number, process);
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
