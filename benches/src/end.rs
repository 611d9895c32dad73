//! One end of a measurement: a client of the daemon with its memory, completion queues and queue
//! pairs.

use crate::control_line::CONTROL_LINE_BYTES;
use crate::plan::{ATOMIC_SIZE, INITIAL_BYTE, MeasurementPlan, Mode};
use anyhow::{anyhow, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use siw::{
    Access, Arena, CmChannel, CmEvent, CompletionChannel, Context, Cq, DeviceInfo, Error, Mr, Qp,
    QpInit, RecvWr, SendData, SendWr, Wc, WcStatus, WrFlags,
};
use std::cell::Cell;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Receives that a ping-pong of SENDs or of WRITEs with immediate data keeps posted.
const LAT_RECEIVES: u32 = 16;

/// No completion for this long is an error.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time that a receive queue may stay full: the worker frees a slot shortly after the
/// completion.
const QUEUE_FULL_TIMEOUT: Duration = Duration::from_millis(100);

/// Role of an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Posts WRITEs, READs or SENDs.
    Initiator,
    /// Receives SENDs, or owns the memory that WRITEs and READs refer to.
    Target,
}

impl Role {
    /// The role of the other end.
    pub fn other(self) -> Role {
        match self {
            Role::Initiator => Role::Target,
            Role::Target => Role::Initiator,
        }
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Role::Initiator => "initiator",
            Role::Target => "target",
        })
    }
}

/// Location of the other end's memory for one QP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerMemory {
    /// Address of the first message slot.
    pub addr: u64,
    /// Key of the message slots.
    pub rkey: u32,
    /// Address of the control line.
    pub control: u64,
    /// Key of the control line.
    pub control_rkey: u32,
}

/// Maximum sleep for completions between two checks of the time.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);

/// A client of the daemon as one end of a measurement.
pub struct TransferEnd {
    /// The queue pairs, by their number.
    pub qps: Vec<Qp>,
    /// The other end's memory for each QP, once connected.
    pub peers: Vec<PeerMemory>,
    /// The message slots of all QPs.
    pub data: Mr,
    /// The control lines of all QPs.
    pub control: Mr,
    /// Completion queue for sends.
    pub send_cq: Cq,
    /// Completion queue for receives.
    pub recv_cq: Cq,
    /// Event channel of both queues, if the plan uses events.
    completions: Option<Arc<CompletionChannel>>,
    is_armed: Cell<bool>,
    /// Events of the connections.
    pub channel: CmChannel,
    /// The measurement plan.
    pub plan: MeasurementPlan,
    /// True if the message slots are in hugepages.
    pub huge: bool,
    /// Established connections, counted by the accepting code.
    pub ready: u32,
    /// Message slots of each QP.
    slots: usize,
    /// The connection to the daemon.
    pub ctx: Context,
}

/// Connects to the daemon; the error explains how to start it.
pub fn open_context(socket: Option<&Path>) -> anyhow::Result<Context> {
    Context::open(socket).map_err(|error| match error {
        Error::Open { path, source }
            if matches!(
                source.kind(),
                ErrorKind::NotFound | ErrorKind::ConnectionRefused
            ) =>
        {
            anyhow!(
                "siwd is not running: nothing listens at {path}; start it with \
                 `siwd --config config/loopback.toml`, or name its socket with --socket"
            )
        }
        error => error.into(),
    })
}

/// Finds the device with this name; the error lists the existing ones.
pub fn find_device(ctx: &Context, name: &str) -> anyhow::Result<DeviceInfo> {
    let devices = ctx.query_devices()?;
    let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    let names = names.join(", ");
    devices
        .iter()
        .find(|device| device.name == name)
        .cloned()
        .ok_or_else(|| anyhow!("siwd has no device {name}; it has {names}"))
}

/// Prefixes the error of a verbs call with the attempted operation.
pub fn failed_call<E: Into<Error>>(what: &str) -> impl Fn(E) -> anyhow::Error + '_ {
    move |error| anyhow!("{what}: {}", error.into())
}

impl TransferEnd {
    /// Creates memory, queues and QPs as the plan requires, not connected.
    pub fn new(ctx: &Context, plan: &MeasurementPlan, role: Role) -> anyhow::Result<TransferEnd> {
        let slots = match role {
            Role::Initiator => plan.initiator_slots(),
            Role::Target => plan.target_slots(),
        };
        let sends = match plan.mode {
            Mode::Bw => plan.depth + 8,
            Mode::Lat => 64,
        };
        let takes_receives = plan.op.takes_receive();
        let receives = match plan.mode {
            Mode::Bw if takes_receives => slots,
            Mode::Lat => LAT_RECEIVES,
            Mode::Bw => 1,
        };
        let limits = ctx.limits();
        if sends.max(receives) > limits.max_qp_wr {
            bail!(
                "siwd allows {} work requests in a queue, {} are needed; lower --depth, or raise \
                 [limits] work_requests",
                limits.max_qp_wr,
                sends.max(receives)
            );
        }
        let cqe = |each: u32| {
            let all = each.saturating_mul(plan.qps).saturating_add(16);
            if all <= limits.max_cqe {
                return Ok(all);
            }
            Err(anyhow!(
                "siwd allows {} completions in a queue, {all} are needed; lower --depth or --qps",
                limits.max_cqe
            ))
        };
        let pd = ctx.alloc_pd().map_err(failed_call("protection domain"))?;
        let access = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC;
        let len = plan.slot_stride() * slots as usize * plan.qps as usize;
        let memory = |len: usize| {
            let huge = len >= siw_shm::shared_memory::HUGE_PAGE;
            let arena = Arena::alloc(ctx, len, huge)?;
            pd.reg_mr(&arena, 0..len, access)
                .map(|mr| (mr, arena.is_huge()))
        };
        let (data, huge) = memory(len).map_err(failed_call("registered memory"))?;
        let (control, _) = memory(CONTROL_LINE_BYTES * plan.qps as usize)
            .map_err(failed_call("registered memory"))?;
        let completions = match plan.events {
            true => Some(CompletionChannel::new(ctx).map_err(failed_call("completion channel"))?),
            false => None,
        };
        let new_cq = |entries: u32| {
            Cq::new(
                ctx,
                entries,
                completions.as_ref().map(|channel| (channel, 0)),
            )
            .map_err(failed_call("completion queue"))
        };
        let (send_cq, recv_cq) = (new_cq(cqe(sends)?)?, new_cq(cqe(receives)?)?);
        let init = QpInit {
            max_send_wr: sends,
            max_recv_wr: receives,
            max_inline: if plan.inline { plan.size } else { 0 }.max(32),
            ..QpInit::default()
        };
        let qps = (0..plan.qps)
            .map(|_| pd.create_qp(&send_cq, &recv_cq, &init))
            .collect::<Result<Vec<Qp>, Error>>()
            .map_err(failed_call("queue pair"))?;
        let end = TransferEnd {
            qps,
            peers: Vec::new(),
            data,
            control,
            send_cq,
            recv_cq,
            completions,
            is_armed: Cell::new(false),
            channel: CmChannel::new(ctx).map_err(failed_call("connection channel"))?,
            plan: *plan,
            huge,
            ready: 0,
            slots: slots as usize,
            ctx: ctx.clone(),
        };
        end.touch_pages()?;
        // Posted before anything can arrive.
        for qp in 0..plan.qps {
            match (plan.mode, role) {
                _ if !takes_receives => {}
                (Mode::Bw, Role::Target) => end.post_receives(qp, 0, slots)?,
                (Mode::Lat, _) => {
                    for _ in 0..LAT_RECEIVES {
                        end.post_receives(qp, 1, 1)?;
                    }
                }
                _ => {}
            }
        }
        Ok(end)
    }

    /// Writes to each page once: the first use of a page costs more than later ones.
    fn touch_pages(&self) -> anyhow::Result<()> {
        let page = [INITIAL_BYTE; 4096];
        for at in (0..self.data.len()).step_by(page.len()) {
            let count = page.len().min(self.data.len() - at);
            self.data
                .write(at, &page[..count])
                .map_err(failed_call("registered memory"))?;
        }
        Ok(())
    }

    /// Location of QP `qp`'s memory, for the peer.
    pub fn local_memory(&self, qp: u32) -> PeerMemory {
        PeerMemory {
            addr: self.data.addr() + self.slot_offset(qp, 0) as u64,
            rkey: self.data.rkey(),
            control: self.control.addr() + (qp as usize * CONTROL_LINE_BYTES) as u64,
            control_rkey: self.control.rkey(),
        }
    }

    /// Offset in the registered memory of a QP's message slot; `slot` counts on without wrapping.
    #[inline]
    pub fn slot_offset(&self, qp: u32, slot: u64) -> usize {
        (qp as usize * self.slots + slot as usize % self.slots) * self.plan.slot_stride()
    }

    /// Posts `n` receives into the slots from `slot` on.
    pub fn post_receives(&self, qp: u32, slot: u64, count: u32) -> anyhow::Result<()> {
        for index in 0..u64::from(count) {
            let sge = self
                .data
                .sge(self.slot_offset(qp, slot + index), self.plan.size as usize);
            let wr = RecvWr {
                wr_id: u64::from(qp),
                sges: &[sge],
            };
            self.post_receive(qp, &wr)?;
        }
        Ok(())
    }

    /// Posts a receive; retries, since the worker may free a slot shortly after its completion.
    #[inline]
    fn post_receive(&self, qp: u32, wr: &RecvWr) -> anyhow::Result<()> {
        let mut since = None;
        loop {
            match self.qps[qp as usize].post_recv(&[*wr]) {
                Ok(()) => return Ok(()),
                Err(error)
                    if matches!(error.error, Error::QueueFull)
                        && since.get_or_insert_with(Instant::now).elapsed()
                            < QUEUE_FULL_TIMEOUT =>
                {
                    std::hint::spin_loop();
                }
                Err(error) => bail!("receive on queue pair {qp}: {error}"),
            }
        }
    }

    /// Writes `bytes` into the peer's control line at `at`, without a completion. False if the send
    /// queue is full.
    pub fn signal_peer(&self, qp: u32, at: u64, bytes: &[u8]) -> anyhow::Result<bool> {
        let peer = self.peers[qp as usize];
        let wr = SendWr::write(
            u64::from(qp),
            SendData::Inline(bytes),
            peer.control + at,
            peer.control_rkey,
        )
        .with_flags(WrFlags::NONE);
        match self.qps[qp as usize].post_send(&[wr]) {
            Ok(()) => Ok(true),
            Err(error) if matches!(error.error, Error::QueueFull) => Ok(false),
            Err(error) => Err(anyhow!("control message on queue pair {qp}: {error}")),
        }
    }

    /// A byte of the local control line, as last written by the peer.
    #[inline]
    pub fn control_byte(&self, qp: u32, at: usize) -> anyhow::Result<u8> {
        self.control
            .read_byte(qp as usize * CONTROL_LINE_BYTES + at)
            .map_err(anyhow::Error::new)
    }

    /// A number in the local control line; complete once a later byte has arrived.
    pub fn control_u64(&self, qp: u32, at: usize) -> anyhow::Result<u64> {
        let mut bytes = [0; 8];
        self.control
            .read(qp as usize * CONTROL_LINE_BYTES + at, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// The 64-bit word in the memory at `offset`.
    pub fn read_word(&self, offset: usize) -> anyhow::Result<u64> {
        let mut word = [0; ATOMIC_SIZE as usize];
        self.data.read(offset, &mut word)?;
        Ok(u64::from_ne_bytes(word))
    }

    /// Arms the completion queues for an event; false if they are already armed.
    fn arm_queues(&self) -> anyhow::Result<bool> {
        if self.completions.is_none() || self.is_armed.replace(true) {
            return Ok(false);
        }
        for cq in [&self.send_cq, &self.recv_cq] {
            cq.req_notify(false)?;
        }
        Ok(true)
    }

    /// Takes the pending completion events.
    fn take_completion_events(&self) -> anyhow::Result<()> {
        let Some(channel) = &self.completions else {
            return Ok(());
        };
        loop {
            match channel.get_event(Some(Duration::ZERO)) {
                Ok(_) => self.is_armed.set(false),
                Err(Error::Timeout) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Checks for errors of unsignaled sends, which complete only when they fail.
    pub fn check_unsignaled_sends(&self) -> anyhow::Result<()> {
        let mut wcs = [Wc::default(); 4];
        let count = self.send_cq.poll(&mut wcs)?;
        wcs[..count]
            .iter()
            .try_for_each(|wc| check_completion(wc, self.plan.op.json_name()))
    }

    /// Fails if a connection ended early.
    pub fn check_peer_present(&self) -> anyhow::Result<()> {
        match take_event(&self.channel)? {
            Some(CmEvent::Disconnected(info)) if info.reason.is_empty() => Err(anyhow!(
                "the connection was lost: the other end disconnected"
            )),
            Some(CmEvent::Disconnected(info)) => {
                Err(anyhow!("the connection was lost: {}", info.reason))
            }
            _ => Ok(()),
        }
    }

    /// Fails if the connection or the daemon is gone; for an end to which nothing arrives.
    #[cold]
    pub fn check_alive(&self) -> anyhow::Result<()> {
        self.check_peer_present()?;
        match self.ctx.is_alive() {
            true => Ok(()),
            false => Err(anyhow!("the connection was lost: siwd is gone")),
        }
    }
}

/// Waits for a completion at one of the ends, for a plan with events. The first of two calls arms
/// the queues, after which the caller has to poll for completions that came earlier; the second
/// call waits for the event, for a limited time.
pub fn sleep_until_completion(ends: &[&TransferEnd]) -> anyhow::Result<()> {
    let mut has_armed = false;
    for end in ends {
        has_armed |= end.arm_queues()?;
    }
    if has_armed {
        return Ok(());
    }
    let mut fds: Vec<_> = ends
        .iter()
        .filter_map(|end| end.completions.as_deref())
        .map(|channel| PollFd::new(channel, PollFlags::IN))
        .collect();
    let limit = Timespec {
        tv_sec: 0,
        tv_nsec: LONGEST_SLEEP.subsec_nanos().into(),
    };
    match poll(&mut fds, Some(&limit)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    ends.iter().try_for_each(|end| end.take_completion_events())
}

/// The next event, if there is one.
pub fn take_event(channel: &CmChannel) -> anyhow::Result<Option<CmEvent>> {
    match channel.get_event(Some(Duration::ZERO)) {
        Ok(error) => Ok(Some(error)),
        Err(Error::Timeout) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Converts a completion with an error into a message that names the failed operation.
#[inline]
pub fn check_completion(wc: &Wc, what: &str) -> anyhow::Result<()> {
    if wc.status == WcStatus::SUCCESS {
        return Ok(());
    }
    // Requests are flushed when their connection ends.
    let lost = match wc.status {
        WcStatus::WR_FLUSH_ERR | WcStatus::RETRY_EXC_ERR => "the connection was lost: ",
        _ => "",
    };
    Err(anyhow!(
        "{lost}{what} on queue pair {}: {} (vendor code {:#x})",
        wc.wr_id as u32,
        wc.status.as_str(),
        wc.vendor_err
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_daemon_is_told_with_the_way_to_start_it() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("siwd.sock");
        let error = open_context(Some(&socket)).err().unwrap().to_string();
        assert!(error.contains("siwd is not running"), "{error}");
        assert!(
            error.contains("siwd --config config/loopback.toml"),
            "{error}"
        );
        assert!(error.contains(socket.to_str().unwrap()), "{error}");
    }

    #[test]
    fn flushed_requests_tell_that_the_connection_was_lost() {
        let completion = |status| Wc {
            status,
            wr_id: 3,
            ..Wc::default()
        };
        let error = |status| {
            let outcome = check_completion(&completion(status), "write");
            outcome.unwrap_err().to_string()
        };
        let lost = error(WcStatus::WR_FLUSH_ERR);
        let begin = "the connection was lost: write on queue pair 3: ";
        assert!(lost.starts_with(begin), "{lost}");
        let refused = error(WcStatus::REM_ACCESS_ERR);
        assert!(refused.starts_with("write on queue pair 3: "), "{refused}");
        assert!(check_completion(&completion(WcStatus::SUCCESS), "write").is_ok());
    }

    #[test]
    fn a_socket_nobody_serves_any_more_is_told_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("siwd.sock");
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let error = open_context(Some(&socket)).err().unwrap().to_string();
        assert!(
            error.contains("siwd --config config/loopback.toml"),
            "{error}"
        );
    }
}
