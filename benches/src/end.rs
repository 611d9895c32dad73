//! One end of a measurement: a client of the daemon with its memory, completion
//! queues and queue pairs.

use crate::control_line::LINE;
use crate::plan::{Mode, Op, Plan};
use serde::{Deserialize, Serialize};
use siw::{
    Access, Arena, CmChannel, CmEvent, Context, Cq, DeviceInfo, Error, Mr, Qp, QpInit, RecvWr,
    SendData, SendWr, Wc, WcStatus, WrFlags,
};
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

/// Receives of a ping-pong by SEND.
const LAT_RECEIVES: u32 = 16;

/// No completion for this long is an error.
pub const STALL: Duration = Duration::from_secs(10);
/// After this a full receive queue is an error.
const FREED: Duration = Duration::from_millis(100);

/// Which part an end plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Initiator,
    Target,
}

/// Where the other end's memory for one QP is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    pub addr: u64,
    pub rkey: u32,
    pub control: u64,
    pub control_rkey: u32,
}

/// A client of the daemon that takes part in a measurement.
pub struct End {
    pub qps: Vec<Qp>,
    /// By QP, once connected.
    pub peers: Vec<Peer>,
    pub data: Mr,
    pub control: Mr,
    pub send_cq: Cq,
    pub recv_cq: Cq,
    pub channel: CmChannel,
    pub plan: Plan,
    pub huge: bool,
    /// Connections that stand, counted by whoever accepts them.
    pub ready: u32,
    slots: usize,
    pub ctx: Context,
}

/// Connects to the daemon, or says how to start it.
pub fn open(socket: Option<&Path>) -> Result<Context, String> {
    Context::open(socket).map_err(|e| match e {
        Error::Open { path, source } => match source.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => format!(
                "siwd is not running: nothing listens at {path}; start it with \
                 `siwd --config config/loopback.toml`, or name its socket with --socket"
            ),
            ErrorKind::PermissionDenied => format!(
                "{path} may not be opened by this user; join the socket's group, or change \
                 [control] mode of the daemon's configuration"
            ),
            _ => format!("siwd at {path}: {source}"),
        },
        e => e.to_string(),
    })
}

/// The device of that name; the error lists those that exist.
pub fn device(ctx: &Context, name: &str) -> Result<DeviceInfo, String> {
    let devices = ctx.query_devices().map_err(|e| e.to_string())?;
    let names: Vec<&str> = devices.iter().map(|d| d.name.as_str()).collect();
    let names = names.join(", ");
    devices
        .iter()
        .find(|d| d.name == name)
        .cloned()
        .ok_or_else(|| format!("siwd has no device {name}; it has {names}"))
}

/// A failed call of the verbs, with what was tried.
pub fn failed(what: &str) -> impl Fn(Error) -> String + '_ {
    move |e| format!("{what}: {e}")
}

impl End {
    /// Memory, queues and QPs as the plan needs them, not connected.
    pub fn new(ctx: &Context, plan: &Plan, role: Role) -> Result<End, String> {
        let slots = match role {
            Role::Initiator => plan.slots(),
            Role::Target => plan.target_slots(),
        };
        let sends = match plan.mode {
            Mode::Bw => plan.depth + 8,
            Mode::Lat => 64,
        };
        let receives = match (plan.mode, plan.op) {
            (Mode::Bw, Op::Send) => slots,
            (Mode::Lat, _) => LAT_RECEIVES,
            _ => 1,
        };
        let limits = ctx.limits();
        if sends.max(receives) > limits.max_qp_wr {
            return Err(format!(
                "siwd allows {} work requests in a queue, {} are needed; lower --depth, or raise \
                 [limits] work_requests",
                limits.max_qp_wr,
                sends.max(receives)
            ));
        }
        let cqe = |each: u32| {
            let all = each.saturating_mul(plan.qps).saturating_add(16);
            if all <= limits.max_cqe {
                return Ok(all);
            }
            Err(format!(
                "siwd allows {} completions in a queue, {all} are needed; lower --depth or --qps",
                limits.max_cqe
            ))
        };
        let pd = ctx.alloc_pd().map_err(failed("protection domain"))?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let len = plan.stride() * slots as usize * plan.qps as usize;
        let memory = |len: usize| {
            let huge = len >= siw_shm::shared_memory::HUGE_PAGE;
            let arena = Arena::alloc(ctx, len, huge)?;
            pd.reg_mr(&arena, 0..len, access)
                .map(|mr| (mr, arena.is_huge()))
        };
        let (data, huge) = memory(len).map_err(failed("registered memory"))?;
        let (control, _) = memory(LINE * plan.qps as usize).map_err(failed("registered memory"))?;
        let send_cq = Cq::new(ctx, cqe(sends)?, None).map_err(failed("completion queue"))?;
        let recv_cq = Cq::new(ctx, cqe(receives)?, None).map_err(failed("completion queue"))?;
        let init = QpInit {
            max_send_wr: sends,
            max_recv_wr: receives,
            max_inline: if plan.inline { plan.size } else { 0 }.max(32),
            ..QpInit::default()
        };
        let qps = (0..plan.qps)
            .map(|_| pd.create_qp(&send_cq, &recv_cq, &init))
            .collect::<Result<Vec<Qp>, Error>>()
            .map_err(failed("queue pair"))?;
        let end = End {
            qps,
            peers: Vec::new(),
            data,
            control,
            send_cq,
            recv_cq,
            channel: CmChannel::new(ctx).map_err(failed("connection channel"))?,
            plan: *plan,
            huge,
            ready: 0,
            slots: slots as usize,
            ctx: ctx.clone(),
        };
        end.touch()?;
        // Before anything can arrive.
        for qp in 0..plan.qps {
            match (plan.mode, plan.op, role) {
                (Mode::Bw, Op::Send, Role::Target) => end.receive(qp, 0, slots)?,
                (Mode::Lat, Op::Send, _) => {
                    for _ in 0..LAT_RECEIVES {
                        end.receive(qp, 1, 1)?;
                    }
                }
                _ => {}
            }
        }
        Ok(end)
    }

    /// First use of a page costs more than all later ones.
    fn touch(&self) -> Result<(), String> {
        let page = [0xa5; 4096];
        for at in (0..self.data.len()).step_by(page.len()) {
            let n = page.len().min(self.data.len() - at);
            self.data
                .write(at, &page[..n])
                .map_err(failed("registered memory"))?;
        }
        Ok(())
    }

    /// What the peer has to know about QP `qp`.
    pub fn about(&self, qp: u32) -> Peer {
        Peer {
            addr: self.data.addr() + self.offset(qp, 0) as u64,
            rkey: self.data.rkey(),
            control: self.control.addr() + (qp as usize * LINE) as u64,
            control_rkey: self.control.rkey(),
        }
    }

    /// Where message slot `slot` of a QP is.
    #[inline]
    pub fn offset(&self, qp: u32, slot: u64) -> usize {
        (qp as usize * self.slots + slot as usize % self.slots) * self.plan.stride()
    }

    /// Posts `n` receives into the slots from `slot` on.
    pub fn receive(&self, qp: u32, slot: u64, n: u32) -> Result<(), String> {
        for i in 0..u64::from(n) {
            let sge = self
                .data
                .sge(self.offset(qp, slot + i), self.plan.size as usize);
            let wr = RecvWr {
                wr_id: u64::from(qp),
                sges: &[sge],
            };
            self.post_receive(qp, &wr)?;
        }
        Ok(())
    }

    /// The worker may free the slot of a receive a little after its completion.
    #[inline]
    fn post_receive(&self, qp: u32, wr: &RecvWr) -> Result<(), String> {
        let mut since = None;
        loop {
            match self.qps[qp as usize].post_recv(&[*wr]) {
                Ok(()) => return Ok(()),
                Err(e)
                    if matches!(e.error, Error::QueueFull)
                        && since.get_or_insert_with(Instant::now).elapsed() < FREED =>
                {
                    std::hint::spin_loop();
                }
                Err(e) => return Err(format!("receive on queue pair {qp}: {e}")),
            }
        }
    }

    /// Writes `bytes` into the peer's control line, at `at`, without a completion.
    /// False when the send queue is full.
    pub fn signal_peer(&self, qp: u32, at: u64, bytes: &[u8]) -> Result<bool, String> {
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
            Err(e) if matches!(e.error, Error::QueueFull) => Ok(false),
            Err(e) => Err(format!("control message on queue pair {qp}: {e}")),
        }
    }

    /// A byte of the own control line, as the peer last wrote it.
    #[inline]
    pub fn control_byte(&self, qp: u32, at: usize) -> Result<u8, String> {
        self.control
            .read_byte(qp as usize * LINE + at)
            .map_err(|e| e.to_string())
    }

    /// A number in the own control line; whole once a later byte arrived.
    pub fn control_u64(&self, qp: u32, at: usize) -> Result<u64, String> {
        let mut b = [0; 8];
        self.control
            .read(qp as usize * LINE + at, &mut b)
            .map_err(|e| e.to_string())?;
        Ok(u64::from_le_bytes(b))
    }

    /// Fails if a message that completes only when it fails has completed.
    pub fn check_unsignaled_sends(&self) -> Result<(), String> {
        let mut wcs = [Wc::default(); 4];
        let n = self.send_cq.poll(&mut wcs).map_err(|e| e.to_string())?;
        wcs[..n]
            .iter()
            .try_for_each(|wc| check(wc, self.plan.op.name()))
    }

    /// Fails if the other end has disconnected before it was done.
    pub fn check_peer_present(&self) -> Result<(), String> {
        match take(&self.channel)? {
            Some(CmEvent::Disconnected(_)) => Err("the other end went away".into()),
            _ => Ok(()),
        }
    }
}

/// The next event if there is one.
pub fn take(channel: &CmChannel) -> Result<Option<CmEvent>, String> {
    match channel.get_event(Some(Duration::ZERO)) {
        Ok(e) => Ok(Some(e)),
        Err(Error::Timeout) => Ok(None),
        Err(e) => Err(e.to_string()),
    }
}

/// A completion that says what failed.
#[inline]
pub fn check(wc: &Wc, what: &str) -> Result<(), String> {
    if wc.status == WcStatus::SUCCESS {
        return Ok(());
    }
    Err(format!(
        "{what} on queue pair {}: {} (vendor code {:#x})",
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
        let e = open(Some(&socket)).err().unwrap();
        assert!(e.contains("siwd is not running"), "{e}");
        assert!(e.contains("siwd --config config/loopback.toml"), "{e}");
        assert!(e.contains(socket.to_str().unwrap()), "{e}");
    }

    #[test]
    fn a_socket_nobody_serves_any_more_is_told_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("siwd.sock");
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let e = open(Some(&socket)).err().unwrap();
        assert!(e.contains("siwd --config config/loopback.toml"), "{e}");
    }
}
