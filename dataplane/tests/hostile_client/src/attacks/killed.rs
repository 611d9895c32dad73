//! A client with ordinary behavior that is killed in the middle of it.

use super::rings::own_address;
use crate::attack::{Attack, Ended};
use crate::session::AttackSession;
use siw_shm::WrFlags;
use siw_shm::control::messages as m;
use std::time::Instant;

/// Runs until the attack's time is over and then kills itself at any point: a test that passes
/// random times has it killed at random points.
pub fn live_until_killed(attack: &mut Attack) -> Ended {
    let end = attack.end;
    std::thread::spawn(move || {
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
        let own = rustix::process::getpid();
        let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
    });
    loop {
        attack.begin_round();
        live_once(attack)?;
    }
}

/// One round: creates objects of every kind, connects, transfers, and destroys most of the objects.
fn live_once(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    let (channel, _fd) = session.call(&m::CreateChannel { reserved: 0 })?;
    let (from, _to, memory) = session.connected_pair(32, own_address())?;
    let sges = [memory.first_half()];
    let request = if attack.next_random().is_multiple_of(2) {
        memory.write_second_half(&sges)
    } else {
        memory.read_second_half(&sges)
    };
    from.post(&request.with_flags(WrFlags::NONE), 4);
    from.ring(&session);
    let srq = m::CreateSrq {
        pd: memory.pd,
        max_wr: 64,
        max_sge: 2,
        limit: 0,
        share: 0,
        reserved: 0,
    };
    let (srq, _) = session.call(&srq)?;
    let window = m::AllocMw {
        pd: memory.pd,
        kind: 1,
    };
    session.call(&window)?;
    let (huge, _file) = session.alloc_arena(4 << 20, true)?;
    let pages = m::AllocFastMr {
        pd: memory.pd,
        arena: huge,
        max_pages: 16,
        reserved: 0,
    };
    session.call(&pages)?;
    let resized = m::ModifySrq {
        srq: srq.srq,
        mask: m::SRQ_MAX_WR,
        max_wr: 128,
        limit: 0,
    };
    session.call(&resized)?;
    let destroyed = m::DestroyQp {
        qp_num: from.reply.qp_num,
        reserved: 0,
    };
    session.call(&destroyed)?;
    let gone = session.call(&m::DeregMr {
        lkey: memory.keys.lkey,
        flags: 0,
    });
    attack.count_refusal(gone)?;
    session.call(&m::DestroyChannel {
        channel: channel.id,
        reserved: 0,
    })?;
    Ok(())
}

/// Connections that [`hold_many_queue_pairs`] makes, with two queue pairs each.
const CONNECTIONS: usize = 5000;

/// Makes many connections and waits to be killed.
pub fn hold_many_queue_pairs(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    let pd = session.alloc_pd()?;
    let (cq, _) = session.create_cq(64)?;
    let listener = session.listen(own_address())?;
    let mut connected = Vec::with_capacity(CONNECTIONS);
    for _ in 0..CONNECTIONS {
        let from = session.create_qp(pd, cq.cq, 4)?;
        let to = session.create_qp(pd, cq.cq, 4)?;
        session.connect(&listener, &from, &to)?;
        connected.push((from, to));
    }
    attack.begin_round();
    std::thread::sleep(attack.end.saturating_duration_since(Instant::now()));
    Ok(())
}
