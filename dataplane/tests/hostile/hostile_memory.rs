//! A client process that overwrites random parts of all memory that it shares with the daemon
//! (rings, doorbells, completion queues, page lists) while workers read it (RFC 5042 section 2.3,
//! local peer): the daemon survives, others get their bytes, and no resources of the client remain.

use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::*;
use siw::{
    Access, Arena, Context, Opcode, QpInit, RecvWr, SendData, SendWr, WcStatus, WindowType,
    WrFlags, inc_rkey,
};

const SECONDS: u64 = 4;
/// Additional run time while no client was detected.
const MORE_TIME: Duration = Duration::from_secs(40);

#[test]
fn a_client_that_scribbles_over_its_rings_harms_nobody_else() {
    let d = Daemon::loopback();
    let (a, b) = pair(&d, 200_000);
    let mut seeds = 1..;
    let mut start = || Scribbler::start(&d, seeds.next().unwrap());
    let mut scribblers = [start(), start()];
    let mut pids: Vec<u32> = scribblers.iter().map(|one| one.0.id()).collect();
    let mut closed = 0;
    let until = Instant::now() + Duration::from_secs(SECONDS);
    let mut rounds = 0;
    // On a slow machine, no write was detected until then, possibly.
    while Instant::now() < until || closed == 0 && Instant::now() < until + MORE_TIME {
        for one in &mut scribblers {
            if one.0.try_wait().unwrap().is_some() {
                closed += std::mem::replace(one, start()).count_closed();
                pids.push(one.0.id());
            }
        }
        rounds += 1;
        a.fill(rounds);
        let len = [1, 64, 1428, 1429, 65_536, 200_000][rounds as usize % 6];
        let at = [a.mr.sge(0, len)];
        let sink = [b.mr.sge(0, len)];
        b.qp.post_recv(&[RecvWr {
            wr_id: rounds,
            sges: &sink,
        }])
        .unwrap();
        a.qp.post_send(&[SendWr::send(rounds, SendData::Sges(&at))])
            .unwrap();
        let wc = b.wc();
        assert_eq!(
            (wc.status, wc.wr_id, wc.byte_len as usize),
            (WcStatus::SUCCESS, rounds, len)
        );
        assert_eq!(a.read(0, len), b.read(0, len));
        let wc = a.wc();
        assert_eq!((wc.status, wc.wr_id), (WcStatus::SUCCESS, rounds));
        b.fill(rounds + 7);
        a.qp.post_send(&[SendWr::read(rounds, &at, b.mr.addr(), b.mr.rkey())])
            .unwrap();
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
        assert_eq!(a.read(0, len), b.read(0, len));
    }
    assert!(rounds > 20, "{rounds} rounds during the attack");
    closed += scribblers
        .map(Scribbler::count_closed)
        .iter()
        .sum::<usize>();
    assert!(closed > 0, "no client was closed for its writes");
    let stats =
        || -> serde_json::Value { serde_json::from_str(&a.ctx.read_stats().unwrap()).unwrap() };
    let end = Instant::now() + PATIENCE;
    loop {
        let s = stats();
        let left = s["clients"].as_array().unwrap().iter();
        let left = left.filter(|c| pids.iter().any(|p| c["pid"] == *p)).count();
        let qps: u64 = s["workers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|w| w["queue_pairs"].as_u64().unwrap())
            .sum();
        if left == 0 && qps == 2 {
            break;
        }
        assert!(Instant::now() < end, "{s}");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(d.stop().success());
}

/// A process that runs [`helper_that_scribbles`].
struct Scribbler(Child);

impl Scribbler {
    fn start(daemon: &Daemon, seed: u64) -> Scribbler {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "hostile_memory::helper_that_scribbles",
                "--ignored",
                "--nocapture",
            ])
            .env("SIW_TEST_SOCKET", &daemon.socket)
            .env("SIW_TEST_SEED", seed.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        Scribbler(child.unwrap())
    }

    /// Ends the process. Returns how many of its connections the daemon closed.
    fn count_closed(mut self) -> usize {
        let _ = self.0.kill();
        let mut said = String::new();
        let _ = self.0.stdout.take().unwrap().read_to_string(&mut said);
        self.0.wait().unwrap();
        said.matches("closed by the daemon").count()
    }
}

/// Memory that this process shares with the daemon and may write, except arenas.
fn shared() -> Vec<(usize, usize)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter(|l| l.contains("rw-s") && l.contains("memfd:siwd-") && !l.contains("siwd-arena"))
        .map(|l| {
            let (from, to) = l.split(' ').next().unwrap().split_once('-').unwrap();
            let at = |s| usize::from_str_radix(s, 16).unwrap();
            (at(from), at(to))
        })
        .collect()
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 16) as usize % n.max(1)
    }
}

/// Overwrites one word or one line of one mapping.
fn scribble(r: &mut Random, how: usize, maps: &[(usize, usize)]) {
    let (from, to) = maps[r.below(maps.len())];
    // Queues are allocated from the start of a mapping.
    let len = (to - from).min(256 << 10);
    let word = (from + r.below(len / 4) * 4) as *mut u32;
    let odd = [
        0,
        1,
        2,
        5,
        8,
        64,
        0x80,
        0xff,
        0x1_0000,
        0x7fff_ffff,
        u32::MAX,
    ];
    // SAFETY: within a mapping of this process that is readable and writable and stays mapped until
    // the context is dropped. Other threads and the daemon may write it too, and the values read
    // here do not matter.
    unsafe {
        match how {
            0 => word.write_volatile(r.next() as u32),
            1 => word.write_volatile(word.read_volatile() ^ (1 << r.below(32))),
            2 => word.write_volatile(odd[r.below(odd.len())]),
            _ => {
                let line = |r: &mut Random| (from + r.below(len / 64) * 64) as *mut [u64; 8];
                let (a, b) = (line(r), line(r));
                a.write_volatile(b.read_volatile());
            }
        }
    }
}

/// Runs one round, and says whether the daemon closed the connection.
fn round(ctx: &Context, r: &mut Random, how: usize) {
    let init = QpInit {
        max_send_wr: 16,
        max_recv_wr: 16,
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline: 64,
        sq_sig_all: false,
    };
    let make = || End::with(ctx, 8192, &init);
    let pairs: Vec<(End, End)> = (0..2)
        .map(|_| {
            let (a, b) = (make(), make());
            connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
            (a, b)
        })
        .collect();
    let pd = &pairs[0].0.pd;
    let arena = Arena::alloc(ctx, 16_384, false).unwrap();
    let mut fast = pd.alloc_fast_mr(&arena, 4).unwrap();
    let bindable = pd.alloc_mr(4096, Access(31)).unwrap();
    let mw = pd.alloc_mw(WindowType::One).unwrap();
    let maps = shared();
    for i in 0..6000u64 {
        scribble(r, how, &maps);
        if i % 8 == 0 {
            let (a, b) = &pairs[r.below(pairs.len())];
            let sge = [a.mr.sge(0, r.below(4096))];
            let sink = [b.mr.sge(0, 4096)];
            let _ = b.qp.post_recv(&[RecvWr {
                wr_id: i,
                sges: &sink,
            }]);
            let wr = match r.below(6) {
                0 => SendWr::write(i, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey()),
                1 => SendWr::read(i, &sge, b.mr.addr(), b.mr.rkey()),
                2 => {
                    let _ = fast.map_ranges(&[0..4096, 8192..12_288], 12);
                    let key = inc_rkey(fast.key());
                    fast.register_request(i, key, 0, Access(7)).unwrap()
                }
                3 => mw.bind_request(i, &bindable.window(0..64, Access(4)).unwrap(), mw.rkey()),
                4 => SendWr {
                    opcode: Opcode::SendWithInv,
                    imm: fast.key(),
                    ..SendWr::send(i, SendData::Sges(&sge))
                },
                _ => SendWr::send(i, SendData::Sges(&sge)),
            };
            let _ = a.qp.post_send(&[wr.with_flags(WrFlags(r.below(8) as u8))]);
        }
        if i % 64 == 0 {
            let mut wc = [siw::Wc::default(); 16];
            for (a, b) in &pairs {
                let _ = a.cq.poll(&mut wc);
                let _ = b.cq.poll(&mut wc);
            }
            if !ctx.is_alive() {
                println!("closed by the daemon");
                return;
            }
        }
    }
}

#[test]
#[ignore = "the client process of the test above"]
fn helper_that_scribbles() {
    let Ok(socket) = std::env::var("SIW_TEST_SOCKET") else {
        return;
    };
    let seed: u64 = std::env::var("SIW_TEST_SEED").unwrap().parse().unwrap();
    let mut r = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let until = Instant::now() + Duration::from_secs(SECONDS) + MORE_TIME;
    for n in 0.. {
        if Instant::now() > until {
            break;
        }
        // The library may wait for ever, since this process overwrites its memory: SIGALRM ends it.
        // SAFETY: no pointers.
        unsafe { nix::libc::alarm(1) };
        let ctx = Context::open(Some(socket.as_ref())).expect("the daemon lives");
        // The overwritten memory may confuse the library in this process, which does not matter.
        let _ = catch_unwind(AssertUnwindSafe(|| round(&ctx, &mut r, n % 4)));
    }
}
