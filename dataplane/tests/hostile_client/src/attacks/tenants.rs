//! Attacks on what all users of a daemon share: its memory, its disposal of descriptors, its log.

use crate::attack::{Attack, Ended};
use crate::session::AttackSession;
use crate::slow_file;
use rustix::fd::AsFd;
use rustix::process::{Resource, Rlimit};
use siw_shm::SharedMemory;
use siw_shm::control::ControlSocket;
use siw_shm::control::codec::{self, CallError};
use siw_shm::control::messages as m;
use siw_shm::shared_memory::PageSize;
use std::collections::VecDeque;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Registrations that one round tries to hold.
const GREED: usize = 500;
/// SO_LINGER time of a socket that is given away.
const LINGER: Duration = Duration::from_secs(60);
/// Clients that are connected at a time, and how many come in a second.
const CROWD: usize = 100;
const ARRIVALS: u32 = 1000;
/// Bytes of a file in memory, of which a page is imported.
const FILE_BYTES: usize = 64 << 20;

/// Registers regions of as many extents as a region may have.
pub fn endless_extents(attack: &mut Attack) -> Ended {
    while attack.begin_round() {
        let mut session = AttackSession::open(&attack.socket)?;
        let pd = session.alloc_pd()?;
        let (arena, _file) = session.alloc_arena(1 << 20, false)?;
        let mut extents = [m::MemoryExtent::default(); m::MAX_EXTENTS];
        for (place, extent) in extents.iter_mut().enumerate() {
            (extent.arena, extent.offset, extent.len) = (arena, place as u64 * 64, 32);
        }
        let (count, reserved) = (m::MAX_EXTENTS as u32, 0);
        for number in 0..GREED {
            for _ in 0..31 {
                session.call(&m::AddExtents {
                    count,
                    reserved,
                    extents,
                })?;
            }
            let made = session.call(&m::RegMemory {
                pd,
                access: 1,
                len: u64::from(count) * 32 * 32,
                va: 0,
                count,
                reserved,
                reason: m::Text::new(&format!("{number:060}")),
                extents,
            });
            if attack.count_refusal(made)?.is_none() || !attack.begin_round() {
                break;
            }
        }
    }
    Ok(())
}

/// Pairs one queue pair again and again with one that does not exist.
pub fn endless_pairs(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    let pd = session.alloc_pd()?;
    let (cq, _) = session.create_cq(16)?;
    let queue_pair = session.create_qp(pd, cq.cq, 4)?;
    let (device, _) = session.call(&m::QueryDevice { index: 0, flags: 0 })?;
    let address = device.ips[0];
    let request = m::PairQp {
        qp_num: queue_pair.reply.qp_num,
        peer_qp_num: 0,
        device: 0,
        ord: 1,
        ird: 1,
        denied_access: 0,
        local: address,
        peer: address,
    };
    while attack.begin_round() {
        for _ in 0..64 {
            let made = session.call(&request);
            attack.count_refusal(made)?;
        }
    }
    Ok(())
}

/// A TCP socket whose close waits for its peer, which reads nothing; and that peer.
fn lingering_socket() -> std::io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 4096)?;
    let mut sender = TcpStream::connect(listener.local_addr()?)?;
    rustix::net::sockopt::set_socket_send_buffer_size(&sender, 4096)?;
    let (peer, _) = listener.accept()?;
    sender.set_nonblocking(true)?;
    while sender.write(&[0; 4096]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&sender, Some(LINGER))?;
    Ok((sender, peer))
}

/// Gives the daemon sockets whose close lasts for a minute.
pub fn lingering_sockets(attack: &mut Attack) -> Ended {
    let patience = Duration::from_millis(200);
    while attack.begin_round() {
        let mut peers = Vec::new();
        for _ in 0..GREED {
            let (socket, peer) = lingering_socket()?;
            let Ok(conn) = ControlSocket::connect_within(&attack.socket, patience) else {
                attack.refused += 1;
                break;
            };
            let request = codec::encode_request(1, &m::ClientHello::new("hostile"));
            if conn.send_packet(&request, &[socket.as_fd()]).is_err() {
                attack.refused += 1;
            }
            peers.push(peer);
            // If the daemon's copy is already closed, this close lingers.
            std::thread::spawn(move || drop(socket));
            if !attack.begin_round() {
                break;
            }
        }
    }
    Ok(())
}

/// Sends messages that the daemon does not know, each of which is worth a line in its log.
pub fn log_flood(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    let mut packet = session.encode(&m::AllocPd {
        device: 0,
        reserved: 0,
    });
    // The kind follows the magic number and the version.
    packet[6..8].copy_from_slice(&60_000u16.to_ne_bytes());
    while attack.begin_round() {
        for _ in 0..16 {
            session.conn.send_packet(&packet, &[])?;
            let answer = session.conn.recv_packet();
            answer.map_err(|_| CallError::Closed)?;
            attack.refused += 1;
        }
    }
    Ok(())
}

/// Imports a page of each of many large files, and leaves the last reference to them to the daemon.
pub fn large_imports(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    while attack.begin_round() {
        let file = SharedMemory::create_memfd("large", FILE_BYTES, PageSize::Normal)?;
        file.fill_zero(0, FILE_BYTES)
            .map_err(|_| CallError::Closed)?;
        let Some(fd) = file.memfd() else {
            return Ok(());
        };
        let fd = fd.try_clone_to_owned()?;
        drop(file);
        let request = m::ImportMemory {
            kind: m::IMPORT_FILE,
            writable: 1,
            offset: 0,
            len: 4096,
        };
        let packet = session.encode(&request);
        session.conn.send_packet(&packet, &[fd.as_fd()])?;
        drop(fd);
        let answer = session.conn.recv_packet();
        let answer = answer.map_err(|_| CallError::Closed)?;
        let (_, seq) = codec::peek_header(&answer.bytes).ok_or(CallError::Closed)?;
        let made = codec::decode_reply::<m::ImportMemory>(seq, &answer.bytes);
        if let Some(made) = attack.count_refusal(made)? {
            let (arena, reserved) = (made.id, 0);
            session.call(&m::FreeArena { arena, reserved })?;
        }
    }
    Ok(())
}

/// Registers many regions and leaves them to the daemon to remove.
pub fn departures(attack: &mut Attack) -> Ended {
    while attack.begin_round() {
        let mut session = AttackSession::open(&attack.socket)?;
        let pd = session.alloc_pd()?;
        let (arena, _file) = session.alloc_arena(4096, false)?;
        let (offset, len, va, access, reserved) = (0, 4096, 0, 1, 0);
        let request = m::RegMr {
            pd,
            arena,
            offset,
            len,
            va,
            access,
            reserved,
        };
        for _ in 0..20 * GREED {
            let made = session.call(&request);
            if attack.count_refusal(made)?.is_none() || !attack.begin_round() {
                break;
            }
        }
    }
    Ok(())
}

/// Binds ports that the daemon selects until it refuses one, and frees them.
pub fn port_binds(attack: &mut Attack) -> Ended {
    while attack.begin_round() {
        let mut session = AttackSession::open(&attack.socket)?;
        let (device, flags, addr) = (m::ANY_DEVICE, 0, m::Addr::NONE);
        for _ in 0..20 * GREED {
            let made = session.call(&m::Bind {
                device,
                flags,
                addr,
            });
            if attack.count_refusal(made)?.is_none() || !attack.begin_round() {
                break;
            }
        }
    }
    Ok(())
}

/// Connects clients that do nothing, until the daemon refuses one.
pub fn idle_clients(attack: &mut Attack) -> Ended {
    let mut idle = Vec::new();
    while attack.begin_round() {
        match AttackSession::open(&attack.socket) {
            Ok(session) => idle.push(session),
            Err(CallError::Io(error)) => return Err(CallError::Io(error)),
            Err(_) => {
                attack.refused += 1;
                idle.clear();
            }
        }
        if idle.len() >= GREED {
            idle.clear();
        }
    }
    Ok(())
}

/// Sends the daemon files whose close lasts as long as the attack: as memory to import, and with a
/// request that has no file.
pub fn slow_files(attack: &mut Attack) -> Ended {
    let file = slow_file::open()?;
    while attack.begin_round() {
        let mut sessions = Vec::new();
        for number in 0..GREED {
            let opened = AttackSession::open(&attack.socket);
            let Some(mut session) = attack.count_refusal(opened)? else {
                break;
            };
            let packet = if number % 2 == 0 {
                session.encode(&m::ImportMemory {
                    kind: m::IMPORT_FILE,
                    writable: 1,
                    offset: 0,
                    len: 4096,
                })
            } else {
                session.encode(&m::QueryDevice { index: 0, flags: 0 })
            };
            // The answer may have to wait for the file.
            session.conn.send_packet(&packet, &[file.as_fd()])?;
            sessions.push(session);
            if !attack.begin_round() {
                break;
            }
        }
    }
    Ok(())
}

/// Many clients are connected; in each round the one that came first goes, and another one comes: as
/// many in a second as [`ARRIVALS`]. Prints the number that came and the time at intervals.
pub fn clients_come_and_go(attack: &mut Attack) -> Ended {
    let descriptors = rustix::process::getrlimit(Resource::Nofile);
    let limit = Rlimit {
        current: descriptors.maximum,
        ..descriptors
    };
    rustix::process::setrlimit(Resource::Nofile, limit).map_err(std::io::Error::from)?;
    let arrive = |attack: &mut Attack| -> Result<ControlSocket, CallError> {
        let mut session = AttackSession::open(&attack.socket)?;
        session.alloc_pd()?;
        // Without the descriptors that the daemon has sent.
        Ok(session.conn)
    };
    let mut present = VecDeque::new();
    while present.len() < attack.count.unwrap_or(CROWD) && !attack.is_over() {
        present.push_back(arrive(attack)?);
    }
    let (begin, mut arrivals) = (Instant::now(), 0);
    while attack.begin_round() {
        present.pop_front();
        present.push_back(arrive(attack)?);
        arrivals += 1;
        let due = begin + Duration::from_secs(1) * arrivals / ARRIVALS;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if arrivals % ARRIVALS == 0 {
            let seconds = begin.elapsed().as_secs_f64();
            println!("{arrivals} clients came in {seconds:.3} s");
        }
    }
    Ok(())
}
