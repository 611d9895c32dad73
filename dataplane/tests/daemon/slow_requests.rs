//! Requests that a client can make slow do not block the control thread: descriptors that take long
//! to close, memory that takes long to allocate and free, and requests sent without waiting.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::common::raw_client::{import_new_file, import_of};
use crate::common::*;
use nix::libc;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{setsockopt, sockopt};
use siw_shm::SharedMemory;
use siw_shm::control::messages as m;
use siw_shm::control::{CallError, ControlSocket, RecvError, codec};
use siw_shm::shared_memory::PageSize;

/// SO_LINGER time of a socket: the test would notice a tenth of it.
const LINGER: Duration = Duration::from_secs(30);

/// A TCP socket whose close waits for its peer, which reads nothing; and that peer.
fn lingering_socket() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    sender.set_nonblocking(true).unwrap();
    while sender.write(&[0; 65_536]).is_ok() {}
    sender.set_nonblocking(false).unwrap();
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: LINGER.as_secs() as i32,
    };
    setsockopt(&sender, sockopt::Linger, &linger).unwrap();
    (sender, peer)
}

fn greeted(d: &Daemon) -> ControlSocket {
    let conn = ControlSocket::connect_to(&d.socket).unwrap();
    let hello = m::ClientHello::new("hostile");
    conn.call_and_wait(1, &hello, &[]).unwrap();
    conn
}

/// Unread input at the time of the daemon's stop: more connections than it accepts at once, and a
/// client's packet, each with a socket that is slow to close.
#[test]
fn descriptors_that_nobody_read_do_not_hold_up_the_end() {
    let mut d = Daemon::loopback();
    let request = codec::encode_request(
        2,
        &m::AllocPd {
            device: 0,
            reserved: 0,
        },
    );
    let mut conns = vec![greeted(&d)];
    let paused = d.pause();
    let connect = || ControlSocket::connect_to(&d.socket).unwrap();
    conns.extend((0..40).map(|_| connect()));
    let mut peers = Vec::new();
    for conn in &conns {
        let (socket, peer) = lingering_socket();
        conn.send_packet(&request, &[socket.as_fd()]).unwrap();
        peers.push(peer);
    }
    d.signal(nix::sys::signal::Signal::SIGTERM);
    let before = Instant::now();
    drop(paused);
    let ended = wait(&mut d.child);
    let waited = before.elapsed();
    assert!(waited < LINGER / 4, "the end took {waited:?}");
    assert!(ended.success());
    assert!(!d.socket.exists());
}

/// Time in which another client gets an answer.
fn answer_time(end: &End) -> Duration {
    let before = Instant::now();
    end.ctx.query_devices().unwrap();
    drop(end.ctx.alloc_pd().unwrap());
    before.elapsed()
}

#[test]
fn descriptors_that_are_slow_to_close_hold_up_nobody() {
    let d = Daemon::loopback();
    let (a, b) = pair(&d, 4096);
    let request = codec::encode_request(
        2,
        &m::AllocPd {
            device: 0,
            reserved: 0,
        },
    );
    let mut peers = Vec::new();
    let mut send_away = |conn: &ControlSocket, times: usize| {
        for _ in 0..times {
            let (socket, peer) = lingering_socket();
            // From here on the daemon has the last copy, unless it has closed the connection.
            if conn.send_packet(&request, &[socket.as_fd()]).is_err() {
                let linger = libc::linger {
                    l_onoff: 1,
                    l_linger: 0,
                };
                setsockopt(&socket, sockopt::Linger, &linger).unwrap();
            }
            peers.push(peer);
            // If the daemon's copy is already closed, this close blocks.
            std::thread::spawn(move || drop(socket));
        }
    };
    // With a request, after a request that is served, and on a connection that has not sent HELLO.
    let first = greeted(&d);
    send_away(&first, 1);
    let second = greeted(&d);
    second.send_packet(&request, &[]).unwrap();
    send_away(&second, 3);
    let third = ControlSocket::connect_to(&d.socket).unwrap();
    send_away(&third, 2);
    for conn in [&first, &third] {
        // Closing a socket with unread data gives its peer an error before the data sent to it.
        let packet = conn.recv_packet().or_else(|_| conn.recv_packet()).unwrap();
        match codec::decode_reply::<m::AllocPd>(2, &packet.bytes) {
            Err(CallError::Refused { errno, reason }) => {
                assert_eq!(errno, libc::EPROTO, "{reason}");
                assert!(reason.contains("descriptors"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
    drop((first, second, third));
    for _ in 0..3 {
        let waited = answer_time(&a);
        assert!(
            waited < LINGER / 10,
            "the control thread was busy for {waited:?}"
        );
    }
    ping(&a, &b);
    drop(peers);
}

/// More sockets than a daemon could close one after the other, each of which would hold up the thread
/// that closes it. All are closed at once, so other clients neither wait nor are refused.
#[test]
fn a_thousand_descriptors_that_are_slow_to_close_are_closed_at_once() {
    const SOCKETS: usize = 1100;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    if hard < 8192 || setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_err() {
        println!("skipped: this process may open {hard} files, 8192 are needed");
        return;
    }
    let d = Daemon::loopback();
    let (a, b) = pair(&d, 4096);
    let open_files = || {
        let folder = format!("/proc/{}/fd", d.child.id());
        std::fs::read_dir(folder).unwrap().count()
    };
    let before = open_files();
    let hello = codec::encode_request(1, &m::ClientHello::new("hostile"));
    let mut peers = Vec::new();
    for _ in 0..SOCKETS {
        let (socket, peer) = short_lingering_socket();
        let conn = ControlSocket::connect_to(&d.socket).unwrap();
        conn.send_packet(&hello, &[socket.as_fd()]).unwrap();
        peers.push(peer);
        // If the daemon's copy is already closed, this close blocks.
        std::thread::spawn(move || drop(socket));
    }
    // A client of another kind is served, and its descriptor is received.
    let client = greeted(&d);
    let file = SharedMemory::create_memfd("own", 4096, PageSize::Normal).unwrap();
    let import = m::ImportMemory {
        kind: m::IMPORT_FILE,
        writable: 1,
        offset: 0,
        len: 4096,
    };
    client
        .call_and_wait(2, &import, &[file.memfd().unwrap()])
        .unwrap();
    assert!(answer_time(&a) < LINGER / 10);
    ping(&a, &b);
    drop((client, file));
    let end = Instant::now() + LINGER / 2;
    while open_files() > before {
        assert!(Instant::now() < end, "{} of {before} files", open_files());
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(peers);
}

/// A client that sends a descriptor while many others of its user are being closed waits until they
/// are closed, and is served then. Clients of all users are accepted and served meanwhile.
#[test]
fn an_import_waits_while_many_descriptors_of_its_user_are_being_closed() {
    const SOCKETS: usize = 4300;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    if hard < 8192 || setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_err() {
        println!("skipped: this process may open {hard} files, 8192 are needed");
        return;
    }
    let config = format!("{LOOPBACK}[limits]\nclients_per_user = 400\n");
    let d = Daemon::start(&config, &[]);
    let (a, b) = pair(&d, 4096);
    let (honest, leaver) = (greeted(&d), greeted(&d));
    let hello = codec::encode_request(1, &m::ClientHello::new("hostile"));
    let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
    let send_away = || {
        let conn = ControlSocket::connect_to(&d.socket).unwrap();
        conn.set_call_timeout(PATIENCE).unwrap();
        // Fails if the daemon has refused the connection already.
        let _ = conn.send_packet(&hello, &[socket.as_fd()]);
        conn
    };
    let Some(stopped) = StoppedThread::stop_new(d.child.id(), || drop(send_away())) else {
        return;
    };
    // The thread that closes descriptors stands still. The last of these connections are refused,
    // because the user has too many.
    let crowd: Vec<_> = (0..SOCKETS).map(|_| send_away()).collect();
    for conn in &crowd {
        // The refusal. The end of the connection comes with the close.
        conn.recv_packet().unwrap();
    }
    let file = SharedMemory::create_memfd("own", 4096, PageSize::Normal).unwrap();
    let import = codec::encode_request(2, &import_of(4096));
    for conn in [&honest, &leaver] {
        let fd = file.memfd().unwrap();
        conn.send_packet(&import, &[fd]).unwrap();
    }
    let (device, reserved) = (0, 0);
    let request = m::AllocPd { device, reserved };
    let next = codec::encode_request(3, &request);
    honest.send_packet(&next, &[]).unwrap();
    // The end of a client that waits does not keep the control thread busy.
    drop(leaver);
    for _ in 0..3 {
        answer_time(&a);
    }
    ping(&a, &b);
    let early = honest.try_recv_packet();
    assert!(matches!(early, Err(RecvError::WouldBlock)), "{early:?}");
    let control = format!("{0}/task/{0}", d.child.id());
    let before = run_time(&control);
    std::thread::sleep(Duration::from_millis(100));
    let spent = run_time(&control) - before;
    assert!(spent < Duration::from_millis(50), "{spent:?} without work");
    drop(stopped);
    let packet = honest.recv_packet().unwrap();
    codec::decode_reply::<m::ImportMemory>(2, &packet.bytes).unwrap();
    let packet = honest.recv_packet().unwrap();
    codec::decode_reply::<m::AllocPd>(3, &packet.bytes).unwrap();
    let log = d.stop_and_read_log();
    assert!(!log.contains("cannot accept"), "{log}");
}

/// A [`lingering_socket`] with short buffers.
fn short_lingering_socket() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    setsockopt(&listener, sockopt::RcvBuf, &4096).unwrap();
    let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    setsockopt(&sender, sockopt::SndBuf, &4096).unwrap();
    let (peer, _) = listener.accept().unwrap();
    sender.set_nonblocking(true).unwrap();
    while sender.write(&[0; 4096]).is_ok() {}
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: LINGER.as_secs() as i32,
    };
    setsockopt(&sender, sockopt::Linger, &linger).unwrap();
    (sender, peer)
}

/// Processor time of the control thread for a request of one client, and for the request of another
/// that shows its end.
fn time_of_request(d: &Daemon, observer: &End, request: impl FnOnce()) -> Duration {
    let pid = d.child.id();
    let control = format!("{pid}/task/{pid}");
    let before = run_time(&control);
    request();
    // The answer to another client follows all work that the request causes in the control thread.
    answer_time(observer);
    run_time(&control) - before
}

/// Requests whose work could grow with what a client holds take less than a millisecond of the control
/// thread each, and the rest of their work is done by helpers.
#[test]
fn no_request_takes_long_however_much_a_client_holds() {
    // Builds for tests are optimised little.
    const MOST: Duration = Duration::from_millis(if cfg!(debug_assertions) { 2 } else { 1 });
    const REGIONS: u32 = 20_000;
    let d = Daemon::loopback();
    let (a, _b) = pair(&d, 4096);
    let client = greeted(&d);
    let mut seq = 1;
    let mut next = || {
        seq += 1;
        seq
    };
    let (device, reserved) = (0, 0);
    let request = m::AllocPd { device, reserved };
    let pd = client.call_and_wait(next(), &request, &[]).unwrap().0.id;
    // One extent each in many arenas.
    let arenas: Vec<u32> = (0..2048)
        .map(|_| {
            let (len, huge) = (4096, 0);
            let request = m::AllocArena {
                len,
                huge,
                reserved,
            };
            client.call_and_wait(next(), &request, &[]).unwrap().0.arena
        })
        .collect();
    let part = |number: usize| {
        let mut extents = [m::MemoryExtent::default(); m::MAX_EXTENTS];
        for (place, extent) in extents.iter_mut().enumerate() {
            let arena = arenas[(number * m::MAX_EXTENTS + place) % arenas.len()];
            (extent.arena, extent.len) = (arena, 64);
        }
        extents
    };
    let mut longest = Vec::new();
    let count = m::MAX_EXTENTS as u32;
    for round in 0..5 {
        for number in 0..31 {
            let extents = part(number);
            let request = m::AddExtents {
                count,
                reserved,
                extents,
            };
            client.call_and_wait(next(), &request, &[]).unwrap();
        }
        let request = m::RegMemory {
            pd,
            access: 1,
            len: 32 * 64 * u64::from(count),
            va: 0,
            count,
            reserved,
            reason: m::Text::new(&format!("round {round}")),
            extents: part(31),
        };
        longest.push((
            "REG_MEMORY",
            time_of_request(&d, &a, || {
                client.call_and_wait(next(), &request, &[]).unwrap();
            }),
        ));
    }
    let mut extents = [m::MemoryExtent::default(); m::MAX_EXTENTS];
    for (extent, offset) in extents.iter_mut().zip([0, 64]) {
        (extent.arena, extent.offset, extent.len) = (arenas[0], offset, 32);
    }
    for number in 0..REGIONS {
        let request = m::RegMemory {
            pd,
            access: 1,
            len: 64,
            va: 0,
            count: 2,
            reserved,
            reason: m::Text::new(&format!("reason {number}")),
            extents,
        };
        client.call_and_wait(next(), &request, &[]).unwrap();
    }
    for _ in 0..5 {
        longest.push((
            "READ_STATS",
            time_of_request(&d, &a, || {
                let offset = 0;
                let request = m::ReadStats { offset, reserved };
                let (part, _) = client.call_and_wait(next(), &request, &[]).unwrap();
                assert!(part.total < 64 << 10, "{} bytes", part.total);
            }),
        ));
    }
    for _ in 0..3 {
        let arena = import_new_file(&client, next(), 256 << 20, 4096);
        let reserved = 0;
        let request = m::FreeArena { arena, reserved };
        longest.push((
            "FREE_ARENA",
            time_of_request(&d, &a, || {
                client.call_and_wait(next(), &request, &[]).unwrap();
            }),
        ));
    }
    // What the observer's own requests cost.
    let base = (0..5).map(|_| time_of_request(&d, &a, || {})).min();
    let base = base.unwrap();
    println!("{longest:?}, {base:?} of them for the observer");
    for kind in ["REG_MEMORY", "READ_STATS", "FREE_ARENA"] {
        // The first of its kind may pay for pages and caches that are touched for the first time.
        let least = longest.iter().filter(|(of, _)| *of == kind);
        let least = least.map(|(_, time)| *time).min().unwrap();
        assert!(least < MOST + base, "{kind}: {longest:?}, {base:?}");
    }
}

/// Sends `ahead` requests of one client and then one of another while the daemon is paused. Returns
/// the number of the first client's requests that are served before the other's.
fn served_before_another(d: &Daemon, seq: impl Fn(u32) -> u32, ahead: u32) -> u32 {
    let (greedy, honest) = (greeted(d), greeted(d));
    let request = m::AllocPd {
        device: 0,
        reserved: 0,
    };
    // Protection domains are numbered in the order in which requests are served.
    let (first, _) = honest.call_and_wait(2, &request, &[]).unwrap();
    let paused = d.pause();
    for number in 0..ahead {
        let packet = codec::encode_request(seq(number), &request);
        greedy.send_packet(&packet, &[]).unwrap();
    }
    honest
        .send_packet(&codec::encode_request(3, &request), &[])
        .unwrap();
    drop(paused);
    let packet = honest.recv_packet().unwrap();
    let second = codec::decode_reply::<m::AllocPd>(3, &packet.bytes).unwrap();
    // Wait until the rest is served, so that the next count starts at zero.
    let last = codec::encode_request(ahead + 2, &request);
    greedy.send_packet(&last, &[]).unwrap();
    let is_last = |packet: &[u8]| codec::peek_header(packet).map(|(_, seq)| seq) == Some(ahead + 2);
    while !is_last(&greedy.recv_packet().unwrap().bytes) {}
    second.id - first.id - 1
}

#[test]
fn requests_that_are_sent_ahead_are_served_in_turn_with_those_of_others() {
    const AHEAD: u32 = 64;
    let d = Daemon::loopback();
    // One per turn; two if both clients became ready in different turns.
    let answered = served_before_another(&d, |number| number + 2, AHEAD);
    assert!(answered <= 2, "{answered} requests were served before");
    // Several requests without a reply are read in one turn, but not all of them.
    let unanswered = served_before_another(&d, |_| codec::UNANSWERED, AHEAD);
    assert!(unanswered <= 16, "{unanswered} requests were served before");
    assert!(d.stop().success());
}

/// Processor time of a thread.
fn run_time(thread: &str) -> Duration {
    let times = std::fs::read_to_string(format!("/proc/{thread}/schedstat")).unwrap();
    Duration::from_nanos(times.split(' ').next().unwrap().parse().unwrap())
}

/// A helper thread unmaps the rings, whose pages have no other user.
#[test]
fn a_large_completion_queue_is_freed_by_a_helper() {
    let d = Daemon::loopback();
    let (a, _b) = pair(&d, 4096);
    let client = greeted(&d);
    let pid = d.child.id();
    let control = format!("{pid}/task/{pid}");
    let request = m::CreateCq {
        cqe: 3 << 20,
        channel: 0,
        cookie: 0,
    };
    for round in 0..3 {
        let seq = 2 + 2 * round;
        let (made, fds) = client.call_and_wait(seq, &request, &[]).unwrap();
        let len = made.mem.region_len;
        assert!(len >= 3 * (64 << 20));
        let fill = |file: std::os::fd::BorrowedFd<'_>| {
            nix::fcntl::fallocate(file, nix::fcntl::FallocateFlags::empty(), 0, len as i64)
        };
        fill(fds[0].as_fd()).unwrap();
        drop(fds);
        // The cost of freeing this memory.
        let same = SharedMemory::create_memfd("same", len as usize, PageSize::Normal);
        let same = same.unwrap();
        fill(same.memfd().unwrap()).unwrap();
        let before = run_time("thread-self");
        drop(same);
        let cost = run_time("thread-self") - before;
        let before = run_time(&control);
        let destroy = m::DestroyCq {
            cq: made.cq,
            reserved: 0,
        };
        client.call_and_wait(seq + 1, &destroy, &[]).unwrap();
        // The answer to another client follows all work that the request causes in the control
        // thread.
        answer_time(&a);
        let spent = run_time(&control) - before;
        assert!(spent < cost / 3, "{spent:?} of {cost:?}");
    }
}

/// Processor time of a process's thread, in clock ticks.
fn thread_ticks(pid: u32, name: &str) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let marked = format!("({name}) ");
    let found = threads.flatten().find_map(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).ok()?;
        stat.contains(&marked).then_some(stat)
    });
    let stat = found.unwrap_or_else(|| panic!("no thread {name}"));
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn a_large_arena_is_made_while_others_are_served() {
    const LEN: u64 = 384 << 20;
    let free = siwd::host::free_hugepage_bytes();
    if free < LEN + (128 << 20) {
        println!(
            "skipped: {} MiB of hugepages are free, 512 are needed",
            free >> 20
        );
        return;
    }
    let config = LOOPBACK.replace("\"never\"", "\"require\"");
    // In addition to the arena, hugepages for the queues of the others.
    let limits = format!("[limits]\nhugepages_per_user = {}\n", LEN + (16 << 20));
    let d = Daemon::start(&format!("{config}{limits}"), &[]);
    let (a, b) = pair(&d, 4096);
    let greedy = greeted(&d);
    let request = m::AllocArena {
        len: LEN,
        huge: 1,
        reserved: 0,
    };
    greedy
        .send_packet(&codec::encode_request(2, &request), &[])
        .unwrap();
    answer_time(&a);
    ping(&a, &b);
    let packet = greedy.recv_packet().unwrap();
    let reply = codec::decode_reply::<m::AllocArena>(2, &packet.bytes).unwrap();
    // The helper thread, not the control thread, filled the pages.
    assert!(thread_ticks(d.child.id(), "siwd-memory") > 0);
    assert_eq!((reply.len, packet.fds.len()), (LEN, 1));
    drop(packet);
    // It is freed in the same way and can be allocated again.
    let free_arena = m::FreeArena {
        arena: reply.arena,
        reserved: 0,
    };
    greedy.call_and_wait(3, &free_arena, &[]).unwrap();
    // Beyond its limit of hugepages the client gets normal pages.
    let first = greedy.call_and_wait(4, &request, &[]).unwrap().0;
    let more = m::AllocArena {
        len: 32 << 20,
        ..request
    };
    let second = greedy.call_and_wait(5, &more, &[]).unwrap().0;
    assert_eq!((first.huge, second.huge), (1, 0));
    answer_time(&a);
}
