//! Everything that a client makes the daemon allocate is charged to the client's account: after each
//! kind of request the growth of the daemon's own memory is compared with that of the account.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::common::*;
use siw_shm::control::messages as m;
use siw_shm::control::{ControlSocket, Message};

/// Growth that no request causes: pages of allocators, stacks and tables that are touched first.
const SLACK: u64 = 3 << 20;

/// Private memory of a process in bytes; the memory shared with clients is not part of it.
fn own_memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next());
    kilobytes.unwrap().parse::<u64>().unwrap() << 10
}

struct Greedy {
    conn: ControlSocket,
    seq: u32,
    pd: u32,
    cq: u32,
    arena: u32,
    _kept: Vec<OwnedFd>,
}

impl Greedy {
    fn new(d: &Daemon) -> Greedy {
        let conn = ControlSocket::connect_to(&d.socket).unwrap();
        let hello = m::ClientHello::new("greedy");
        let (_, kept) = conn.call_and_wait(1, &hello, &[]).unwrap();
        let mut greedy = Greedy {
            conn,
            seq: 1,
            pd: 0,
            cq: 0,
            arena: 0,
            _kept: kept,
        };
        greedy.pd = greedy.alloc_pd();
        greedy.cq = greedy.create_cq();
        greedy.arena = greedy.alloc_arena();
        greedy
    }

    fn call<M: Message>(&mut self, request: &M) -> M::Reply {
        self.seq += 1;
        let answer = self.conn.call_and_wait(self.seq, request, &[]);
        answer
            .unwrap_or_else(|why| panic!("{}: {why}", std::any::type_name::<M>()))
            .0
    }

    fn alloc_pd(&mut self) -> u32 {
        let (device, reserved) = (0, 0);
        self.call(&m::AllocPd { device, reserved }).id
    }

    fn create_cq(&mut self) -> u32 {
        let (cqe, channel, cookie) = (4, 0, 0);
        self.call(&m::CreateCq {
            cqe,
            channel,
            cookie,
        })
        .cq
    }

    fn alloc_arena(&mut self) -> u32 {
        let request = m::AllocArena {
            len: 2 << 20,
            huge: 0,
            reserved: 0,
        };
        self.call(&request).arena
    }

    fn create_srq(&mut self) -> u32 {
        let request = m::CreateSrq {
            pd: self.pd,
            max_wr: 4,
            max_sge: 1,
            limit: 0,
            share: 0,
            reserved: 0,
        };
        self.call(&request).srq
    }

    fn create_qp(&mut self) -> u32 {
        let request = m::CreateQp {
            pd: self.pd,
            send_cq: self.cq,
            recv_cq: self.cq,
            max_send_wr: 4,
            max_recv_wr: 4,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            sq_sig_all: 0,
            srq: 0,
            final_send: m::FinalSend::default(),
        };
        self.call(&request).qp_num
    }

    /// Registers a region of 4096 extents.
    fn register_extents(&mut self, reason: &str) {
        let mut extents = [m::MemoryExtent::default(); m::MAX_EXTENTS];
        for (place, extent) in extents.iter_mut().enumerate() {
            extent.arena = self.arena;
            extent.offset = place as u64 * 64;
            extent.len = 32;
        }
        let (count, reserved) = (m::MAX_EXTENTS as u32, 0);
        for _ in 0..31 {
            self.call(&m::AddExtents {
                count,
                reserved,
                extents,
            });
        }
        let request = m::RegMemory {
            pd: self.pd,
            access: 1,
            len: 32 * u64::from(count) * 32,
            va: 0,
            count,
            reserved,
            reason: m::Text::new(reason),
            extents,
        };
        self.call(&request);
    }
}

/// Heap bytes in the accounts of all clients.
fn charged_heap(observer: &siw::Context) -> u64 {
    let stats: serde_json::Value = serde_json::from_str(&observer.read_stats().unwrap()).unwrap();
    let clients = stats["clients"].as_array().unwrap();
    clients
        .iter()
        .map(|client| client["heap_bytes"].as_u64().unwrap())
        .sum()
}

#[test]
fn everything_that_a_client_makes_the_daemon_allocate_is_on_its_account() {
    type Request<'a> = &'a dyn Fn(&mut Greedy, u32);
    let dir = tempfile::tempdir().unwrap();
    let mut command = daemon_command(dir.path(), LOOPBACK, &[]);
    // With huge pages, each thread's first small object may take 2 MiB.
    let child = command.env("MIMALLOC_ALLOW_THP", "0").spawn().unwrap();
    let d = Daemon::wait_ready(dir, child);
    let observer = d.context();
    charged_heap(&observer);
    let device = observer.query_devices().unwrap()[0].clone();
    let local: m::Addr = std::net::SocketAddr::new(device.ips[0], 0).into();
    let clients = std::cell::RefCell::new(Vec::new());
    let kinds: &[(&str, u32, Request<'_>)] = &[
        ("protection domains", 50_000, &|client, _| {
            client.alloc_pd();
        }),
        ("regions", 20_000, &|client, _| {
            let request = m::RegMr {
                pd: client.pd,
                arena: client.arena,
                offset: 0,
                len: 4096,
                va: 0,
                access: 1,
                reserved: 0,
            };
            client.call(&request);
        }),
        ("extents", 60, &|client, number| {
            client.register_extents(&format!("{number:060}"));
        }),
        ("windows", 20_000, &|client, _| {
            let (pd, kind) = (client.pd, 1);
            client.call(&m::AllocMw { pd, kind });
        }),
        ("fast registrations", 3000, &|client, _| {
            let request = m::AllocFastMr {
                pd: client.pd,
                arena: client.arena,
                max_pages: 512,
                reserved: 0,
            };
            client.call(&request);
        }),
        ("completion queues", 5000, &|client, _| {
            client.create_cq();
        }),
        ("queue pairs", 5000, &|client, _| {
            client.create_qp();
        }),
        ("shared receive queues", 5000, &|client, _| {
            client.create_srq();
        }),
        ("arenas", 1000, &|client, _| {
            client.alloc_arena();
        }),
        ("completion channels", 1000, &|client, _| {
            client.call(&m::CreateChannel { reserved: 0 });
        }),
        ("connection channels", 1000, &|client, _| {
            client.call(&m::CreateCmChannel { flags: 0 });
        }),
        ("statistics", 300, &|client, _| {
            let (offset, reserved) = (0, 0);
            client.call(&m::ReadStats { offset, reserved });
        }),
        ("lists", 300, &|client, _| {
            for list in m::ObjectList::ALL {
                client.call(&m::ListObjects {
                    list: *list as u32,
                    reserved: 0,
                    after: m::ListPosition::default(),
                });
            }
        }),
        ("clients", 300, &|_, _| {
            clients.borrow_mut().push(Greedy::new(&d));
        }),
        ("pairs of one queue pair", 1, &|client, _| {
            let qp_num = client.create_qp();
            let request = m::PairQp {
                qp_num,
                // The other end has the lower number, and is the one that connects.
                peer_qp_num: 0,
                device: 0,
                ord: 1,
                ird: 1,
                denied_access: 0,
                local,
                peer: local,
            };
            for _ in 0..100_000 {
                client.call(&request);
            }
        }),
    ];
    let mut outside = Vec::new();
    for (kind, count, request) in kinds {
        let mut client = Greedy::new(&d);
        let before = (own_memory(d.child.id()), charged_heap(&observer));
        for number in 0..*count {
            request(&mut client, number);
        }
        let after = (own_memory(d.child.id()), charged_heap(&observer));
        let grown = after.0.saturating_sub(before.0);
        let charged = after.1 - before.1;
        println!("{kind}: {} KiB, {} KiB charged", grown >> 10, charged >> 10);
        if grown > charged + SLACK {
            outside.push(format!("{kind}: {grown} bytes, {charged} charged"));
        }
        clients.borrow_mut().clear();
    }
    assert!(outside.is_empty(), "{outside:?}");
    assert!(d.stop().success());
}

/// A client's extents and unread statistics exceed its memory: it is refused, not the daemon's host.
#[test]
fn heap_beyond_the_memory_of_a_client_is_refused() {
    let limits = "[limits]\nmemory_per_client = \"8 MiB\"\n";
    let d = Daemon::start(&format!("{LOOPBACK}{limits}"), &[]);
    let mut client = Greedy::new(&d);
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        for _ in 0..64 {
            client.register_extents("");
        }
    }));
    let why = *refused.unwrap_err().downcast::<String>().unwrap();
    assert!(why.contains("[limits] memory_per_client"), "{why}");
    // Another client has its own.
    Greedy::new(&d).register_extents("");
    assert!(d.stop().success());
}

/// What a departed client's objects needed goes back to the operating system, also if nobody asks siwd
/// for anything afterwards.
#[test]
fn heap_of_a_departed_client_returns_to_the_system() {
    let d = Daemon::start(LOOPBACK, &[]);
    let used = || own_memory(d.child.id());
    drop(Greedy::new(&d));
    let before = used();
    let mut client = Greedy::new(&d);
    for _ in 0..100 {
        client.register_extents("");
    }
    let grown = used().saturating_sub(before);
    assert!(grown > 8 << 20, "only {grown} bytes");
    drop(client);
    // A transparent huge page stays while one block in it is used.
    let slack = SLACK.max(grown / 4);
    let end = Instant::now() + Duration::from_secs(20);
    while used() > before + slack {
        let kept = used().saturating_sub(before);
        assert!(Instant::now() < end, "{kept} bytes of {grown} remain");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(d.stop().success());
}
