//! Attacks through shared memory: queues, doorbells, wake-ups.

use crate::attack::{Attack, Ended};
use crate::session::AttackSession;
use siw_shm::control::RecvError;
use siw_shm::control::codec::CallError;
use siw_shm::control::messages::{ModifyQp, QpState};
use siw_shm::{SendData, SendWr, Sge, WrFlags};
use std::net::SocketAddr;

/// Requests between two checks of the clock.
const ROUND: u32 = 256;

/// Address for connections between the attacker's own queue pairs.
pub fn own_address() -> SocketAddr {
    SocketAddr::from(([10, 77, 0, 2], 0))
}

/// Makes the workers' wake descriptors blocking, and reads them before the workers do.
pub fn blocking_wake(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    let (from, _to, _memory) = session.connected_pair(16, own_address())?;
    let mut counter = [0; 8];
    while attack.begin_round() {
        for wake in &session.wake {
            // O_NONBLOCK belongs to the open file description, which the daemon may share.
            let _ = rustix::io::ioctl_fionbio(wake, false);
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
            // Non-blocking again for this process's own read.
            let _ = rustix::io::ioctl_fionbio(wake, true);
            let _ = rustix::io::read(wake, &mut counter);
            let _ = rustix::io::ioctl_fionbio(wake, false);
        }
        from.ring(&session);
        std::thread::yield_now();
    }
    for wake in &session.wake {
        let _ = rustix::io::ioctl_fionbio(wake, true);
    }
    Ok(())
}

/// Keeps the rings full whenever the worker looks: endless valid requests.
pub fn full_rings(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    let (from, to, memory) = session.connected_pair(256, own_address())?;
    let request = SendWr::write(1, SendData::Inline(&[]), 0, memory.keys.rkey);
    let quiet = request.with_flags(WrFlags::NONE);
    for queue_pair in [&from, &to] {
        queue_pair.fill_slots(&quiet);
    }
    while attack.begin_round() {
        for _ in 0..ROUND {
            for queue_pair in [&from, &to] {
                queue_pair.fill_rings();
                queue_pair.ring(&session);
            }
        }
        is_open(&mut session)?;
    }
    Ok(())
}

/// Checks that the daemon still serves this client.
fn is_open(session: &mut AttackSession) -> Ended {
    let device = siw_shm::control::messages::QueryDevice { index: 0, flags: 0 };
    session.call(&device).map(drop)
}

/// Rings endless doorbells without work, for own numbers and any others.
pub fn endless_doorbells(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    let (from, to, _memory) = session.connected_pair(16, own_address())?;
    while attack.begin_round() {
        for _ in 0..ROUND {
            let number = attack.next_random() as u32;
            for worker in 0..session.hello.n_workers {
                session.ring_doorbell(worker, number);
                session.ring_doorbell(worker, number % 1024);
            }
            from.ring(&session);
            to.ring(&session);
        }
        is_open(&mut session)?;
    }
    Ok(())
}

/// Keeps the rings of queue pairs in the error state full, so that flushing never ends. The queue
/// pairs were never connected.
pub fn flush_loops(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    let pd = session.alloc_pd()?;
    while attack.begin_round() {
        let (cq, _) = session.create_cq(16)?;
        let request = SendWr::send(1, SendData::Inline(&[]));
        for _ in 0..4 {
            let queue_pair = session.create_qp(pd, cq.cq, 1024)?;
            queue_pair.fill_slots(&request);
            queue_pair.fill_rings();
            let to_error = session.encode(&ModifyQp {
                qp_num: queue_pair.reply.qp_num,
                state: QpState::Error as u32,
                flags: 0,
                denied_access: 0,
            });
            session.conn.send_packet(&to_error, &[])?;
            // Refill the rings while the daemon flushes.
            let reply = loop {
                for _ in 0..ROUND {
                    queue_pair.fill_rings();
                }
                match session.conn.try_recv_packet() {
                    Err(RecvError::WouldBlock) => {}
                    reply => break reply,
                }
            };
            reply.map_err(|_| CallError::Closed)?;
            for _ in 0..ROUND {
                queue_pair.fill_rings();
                queue_pair.ring(&session);
            }
        }
    }
    Ok(())
}

/// Writes random data to every word and slot of the rings and to the doorbells.
pub fn scribbled_rings(attack: &mut Attack) -> Ended {
    while attack.begin_round() {
        let mut session = AttackSession::open(&attack.socket)?;
        let (from, to, _memory) = session.connected_pair(16, own_address())?;
        for _ in 0..16 {
            let bytes = attack.random_bytes(4096);
            from.scribble(&bytes);
            to.scribble(&bytes[64..]);
            if attack.next_random().is_multiple_of(4) {
                let _ = session.bells.write(0, &bytes);
            }
            from.ring(&session);
            to.ring(&session);
        }
        attack.closed += u64::from(is_open(&mut session).is_err());
    }
    Ok(())
}

/// Posts far more requests than the queue pair was created for; they complete late or never.
pub fn too_many_requests(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    let (from, _to, memory) = session.connected_pair(4, own_address())?;
    let sges = [Sge {
        addr: 0,
        length: 4096,
        lkey: memory.keys.lkey,
    }];
    let read = SendWr::read(1, &sges, 0, memory.keys.rkey).with_flags(WrFlags::NONE);
    from.fill_slots(&read);
    while attack.begin_round() {
        for _ in 0..ROUND {
            from.fill_rings();
            from.ring(&session);
        }
        is_open(&mut session)?;
    }
    Ok(())
}
