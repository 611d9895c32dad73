//! One connection and the steps of the protocol on it, for both ends.

use crate::protocol::{BUFFER_INFO_LEN, BufferInfo, ping_data};
use crate::{PingArgs, print_line};
use rustix::event::{PollFd, PollFlags, poll};
use siw::{
    Access, CmChannel, CmEvent, CompletionChannel, ConnectionInfo, Context, Cq, Error, Mr, Pd, Qp,
    QpInit, QpState, RecvWr, SendData, SendWr, Wc, WcOpcode, WcStatus, WrFlags,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SQ_DEPTH: u32 = 16;
/// Work request ids, one for each kind.
const RECV: u64 = 1;
const SEND: u64 = 2;
const RDMA: u64 = 3;

/// Reason why a session ended early.
#[derive(Debug)]
pub enum Stop {
    /// The peer closed gracefully.
    Closed,
    /// An error occurred.
    Failed(String),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Failed(error.to_string())
    }
}

/// One connection: its queues, buffers, and completions not yet waited for.
pub struct Session {
    pub qp: Qp,
    cq: Cq,
    channel: Arc<CompletionChannel>,
    pub cm: CmChannel,
    recv: Mr,
    send: Mr,
    data: Mr,
    received: Vec<BufferInfo>,
    rdma_done: u32,
    ended: Option<Stop>,
    pub timeout: Duration,
    debug: bool,
}

impl Session {
    pub fn new(ctx: &Context, args: &PingArgs, data: usize) -> Result<Session, Error> {
        let pd: Pd = ctx.alloc_pd()?;
        let channel = CompletionChannel::new(ctx)?;
        let cq = Cq::new(ctx, SQ_DEPTH * 2, Some((&channel, 0)))?;
        let init = QpInit {
            max_send_wr: SQ_DEPTH,
            max_recv_wr: 2,
            max_inline: 0,
            ..QpInit::default()
        };
        let qp = pd.create_qp(&cq, &cq, &init)?;
        let remote = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::LOCAL_WRITE;
        let session = Session {
            cm: CmChannel::new(ctx)?,
            recv: pd.alloc_mr(BUFFER_INFO_LEN, Access::LOCAL_WRITE)?,
            send: pd.alloc_mr(BUFFER_INFO_LEN, Access::NONE)?,
            data: pd.alloc_mr(data, remote)?,
            qp,
            cq,
            channel,
            received: Vec::new(),
            rdma_done: 0,
            ended: None,
            timeout: Duration::from_secs(args.timeout),
            debug: args.debug,
        };
        session.post_recv()?;
        Ok(session)
    }

    pub fn print_step(&self, what: std::fmt::Arguments<'_>) {
        if self.debug {
            eprintln!("siw-ping: {what}");
        }
    }

    pub fn post_recv(&self) -> Result<(), Error> {
        let wr = RecvWr {
            wr_id: RECV,
            sges: &[self.recv.sge(0, BUFFER_INFO_LEN)],
        };
        self.qp.post_recv(&[wr]).map_err(|error| error.error)
    }

    /// Posts a request. A connection that has ended refuses it, perhaps before its event is read: the
    /// event has the reason.
    fn post_send(&mut self, wr: SendWr<'_>) -> Result<(), Stop> {
        let Err(refused) = self.qp.post_send(&[wr]) else {
            return Ok(());
        };
        if self.qp.state() == Some(QpState::Rts) {
            return Err(refused.error.into());
        }
        let ended = self.wait_until("the end of the connection", |_| None::<()>);
        Err(ended.err().unwrap_or(Stop::Closed))
    }

    pub fn send_info(&mut self, info: BufferInfo) -> Result<(), Stop> {
        self.print_step(format_args!(
            "send addr {:#x} rkey {:#x} size {}",
            info.addr, info.rkey, info.size
        ));
        self.send.write(0, &info.to_bytes())?;
        let sge = [self.send.sge(0, BUFFER_INFO_LEN)];
        self.post_send(SendWr::send(SEND, SendData::Sges(&sge)))
    }

    fn on_completion(&mut self, wc: &Wc) -> Result<(), Stop> {
        match (wc.status, wc.opcode) {
            (WcStatus::WR_FLUSH_ERR, _) => {
                // The event on the CM channel shows whether the end is graceful.
                return Ok(());
            }
            (WcStatus::SUCCESS, WcOpcode::RECV) => {
                if wc.byte_len as usize != BUFFER_INFO_LEN {
                    return Err(Stop::Failed(format!(
                        "received a message of {} bytes, which is not a buffer announcement",
                        wc.byte_len
                    )));
                }
                let mut bytes = [0; BUFFER_INFO_LEN];
                self.recv.read(0, &mut bytes)?;
                self.received.push(BufferInfo::from_bytes(bytes));
                self.post_recv()?;
            }
            (WcStatus::SUCCESS, WcOpcode::RDMA_READ | WcOpcode::RDMA_WRITE) => self.rdma_done += 1,
            (WcStatus::SUCCESS, _) => {}
            (status, _) => {
                return Err(Stop::Failed(format!(
                    "work request {} failed: {} (vendor error {:#x})",
                    wc.wr_id,
                    status.as_str(),
                    wc.vendor_err
                )));
            }
        }
        Ok(())
    }

    fn process_completions(&mut self) -> Result<bool, Stop> {
        let mut wc = [Wc::default(); 8];
        let count = self.cq.poll_spin(&mut wc, Duration::from_micros(20))?;
        for wc in &wc[..count] {
            self.on_completion(wc)?;
        }
        Ok(count > 0)
    }

    /// Processes pending connection events; remembers the end of the connection.
    fn process_cm_events(&mut self) -> Result<(), Stop> {
        loop {
            match self.cm.get_event(Some(Duration::ZERO)) {
                Ok(CmEvent::Disconnected(info)) => {
                    self.print_step(format_args!("disconnected {}", info.reason));
                    self.ended = Some(match info.errno {
                        0 => Stop::Closed,
                        errno => Stop::Failed(format!(
                            "connection broke: {} (errno {errno})",
                            info.reason
                        )),
                    });
                }
                Ok(CmEvent::Established(info)) => self.print_established(&info),
                Ok(other) => return Err(Stop::Failed(format!("unexpected event {other:?}"))),
                Err(Error::Timeout) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    pub fn print_established(&self, info: &ConnectionInfo) {
        self.print_step(format_args!(
            "established: CRC {}, MPA revision {}, ird {} ord {}",
            if info.crc { "on" } else { "off" },
            info.mpa_rev,
            info.ird,
            info.ord
        ));
    }

    /// Waits until `ready` takes an item out of the session.
    fn wait_until<T>(
        &mut self,
        what: &str,
        mut ready: impl FnMut(&mut Self) -> Option<T>,
    ) -> Result<T, Stop> {
        let deadline = Instant::now() + self.timeout;
        loop {
            if let Some(taken) = ready(self) {
                return Ok(taken);
            }
            if self.process_completions()? {
                continue;
            }
            self.cq.req_notify(false)?;
            if self.process_completions()? {
                continue;
            }
            self.process_cm_events()?;
            if let Some(stop) = self.ended.take() {
                // Completions from before the end still count.
                while self.process_completions()? {}
                let Some(taken) = ready(self) else {
                    return Err(stop);
                };
                // The next wait reports the end.
                self.ended = Some(stop);
                return Ok(taken);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Stop::Failed(format!("timed out waiting for {what}")));
            }
            let timespec = rustix::event::Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut fds = [
                PollFd::new(&*self.channel, PollFlags::IN),
                PollFd::new(&self.cm, PollFlags::IN),
            ];
            match poll(&mut fds, Some(&timespec)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Stop::Failed(format!("poll: {error}"))),
            }
            if !fds[0].revents().is_empty() {
                self.channel
                    .get_event(Some(Duration::ZERO))
                    .map(drop)
                    .or_else(|error| match error {
                        Error::Timeout => Ok(()),
                        error => Err(error),
                    })?;
            }
        }
    }

    fn wait_info(&mut self, what: &str) -> Result<BufferInfo, Stop> {
        self.wait_until(what, |session| {
            (!session.received.is_empty()).then(|| session.received.remove(0))
        })
    }

    fn wait_rdma(&mut self, what: &str) -> Result<(), Stop> {
        self.wait_until(what, |session| {
            let done = session.rdma_done > 0;
            session.rdma_done -= u32::from(done);
            done.then_some(())
        })
    }

    /// Answers pings until the client disconnects; returns their number.
    pub fn serve_pings(&mut self, verbose: bool) -> (u64, Stop) {
        let mut pings = 0;
        loop {
            match self.serve_ping(verbose) {
                Ok(()) => pings += 1,
                Err(stop) => return (pings, stop),
            }
        }
    }

    fn serve_ping(&mut self, verbose: bool) -> Result<(), Stop> {
        let source = self.wait_info("the client's source address")?;
        let len = source.size as usize;
        if len > self.data.len() {
            return Err(Stop::Failed(format!(
                "the client offers {len} bytes, this server takes {} (-S)",
                self.data.len()
            )));
        }
        let sge = [self.data.sge(0, len)];
        self.post_rdma(SendWr::read(RDMA, &sge, source.addr, source.rkey))?;
        self.wait_rdma("the RDMA READ")?;
        let mut data = vec![0; len];
        self.data.read(0, &mut data)?;
        let text = data.iter().position(|byte| *byte == 0).unwrap_or(len);
        if verbose {
            let text = String::from_utf8_lossy(&data[..text]);
            print_line(format_args!("server ping data: {text}"));
        }
        let go = BufferInfo::for_region(&self.data, len as u32);
        self.send_info(go)?;
        let sink = self.wait_info("the client's sink address")?;
        // As rping: the string and its terminator.
        let sge = [self.data.sge(0, (text + 1).min(len))];
        self.post_rdma(SendWr::write(
            RDMA,
            SendData::Sges(&sge),
            sink.addr,
            sink.rkey,
        ))?;
        self.wait_rdma("the RDMA WRITE")?;
        self.send_info(go)
    }

    fn post_rdma(&mut self, wr: SendWr<'_>) -> Result<(), Stop> {
        self.print_step(format_args!(
            "{:?} at {:#x}, rkey {:#x}",
            wr.opcode, wr.remote_addr, wr.rkey
        ));
        self.post_send(wr.with_flags(WrFlags::SIGNALED))
    }

    /// Runs one ping: `source` holds the data, the session's buffer is the sink.
    pub fn run_ping(&mut self, source: &Mr, number: u64, args: &PingArgs) -> Result<(), Stop> {
        let data = ping_data(number, args.size as usize);
        source.write(0, &data)?;
        self.send_info(BufferInfo::for_region(source, args.size))?;
        self.wait_info("the server to read")?;
        self.send_info(BufferInfo::for_region(&self.data, args.size))?;
        self.wait_info("the server to write")?;
        let mut back = vec![0; data.len()];
        self.data.read(0, &mut back)?;
        if args.validate && back != data {
            let at = back
                .iter()
                .zip(&data)
                .position(|(got, sent)| got != sent)
                .unwrap_or(0);
            return Err(Stop::Failed(format!(
                "data mismatch in ping {number} at byte {at}"
            )));
        }
        if args.verbose {
            let text = back
                .iter()
                .position(|byte| *byte == 0)
                .unwrap_or(back.len());
            let text = String::from_utf8_lossy(&back[..text]);
            print_line(format_args!("ping data: {text}"));
        }
        Ok(())
    }

    /// Closes the connection from this side and waits for the end.
    pub fn close_connection(&mut self) -> Result<(), Stop> {
        self.qp.disconnect()?;
        match self.wait_until("the disconnect", |_| None::<()>) {
            Err(Stop::Closed) | Ok(()) => Ok(()),
            Err(stop) => Err(stop),
        }
    }
}
