//! Attacks through the control socket.

use crate::attack::{Attack, Ended};
use crate::session::AttackSession;
use rustix::fd::{AsFd, OwnedFd};
use siw_shm::control::ControlSocket;
use siw_shm::control::messages as m;
use std::time::Duration;

/// Connections and channels that one round tries to hold.
const GREED: usize = 2000;

/// Opens connections that never send anything, and unlimited channels and completion channels: each
/// costs the daemon a descriptor.
pub fn exhaust_descriptors(attack: &mut Attack) -> Ended {
    while attack.begin_round() {
        let mut silent = Vec::new();
        let patience = Duration::from_millis(50);
        while silent.len() < GREED {
            match ControlSocket::connect_within(&attack.socket, patience) {
                Ok(socket) => silent.push(socket),
                Err(_) => break,
            }
        }
        let mut kept: Vec<OwnedFd> = Vec::new();
        let mut session = AttackSession::open(&attack.socket)?;
        while kept.len() < GREED {
            let made = session.call(&m::CreateCmChannel { flags: 0 });
            let Some((_, fds)) = attack.count_refusal(made)? else {
                break;
            };
            kept.extend(fds);
            let made = session.call(&m::CreateChannel { reserved: 0 });
            let Some((_, fds)) = attack.count_refusal(made)? else {
                break;
            };
            kept.extend(fds);
        }
    }
    Ok(())
}

/// Sends endless requests with unexpected descriptors and reads no reply.
pub fn slow_socket(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    session.conn.set_nonblocking(true)?;
    let query = m::QueryDevice { index: 0, flags: 0 };
    let (one_end, _other_end) = ControlSocket::new_pair()?;
    while attack.begin_round() {
        for _ in 0..64 {
            let packet = session.encode(&query);
            let extra = [one_end.as_fd(); 8];
            let fds = if attack.next_random().is_multiple_of(8) {
                &extra[..]
            } else {
                &[]
            };
            match session.conn.send_packet(&packet, fds) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    std::thread::yield_now();
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

/// Opens endless connections to a listener and reads none of its events.
pub fn unread_events(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    let pd = session.alloc_pd()?;
    let (cq, _) = session.create_cq(16)?;
    let listener = session.listen(super::rings::own_address())?;
    while attack.begin_round() {
        let mut connecting = Vec::new();
        for _ in 0..32 {
            let queue_pair = session.create_qp(pd, cq.cq, 4)?;
            let started = session.start_connect(&listener, &queue_pair);
            attack.count_refusal(started)?;
            connecting.push(queue_pair);
        }
        for queue_pair in connecting {
            let request = m::DestroyQp {
                qp_num: queue_pair.reply.qp_num,
                reserved: 0,
            };
            session.call(&request)?;
        }
    }
    Ok(())
}

/// Requests all statistics endlessly from several sessions at once.
pub fn statistics_flood(attack: &mut Attack) -> Ended {
    let mut sessions = (0..8)
        .map(|_| AttackSession::open(&attack.socket))
        .collect::<Result<Vec<_>, _>>()?;
    let request = m::ReadStats {
        offset: 0,
        reserved: 0,
    };
    while attack.begin_round() {
        // All sessions send their request before any reads a reply.
        for session in &mut sessions {
            let packet = session.encode(&request);
            session.conn.send_packet(&packet, &[])?;
        }
        for session in &sessions {
            let reply = session.conn.recv_packet();
            reply.map_err(|_| siw_shm::control::codec::CallError::Closed)?;
        }
    }
    Ok(())
}

/// Creates and destroys objects of every kind as fast as the daemon allows.
pub fn create_and_destroy(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    while attack.begin_round() {
        let pd = session.alloc_pd()?;
        let (cq, _) = session.create_cq(64)?;
        let mut numbers = Vec::new();
        for _ in 0..32 {
            numbers.push(session.create_qp(pd, cq.cq, 16)?.reply.qp_num);
        }
        let memory = session.new_memory(pd)?;
        for qp_num in numbers {
            let request = m::DestroyQp {
                qp_num,
                reserved: 0,
            };
            session.call(&request)?;
        }
        let request = m::DeregMr {
            lkey: memory.keys.lkey,
            flags: 0,
        };
        session.call(&request)?;
        session.call(&m::FreeArena {
            arena: memory.arena,
            reserved: 0,
        })?;
        session.call(&m::DestroyCq {
            cq: cq.cq,
            reserved: 0,
        })?;
        session.call(&m::DeallocPd { pd, reserved: 0 })?;
    }
    Ok(())
}
