//! Attacks with many legal objects: what one client has, waits for or leaves must cost another nothing.

use super::rings::own_address;
use crate::attack::{Attack, Ended};
use crate::session::{AttackSession, AttackerListener};
use siw_shm::control::codec::CallError;
use siw_shm::control::messages as m;
use siw_shm::{SendData, SendWr};
use std::time::Instant;

/// Idle completion queues beside the clients that come and go.
const IDLE_QUEUES: usize = 4000;
/// Connections of a client that leaves, with two queue pairs each.
const LEFT_CONNECTIONS: usize = 500;
/// Connections whose SEND has no receive request.
const PARKED: usize = 600;
/// Arenas of a region, each with one extent.
const ARENAS: usize = 4096;

/// Holds many idle completion queues; other clients come, connect and go.
pub fn idle_queues_and_connects(attack: &mut Attack) -> Ended {
    let mut holder = AttackSession::open(&attack.socket)?;
    for _ in 0..IDLE_QUEUES {
        let request = m::CreateCq {
            cqe: 4,
            channel: 0,
            cookie: 0,
        };
        let made = holder.call(&request);
        if attack.count_refusal(made)?.is_none() {
            break;
        }
    }
    while attack.begin_round() {
        let mut session = AttackSession::open(&attack.socket)?;
        let made = session.connected_pair(4, own_address());
        attack.count_refusal(made)?;
    }
    Ok(())
}

/// Makes many queue pairs, all of them connected, and leaves them all at once.
pub fn mass_departure(attack: &mut Attack) -> Ended {
    let pairs = attack.count.unwrap_or(LEFT_CONNECTIONS);
    loop {
        let left = connect_pairs(attack, pairs)?;
        if !attack.begin_round() {
            return Ok(());
        }
        drop(left);
    }
}

/// A client with queue pairs that are connected to each other, and its listeners.
fn connect_pairs(
    attack: &mut Attack,
    pairs: usize,
) -> Result<(AttackSession, Vec<AttackerListener>), CallError> {
    /// Connections to one port: each has a port of its own at the other end.
    const OF_LISTENER: usize = 10_000;
    let mut session = AttackSession::open(&attack.socket)?;
    let pd = session.alloc_pd()?;
    let (cq, _) = session.create_cq(64)?;
    let mut listeners = Vec::new();
    for number in 0..pairs {
        if number % OF_LISTENER == 0 {
            listeners.push(session.listen(own_address())?);
        }
        let ends = [
            session.create_qp(pd, cq.cq, 4),
            session.create_qp(pd, cq.cq, 4),
        ];
        let [Ok(from), Ok(to)] = ends else {
            attack.refused += 1;
            break;
        };
        if let Some(listener) = listeners.last() {
            session.connect(listener, &from, &to)?;
        }
        if attack.is_over() {
            break;
        }
    }
    Ok((session, listeners))
}

/// Holds many idle queue pairs and as many completion queues.
pub fn many_objects(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    let pd = session.alloc_pd()?;
    let (cq, _) = session.create_cq(64)?;
    for _ in 0..attack.count.unwrap_or(IDLE_QUEUES) {
        session.create_qp(pd, cq.cq, 4)?;
        session.create_cq(4)?;
    }
    attack.begin_round();
    std::thread::sleep(attack.end.saturating_duration_since(Instant::now()));
    Ok(())
}

/// Sends on many connections to queue pairs without receive requests, and does nothing more.
pub fn parked_sends(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    let pd = session.alloc_pd()?;
    let connections = attack.count.unwrap_or(PARKED);
    let (cq, _) = session.create_cq(4 * connections as u32)?;
    let memory = session.new_memory(pd)?;
    let listener = session.listen(own_address())?;
    let mut parked = Vec::new();
    for _ in 0..connections {
        let from = session.create_qp(pd, cq.cq, 4)?;
        let to = session.create_qp(pd, cq.cq, 4)?;
        session.connect(&listener, &from, &to)?;
        parked.push((from, to));
    }
    let sges = [memory.first_half()];
    for (from, _) in &parked {
        from.post(&SendWr::send(1, SendData::Sges(&sges)), 1);
        from.ring(&session);
    }
    while attack.begin_round() {
        // The worker is awake all the time.
        session.wake_worker(0);
        std::thread::yield_now();
    }
    Ok(())
}

/// Registers regions of one extent in each of thousands of arenas.
pub fn many_arenas(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    let pd = session.alloc_pd()?;
    let mut arenas = Vec::new();
    for _ in 0..ARENAS {
        let made = session.alloc_arena(4096, false);
        match attack.count_refusal(made)? {
            // The daemon's mapping stays.
            Some((arena, _file)) => arenas.push(arena),
            None => break,
        }
    }
    let parts: Vec<_> = arenas.chunks(m::MAX_EXTENTS).collect();
    let Some((last, first)) = parts.split_last() else {
        return Err(CallError::Closed);
    };
    let list = |arenas: &[u32]| {
        let mut extents = [m::MemoryExtent::default(); m::MAX_EXTENTS];
        for (extent, arena) in extents.iter_mut().zip(arenas) {
            (extent.arena, extent.len) = (*arena, 4096);
        }
        (arenas.len() as u32, extents)
    };
    while attack.begin_round() {
        for part in first {
            let (count, extents) = list(part);
            session.call(&m::AddExtents {
                count,
                reserved: 0,
                extents,
            })?;
        }
        let (count, extents) = list(last);
        let made = session.call(&m::RegMemory {
            pd,
            access: 7,
            len: arenas.len() as u64 * 4096,
            va: 0,
            count,
            reserved: 0,
            reason: m::Text::new(""),
            extents,
        });
        if let Some((keys, _)) = attack.count_refusal(made)? {
            let gone = session.call(&m::DeregMr {
                lkey: keys.lkey,
                flags: 0,
            });
            attack.count_refusal(gone)?;
        }
    }
    Ok(())
}
