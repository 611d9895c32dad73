//! The connection to the daemon: control calls, devices, doorbells, the liveness
//! of the daemon, asynchronous events. Everything else holds an Arc of it.

use crate::{Error, Pd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use siw_shm::control::{
    self, AllocPd, ClientHello, ControlSocket, DeviceReply, HelloReply, Limits, Message,
    PORT_ACTIVE, ProtoError, QueryDevice, QueueRef, ReadStats, RecvError, Text, VERSION,
};
use siw_shm::doorbell::{WORKER_LINE, ring_len, ring_offset};
use siw_shm::{DoorbellProducer, SharedMemory, WorkerPageView};
use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A client of one daemon. Clones share the connection.
#[derive(Clone)]
pub struct Context(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    /// Serialises request and reply; holds the last sequence number.
    seq: Mutex<u32>,
    conn: ControlSocket,
    hello: HelloReply,
    page: WorkerPageView,
    workers: Vec<(DoorbellProducer, OwnedFd)>,
    async_events: ControlSocket,
    alive: AtomicBool,
    regions: Mutex<HashMap<u32, Arc<SharedMemory>>>,
}

/// A device of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    pub index: u32,
    pub name: String,
    /// DPDK driver.
    pub driver: String,
    pub mac: [u8; 6],
    pub ips: Vec<IpAddr>,
    pub mtu: u32,
    pub link_mbps: u32,
    pub active: bool,
    pub crc: bool,
    pub mpa_rev: u8,
}

/// What happened to an object, or to everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AsyncEvent {
    /// None for kinds of a newer daemon.
    pub kind: Option<control::AsyncEventKind>,
    /// QP number, CQ id or device index.
    pub object: u32,
    pub reason: String,
}

fn locked<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Context {
    /// Connects to the daemon: at `socket`, else $SIWD_SOCKET, else
    /// /run/siwd/siwd.sock.
    pub fn open(socket: Option<&Path>) -> Result<Context, Error> {
        let path = control::socket_path(socket);
        let conn = ControlSocket::connect_to(&path).map_err(|source| Error::Open {
            path: path.display().to_string(),
            source,
        })?;
        Self::from_conn(conn)
    }

    /// Over a connected socket.
    pub fn from_conn(conn: ControlSocket) -> Result<Context, Error> {
        let name = std::env::args_os().next().unwrap_or_default();
        let name = Path::new(&name)
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let hello = ClientHello {
            version: VERSION.into(),
            pid: std::process::id(),
            name: Text::new(&name),
        };
        let (hello, fds) = conn.call_and_wait(1, &hello, &[])?;
        let n = hello.n_workers;
        if n == 0 || n > 64 || fds.len() != n as usize + 3 {
            return Err(ProtoError::MissingFd.into());
        }
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or(Error::Proto(ProtoError::MissingFd));
        let page = SharedMemory::map_read_only(next()?, n as usize * WORKER_LINE)?;
        let cap = hello.doorbell_capacity;
        if !cap.is_power_of_two() || cap > siw_shm::doorbell::MAX_CAPACITY {
            return Err(Error::Invalid(
                "siwd announced a doorbell ring that is no power of two",
            ));
        }
        let bells = Arc::new(SharedMemory::map_fd(next()?, n as usize * ring_len(cap))?);
        let async_events = ControlSocket::from(next()?);
        async_events.set_nonblocking(false)?;
        let mut workers = Vec::with_capacity(n as usize);
        for w in 0..n {
            let bell = DoorbellProducer::new(bells.clone(), ring_offset(w, cap), cap)?;
            workers.push((bell, next()?));
        }
        Ok(Context(Arc::new(Inner {
            seq: Mutex::new(1),
            conn,
            hello,
            page: WorkerPageView::new(Arc::new(page), n)?,
            workers,
            async_events,
            alive: AtomicBool::new(true),
            regions: Mutex::default(),
        })))
    }

    /// What this client may ask for.
    pub fn limits(&self) -> Limits {
        self.0.hello.limits
    }

    /// Name and version of the daemon.
    pub fn daemon(&self) -> String {
        self.0.hello.daemon.to_text()
    }

    /// All devices.
    pub fn devices(&self) -> Result<Vec<Device>, Error> {
        (0..self.0.hello.n_devices)
            .map(|i| self.device(i))
            .collect()
    }

    /// One device by index.
    pub fn device(&self, index: u32) -> Result<Device, Error> {
        let (d, _) = self.0.call(&QueryDevice { index, reserved: 0 })?;
        Ok(Device::from(&d))
    }

    /// One device by name.
    pub fn device_by_name(&self, name: &str) -> Result<Device, Error> {
        self.devices()?
            .into_iter()
            .find(|d| d.name == name)
            .ok_or(Error::Invalid("siwd has no device of that name"))
    }

    /// A protection domain.
    pub fn alloc_pd(&self) -> Result<Pd, Error> {
        let (r, _) = self.0.call(&AllocPd {
            device: control::ANY_DEVICE,
            reserved: 0,
        })?;
        Ok(Pd::new(self.0.clone(), r.id))
    }

    /// False once the daemon was found to be gone. Looks at the socket.
    pub fn is_alive(&self) -> bool {
        self.0.check_alive()
    }

    /// Becomes readable with asynchronous events and when the daemon goes away.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        self.0.async_events.as_fd()
    }

    /// The next asynchronous event; [`Error::Timeout`] when none comes in time,
    /// [`Error::DaemonGone`] after the last one.
    pub fn get_async_event(&self, timeout: Option<Duration>) -> Result<AsyncEvent, Error> {
        let p = self.0.recv_event(&self.0.async_events, timeout)?;
        let e: control::AsyncEventMessage = control::decode_event(control::KIND_ASYNC_EVENT, &p)?;
        Ok(AsyncEvent {
            kind: control::AsyncEventKind::from_u32(e.kind),
            object: e.object,
            reason: e.reason.to_text(),
        })
    }

    /// The daemon's statistics as JSON.
    pub fn stats(&self) -> Result<String, Error> {
        let mut text = Vec::new();
        loop {
            let (r, _) = self.0.call(&ReadStats {
                offset: text.len() as u32,
                reserved: 0,
            })?;
            let n = (r.len as usize).min(r.text.len());
            text.extend_from_slice(&r.text[..n]);
            if n == 0 || text.len() >= r.total as usize {
                return Ok(String::from_utf8_lossy(&text).into_owned());
            }
        }
    }
}

impl From<&DeviceReply> for Device {
    fn from(d: &DeviceReply) -> Device {
        let ips = d.ips.iter().take(usize::from(d.n_ips));
        Device {
            index: d.index,
            name: d.name.to_text(),
            driver: d.driver.to_text(),
            mac: d.mac,
            ips: ips
                .filter_map(|a| a.to_socket_addr())
                .map(|a| a.ip())
                .collect(),
            mtu: d.mtu,
            link_mbps: d.link_mbps,
            active: d.port_state == PORT_ACTIVE,
            crc: d.crc != 0,
            mpa_rev: d.mpa_rev,
        }
    }
}

impl Inner {
    /// One request and its reply.
    pub(crate) fn call<M: Message>(&self, m: &M) -> Result<(M::Reply, Vec<OwnedFd>), Error> {
        let mut seq = locked(&self.seq);
        if !self.alive.load(Ordering::Relaxed) {
            return Err(Error::DaemonGone);
        }
        *seq = seq.wrapping_add(1).max(1);
        let r = self.conn.call_and_wait(*seq, m, &[]);
        drop(seq);
        r.map_err(|e| {
            let e = Error::from(e);
            // After anything but a refusal, replies and requests may be out of step.
            if !matches!(e, Error::Refused { .. }) {
                self.alive.store(false, Ordering::Release);
            }
            e
        })
    }

    /// A request that nobody waits for: it is done before any later one, and what it says is
    /// lost.
    pub(crate) fn post<M: Message>(&self, m: &M) {
        let _one_at_a_time = locked(&self.seq);
        if self.alive.load(Ordering::Relaxed) && self.conn.post_unanswered(m).is_err() {
            self.alive.store(false, Ordering::Release);
        }
    }

    /// For destructors: nobody is left to tell about failures.
    pub(crate) fn call_quietly<M: Message>(&self, m: &M) {
        let _ = self.call(m);
    }

    /// The region of a queue: the one in the reply, or one seen before.
    pub(crate) fn region(
        &self,
        q: &QueueRef,
        fds: Vec<OwnedFd>,
    ) -> Result<Arc<SharedMemory>, Error> {
        let mut regions = locked(&self.regions);
        if q.fd == 0 {
            return Ok(regions.get(&q.region).ok_or(ProtoError::MissingFd)?.clone());
        }
        let fd = fds.into_iter().next().ok_or(ProtoError::MissingFd)?;
        let len = usize::try_from(q.region_len).map_err(|_| ProtoError::MissingFd)?;
        let r = Arc::new(SharedMemory::map_fd(fd, len)?);
        if q.dedicated == 0 {
            regions.insert(q.region, r.clone());
        }
        Ok(r)
    }

    /// Tells a worker that a QP has work.
    #[inline]
    pub(crate) fn ring(&self, worker: u32, qp_num: u32) {
        let Some((bell, eventfd)) = self.workers.get(worker as usize) else {
            return;
        };
        bell.ring_doorbell(qp_num);
        if self.page.must_wake(worker) {
            // The counter is full only if the worker has been told already.
            let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
        }
    }

    /// What was last known.
    #[inline]
    pub(crate) fn known_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// Looks at the control socket: a system call, for slow paths.
    #[cold]
    pub(crate) fn check_alive(&self) -> bool {
        if self.known_alive() {
            let mut fds = [PollFd::new(&self.conn, PollFlags::RDHUP)];
            let zero = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            if poll(&mut fds, Some(&zero)).is_ok_and(|n| n > 0) {
                self.alive.store(false, Ordering::Release);
            }
        }
        self.known_alive()
    }

    /// Waits until `fd` is readable. Ready data wins over a dead daemon.
    pub(crate) fn wait_readable(
        &self,
        fd: BorrowedFd<'_>,
        timeout: Option<Duration>,
    ) -> Result<(), Error> {
        let deadline = timeout.map(|t| Instant::now() + t);
        loop {
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            let ts = left.map(|l| Timespec {
                tv_sec: l.as_secs() as i64,
                tv_nsec: l.subsec_nanos().into(),
            });
            let mut fds = [
                PollFd::from_borrowed_fd(fd, PollFlags::IN),
                PollFd::new(&self.conn, PollFlags::RDHUP),
            ];
            match poll(&mut fds, ts.as_ref()) {
                Ok(0) => return Err(Error::Timeout),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            }
            if fds[0].revents().contains(PollFlags::IN) {
                return Ok(());
            }
            if !fds[1].revents().is_empty() || !fds[0].revents().is_empty() {
                self.check_alive();
                return Err(Error::DaemonGone);
            }
        }
    }

    /// One event packet from an event socket.
    pub(crate) fn recv_event(
        &self,
        from: &ControlSocket,
        timeout: Option<Duration>,
    ) -> Result<Vec<u8>, Error> {
        loop {
            match from.try_recv_packet() {
                Ok(p) => return Ok(p.bytes),
                Err(RecvError::WouldBlock) => self.wait_readable(from.as_fd(), timeout)?,
                Err(RecvError::Closed) => {
                    self.check_alive();
                    return Err(Error::DaemonGone);
                }
                Err(RecvError::Truncated) => return Err(ProtoError::NotSiwd(0).into()),
                Err(RecvError::Io(e)) => return Err(e.into()),
            }
        }
    }
}
