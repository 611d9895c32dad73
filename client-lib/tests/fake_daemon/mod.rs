//! A small in-process daemon for the tests of client-lib: it speaks the real
//! control protocol and serves the real rings, and joins QPs by copying memory.
//! One worker, one thread, no network.
#![allow(dead_code)]

use bytemuck::Zeroable;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use siw_shm::control::*;
use siw_shm::queue_alloc::{QueueAlloc, QueueMem};
use siw_shm::region::Pages;
use siw_shm::*;
use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;

const CAP: u32 = 256;

/// Runs until dropped; then every connection closes.
pub struct FakeDaemon {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
    wake: Arc<OwnedFd>,
    /// Eventfd wake-ups seen by the worker.
    pub wakes: Arc<AtomicU32>,
}

impl FakeDaemon {
    pub fn start() -> FakeDaemon {
        static N: AtomicU32 = AtomicU32::new(0);
        let n = N.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("siw-fake-{}-{n}.sock", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = Conn::listen(&path, 16).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let wakes = Arc::new(AtomicU32::new(0));
        let (s, w, c) = (stop.clone(), wake.clone(), wakes.clone());
        let thread = std::thread::spawn(move || Fake::new(listener, c).run(&s, &w));
        FakeDaemon {
            stop,
            thread: Some(thread),
            path,
            wake,
            wakes,
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn open(&self) -> siw::Context {
        siw::Context::open(Some(&self.path)).unwrap()
    }

    /// As if the daemon died.
    pub fn kill(&mut self) {
        // A child of a parallel test may hold the listener between fork and exec.
        let _ = std::fs::remove_file(&self.path);
        self.stop.store(true, Ordering::Release);
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        if let Some(t) = self.thread.take() {
            t.join().unwrap();
        }
    }
}

impl Drop for FakeDaemon {
    fn drop(&mut self) {
        self.kill();
    }
}

struct CqState {
    ring: CqProducer,
    channel: u32,
    cookie: u64,
    mem: QueueMem,
}

struct Client {
    conn: Conn,
    bell: DoorbellConsumer,
    eventfd: OwnedFd,
    async_events: Conn,
    alloc: QueueAlloc,
    next: u32,
    arenas: HashMap<u32, Arc<Region>>,
    channels: HashMap<u32, OwnedFd>,
    cqs: HashMap<u32, CqState>,
    cms: HashMap<u32, Conn>,
}

struct QpServed {
    client: u32,
    pd: u32,
    send_cq: u32,
    recv_cq: u32,
    sq: SqConsumer,
    rq: RqConsumer,
    mem: QueueMem,
    peer: u32,
    cm: u32,
    cookie: u64,
    error: bool,
    stalled: VecDeque<SendWqe>,
}

struct Listening {
    client: u32,
    id: u32,
    port: u16,
    cm: u32,
    cookie: u64,
}

struct Pending {
    qp_num: u32,
    listener_cm: u32,
}

struct Fake {
    listener: OwnedFd,
    page: WorkerPage,
    keys: Arc<KeyTable>,
    reader: Reader,
    clients: HashMap<u32, Client>,
    joining: Vec<Conn>,
    qps: HashMap<u32, QpServed>,
    listening: Vec<Listening>,
    pending: HashMap<u32, Pending>,
    next: u32,
    wakes: Arc<AtomicU32>,
}

type Refusal = (i32, &'static str);

impl Fake {
    fn new(listener: OwnedFd, wakes: Arc<AtomicU32>) -> Fake {
        let keys = KeyTable::new(1024, 1);
        let reader = keys.reader().unwrap();
        Fake {
            listener,
            page: WorkerPage::create(1).unwrap(),
            keys,
            reader,
            clients: HashMap::new(),
            joining: Vec::new(),
            qps: HashMap::new(),
            listening: Vec::new(),
            pending: HashMap::new(),
            next: 1,
            wakes,
        }
    }

    fn id(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    fn run(mut self, stop: &AtomicBool, wake: &OwnedFd) {
        let flag = self.page.flag(0).unwrap();
        while !stop.load(Ordering::Acquire) {
            while let Some(c) = Conn::accept(self.listener.as_fd()).unwrap() {
                self.joining.push(c);
            }
            let mut busy = self.hellos() | self.requests() | self.doorbells();
            self.reader.quiesce();
            self.keys.try_reclaim();
            if !busy {
                flag.announce_sleep();
                busy = self.clients.values().any(|c| c.bell.has_work());
                if !busy {
                    self.sleep(wake);
                }
                flag.announce_awake();
            }
        }
    }

    fn sleep(&self, wake: &OwnedFd) {
        let mut fds = vec![
            PollFd::new(wake, PollFlags::IN),
            PollFd::new(&self.listener, PollFlags::IN),
        ];
        fds.extend(self.joining.iter().map(|c| PollFd::new(c, PollFlags::IN)));
        for c in self.clients.values() {
            fds.push(PollFd::new(&c.conn, PollFlags::IN));
            fds.push(PollFd::new(&c.eventfd, PollFlags::IN));
        }
        poll(
            &mut fds,
            Some(&Timespec {
                tv_sec: 10,
                tv_nsec: 0,
            }),
        )
        .unwrap();
        for c in self.clients.values() {
            if rustix::io::read(&c.eventfd, &mut [0u8; 8]).is_ok() {
                self.wakes.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn hellos(&mut self) -> bool {
        let mut busy = false;
        for conn in std::mem::take(&mut self.joining) {
            match conn.recv() {
                Ok(p) => {
                    busy = true;
                    self.hello(conn, &p.bytes);
                }
                Err(RecvError::WouldBlock) => self.joining.push(conn),
                Err(_) => {}
            }
        }
        busy
    }

    fn hello(&mut self, conn: Conn, p: &[u8]) {
        let seq = match Request::decode(p) {
            Ok((seq, Request::Hello(_))) => seq,
            Ok((seq, r)) => return conn.refuse(r.kind(), seq, 71, "say Hello first").unwrap(),
            Err(e) => {
                let (kind, seq) = codec::peek(p).unwrap_or((0, 0));
                return conn.refuse(kind, seq, 93, &e.to_string()).unwrap();
            }
        };
        let id = self.id();
        let len = doorbell::ring_len(CAP);
        let bells = Arc::new(Region::create("bells", len, Pages::Normal).unwrap());
        let (async_daemon, async_client) = Conn::pair().unwrap();
        let efd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let reply = HelloReply {
            version: VERSION.into(),
            client_id: id,
            n_workers: 1,
            n_devices: 2,
            doorbell_capacity: CAP,
            reserved: 0,
            limits: Limits {
                max_qp_wr: 1024,
                max_cqe: 65536,
                ..Limits::zeroed()
            },
            daemon: Text::new("fake"),
        };
        let page = self.page.region().fd().unwrap();
        let fds = [page, bells.fd().unwrap(), async_client.as_fd(), efd.as_fd()];
        conn.reply::<Hello>(seq, &reply, &fds).unwrap();
        let client = Client {
            conn,
            bell: DoorbellConsumer::new(bells, 0, CAP).unwrap(),
            eventfd: efd,
            async_events: async_daemon,
            alloc: QueueAlloc::new(Pages::Normal, 64 << 20),
            next: 0,
            arenas: HashMap::new(),
            channels: HashMap::new(),
            cqs: HashMap::new(),
            cms: HashMap::new(),
        };
        self.clients.insert(id, client);
    }

    fn requests(&mut self) -> bool {
        let mut busy = false;
        for id in self.clients.keys().copied().collect::<Vec<_>>() {
            match self.clients[&id].conn.recv() {
                Ok(p) => {
                    busy = true;
                    let (seq, req) = Request::decode(&p.bytes).unwrap();
                    if let Err((errno, why)) = self.request(id, seq, req) {
                        self.clients[&id]
                            .conn
                            .refuse(req.kind(), seq, errno, why)
                            .unwrap();
                    }
                }
                Err(RecvError::WouldBlock) => {}
                Err(_) => {
                    let mine: Vec<u32> = self
                        .qps
                        .iter()
                        .filter(|(_, q)| q.client == id)
                        .map(|(n, _)| *n)
                        .collect();
                    for n in mine {
                        self.disconnect(n, 104);
                        self.qps.remove(&n);
                    }
                    self.listening.retain(|l| l.client != id);
                    self.clients.remove(&id);
                }
            }
        }
        busy
    }

    fn ok<M: Message>(
        &self,
        client: u32,
        seq: u32,
        r: &M::Reply,
        fds: &[&dyn AsFd],
    ) -> Result<(), Refusal> {
        let fds: Vec<_> = fds.iter().map(|f| f.as_fd()).collect();
        self.clients[&client].conn.reply::<M>(seq, r, &fds).unwrap();
        Ok(())
    }

    fn request(&mut self, id: u32, seq: u32, req: Request) -> Result<(), Refusal> {
        let c = self.clients.get_mut(&id).unwrap();
        c.next += 1;
        let new = IdReply {
            id: c.next,
            reserved: 0,
        };
        let none = Empty::default();
        match req {
            Request::QueryDevice(q) => {
                let mut d = DeviceReply {
                    index: q.index,
                    port_state: PORT_ACTIVE,
                    name: Text::new(&format!("siw{}", q.index)),
                    n_ips: 1,
                    mtu: 1500,
                    ..DeviceReply::zeroed()
                };
                d.ips[0] = std::net::IpAddr::from([10, 0, 0, q.index as u8 + 1]).into();
                self.ok::<QueryDevice>(id, seq, &d, &[])
            }
            Request::AllocPd(_) => {
                let pd = IdReply {
                    id: self.id(),
                    reserved: 0,
                };
                self.ok::<AllocPd>(id, seq, &pd, &[])
            }
            Request::AllocArena(a) => {
                if a.len == 0 || a.len > 1 << 30 {
                    return Err((12, "arena too large"));
                }
                let r = Arc::new(Region::create("arena", a.len as usize, Pages::Normal).unwrap());
                c.arenas.insert(new.id, r.clone());
                let reply = ArenaReply {
                    arena: new.id,
                    huge: 0,
                    len: r.len() as u64,
                };
                self.ok::<AllocArena>(id, seq, &reply, &[&r.fd().unwrap()])
            }
            Request::FreeArena(f) => {
                c.arenas.remove(&f.arena);
                self.ok::<FreeArena>(id, seq, &none, &[])
            }
            Request::RegMr(m) => {
                let arena = c.arenas.get(&m.arena).ok_or((22, "no such arena"))?;
                let mr = Mr::new(
                    arena.clone(),
                    m.offset,
                    m.len,
                    m.va,
                    m.pd,
                    None,
                    Access(m.access),
                )
                .map_err(|_| (22, "outside of the arena"))?;
                let s = self.keys.insert(mr).map_err(|_| (12, "no key"))?;
                self.ok::<RegMr>(
                    id,
                    seq,
                    &MrReply {
                        lkey: s.0,
                        rkey: s.0,
                    },
                    &[],
                )
            }
            Request::DeregMr(d) => {
                self.keys.remove(Stag(d.lkey)).ok_or((22, "no such key"))?;
                self.ok::<DeregMr>(id, seq, &none, &[])
            }
            Request::CreateChannel(_) => {
                let (mine, theirs) = event_pipe().unwrap();
                c.channels.insert(new.id, mine);
                self.ok::<CreateChannel>(id, seq, &new, &[&theirs])
            }
            Request::DestroyChannel(d) => {
                c.channels.remove(&d.channel);
                self.ok::<DestroyChannel>(id, seq, &none, &[])
            }
            Request::CreateCq(q) => {
                let g = CqGeometry::new(q.cqe, 1).ok_or((22, "too many entries"))?;
                let mem = c.alloc.alloc(g.len).unwrap();
                let ring = CqProducer::new(mem.region.clone(), mem.offset, g, 0).unwrap();
                let reply = CqReply {
                    cq: new.id,
                    entries: g.entries,
                    workers: 1,
                    reserved: 0,
                    mem: QueueRef::from(&mem),
                };
                let region = mem.region.clone();
                let fresh = mem.new_region;
                c.cqs.insert(
                    new.id,
                    CqState {
                        ring,
                        channel: q.channel,
                        cookie: q.cookie,
                        mem,
                    },
                );
                let fd = region.fd().unwrap();
                let fds: &[&dyn AsFd] = if fresh { &[&fd] } else { &[] };
                self.ok::<CreateCq>(id, seq, &reply, fds)
            }
            Request::DestroyCq(d) => {
                if let Some(q) = c.cqs.remove(&d.cq) {
                    c.alloc.free(q.mem);
                }
                self.ok::<DestroyCq>(id, seq, &none, &[])
            }
            Request::CreateQp(q) => self.create_qp(id, seq, &q),
            Request::ModifyQp(m) => {
                self.set_error(m.qp_num);
                self.ok::<ModifyQp>(id, seq, &QpStateReply::zeroed(), &[])
            }
            Request::QueryQp(q) => {
                let error = self.qps.get(&q.qp_num).ok_or((22, "no such QP"))?.error;
                let state = if error { QpState::Error } else { QpState::Rts } as u32;
                let reply = QpStateReply {
                    state,
                    ..QpStateReply::zeroed()
                };
                self.ok::<QueryQp>(id, seq, &reply, &[])
            }
            Request::DestroyQp(d) => {
                self.disconnect(d.qp_num, 0);
                if let Some(q) = self.qps.remove(&d.qp_num) {
                    self.clients.get_mut(&id).unwrap().alloc.free(q.mem);
                }
                self.ok::<DestroyQp>(id, seq, &none, &[])
            }
            Request::CreateCmChannel(_) => {
                let (mine, theirs) = Conn::pair().unwrap();
                c.cms.insert(new.id, mine);
                self.ok::<CreateCmChannel>(id, seq, &new, &[&theirs])
            }
            Request::DestroyCmChannel(d) => {
                c.cms.remove(&d.channel);
                self.ok::<DestroyCmChannel>(id, seq, &none, &[])
            }
            Request::Listen(l) => {
                let at = l.addr.to_socket_addr().ok_or((22, "no address"))?;
                let port = if at.port() == 0 {
                    10_000 + self.id() as u16
                } else {
                    at.port()
                };
                if self.listening.iter().any(|l| l.port == port) {
                    return Err((98, "the port is in use"));
                }
                let reply = ListenReply {
                    listener: new.id,
                    reserved: 0,
                    addr: std::net::SocketAddr::new(at.ip(), port).into(),
                };
                self.listening.push(Listening {
                    client: id,
                    id: new.id,
                    port,
                    cm: l.cm_channel,
                    cookie: l.cookie,
                });
                self.ok::<Listen>(id, seq, &reply, &[])
            }
            Request::Unlisten(u) => {
                self.listening
                    .retain(|l| l.client != id || l.id != u.listener);
                self.ok::<Unlisten>(id, seq, &none, &[])
            }
            Request::Connect(m) => self.connect(id, seq, &m),
            Request::Accept(m) => self.accept(id, seq, &m),
            Request::Reject(m) => {
                let p = self
                    .pending
                    .remove(&m.request)
                    .ok_or((22, "no such request"))?;
                self.tell(
                    p.qp_num,
                    CmEvent {
                        private_data: m.private_data,
                        ..CmEvent::new(CmEventKind::Rejected)
                    },
                );
                self.ok::<Reject>(id, seq, &none, &[])
            }
            Request::Disconnect(d) => {
                self.ok::<Disconnect>(id, seq, &none, &[])?;
                self.disconnect(d.qp_num, 0);
                Ok(())
            }
            Request::Stats(s) => {
                let text = format!("{{\"pad\":\"{}\"}}", "x".repeat(5000));
                let part = &text.as_bytes()[(s.offset as usize).min(text.len())..];
                let mut r = StatsReply::zeroed();
                let n = part.len().min(r.text.len());
                r.total = text.len() as u32;
                r.len = n as u32;
                r.text[..n].copy_from_slice(&part[..n]);
                self.ok::<Stats>(id, seq, &r, &[])
            }
            Request::DeallocPd(_) => self.ok::<DeallocPd>(id, seq, &none, &[]),
            Request::Hello(_) => Err((71, "Hello twice")),
        }
    }

    fn create_qp(&mut self, id: u32, seq: u32, q: &CreateQp) -> Result<(), Refusal> {
        if q.max_send_wr > 1024 {
            return Err((22, "max_send_wr is at most 1024"));
        }
        let g = QpGeometry::new(
            q.max_send_wr,
            q.max_recv_wr,
            q.max_send_sge,
            q.max_recv_sge,
            q.max_inline,
        )
        .ok_or((22, "QP too large"))?;
        let qp_num = self.id();
        let c = self.clients.get_mut(&id).unwrap();
        let mem = c.alloc.alloc(g.len).unwrap();
        let sq = SqConsumer::new(mem.region.clone(), mem.offset, g.sq_slots).unwrap();
        let rq = RqConsumer::new(mem.region.clone(), mem.offset + g.rq_offset, g.rq_slots).unwrap();
        sq.set_qp_state(QpState::Idle as u32);
        sq.set_worker(0);
        let reply = QpReply {
            qp_num,
            worker: 0,
            sq_slots: g.sq_slots,
            rq_slots: g.rq_slots,
            rq_offset: g.rq_offset as u32,
            max_send_wr: q.max_send_wr,
            max_recv_wr: q.max_recv_wr,
            max_send_sge: q.max_send_sge,
            max_recv_sge: q.max_recv_sge,
            max_inline: q.max_inline,
            mem: QueueRef::from(&mem),
        };
        let (region, fresh) = (mem.region.clone(), mem.new_region);
        let served = QpServed {
            client: id,
            pd: q.pd,
            send_cq: q.send_cq,
            recv_cq: q.recv_cq,
            sq,
            rq,
            mem,
            peer: 0,
            cm: 0,
            cookie: 0,
            error: false,
            stalled: VecDeque::new(),
        };
        self.qps.insert(qp_num, served);
        let fd = region.fd().unwrap();
        let fds: &[&dyn AsFd] = if fresh { &[&fd] } else { &[] };
        self.ok::<CreateQp>(id, seq, &reply, fds)
    }

    /// A CM event about a QP.
    fn tell(&self, qp_num: u32, e: CmEvent) {
        let Some(q) = self.qps.get(&qp_num) else {
            return;
        };
        let e = CmEvent {
            qp_num,
            cookie: q.cookie,
            ..e
        };
        if let Some(cm) = self.clients.get(&q.client).and_then(|c| c.cms.get(&q.cm)) {
            let _ = cm.send(&encode_event(KIND_CM_EVENT, &e), &[]);
        }
    }

    fn connect(&mut self, id: u32, seq: u32, m: &Connect) -> Result<(), Refusal> {
        let port = m.dst.to_socket_addr().ok_or((22, "no address"))?.port();
        let q = self.qps.get_mut(&m.qp_num).ok_or((22, "no such QP"))?;
        q.cm = m.cm_channel;
        q.cookie = m.cookie;
        self.ok::<Connect>(id, seq, &Empty::default(), &[])?;
        let request = self.id();
        let Some(l) = self.listening.iter().find(|l| l.port == port) else {
            let e = CmEvent {
                errno: 111,
                ..CmEvent::new(CmEventKind::ConnectError)
            };
            self.tell(
                m.qp_num,
                CmEvent {
                    reason: Text::new("connection refused"),
                    ..e
                },
            );
            return Ok(());
        };
        let e = CmEvent {
            cookie: l.cookie,
            listener: l.id,
            request,
            device: 0,
            ird: m.params.ird,
            ord: m.params.ord,
            peer: m.src,
            local: m.dst,
            private_data: m.params.private_data,
            ..CmEvent::new(CmEventKind::ConnectRequest)
        };
        self.clients[&l.client].cms[&l.cm]
            .send(&encode_event(KIND_CM_EVENT, &e), &[])
            .unwrap();
        self.pending.insert(
            request,
            Pending {
                qp_num: m.qp_num,
                listener_cm: l.cm,
            },
        );
        Ok(())
    }

    fn accept(&mut self, id: u32, seq: u32, m: &Accept) -> Result<(), Refusal> {
        let p = self
            .pending
            .remove(&m.request)
            .ok_or((22, "no such request"))?;
        let a = self.qps.get_mut(&m.qp_num).ok_or((22, "no such QP"))?;
        a.peer = p.qp_num;
        a.cm = if m.cm_channel == 0 {
            p.listener_cm
        } else {
            m.cm_channel
        };
        a.cookie = m.cookie;
        a.sq.set_qp_state(QpState::Rts as u32);
        let b = self
            .qps
            .get_mut(&p.qp_num)
            .ok_or((104, "the peer is gone"))?;
        b.peer = m.qp_num;
        b.sq.set_qp_state(QpState::Rts as u32);
        self.ok::<Accept>(id, seq, &Empty::default(), &[])?;
        let e = CmEvent {
            crc: 1,
            mpa_rev: 2,
            ..CmEvent::new(CmEventKind::Established)
        };
        self.tell(m.qp_num, e);
        self.tell(
            p.qp_num,
            CmEvent {
                private_data: m.params.private_data,
                ..e
            },
        );
        Ok(())
    }

    fn set_error(&mut self, qp_num: u32) {
        let Some(q) = self.qps.get_mut(&qp_num) else {
            return;
        };
        q.error = true;
        q.sq.set_qp_state(QpState::Error as u32);
        self.serve(qp_num);
    }

    fn disconnect(&mut self, qp_num: u32, errno: u32) {
        let peer = self
            .qps
            .get_mut(&qp_num)
            .map_or(0, |q| std::mem::take(&mut q.peer));
        if peer == 0 {
            return;
        }
        if let Some(p) = self.qps.get_mut(&peer) {
            p.peer = 0;
        }
        for (n, errno) in [(peer, errno), (qp_num, 0)] {
            self.set_error(n);
            self.tell(
                n,
                CmEvent {
                    errno,
                    ..CmEvent::new(CmEventKind::Disconnected)
                },
            );
        }
    }

    fn doorbells(&mut self) -> bool {
        let mut rung = Vec::new();
        for c in self.clients.values_mut() {
            while let Some(n) = c.bell.pop() {
                rung.push(n);
            }
        }
        for n in &rung {
            if let Some(q) = self.qps.get(n) {
                q.sq.clear_pending();
            }
            self.serve(*n);
        }
        // A SEND that found no receive request waits for one.
        let stalled: Vec<u32> = self
            .qps
            .iter()
            .filter(|(_, q)| !q.stalled.is_empty())
            .map(|(n, _)| *n)
            .collect();
        for n in &stalled {
            self.serve(*n);
        }
        !rung.is_empty() || !stalled.is_empty()
    }

    fn serve(&mut self, qp_num: u32) {
        let mut w = SendWqe::new();
        while let Some(q) = self.qps.get_mut(&qp_num) {
            let stalled = q.stalled.pop_front();
            match stalled {
                Some(s) => w = s,
                None => match q.sq.pop(&mut w) {
                    Ok(Some(())) => q.sq.release(),
                    Ok(None) => break,
                    Err(e) => panic!("hostile client: {e}"),
                },
            }
            if !q.error {
                match self.execute(qp_num, &w) {
                    Some(status) => self.complete_send(qp_num, &w, status),
                    None => {
                        self.qps.get_mut(&qp_num).unwrap().stalled.push_front(w);
                        break;
                    }
                }
            } else {
                self.complete_send(qp_num, &w, WcStatus::WR_FLUSH_ERR);
            }
        }
        let mut r = RecvWqe::new();
        while let Some(q) = self.qps.get_mut(&qp_num) {
            if !q.error || q.rq.pop(&mut r) != Ok(Some(())) {
                break;
            }
            self.complete_recv(qp_num, &r, WcStatus::WR_FLUSH_ERR, 0, WcFlags::NONE);
        }
    }

    fn gather(&self, q: &QpServed, sges: &[Sge]) -> Option<Vec<u8>> {
        let mut data = Vec::new();
        for s in sges {
            let (mr, off) = self
                .reader
                .check(Stag(s.lkey), s.addr, s.length, Access::NONE, q.pd, 0)
                .ok()?;
            let at = data.len();
            data.resize(at + s.length as usize, 0);
            mr.read_at(off, &mut data[at..]).ok()?;
        }
        Some(data)
    }

    fn place(&self, pd: u32, stag: u32, addr: u64, need: Access, data: &[u8]) -> bool {
        self.reader
            .check(Stag(stag), addr, data.len() as u32, need, pd, 0)
            .is_ok_and(|(mr, off)| mr.write_at(off, data).is_ok())
    }

    fn scatter(&self, pd: u32, sges: &[Sge], mut data: &[u8]) -> bool {
        for s in sges {
            let (now, rest) = data.split_at(data.len().min(s.length as usize));
            if !now.is_empty() && !self.place(pd, s.lkey, s.addr, Access::LOCAL_WRITE, now) {
                return false;
            }
            data = rest;
        }
        data.is_empty()
    }

    /// None: the peer has no receive request.
    fn execute(&mut self, qp_num: u32, w: &SendWqe) -> Option<WcStatus> {
        let q = &self.qps[&qp_num];
        let Some(peer) = self.qps.get(&q.peer) else {
            return Some(WcStatus::WR_FLUSH_ERR);
        };
        let (peer_num, peer_pd) = (q.peer, peer.pd);
        let data = match w.inline_data() {
            Some(d) => d.to_vec(),
            None if w.opcode == Opcode::Read => Vec::new(),
            None => match self.gather(q, w.sges()) {
                Some(d) => d,
                None => return Some(WcStatus::LOC_PROT_ERR),
            },
        };
        let fine = match w.opcode {
            Opcode::Write => {
                self.place(peer_pd, w.rkey, w.remote_addr, Access::REMOTE_WRITE, &data)
            }
            Opcode::Read => {
                let need = Access::REMOTE_READ;
                let mut data = vec![0; w.length as usize];
                let key = Stag(w.rkey);
                self.reader
                    .check(key, w.remote_addr, w.length, need, peer_pd, 0)
                    .is_ok_and(|(mr, off)| mr.read_at(off, &mut data).is_ok())
                    && self.scatter(q.pd, w.sges(), &data)
            }
            _ => {
                let mut r = RecvWqe::new();
                let p = self.qps.get_mut(&peer_num).unwrap();
                p.rq.pop(&mut r).unwrap()?;
                p.rq.release();
                let fits = self.scatter(peer_pd, r.sges(), &data);
                let status = if fits {
                    WcStatus::SUCCESS
                } else {
                    WcStatus::LOC_LEN_ERR
                };
                let flags = if w.flags.contains(WrFlags::SOLICITED) {
                    WcFlags::SOLICITED
                } else {
                    WcFlags::NONE
                };
                self.complete_recv(peer_num, &r, status, data.len() as u32, flags);
                true
            }
        };
        Some(if fine {
            WcStatus::SUCCESS
        } else {
            WcStatus::REM_ACCESS_ERR
        })
    }

    fn complete_send(&mut self, qp_num: u32, w: &SendWqe, status: WcStatus) {
        let q = self.qps.get_mut(&qp_num).unwrap();
        q.sq.complete(1);
        if !w.is_signaled() && status == WcStatus::SUCCESS {
            return;
        }
        let e = Cqe {
            wr_id: w.wr_id,
            qp_num,
            status,
            opcode: w.opcode.into(),
            ..Cqe::default()
        };
        let (client, cq) = (q.client, q.send_cq);
        self.push(client, cq, &e);
    }

    fn complete_recv(
        &mut self,
        qp_num: u32,
        w: &RecvWqe,
        status: WcStatus,
        byte_len: u32,
        flags: WcFlags,
    ) {
        let q = self.qps.get_mut(&qp_num).unwrap();
        q.rq.complete(1);
        q.rq.release();
        let opcode = WcOpcode::RECV;
        let e = Cqe {
            wr_id: w.wr_id,
            qp_num,
            status,
            opcode,
            byte_len,
            flags,
            ..Cqe::default()
        };
        let (client, cq) = (q.client, q.recv_cq);
        self.push(client, cq, &e);
    }

    fn push(&mut self, client: u32, cq: u32, e: &Cqe) {
        let Some(c) = self.clients.get_mut(&client) else {
            return;
        };
        let Some(q) = c.cqs.get_mut(&cq) else { return };
        if q.ring.push(e).is_err() {
            q.ring.set_error(75);
            let a = AsyncEvent::new(AsyncEventKind::CqErr, cq, "completion queue overflow");
            let _ = c
                .async_events
                .send(&encode_event(KIND_ASYNC_EVENT, &a), &[]);
            return;
        }
        if q.ring.take_event()
            && let Some(ch) = c.channels.get(&q.channel)
        {
            let _ = rustix::io::write(ch, &q.cookie.to_ne_bytes());
        }
    }
}
