//! `rping` over siwd: the same protocol on the wire, so that either end may be
//! librdmacm's rping.
//!
//! ```text
//! client                                   server
//! SEND  {source addr, rkey, size}  ----->
//!                                  <-----  RDMA READ of the ping data
//!                                  <-----  SEND "go ahead"
//! SEND  {sink addr, rkey, size}    ----->
//!                                  <-----  RDMA WRITE of what was read
//!                                  <-----  SEND "go ahead"
//! compare, repeat; disconnect
//! ```
#![forbid(unsafe_code)]

use clap::Parser;
use rustix::event::{PollFd, PollFlags, poll};
use siw::{
    Access, CmChannel, CmEvent, CmListener, CompletionChannel, ConnectOptions, ConnectionInfo,
    ConnectionRequest, Context, Cq, Error, Mr, Pd, Qp, QpInit, QpState, RecvWr, SendData, SendWr,
    Wc, WcOpcode, WcStatus, WrFlags,
};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// RDMA ping-pong that speaks the protocol of rping.
#[derive(Debug, Parser)]
#[command(name = "siw-ping", version, disable_version_flag = true)]
struct PingArgs {
    /// Run as server
    #[arg(short, conflicts_with = "client")]
    server: bool,
    /// Run as client
    #[arg(short, required_unless_present = "server")]
    client: bool,
    /// Address to connect to, or to listen on
    #[arg(short, value_name = "ADDR", required_unless_present = "server")]
    addr: Option<IpAddr>,
    /// Port
    #[arg(short, default_value_t = 7174)]
    port: u16,
    /// Number of pings; 0 pings for ever
    #[arg(short = 'C', default_value_t = 0, value_name = "COUNT")]
    count: u64,
    /// Bytes of ping data
    #[arg(short = 'S', default_value_t = 64, value_name = "SIZE",
          value_parser = clap::value_parser!(u32).range(MIN_SIZE as i64..=MAX_SIZE as i64))]
    size: u32,
    /// Print the ping data
    #[arg(short)]
    verbose: bool,
    /// Compare the data that comes back
    #[arg(short = 'V')]
    validate: bool,
    /// Print every step
    #[arg(short)]
    debug: bool,
    /// Server: go on after the first client, serve several at once
    #[arg(short = 'P')]
    persistent: bool,
    /// Source address of the client
    #[arg(short = 'I', value_name = "ADDR")]
    source: Option<IpAddr>,
    /// Device; routed by address without it
    #[arg(long)]
    device: Option<String>,
    /// Control socket of siwd
    #[arg(long)]
    socket: Option<PathBuf>,
    /// MPA CRC, instead of the device's setting
    #[arg(long, value_parser = ["on", "off"])]
    crc: Option<String>,
    /// Seconds to wait for the peer in each step
    #[arg(long, default_value_t = 30, value_name = "SECS")]
    timeout: u64,
    /// Print one JSON line with the result
    #[arg(long)]
    json: bool,
    // -V is rping's "validate".
    /// Print the version
    #[arg(long, action = clap::ArgAction::Version)]
    version: Option<bool>,
}

/// rping's smallest buffer: its format with the longest number.
const MIN_SIZE: u32 = 26;
const MAX_SIZE: u32 = 1 << 20;
const INFO: usize = 16;
const SQ_DEPTH: u32 = 16;
const RECV: u64 = 1;
const SEND: u64 = 2;
const RDMA: u64 = 3;

/// Why a session ended before it was done.
#[derive(Debug)]
enum Stop {
    /// The peer closed in order.
    Closed,
    Failed(String),
}

impl From<Error> for Stop {
    fn from(e: Error) -> Self {
        Stop::Failed(e.to_string())
    }
}

/// `struct rping_rdma_info`, big-endian.
#[derive(Clone, Copy)]
struct Info {
    addr: u64,
    rkey: u32,
    size: u32,
}

impl Info {
    fn of(mr: &Mr, size: u32) -> Info {
        Info {
            addr: mr.addr(),
            rkey: mr.rkey(),
            size,
        }
    }

    fn to_bytes(self) -> [u8; INFO] {
        let mut b = [0; INFO];
        b[..8].copy_from_slice(&self.addr.to_be_bytes());
        b[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        b[12..].copy_from_slice(&self.size.to_be_bytes());
        b
    }

    fn from_bytes(b: [u8; INFO]) -> Info {
        let [
            a0,
            a1,
            a2,
            a3,
            a4,
            a5,
            a6,
            a7,
            k0,
            k1,
            k2,
            k3,
            s0,
            s1,
            s2,
            s3,
        ] = b;
        Info {
            addr: u64::from_be_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            rkey: u32::from_be_bytes([k0, k1, k2, k3]),
            size: u32::from_be_bytes([s0, s1, s2, s3]),
        }
    }
}

/// The data of ping number `n`, exactly as rping writes it.
fn ping_data(n: u64, size: usize) -> Vec<u8> {
    let mut d = format!("rdma-ping-{n}: ").into_bytes();
    let span = 122 - 65 + 1;
    let start = n % span;
    d.extend(
        (0..)
            .map(|i| (65 + (start + i) % span) as u8)
            .take(size.saturating_sub(d.len())),
    );
    d.truncate(size);
    if let Some(last) = d.last_mut() {
        *last = 0;
    }
    d
}

/// One connection: its queues, buffers, and what completed but was not waited for.
struct Session {
    qp: Qp,
    cq: Cq,
    channel: Arc<CompletionChannel>,
    cm: CmChannel,
    recv: Mr,
    send: Mr,
    data: Mr,
    received: Vec<Info>,
    rdma_done: u32,
    ended: Option<Stop>,
    timeout: Duration,
    debug: bool,
}

impl Session {
    fn new(ctx: &Context, args: &PingArgs, data: usize) -> Result<Session, Error> {
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
        let s = Session {
            cm: CmChannel::new(ctx)?,
            recv: pd.alloc_mr(INFO, Access::LOCAL_WRITE)?,
            send: pd.alloc_mr(INFO, Access::NONE)?,
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
        s.post_recv()?;
        Ok(s)
    }

    fn say(&self, what: std::fmt::Arguments<'_>) {
        if self.debug {
            eprintln!("siw-ping: {what}");
        }
    }

    fn post_recv(&self) -> Result<(), Error> {
        let wr = RecvWr {
            wr_id: RECV,
            sges: &[self.recv.sge(0, INFO)],
        };
        self.qp.post_recv(&[wr]).map_err(|e| e.error)
    }

    fn send_info(&self, info: Info) -> Result<(), Error> {
        self.say(format_args!(
            "send addr {:#x} rkey {:#x} size {}",
            info.addr, info.rkey, info.size
        ));
        self.send.write(0, &info.to_bytes())?;
        let sge = [self.send.sge(0, INFO)];
        self.qp
            .post_send(&[SendWr::send(SEND, SendData::Sges(&sge))])
            .map_err(|e| e.error)
    }

    fn complete(&mut self, wc: &Wc) -> Result<(), Stop> {
        match (wc.status, wc.opcode) {
            (WcStatus::WR_FLUSH_ERR, _) => {
                // The event on the CM channel says whether this is an orderly end.
                return Ok(());
            }
            (WcStatus::SUCCESS, WcOpcode::RECV) => {
                if wc.byte_len as usize != INFO {
                    return Err(Stop::Failed(format!(
                        "received bogus data, size {}",
                        wc.byte_len
                    )));
                }
                let mut b = [0; INFO];
                self.recv.read(0, &mut b)?;
                self.received.push(Info::from_bytes(b));
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

    fn drain(&mut self) -> Result<bool, Stop> {
        let mut wc = [Wc::default(); 8];
        let n = self.cq.poll_spin(&mut wc, Duration::from_micros(20))?;
        for wc in &wc[..n] {
            self.complete(wc)?;
        }
        Ok(n > 0)
    }

    /// Takes connection events that are there; remembers the end of the connection.
    fn cm_events(&mut self) -> Result<(), Stop> {
        loop {
            match self.cm.get_event(Some(Duration::ZERO)) {
                Ok(CmEvent::Disconnected(i)) => {
                    self.say(format_args!("disconnected {}", i.reason));
                    self.ended = Some(match i.errno {
                        0 => Stop::Closed,
                        e => Stop::Failed(format!("connection broke: {} (errno {e})", i.reason)),
                    });
                }
                Ok(CmEvent::Established(i)) => self.established(&i),
                Ok(other) => return Err(Stop::Failed(format!("unexpected event {other:?}"))),
                Err(Error::Timeout) => return Ok(()),
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn established(&self, i: &ConnectionInfo) {
        self.say(format_args!(
            "established: CRC {}, MPA revision {}, ird {} ord {}",
            if i.crc { "on" } else { "off" },
            i.mpa_rev,
            i.ird,
            i.ord
        ));
    }

    /// Waits until `ready` takes what it waits for out of the session.
    fn wait<T>(
        &mut self,
        what: &str,
        mut ready: impl FnMut(&mut Self) -> Option<T>,
    ) -> Result<T, Stop> {
        let deadline = Instant::now() + self.timeout;
        loop {
            if let Some(t) = ready(self) {
                return Ok(t);
            }
            if self.drain()? {
                continue;
            }
            self.cq.req_notify(false)?;
            if self.drain()? {
                continue;
            }
            self.cm_events()?;
            if let Some(stop) = self.ended.take() {
                // What completed before the end counts.
                while self.drain()? {}
                return ready(self).ok_or(stop);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Stop::Failed(format!("timed out waiting for {what}")));
            }
            let ts = rustix::event::Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut fds = [
                PollFd::new(&*self.channel, PollFlags::IN),
                PollFd::new(&self.cm, PollFlags::IN),
            ];
            match poll(&mut fds, Some(&ts)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Stop::Failed(format!("poll: {e}"))),
            }
            if !fds[0].revents().is_empty() {
                self.channel
                    .get_event(Some(Duration::ZERO))
                    .map(drop)
                    .or_else(|e| match e {
                        Error::Timeout => Ok(()),
                        e => Err(e),
                    })?;
            }
        }
    }

    fn wait_info(&mut self, what: &str) -> Result<Info, Stop> {
        self.wait(what, |s| {
            (!s.received.is_empty()).then(|| s.received.remove(0))
        })
    }

    fn wait_rdma(&mut self, what: &str) -> Result<(), Stop> {
        self.wait(what, |s| {
            let done = s.rdma_done > 0;
            s.rdma_done -= u32::from(done);
            done.then_some(())
        })
    }

    /// Pings answered until the client leaves.
    fn serve(&mut self, verbose: bool) -> (u64, Stop) {
        let mut pings = 0;
        loop {
            match self.serve_one(verbose) {
                Ok(()) => pings += 1,
                Err(stop) => return (pings, stop),
            }
        }
    }

    fn serve_one(&mut self, verbose: bool) -> Result<(), Stop> {
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
        let text = data.iter().position(|b| *b == 0).unwrap_or(len);
        if verbose {
            println!(
                "server ping data: {}",
                String::from_utf8_lossy(&data[..text])
            );
        }
        let go = Info::of(&self.data, len as u32);
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
        Ok(self.send_info(go)?)
    }

    fn post_rdma(&self, wr: SendWr<'_>) -> Result<(), Error> {
        self.say(format_args!(
            "{:?} at {:#x}, rkey {:#x}",
            wr.opcode, wr.remote_addr, wr.rkey
        ));
        self.qp
            .post_send(&[wr.with_flags(WrFlags::SIGNALED)])
            .map_err(|e| e.error)
    }

    /// One ping: `source` holds the data, the session's buffer is the sink.
    fn ping(&mut self, source: &Mr, n: u64, args: &PingArgs) -> Result<(), Stop> {
        let data = ping_data(n, args.size as usize);
        source.write(0, &data)?;
        self.send_info(Info::of(source, args.size))?;
        self.wait_info("the server to read")?;
        self.send_info(Info::of(&self.data, args.size))?;
        self.wait_info("the server to write")?;
        let mut back = vec![0; data.len()];
        self.data.read(0, &mut back)?;
        if args.validate && back != data {
            let at = back
                .iter()
                .zip(&data)
                .position(|(a, b)| a != b)
                .unwrap_or(0);
            return Err(Stop::Failed(format!(
                "data mismatch in ping {n} at byte {at}"
            )));
        }
        if args.verbose {
            let text = back.iter().position(|b| *b == 0).unwrap_or(back.len());
            println!("ping data: {}", String::from_utf8_lossy(&back[..text]));
        }
        Ok(())
    }

    /// Closes from this side and waits for the end.
    fn close(&mut self) -> Result<(), Stop> {
        self.qp.disconnect()?;
        match self.wait("the disconnect", |_| None::<()>) {
            Err(Stop::Closed) | Ok(()) => Ok(()),
            Err(e) => Err(e),
        }
    }
}

fn options(args: &PingArgs, ctx: &Context) -> Result<ConnectOptions<'static>, Error> {
    let device = args
        .device
        .as_deref()
        .map(|d| ctx.device_by_name(d))
        .transpose()?;
    Ok(ConnectOptions {
        device: device.map(|d| d.index),
        src: args.source.map(|ip| SocketAddr::new(ip, 0)),
        ord: 1,
        ird: 1,
        crc: args.crc.as_deref().map(|c| c == "on"),
        timeout: Some(Duration::from_secs(args.timeout)),
        ..ConnectOptions::default()
    })
}

fn run_client(args: &PingArgs, ctx: &Context) -> Result<u64, Stop> {
    let ip = args.addr.ok_or(Stop::Failed("-a is missing".into()))?;
    let mut s = Session::new(ctx, args, args.size as usize)?;
    let source = s.qp.pd().alloc_mr(
        args.size as usize,
        Access::REMOTE_READ | Access::LOCAL_WRITE,
    )?;
    let opt = options(args, ctx)?;
    s.qp.connect(&s.cm, SocketAddr::new(ip, args.port), &opt)?;
    match s.cm.get_event(Some(s.timeout + Duration::from_secs(2)))? {
        CmEvent::Established(i) => s.established(&i),
        CmEvent::Rejected(i)
        | CmEvent::Unreachable(i)
        | CmEvent::ConnectError(i)
        | CmEvent::Disconnected(i) => {
            return Err(Stop::Failed(format!(
                "cannot connect to {ip}: {}",
                i.reason
            )));
        }
        other => return Err(Stop::Failed(format!("unexpected event {other:?}"))),
    }
    let mut n = 0;
    while args.count == 0 || n < args.count {
        s.ping(&source, n, args)?;
        n += 1;
    }
    s.close()?;
    Ok(n)
}

fn serve_request(args: &PingArgs, ctx: &Context, req: ConnectionRequest) -> Result<u64, Stop> {
    let mut s = Session::new(ctx, args, MAX_SIZE as usize)?;
    let opt = options(args, ctx)?;
    s.say(format_args!(
        "request from {:?}",
        req.connection_info().peer
    ));
    req.accept(&s.qp, Some(&s.cm), &opt)?;
    match s.serve(args.verbose) {
        (pings, Stop::Closed) => {
            // Answer the peer's close, unless the daemon has done so.
            if s.qp.state() == Some(QpState::Rts) {
                let _ = s.qp.disconnect();
            }
            Ok(pings)
        }
        (_, failed) => Err(failed),
    }
}

fn run_server(args: &PingArgs, ctx: &Context) -> Result<u64, Stop> {
    let cm = CmChannel::new(ctx)?;
    let device = options(args, ctx)?.device;
    let ip = args.addr.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let listener = CmListener::new(&cm, device, SocketAddr::new(ip, args.port), 3, 0)?;
    eprintln!("siw-ping: listening on {}", listener.local_addr());
    std::thread::scope(|threads| {
        loop {
            let req = match cm.get_event(None)? {
                CmEvent::ConnectRequest(r) => r,
                CmEvent::RequestCancelled { .. } => continue,
                CmEvent::DeviceRemoval { .. } => {
                    return Err(Stop::Failed("the device was removed".into()));
                }
                _ => continue,
            };
            if !args.persistent {
                return serve_request(args, ctx, req);
            }
            threads.spawn(move || report(args, serve_request(args, ctx, req)));
        }
    })
}

fn report(args: &PingArgs, r: Result<u64, Stop>) -> bool {
    let (pings, error) = match r {
        Ok(n) => (n, None),
        Err(Stop::Closed) => (0, Some("the peer closed the connection early".to_owned())),
        Err(Stop::Failed(e)) => (0, Some(e)),
    };
    if let Some(e) = &error {
        eprintln!("siw-ping: {e}");
    }
    if args.json {
        let role = if args.server { "server" } else { "client" };
        println!(
            "{}",
            serde_json::json!({"role": role, "pings": pings, "size": args.size,
                               "ok": error.is_none(), "error": error})
        );
    }
    error.is_none()
}

fn main() -> ExitCode {
    let args = PingArgs::parse();
    let r = Context::open(args.socket.as_deref())
        .map_err(Stop::from)
        .and_then(|ctx| {
            if args.server {
                run_server(&args, &ctx)
            } else {
                run_client(&args, &ctx)
            }
        });
    if report(&args, r) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ping_data_is_that_of_rping() {
        assert_eq!(ping_data(0, 22), b"rdma-ping-0: ABCDEFGH\0");
        assert_eq!(ping_data(1, 22), b"rdma-ping-1: BCDEFGHI\0");
        assert_eq!(ping_data(57, 22), b"rdma-ping-57: zABCDEF\0");
        assert_eq!(ping_data(58, 22), b"rdma-ping-58: ABCDEFG\0");
        let long = ping_data(0, 100);
        assert_eq!((long[13], long[13 + 57], long[13 + 58]), (b'A', b'z', b'A'));
    }

    #[test]
    fn buffer_infos_are_big_endian() {
        let i = Info {
            addr: 0x0102_0304_0506_0708,
            rkey: 0x090a_0b0c,
            size: 0x0d0e_0f10,
        };
        let b = i.to_bytes();
        assert_eq!(b, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        assert_eq!(Info::from_bytes(b).to_bytes(), b);
    }

    #[test]
    fn the_command_line_is_that_of_rping() {
        let a = PingArgs::try_parse_from([
            "siw-ping", "-c", "-a", "10.0.0.1", "-p", "9", "-C", "3", "-v", "-V", "-S", "1000",
            "-d",
        ])
        .unwrap();
        assert!(a.client && a.verbose && a.validate && a.debug);
        assert_eq!((a.count, a.size, a.port), (3, 1000, 9));
        assert!(PingArgs::try_parse_from(["siw-ping", "-s"]).unwrap().server);
        assert!(PingArgs::try_parse_from(["siw-ping", "-c"]).is_err());
        assert!(PingArgs::try_parse_from(["siw-ping", "-c", "-s", "-a", "::1"]).is_err());
        assert!(PingArgs::try_parse_from(["siw-ping", "-s", "-S", "3"]).is_err());
    }
}
