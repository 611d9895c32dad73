//! The control thread serves all clients: no request occupies it for long, however much its client
//! holds. Processor time is measured, because other programs may use the processor as well.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::common::raw_client::import_new_file;
use crate::common::*;
use nix::libc;
use nix::time::ClockId;
use siw::{
    BindOptions, CmBinding, CmChannel, CmEvent, CmListener, CompletionChannel, ConnectOptions,
    ListenOptions, ObjectList, QpInit, RdmaCmEvent, ResolvedAddress, ServiceSearch, StreamOptions,
    StreamingConnection,
};
use siw_shm::control::messages as m;
use siw_shm::control::{ControlSocket, Message, Request};

/// Longest permitted processor time of one piece of work. Builds for tests are optimised little;
/// `./benches/figures trust` has the floor of 1 ms for release builds.
const MOST: Duration = Duration::from_millis(if cfg!(debug_assertions) { 2 } else { 1 });
/// Daemons measured at most: interrupts and page faults count as processor time too, so the least time
/// of each kind is taken.
const DAEMONS: usize = 8;
/// Protection domains of the client with many numbers.
const DOMAINS: usize = 50_000;
/// Memory regions of that client.
const REGIONS: usize = 30_000;
/// Regions of the most extents of that client.
const LONG_REGIONS: usize = 200;
/// Completion queues of that client.
const COMPLETION_QUEUES: usize = 3000;
/// Listeners of a client, nearly as many as its limit.
const LISTENERS: usize = 4000;

/// A client that makes the control protocol's requests.
struct Requests {
    conn: ControlSocket,
    seq: u32,
}

impl Requests {
    fn new(d: &Daemon) -> Requests {
        let conn = ControlSocket::connect_to(&d.socket).unwrap();
        conn.set_call_timeout(PATIENCE).unwrap();
        let mut requests = Requests { conn, seq: 0 };
        requests.call(&m::ClientHello::new("turn times"));
        requests
    }

    fn call<M: Message>(&mut self, request: &M) -> M::Reply {
        self.seq += 1;
        let called = self.conn.call_and_wait(self.seq, request, &[]);
        called
            .unwrap_or_else(|error| panic!("request {:#x}: {error}", M::KIND))
            .0
    }

    fn alloc_arena(&mut self, len: u64) -> u32 {
        let (huge, reserved) = (0, 0);
        self.call(&m::AllocArena {
            len,
            huge,
            reserved,
        })
        .arena
    }

    /// Registers `len` bytes of an arena, `count` times.
    fn register_all(&mut self, pd: u32, arena: u32, len: u64, count: usize) {
        let (offset, va, access, reserved) = (0, 0, 1, 0);
        for _ in 0..count {
            self.call(&m::RegMr {
                pd,
                arena,
                offset,
                len,
                va,
                access,
                reserved,
            });
        }
    }

    /// Registers a region of the most extents.
    fn register_extents(&mut self, pd: u32, arena: u32) -> m::MrReply {
        let reserved = 0;
        let extents = [m::MemoryExtent {
            arena,
            len: 64,
            ..Default::default()
        }; m::MAX_EXTENTS];
        let count = m::MAX_EXTENTS as u32;
        for _ in 0..31 {
            self.call(&m::AddExtents {
                count,
                reserved,
                extents,
            });
        }
        self.call(&m::RegMemory {
            pd,
            access: 1,
            len: 32 * 64 * u64::from(count),
            va: 0,
            count,
            reserved,
            reason: m::Text::new("turn times"),
            extents,
        })
    }

    /// Registers, changes and deregisters memory of one arena, of the most extents, and of a file.
    fn register_memory(&mut self, pd: u32) {
        let reserved = 0;
        let arena = self.alloc_arena(64 << 20);
        self.register_all(pd, arena, 64 << 20, 5000);
        let made = self.register_extents(pd, arena);
        let (lkey, flags) = (made.lkey, m::REREG_ACCESS);
        self.call(&m::ReregMr {
            lkey,
            flags,
            pd,
            arena: 0,
            offset: 0,
            len: 0,
            va: 0,
            access: 0,
            reserved,
        });
        self.call(&m::DeregMr { lkey, flags: 0 });
        let max_pages = 256;
        let fast = self.call(&m::AllocFastMr {
            pd,
            arena,
            max_pages,
            reserved,
        });
        self.call(&m::DeregMr {
            lkey: fast.lkey,
            flags: 0,
        });
        let rkey = self.call(&m::AllocMw { pd, kind: 1 }).rkey;
        self.call(&m::DeallocMw { rkey, reserved });
        self.seq += 1;
        let arena = import_new_file(&self.conn, self.seq, 128 << 20, 128 << 20);
        self.call(&m::FreeArena { arena, reserved });
        self.import_own_file();
        for len in [4096, 4 << 20, 256 << 20] {
            let arena = self.alloc_arena(len);
            self.call(&m::FreeArena { arena, reserved });
        }
    }

    /// Imports the file of an arena of this process.
    fn import_own_file(&mut self) {
        let (huge, reserved) = (0, 0);
        let len = 64 << 20;
        let request = m::AllocArena {
            len,
            huge,
            reserved,
        };
        self.seq += 1;
        let (made, fds) = self.conn.call_and_wait(self.seq, &request, &[]).unwrap();
        let status = nix::sys::stat::fstat(&fds[0]).unwrap();
        let imported = self.call(&m::ImportOwnFile {
            device_major: nix::sys::stat::major(status.st_dev) as u32,
            device_minor: nix::sys::stat::minor(status.st_dev) as u32,
            inode: status.st_ino,
            writable: 1,
            reserved,
            offset: 0,
            len,
        });
        for arena in [imported.id, made.arena] {
            self.call(&m::FreeArena { arena, reserved });
        }
    }

    /// Creates and destroys queues, a large one among them.
    fn change_queues(&mut self, pd: u32) {
        let (reserved, channel, cookie) = (0, 0, 0);
        let cq = self
            .call(&m::CreateCq {
                cqe: 3 << 20,
                channel,
                cookie,
            })
            .cq;
        self.call(&m::ModerateCq {
            cq,
            count: 4,
            period: 4,
        });
        self.call(&m::DestroyCq { cq, reserved });
        let cq = self
            .call(&m::CreateCq {
                cqe: 16,
                channel,
                cookie,
            })
            .cq;
        self.call(&m::ResizeCq { cq, cqe: 1 << 20 });
        self.call(&m::FreeCqRing { cq, notify: 0 });
        let srq = self.call(&m::CreateSrq {
            pd,
            max_wr: 4096,
            max_sge: 4,
            limit: 0,
            share: 0,
            reserved,
        });
        let srq = srq.srq;
        self.call(&m::QuerySrq { srq, reserved });
        let mask = m::SRQ_MAX_WR | m::SRQ_LIMIT;
        for (max_wr, limit) in [(8192, 16), (4096, 8)] {
            self.call(&m::ModifySrq {
                srq,
                mask,
                max_wr,
                limit,
            });
        }
        for _ in 0..3000 {
            self.create_queue_pair(pd, cq);
        }
        self.call(&m::DestroySrq { srq, reserved });
        self.change_queue_pair(pd, cq);
    }

    fn create_queue_pair(&mut self, pd: u32, cq: u32) -> u32 {
        let request = m::CreateQp {
            pd,
            send_cq: cq,
            recv_cq: cq,
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline: 64,
            sq_sig_all: 0,
            srq: 0,
            final_send: m::FinalSend::default(),
        };
        self.call(&request).qp_num
    }

    /// Pairs a queue pair with one that does not exist, moves it through its states, and destroys it.
    fn change_queue_pair(&mut self, pd: u32, cq: u32) {
        let (device, reserved) = (0, 0);
        let address = |text: &str| text.parse::<std::net::SocketAddr>().unwrap().into();
        let qp_num = self.create_queue_pair(pd, cq);
        self.call(&m::PairQp {
            qp_num,
            peer_qp_num: 1,
            device,
            ord: 4,
            ird: 4,
            denied_access: 0,
            local: address("10.77.0.1:0"),
            peer: address("10.77.0.2:0"),
        });
        for state in [m::QpState::Idle, m::QpState::Error, m::QpState::Idle] {
            let (flags, denied_access) = (0, 0);
            let state = state as u32;
            self.call(&m::ModifyQp {
                qp_num,
                state,
                flags,
                denied_access,
            });
            self.call(&m::QueryQp { qp_num, reserved });
        }
        self.call(&m::StartDatagrams {
            qp_num,
            device,
            qkey: 1,
            reserved,
        });
        let group = address("239.1.2.3:0");
        self.call(&m::AttachGroup {
            qp_num,
            reserved,
            group,
        });
        self.call(&m::DetachGroup {
            qp_num,
            reserved,
            group,
        });
        let made = self.call(&m::CreateAh {
            device,
            hop_limit: 0,
            traffic_class: 0,
            reserved: 0,
            flow_label: 0,
            timeout_ms: 0,
            local: m::Addr::NONE,
            remote: address("10.77.0.2:0"),
        });
        let ah = made.id;
        self.call(&m::DestroyAh { ah, reserved });
        let cm_channel = self.call(&m::CreateCmChannel { flags: 0 }).id;
        let made = self.call(&m::FindService {
            device,
            cm_channel,
            timeout_ms: 0,
            reserved,
            cookie: 0,
            dst: address("10.77.0.2:7"),
            src: address("10.77.0.1:7"),
            private_data: m::PrivateData::new(&[]).unwrap(),
            reserved2: 0,
        });
        let search = made.id;
        self.call(&m::EndFindService { search, reserved });
        let channel = cm_channel;
        self.call(&m::DestroyCmChannel { channel, reserved });
        self.call(&m::DestroyQp { qp_num, reserved });
    }

    /// Makes objects that have little but their numbers.
    fn take_numbers(&mut self) {
        let (device, reserved, channel, cookie) = (0, 0, 0, 0);
        for _ in 0..DOMAINS {
            self.call(&m::AllocPd { device, reserved });
        }
        let pd = self.call(&m::AllocPd { device, reserved }).id;
        let arena = self.alloc_arena(4096);
        self.register_all(pd, arena, 4096, REGIONS);
        for _ in 0..LONG_REGIONS {
            self.register_extents(pd, arena);
        }
        for _ in 0..COMPLETION_QUEUES {
            let cqe = 4;
            self.call(&m::CreateCq {
                cqe,
                channel,
                cookie,
            });
        }
    }

    /// Binds and listens at many ports.
    fn listen(&mut self) {
        let (device, reserved) = (m::ANY_DEVICE, 0);
        let cm_channel = self.call(&m::CreateCmChannel { flags: 0 }).id;
        for _ in 0..LISTENERS {
            let (addr, flags) = (m::Addr::NONE, 0);
            let binding = self
                .call(&m::Bind {
                    device,
                    flags,
                    addr,
                })
                .listener;
            self.call(&m::Listen {
                device,
                backlog: 8,
                cm_channel,
                binding,
                cookie: 0,
                mpa: m::MpaOptions::BY_DEVICE,
                addr,
                flags: 0,
                reserved: 0,
            });
            self.call(&m::MigrateCm {
                cm_channel,
                qp_num: 0,
                listener: binding,
                request: 0,
                search: 0,
            });
        }
        let addr = m::Addr::NONE;
        let listener = self
            .call(&m::Bind {
                device,
                flags: 0,
                addr,
            })
            .listener;
        self.call(&m::Unlisten { listener, flags: 0 });
        let to: std::net::SocketAddr = "10.77.0.2:9".parse().unwrap();
        self.call(&m::Resolve {
            device,
            reserved,
            dst: to.into(),
            src: m::Addr::NONE,
        });
        let channel = self.call(&m::CreateCmChannel { flags: 0 }).id;
        let from: std::net::SocketAddr = "10.77.0.1:0".parse().unwrap();
        let resolution = self
            .call(&m::StartResolution {
                device: 0,
                cm_channel: channel,
                timeout_ms: 1000,
                reserved,
                cookie: 0,
                dst: to.into(),
                src: from.into(),
            })
            .id;
        self.call(&m::EndResolution {
            resolution,
            reserved,
        });
        self.call(&m::DestroyCmChannel { channel, reserved });
    }
}

/// Rejects one connection and ends another.
fn end_connections(d: &Daemon) {
    let (a, b) = pair(d, 4096);
    a.qp.disconnect().unwrap();
    let end = End::new(&d.context(), 4096);
    let listener = CmListener::new(&b.cm, None, "10.77.0.2:0".parse().unwrap(), 8, 0).unwrap();
    let to = listener.local_addr();
    end.qp
        .connect(&end.cm, to, &ConnectOptions::default())
        .unwrap();
    let request = loop {
        match b.cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::ConnectRequest(request) => break request,
            CmEvent::Disconnected(_) => {}
            other => panic!("{other:?}"),
        }
    };
    request.reject(b"").unwrap();
    let answer = end.cm.get_event(Some(PATIENCE)).unwrap();
    assert!(matches!(answer, CmEvent::Rejected(_)), "{answer:?}");
}

/// Refuses a request to a datagram service.
fn answer_search(d: &Daemon) {
    let address = |text: &str| text.parse::<std::net::SocketAddr>().unwrap();
    let ctx = d.context();
    let cm = CmChannel::new(&ctx).unwrap();
    let options = BindOptions {
        datagrams: true,
        ..BindOptions::default()
    };
    let binding = CmBinding::new(&ctx, address("10.77.0.2:0"), &options).unwrap();
    let listener = CmListener::from_binding(&cm, binding, &ListenOptions::default());
    let to = listener.as_ref().unwrap().local_addr();
    let local = address("10.77.0.1:4444");
    let from = ResolvedAddress { device: 0, local };
    let _search = ServiceSearch::start(&cm, &from, to, b"", Some(PATIENCE), 0).unwrap();
    match cm.get_rdma_cm_event(Some(PATIENCE)).unwrap() {
        RdmaCmEvent::ServiceRequest(request) => request.reject(b"").unwrap(),
        other => panic!("{other:?}"),
    }
}

/// Loads a plan of the most faults and nearly the longest text, which never happen.
fn load_faults(ctx: &siw::Context) {
    let fault = "[[fault]]\nkind = \"wire_drop\"\nprobability = 0\nuser = 0\n";
    let comment = format!("# {}\n", "x".repeat(430));
    let text = format!("{fault}{comment}").repeat(64);
    assert!((30_000..m::MAX_PLAN_TEXT).contains(&text.len()));
    let outcome = ctx.load_faults("turns", "turns.toml", &text, None).unwrap();
    assert!(outcome.contains("\"faults\":64"), "{outcome}");
    ctx.clear_faults("turns").unwrap();
}

/// Sends bytes in streaming mode, and turns to RDMA.
fn exchange_streams(d: &Daemon) {
    let ctx = d.context();
    let cm = CmChannel::new(&ctx).unwrap();
    let options = ListenOptions {
        streaming: true,
        ..ListenOptions::default()
    };
    let any = "10.77.0.2:0".parse().unwrap();
    let listener = CmListener::new_with_options(&cm, any, &options).unwrap();
    let to = listener.local_addr();
    let mut here = StreamingConnection::open(&ctx, to, &StreamOptions::default()).unwrap();
    let mut there = cm.accept_stream(Some(PATIENCE)).unwrap();
    let sent = pattern(1, 4096);
    here.send_all(&sent, Some(PATIENCE)).unwrap();
    let mut received = vec![0; sent.len()];
    there.receive_exact(&mut received, Some(PATIENCE)).unwrap();
    assert!(received == sent);
    there.start_responder(&cm, 0).unwrap();
    here.reset().unwrap();
}

/// Processor time of each kind of work in a daemon that serves requests of all kinds, of clients that
/// hold much and of many clients.
fn longest_times() -> BTreeMap<String, Duration> {
    let d = Daemon::start(LOOPBACK, &[]);
    let crowd: Vec<Requests> = (0..300).map(|_| Requests::new(&d)).collect();
    for _ in 0..3 {
        let mut client = Requests::new(&d);
        let (device, reserved) = (0, 0);
        client.call(&m::QueryDevice { index: 0, flags: 0 });
        let pd = client.call(&m::AllocPd { device, reserved }).id;
        client.register_memory(pd);
        client.change_queues(pd);
        client.listen();
        let free = client.call(&m::AllocPd { device, reserved }).id;
        client.call(&m::DeallocPd { pd: free, reserved });
        let (a, b) = pair(&d, 4096);
        ping(&a, &b);
        drop(CompletionChannel::new(&a.ctx).unwrap());
        let qp = a.pd.create_qp(&a.cq, &a.cq, &QpInit::default()).unwrap();
        drop(qp);
        let any = "10.77.0.1:0".parse().unwrap();
        drop(CmListener::new(&a.cm, None, any, 4, 0).unwrap());
        a.ctx.read_stats().unwrap();
        for list in ObjectList::ALL {
            a.ctx.list_objects(*list).unwrap();
        }
        a.ctx.set_log_filter("info").unwrap();
        let captured = a.ctx.start_capture(&m::StartCapture::ALL_FRAMES);
        a.ctx.stop_capture(captured.unwrap().0).unwrap();
        let traced = a.ctx.start_trace(&m::StartTrace {
            selection: m::StartCapture::ALL_FRAMES,
            records: 16_384,
            reserved: 0,
        });
        a.ctx.stop_capture(traced.unwrap().0).unwrap();
        load_faults(&a.ctx);
        end_connections(&d);
        answer_search(&d);
        exchange_streams(&d);
        // The end of a client that holds much is work of several turns.
        drop((client, a, b));
    }
    let mut client = Requests::new(&d);
    client.take_numbers();
    drop((client, crowd));
    let context = d.context();
    let clients = || {
        let all: serde_json::Value = serde_json::from_str(&context.read_stats().unwrap()).unwrap();
        all["clients"].as_array().unwrap().len()
    };
    let end = std::time::Instant::now() + PATIENCE;
    while clients() > 1 {
        assert!(std::time::Instant::now() < end, "clients remain");
        std::thread::sleep(Duration::from_millis(5));
    }
    let all: serde_json::Value = serde_json::from_str(&context.read_stats().unwrap()).unwrap();
    let times = all["control"]["longest_ns"].as_object().unwrap().iter();
    times
        .map(|(kind, time)| (kind.clone(), Duration::from_nanos(time.as_u64().unwrap())))
        .collect()
}

/// Processor time of the first access to a transparent huge page, in which the daemon's heap lies: a tenth
/// of a millisecond, or several in a virtual machine whose host provides the page only then.
fn huge_page_time() -> Duration {
    const LEN: usize = 2 << 20;
    let processor_time = || -> Duration {
        let time = ClockId::CLOCK_THREAD_CPUTIME_ID.now();
        time.unwrap().into()
    };
    let touch = |_| {
        // SAFETY: a new mapping, of which only this function knows.
        unsafe {
            let (access, flags) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            );
            let start = libc::mmap(std::ptr::null_mut(), 2 * LEN, access, flags, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            libc::madvise(start, 2 * LEN, libc::MADV_HUGEPAGE);
            let page = start.byte_add(start.align_offset(LEN));
            let before = processor_time();
            page.cast::<u8>().write_volatile(1);
            let time = processor_time() - before;
            libc::munmap(start, 2 * LEN);
            time
        }
    };
    (0..5).map(touch).max().unwrap_or_default()
}

#[test]
fn no_piece_of_work_occupies_the_control_thread_for_long() {
    let mut page = huge_page_time();
    let mut least = longest_times();
    // The lists of a region of the most extents may reach into two new ones.
    let most = |page: Duration| MOST + 2 * page;
    for _ in 1..DAEMONS {
        page = page.max(huge_page_time());
        if least.values().all(|time| *time < most(page)) {
            break;
        }
        for (kind, time) in longest_times() {
            let known = least.entry(kind).or_insert(time);
            *known = time.min(*known);
        }
    }
    page = page.max(huge_page_time());
    let most = most(page);
    println!("{:>8.1} us  a huge page", page.as_secs_f64() * 1e6);
    let mut table: Vec<_> = least.iter().collect();
    table.sort_by_key(|(_, time)| std::cmp::Reverse(**time));
    for (kind, time) in &table {
        println!("{:>8.1} us  {kind}", time.as_secs_f64() * 1e6);
    }
    let rounds = ["ReadStats, rows", "reclaim", "timers"];
    for kind in Request::NAMES.iter().chain(&rounds) {
        assert!(least.contains_key(*kind), "{kind} is not measured");
    }
    let long: Vec<_> = table.iter().filter(|(_, time)| **time >= most).collect();
    assert!(long.is_empty(), "{long:?}");
}
