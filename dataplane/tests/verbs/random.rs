//! Two queue pairs of a running siwd, random work requests from both sides at once, over memory and
//! over a link that loses, duplicates and reorders: memory equals a model, completions arrive in
//! order, each exactly once. `SIWD_SEED=n` repeats one seed.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use crate::common::net::{Netns, lacks_network, missing_program};
use crate::common::*;
use nix::sys::socket::{MsgFlags, recv, send, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use siw::{
    Access, AtomicArgs, Mr, Opcode, QpInit, RecvWr, SendData, SendWr, Sge, Wc, WcFlags, WcOpcode,
    WcStatus, WrFlags,
};

/// Size of each slice of a side's memory: the source of its own requests, the sink of its READs,
/// the target of the peer's WRITEs, the receive buffers; then a word for the peer's atomics. The
/// slices make the model independent of timing.
const SLICE: usize = 128 << 10;
const WORD: usize = 4 * SLICE;
const OPS: usize = 60;

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        ((self.0 >> 33) as usize) % n.max(1)
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// A length near the sizes where code paths change, or any length.
    fn len(&mut self) -> usize {
        let around = [0, 4, 64, 256, 512, 1428, 1448, 8192, 65_536][self.below(9)];
        match self.below(3) {
            0 => around,
            1 => (around + self.below(17)).saturating_sub(8),
            _ => self.below(SLICE),
        }
    }
}

/// A send work request that owns its data.
struct Request {
    opcode: Opcode,
    flags: WrFlags,
    imm: u32,
    remote: (u64, u32),
    sges: Vec<Sge>,
    inline: Option<Vec<u8>>,
    atomic: Option<AtomicArgs>,
}

impl Request {
    fn wr(&self, wr_id: u64) -> SendWr<'_> {
        SendWr {
            opcode: self.opcode,
            flags: self.flags,
            wr_id,
            imm: self.imm,
            remote_addr: self.remote.0,
            rkey: self.remote.1,
            data: match (&self.inline, self.atomic) {
                (Some(octets), _) => SendData::Inline(octets),
                (_, Some(args)) => SendData::Atomic(self.sges[0], args),
                _ => SendData::Sges(&self.sges),
            },
        }
    }
}

/// Expected result of a receive work request.
struct Expected {
    at: usize,
    room: usize,
    len: u32,
    flags: WcFlags,
    imm: u32,
    opcode: WcOpcode,
}

struct Side {
    end: End,
    model: Vec<u8>,
    requests: VecDeque<Request>,
    receives: Vec<Expected>,
    /// Regions whose keys the peer invalidates.
    spare: Vec<Mr>,
}

impl Side {
    fn new(end: End, seed: u64) -> Side {
        let model = pattern(seed, WORD + 8);
        end.mr.write(0, &model).unwrap();
        Side {
            end,
            model,
            requests: VecDeque::new(),
            receives: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// `len` octets from `at`, split into at most sixteen elements.
    fn elements(&self, rng: &mut Rng, at: usize, len: usize) -> Vec<Sge> {
        let mut cuts: Vec<usize> = (0..rng.below(16)).map(|_| rng.below(len + 1)).collect();
        cuts.extend([0, len]);
        cuts.sort_unstable();
        let pairs = cuts.windows(2);
        pairs
            .map(|w| self.end.mr.sge(at + w[0], w[1] - w[0]))
            .collect()
    }
}

/// Adds a request of `me` and applies its effect to the models of both memories.
fn plan(rng: &mut Rng, me: &mut Side, peer: &mut Side) {
    let len = rng.len().min(SLICE);
    let (from, to) = (rng.below(SLICE - len + 1), rng.below(SLICE - len + 1));
    let n = me.requests.len() as u32;
    let peer_at = |at: usize| (peer.end.mr.addr() + at as u64, peer.end.mr.rkey());
    let mut r = Request {
        opcode: Opcode::Write,
        flags: [WrFlags::SIGNALED, WrFlags::NONE][rng.below(2)],
        imm: n,
        remote: (0, 0),
        sges: me.elements(rng, from, len),
        inline: (len <= 256 && rng.one_in(2)).then(|| me.model[from..from + len].to_vec()),
        atomic: None,
    };
    if rng.one_in(8) {
        r.flags = r.flags | WrFlags::FENCE;
    }
    let data = me.model[from..from + len].to_vec();
    let mut expected = Expected {
        at: 3 * SLICE + to,
        room: len,
        len: len as u32,
        flags: WcFlags::NONE,
        imm: 0,
        opcode: WcOpcode::RECV,
    };
    match rng.below(9) {
        kind @ 0..=2 => {
            let at = 2 * SLICE + to;
            r.remote = peer_at(at);
            peer.model[at..at + len].copy_from_slice(&data);
            if kind == 2 {
                r.opcode = Opcode::WriteWithImm;
                (expected.room, expected.imm) = (0, n);
                expected.flags = WcFlags::WITH_IMM;
                expected.opcode = WcOpcode::RECV_RDMA_WITH_IMM;
                peer.receives.push(expected);
            }
        }
        kind @ 3..=5 => {
            r.opcode = Opcode::Send;
            if kind == 4 {
                r.opcode = Opcode::SendWithImm;
                (expected.flags, expected.imm) = (WcFlags::WITH_IMM, n);
            } else if kind == 5 {
                let spare = peer.end.pd.alloc_mr(64, ALL).unwrap();
                r.opcode = Opcode::SendWithInv;
                r.imm = spare.rkey();
                (expected.flags, expected.imm) = (WcFlags::WITH_INV, spare.rkey());
                peer.spare.push(spare);
            }
            let at = expected.at;
            peer.model[at..at + len].copy_from_slice(&data);
            peer.receives.push(expected);
        }
        kind @ 6..=7 => {
            let old = u64::from_ne_bytes(peer.model[WORD..].try_into().unwrap());
            let args = AtomicArgs {
                add_or_swap: rng.0,
                add_or_swap_mask: u64::MAX << rng.below(64),
                compare: [old, rng.0][rng.below(2)],
                compare_mask: u64::MAX >> rng.below(64),
            };
            let new = if kind == 6 {
                r.opcode = Opcode::FetchAdd;
                args.fetch_add_result(old)
            } else {
                r.opcode = Opcode::CmpSwap;
                args.cmp_swap_result(old).unwrap_or(old)
            };
            let at = SLICE + rng.below(SLICE - 8);
            r.remote = peer_at(WORD);
            (r.sges, r.inline) = (vec![me.end.mr.sge(at, 8)], None);
            r.atomic = Some(args);
            me.model[at..at + 8].copy_from_slice(&old.to_ne_bytes());
            peer.model[WORD..].copy_from_slice(&new.to_ne_bytes());
        }
        _ => {
            r.opcode = Opcode::Read;
            r.remote = peer_at(from);
            r.inline = None;
            r.sges = me.elements(rng, SLICE + to, len);
            let there = peer.model[from..from + len].to_vec();
            me.model[SLICE + to..SLICE + to + len].copy_from_slice(&there);
        }
    }
    me.requests.push_back(r);
}

/// Posts in random batches, polls in between, and checks each completion.
fn run(me: &Side, mut rng: Rng) {
    let list: Vec<[Sge; 1]> = me
        .receives
        .iter()
        .map(|e| [me.end.mr.sge(e.at, e.room)])
        .collect();
    let (mut posted, mut sent, mut received) = (0, 0, 0);
    let mut wc = [Wc::default(); 8];
    let last = me
        .requests
        .iter()
        .rposition(|r| r.flags.contains(WrFlags::SIGNALED));
    let end = Instant::now() + PATIENCE;
    while posted < me.requests.len()
        || received < list.len()
        || last.is_some_and(|last| sent <= last)
    {
        let n = rng.below(6).min(me.requests.len() - posted);
        let batch: Vec<SendWr<'_>> = (posted..posted + n)
            .map(|i| me.requests[i].wr(i as u64))
            .collect();
        me.end.qp.post_send(&batch).unwrap();
        posted += n;
        let n = me.end.cq.poll(&mut wc).unwrap();
        for wc in &wc[..n] {
            assert_eq!(wc.status, WcStatus::SUCCESS, "{wc:?}");
            let id = wc.wr_id as usize;
            if wc.opcode.is_receive() {
                let e = &me.receives[received];
                assert_eq!(id, 1000 + received, "receives in order: {wc:?}");
                let got = (wc.byte_len, WcFlags(wc.flags.0 & 10), wc.opcode);
                assert_eq!(got, (e.len, e.flags, e.opcode), "{id}: {wc:?}");
                assert!(e.flags == WcFlags::NONE || wc.imm == e.imm, "{id}: {wc:?}");
                received += 1;
            } else {
                let skipped = (sent..id).all(|i| !me.requests[i].flags.contains(WrFlags::SIGNALED));
                assert!(
                    id >= sent && skipped,
                    "in order and once: {id} after {sent}"
                );
                let r = &me.requests[id];
                assert!(
                    r.flags.contains(WrFlags::SIGNALED),
                    "{id} was not signalled"
                );
                assert_eq!(wc.opcode, WcOpcode::from(r.opcode));
                sent = id + 1;
            }
        }
        assert!(
            Instant::now() < end,
            "{posted} posted, {sent} of {last:?} sent, {received} of {} received: {:?}",
            list.len(),
            me.end.qp.query()
        );
    }
}

fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("SIWD_SEED") {
        Ok(one) => vec![one.parse().expect("SIWD_SEED is a number")],
        Err(_) => (1..=count).collect(),
    }
}

fn random_requests(siwd: &Daemon, seed: u64) {
    println!("SIWD_SEED={seed}");
    let mut rng = Rng(seed);
    let init = QpInit {
        max_send_wr: OPS as u32 + 4,
        max_recv_wr: OPS as u32,
        max_send_sge: 16,
        max_inline: 256,
        ..QpInit::default()
    };
    let end = || {
        let mut end = End::with(&siwd.context(), 64, &init);
        let access = ALL | Access::REMOTE_ATOMIC;
        end.mr = end.pd.alloc_mr(WORD + 8, access).unwrap();
        end
    };
    let (mut a, mut b) = (Side::new(end(), seed), Side::new(end(), !seed));
    let to: SocketAddr = "10.77.0.2:0".parse().unwrap();
    for _ in 0..OPS {
        plan(&mut rng, &mut a, &mut b);
        plan(&mut rng, &mut b, &mut a);
    }
    // All receives are posted before the connection, so no SEND of the peer can arrive too early.
    for side in [&a, &b] {
        for (i, e) in side.receives.iter().enumerate() {
            let sges = [side.end.mr.sge(e.at, e.room)];
            let wr_id = 1000 + i as u64;
            side.end
                .qp
                .post_recv(&[RecvWr { wr_id, sges: &sges }])
                .unwrap();
        }
    }
    connect(&a.end, &b.end, "siw0", to);
    let (one, two) = (rng.0, !rng.0);
    std::thread::scope(|s| {
        let ours = s.spawn(|| run(&a, Rng(one)));
        run(&b, Rng(two));
        ours.join().unwrap();
    });
    // A last READ of each side completes after all unsignaled requests.
    for (me, peer) in [(&a, &b), (&b, &a)] {
        let sges = [me.end.mr.sge(SLICE, 0)];
        let read = SendWr::read(u64::MAX, &sges, peer.end.mr.addr(), peer.end.mr.rkey());
        me.end.qp.post_send(&[read]).unwrap();
        let wc = me.end.wc();
        assert_eq!((wc.wr_id, wc.status), (u64::MAX, WcStatus::SUCCESS));
    }
    for side in [&a, &b] {
        let got = side.end.read(0, WORD + 8);
        let wrong = got.iter().zip(&side.model).position(|(x, y)| x != y);
        assert_eq!(
            wrong, None,
            "seed {seed}: first octet that differs from the model"
        );
    }
}

#[test]
fn random_requests_over_memory_leave_what_the_model_says() {
    let siwd = Daemon::loopback();
    for seed in seeds(200) {
        random_requests(&siwd, seed);
    }
}

/// Long frames of a pair: jumbo frames, and the maximum IP length, which needs two packet buffers;
/// also with markers, which split each FPDU many times.
#[test]
fn random_requests_in_long_frames_leave_what_the_model_says() {
    for mtu in [9000, 65_535] {
        for markers in ["accept", "request"] {
            let ends = ["siw0", "siw1"].map(|end| format!("name = \"{end}\"\n"));
            let keys = format!("mtu = {mtu}\n");
            let mpa = format!("mpa = {{ markers = \"{markers}\" }}\n");
            let mut config = LOOPBACK.replace("buffers = 4096", "buffers = 1024");
            for end in &ends {
                config = config.replacen(end, &format!("{end}{keys}{mpa}"), 1);
            }
            let siwd = Daemon::start(&config, &[]);
            for seed in seeds(25) {
                random_requests(&siwd, seed);
            }
        }
    }
}

/// Forwards frames between two interfaces, and drops, duplicates and delays some.
struct BadLink<'a> {
    stop: &'a AtomicBool,
    lost: &'a AtomicU64,
}

impl BadLink<'_> {
    fn carry(&self, from: &OwnedFd, to: &OwnedFd, mac: [u8; 6], mut rng: Rng) {
        let mut held: Option<Vec<u8>> = None;
        let mut b = vec![0; 65_536];
        while !self.stop.load(Ordering::Relaxed) {
            let n = recv(from.as_raw_fd(), &mut b, MsgFlags::empty());
            // Skips frames that this link itself sent.
            let frame = n
                .ok()
                .map(|n| &b[..n])
                .filter(|f| f.get(6..12) == Some(&mac));
            if let Some(frame) = frame {
                if rng.one_in(100) {
                    self.lost.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                if held.is_none() && rng.one_in(50) {
                    held = Some(frame.to_vec());
                    continue;
                }
                for _ in 0..1 + usize::from(rng.one_in(100)) {
                    let _ = send(to.as_raw_fd(), frame, MsgFlags::empty());
                }
            }
            if (frame.is_none() || rng.one_in(4))
                && let Some(late) = held.take()
            {
                let _ = send(to.as_raw_fd(), &late, MsgFlags::empty());
            }
        }
    }
}

#[test]
fn random_requests_over_a_bad_link_leave_what_the_model_says() {
    skip_if!(lacks_network().or_else(|| missing_program("ethtool")));
    let ns = Netns::new();
    let mut config = String::from("[dpdk]\nhugepages = \"never\"\nbuffers = 16384\n");
    let mut ends = Vec::new();
    for n in [1, 2] {
        ns.ip(&format!("link add our{n} type veth peer name far{n}"));
        for end in [format!("our{n}"), format!("far{n}")] {
            ns.command(
                "ethtool",
                &format!("-K {end} tso off gso off gro off rx off tx off"),
            );
            ns.ip(&format!("link set {end} addrgenmode none"));
            ns.ip(&format!("link set {end} up arp off"));
        }
        config += &format!(
            "[[device]]\nname = \"siw{}\"\ndevargs = \"net_af_packet{n},iface=our{n}\"\n\
             mac = \"02:00:00:77:00:0{n}\"\naddresses = [\"10.77.0.{n}/24\"]\n",
            n - 1
        );
        let socket = crate::common::raw::packet_socket(&ns, &format!("far{n}"));
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::milliseconds(2)).unwrap();
        ends.push((socket, [2, 0, 0, 0x77, 0, n]));
    }
    let siwd = ns.siwd(&config, &[]);
    let (stop, lost) = (AtomicBool::new(false), AtomicU64::new(0));
    let link = BadLink {
        stop: &stop,
        lost: &lost,
    };
    let link = &link;
    std::thread::scope(|s| {
        let (one, two) = (&ends[0], &ends[1]);
        s.spawn(move || link.carry(&one.0, &two.0, one.1, Rng(1)));
        s.spawn(move || link.carry(&two.0, &one.0, two.1, Rng(2)));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for seed in seeds(60) {
                random_requests(&siwd, seed);
            }
        }));
        stop.store(true, Ordering::Relaxed);
        if let Err(error) = result {
            std::panic::resume_unwind(error);
        }
    });
    let lost = lost.into_inner();
    assert!(lost > 20, "the link lost only {lost} frames");
}
