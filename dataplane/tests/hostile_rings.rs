//! A client that writes garbage into its own queues: it and its streams end, and nobody else's.

mod common;

use std::sync::Arc;

use common::*;
use siw::{CmEvent, SendData, SendWr};
use siw_shm::control::messages as m;
use siw_shm::control::{ControlSocket, codec};
use siw_shm::shared_memory::SharedMemory;

/// A client that speaks the control protocol itself, so that it can write anything into its queues.
struct Hostile {
    conn: ControlSocket,
    _fds: Vec<std::os::fd::OwnedFd>,
    queues: Arc<SharedMemory>,
    qp: m::QpReply,
    /// In `queues` too.
    srq: m::SrqReply,
    bells: SharedMemory,
    wake: std::os::fd::OwnedFd,
}

impl Hostile {
    fn new(d: &Daemon, end: &End) -> Hostile {
        Hostile::with(d, end, false)
    }

    /// `shared`: the queue pair receives through a shared receive queue.
    fn with(d: &Daemon, end: &End, shared: bool) -> Hostile {
        let conn = ControlSocket::connect_to(&d.socket).unwrap();
        let hello = m::ClientHello::new("hostile");
        let (h, mut fds) = conn.call_and_wait(1, &hello, &[]).unwrap();
        let wake = fds.remove(3);
        let bells = fds.remove(1);
        let len = siw_shm::doorbell::ring_len(h.doorbell_capacity);
        let bells = SharedMemory::map_fd(bells, len).unwrap();
        let (pd, _) = conn
            .call_and_wait(
                2,
                &m::AllocPd {
                    device: 0,
                    reserved: 0,
                },
                &[],
            )
            .unwrap();
        let cq = m::CreateCq {
            cqe: 64,
            channel: 0,
            cookie: 0,
        };
        let (cq, mut cq_fds) = conn.call_and_wait(3, &cq, &[]).unwrap();
        let region = cq_fds.pop().unwrap();
        let srq = m::CreateSrq {
            pd: pd.id,
            max_wr: 16,
            max_sge: 4,
            limit: if shared { 4 } else { 0 },
            share: 0,
            reserved: 0,
        };
        let (srq, _) = conn.call_and_wait(7, &srq, &[]).unwrap();
        let create = m::CreateQp {
            pd: pd.id,
            send_cq: cq.cq,
            recv_cq: cq.cq,
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline: 64,
            sq_sig_all: 1,
            srq: if shared { srq.srq } else { 0 },
        };
        let (qp, _) = conn.call_and_wait(4, &create, &[]).unwrap();
        let queues = Arc::new(SharedMemory::map_fd(region, qp.mem.region_len as usize).unwrap());
        let (ch, mut ch_fds) = conn
            .call_and_wait(5, &m::CreateCmChannel { reserved: 0 }, &[])
            .unwrap();
        let events = ControlSocket::from(ch_fds.pop().unwrap());
        events.set_nonblocking(false).unwrap();
        let listener =
            siw::CmListener::new(&end.cm, None, "10.77.0.2:0".parse().unwrap(), 8, 0).unwrap();
        let connect = m::Connect {
            qp_num: qp.qp_num,
            device: m::ANY_DEVICE,
            cm_channel: ch.id,
            timeout_ms: 0,
            cookie: 0,
            dst: listener.local_addr().into(),
            src: m::Addr::NONE,
            params: m::ConnParams {
                ord: 4,
                ird: 4,
                crc: m::BY_DEVICE,
                mpa_rev: m::BY_DEVICE,
                reserved: [0; 2],
                private_data: m::PrivateData::new(&[]).unwrap(),
            },
        };
        conn.call_and_wait(6, &connect, &[]).unwrap();
        let CmEvent::ConnectRequest(r) = end.cm.get_event(Some(PATIENCE)).unwrap() else {
            panic!("no request");
        };
        r.accept(&end.qp, None, &siw::ConnectOptions::default())
            .unwrap();
        let e = events.recv_packet().unwrap();
        let e: m::CmEventMessage = codec::decode_event(m::KIND_CM_EVENT, &e.bytes).unwrap();
        assert_eq!(e.kind, m::CmEventKind::Established as u32);
        fds.extend(ch_fds);
        Hostile {
            conn,
            _fds: fds,
            queues,
            qp,
            srq,
            bells,
            wake,
        }
    }

    /// Writes the send queue's producer index and rings.
    fn ring(&self, tail: u32) {
        use std::sync::atomic::Ordering::SeqCst;
        let at = self.qp.mem.offset as usize;
        self.queues.atomic_u32(at).unwrap().store(tail, SeqCst);
        self.queues.atomic_u32(at + 4).unwrap().store(1, SeqCst);
        let bell = self.bells.atomic_u32(0).unwrap().fetch_add(1, SeqCst);
        let slot = siw_shm::doorbell::HEADER + bell as usize * 4;
        self.bells
            .atomic_u32(slot)
            .unwrap()
            .store(self.qp.qp_num + 1, SeqCst);
        let _ = nix::unistd::write(&self.wake, &1u64.to_ne_bytes());
    }
}

#[test]
fn impossible_ring_indices_close_that_client_and_no_other() {
    let d = Daemon::loopback();
    let (a, b) = pair(&d, 4096);
    let end = End::new(&d.context(), 4096);
    let h = Hostile::new(&d, &end);
    h.ring(0x8000_0000);
    // Closed: the next receive says so.
    assert!(h.conn.recv_packet().is_err());
    assert!(matches!(
        end.cm.get_event(Some(PATIENCE)).unwrap(),
        CmEvent::Established(_)
    ));
    assert!(matches!(
        end.cm.get_event(Some(PATIENCE)).unwrap(),
        CmEvent::Disconnected(_)
    ));
    ping(&a, &b);
}

#[test]
fn garbage_work_requests_end_their_queue_pair_and_nothing_else() {
    let d = Daemon::loopback();
    let (a, b) = pair(&d, 4096);
    for seed in 1..20 {
        let end = End::new(&d.context(), 4096);
        let h = Hostile::new(&d, &end);
        let at = h.qp.mem.offset as usize + siw_shm::work_queue::HEADER;
        let mut slots = pattern(seed, 64 * 8);
        if seed % 2 == 0 {
            // A right opcode and slot count before garbage addresses and keys.
            slots[..4].copy_from_slice(&[1, 1, 1, 1]);
        }
        h.queues.write(at, &slots).unwrap();
        h.ring(8);
        // Its peer sees the end, whatever the garbage was.
        loop {
            match end.cm.get_event(Some(PATIENCE)).unwrap() {
                CmEvent::Disconnected(_) => break,
                CmEvent::Established(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }
    ping(&a, &b);
}

#[test]
fn a_hostile_shared_receive_queue_ends_its_own_streams_only() {
    use std::sync::atomic::Ordering::SeqCst;
    let d = Daemon::loopback();
    let (a, b) = pair(&d, 4096);
    for seed in 1..20 {
        let end = End::new(&d.context(), 4096);
        let h = Hostile::with(&d, &end, true);
        let at = h.srq.mem.offset as usize;
        let mut slots = pattern(seed, 64 * 16);
        if seed % 2 == 0 {
            // A receive of one element: garbage address and key.
            slots[..4].copy_from_slice(&[0x80, 0, 1, 1]);
        }
        let first = at + siw_shm::shared_receive_queue::HEADER;
        h.queues.write(first, &slots).unwrap();
        let tail = [1, 16, 17, u32::MAX][seed as usize % 4];
        h.queues.atomic_u32(at).unwrap().store(tail, SeqCst);
        end.qp
            .post_send(&[SendWr::send(1, SendData::Inline(b"x"))])
            .unwrap();
        loop {
            match end.cm.get_event(Some(PATIENCE)).unwrap() {
                CmEvent::Disconnected(_) => break,
                CmEvent::Established(_) => {}
                other => panic!("{other:?}"),
            }
        }
        // An index that cannot be closes the client.
        if tail > 16 {
            assert!(h.conn.recv_packet().is_err());
        }
        ping(&a, &b);
    }
}
