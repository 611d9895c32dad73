//! HELLO, a client's first message: sets up its doorbells and event socket, and reports its limits.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use siw_shm::control::{ControlSocket, messages};
use siw_shm::{DoorbellConsumer, SharedMemory, doorbell};

use super::outbox::Outbox;
use super::quotas::Quota;
use super::{ControlThread, requests};
use crate::ids::ClientId;
use crate::worker::messages::Command;

impl ControlThread {
    pub(super) fn greet_client(
        &mut self,
        id: ClientId,
        seq: u32,
        hello: &messages::ClientHello,
    ) -> requests::Outcome {
        let version = hello.common_version().ok_or_else(|| {
            requests::Refusal::new(
                nix::libc::EPROTONOSUPPORT,
                format!(
                    "protocol versions {} to {}, siwd speaks {} to {}: update the older one of client library and siwd",
                    hello.min_version,
                    hello.version,
                    messages::MIN_VERSION,
                    messages::VERSION
                ),
            )
        })?;
        let workers = self.workers.worker_count() as u32;
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return Ok(requests::Served::Replied);
        };
        if client.greeted {
            return Err(requests::Refusal::new(
                nix::libc::EISCONN,
                "HELLO was already sent",
            ));
        }
        let capacity = self
            .config
            .limits
            .queue_pairs_per_client
            // A destroyed queue pair may leave an entry behind.
            .saturating_mul(2)
            .next_power_of_two()
            .clamp(64, doorbell::MAX_CAPACITY);
        let len = doorbell::ring_len(capacity) * workers as usize;
        // The client can touch all of it, so all of it is charged.
        self.resources.charge(id, &[(Quota::Memory, len as u64)])?;
        let client = self.resources.client_mut(id)?;
        client.name = hello.name.to_text();
        let region = Arc::new(
            SharedMemory::create_memfd(
                "siwd-doorbells",
                len,
                siw_shm::shared_memory::PageSize::Normal,
            )
            .and_then(|memory| memory.guard_for(id.fault_owner()))
            .map_err(requests::Refusal::no_shared_memory)?,
        );
        let (events, theirs) =
            ControlSocket::new_pair().map_err(requests::Refusal::no_shared_memory)?;
        let mut ends = Vec::new();
        for worker in 0..workers {
            let ring = DoorbellConsumer::new(
                region.clone(),
                doorbell::ring_offset(worker, capacity),
                capacity,
            )
            .map_err(|error| requests::Refusal::new(nix::libc::EINVAL, error.to_string()))?;
            let wake = nix::sys::eventfd::EventFd::from_value_and_flags(
                0,
                nix::sys::eventfd::EfdFlags::EFD_NONBLOCK
                    | nix::sys::eventfd::EfdFlags::EFD_CLOEXEC,
            )
            .map_err(|error| requests::Refusal::no_shared_memory(error.into()))?;
            ends.push((ring, Arc::new(OwnedFd::from(wake))));
        }
        let reply = messages::HelloReply {
            version: version.into(),
            client_id: id.0 as u32,
            n_workers: workers,
            n_devices: self.config.devices.len() as u32,
            doorbell_capacity: capacity,
            features: hello.features & messages::FEATURES,
            limits: requests::client_limits(&self.config.limits, &self.config.devices),
            daemon: messages::Text::new(concat!("siwd ", env!("CARGO_PKG_VERSION"))),
        };
        let page = self.config.page.shared_memory().memfd();
        let (Some(page), Some(bells)) = (page, region.memfd()) else {
            return Err(requests::Refusal::new(
                nix::libc::ENOMEM,
                "shared memory has no descriptor",
            ));
        };
        let mut fds = vec![page, bells, theirs.as_fd()];
        fds.extend(ends.iter().map(|end| end.1.as_fd()));
        client.conn.set_version(version);
        client
            .conn
            .send_reply::<messages::ClientHello>(seq, &reply, &fds)
            .map_err(requests::Refusal::no_shared_memory)?;
        client.greeted = true;
        client.doorbells = Some(region);
        let token = self.resources.next_outbox_token(id, None);
        let client = self.resources.client_mut(id)?;
        let budget = client.events_waiting.clone();
        client.events = Some(Outbox::new(events, token, version, budget));
        let user = client.account.uid();
        for (worker, (doorbells, wake)) in ends.into_iter().enumerate() {
            self.workers.post_command(
                worker,
                Command::AddClient {
                    client: id,
                    user,
                    doorbells,
                    wake,
                },
            );
        }
        Ok(requests::Served::Replied)
    }
}
