//! The peer of the guest's matrix program (deploy/lab/linux-siw/programs/matrix.c, which describes
//! the operations): the same operations from the other end, through siwd's verbs.

use std::net::{IpAddr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use siw::{
    Arena, CmChannel, CmEvent, CmListener, CompletionChannel, ConnectOptions, ConnectionInfo, Cq,
    ListenOptions, Mr, Opcode, Pd, Qp, QpInit, RecvWr, SendData, SendWr, Wc, WcFlags, WcStatus,
};

use super::guest::{GUEST_PATIENCE, Guest, Running};
use super::{ALL, Daemon};

const DEPTH: u64 = 64;
/// READs posted at once.
pub const READS: usize = 32;
/// Requests outstanding when a connection is broken on purpose.
pub const BURST: u64 = 48;
/// Receives outstanding at that time.
pub const INBOXES: usize = 2;
/// Room for words behind the memory.
const ROOM: usize = 64;

/// The side that connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// siwd connects to the guest.
    Initiator,
    /// The guest connects to siwd.
    Responder,
}

/// Parameters of one connection.
#[derive(Clone, Debug)]
pub struct Plan {
    pub role: Role,
    pub us: IpAddr,
    pub them: IpAddr,
    /// The port on which the guest listens.
    pub port: u16,
    /// Whether siwd asks for CRC.
    pub crc: bool,
    /// Bytes of memory of each side.
    pub length: usize,
    /// ORD and IRD of this side, used by its listener too, and those of the guest.
    pub depth: (u16, u16),
    pub guest_depth: (u16, u16),
    /// Operations in the notation of the guest's program, from its point of view.
    pub ops: Vec<String>,
}

/// Result of a connection.
pub struct Outcome {
    /// From ESTABLISHED on this side.
    pub info: ConnectionInfo,
    /// Output of the guest's program.
    pub out: String,
    /// Completions of the last, failing operation.
    pub last: Vec<Wc>,
}

/// Ways in which a burst of this side loses its connection.
pub enum Loss<'a> {
    /// By a command in the guest, while its program is alive.
    Command(&'a str),
    /// By killing the guest's program.
    Kill,
}

/// Makes the connection and runs all operations; both sides check every byte. Panics with the
/// guest's output on any mismatch.
pub fn play(siwd: &Daemon, guest: &Guest, plan: &Plan, loss: Option<Loss<'_>>) -> Outcome {
    let mut program = None;
    let result = catch_unwind(AssertUnwindSafe(|| {
        let (mut side, info) = Side::connect(siwd, guest, plan, &mut program);
        let mut lose = || match &loss {
            Some(Loss::Command(command)) => drop(guest.run(command)),
            Some(Loss::Kill) => drop(program.take().map(Running::kill)),
            None => panic!("no way to lose the connection"),
        };
        let mut last = Vec::new();
        for (n, op) in (1..).zip(&plan.ops) {
            last = side.operation(n, op, &mut lose);
        }
        (info, last)
    }));
    let patience = match result {
        Ok(_) => GUEST_PATIENCE,
        Err(_) => Duration::from_secs(5),
    };
    let done = program.map(|p| p.wait(patience));
    let (info, last) = result.unwrap_or_else(|e| {
        println!("{plan:?}\nthe guest: {done:?}");
        resume_unwind(e)
    });
    let out = done.map_or(String::new(), |done| {
        assert_eq!((done.status, &done.err[..]), (Some(0), ""), "{plan:?}");
        let end = format!("done {}\n", plan.ops.len());
        assert!(done.out.ends_with(&end), "{plan:?}: {done:?}");
        done.out
    });
    Outcome { info, out, last }
}

/// Byte `i` of operation `n`.
fn pattern(n: u32, i: usize) -> u8 {
    let of = |i: usize, times: usize| i.wrapping_mul(times);
    let x = of(i, 31) + of(i >> 8, 7) + of(i >> 16, 3) + of(i >> 24, 5);
    (x + n as usize * 13 + 1) as u8
}

fn assert_pattern(bytes: &[u8], n: u32, op: &str) {
    let wrong = (0..bytes.len()).find(|i| bytes[*i] != pattern(n, *i));
    if let Some(i) = wrong {
        panic!(
            "operation {n} ({op}): byte {i} is {:02x}, not {:02x}",
            bytes[i],
            pattern(n, i)
        );
    }
}

struct Side {
    pd: Pd,
    cq: Cq,
    qp: Qp,
    cm: CmChannel,
    arena: Arc<Arena>,
    memory: Mr,
    inbox: [Mr; INBOXES],
    length: usize,
    peer: (u64, u32),
    arrived: Vec<Wc>,
    taken: usize,
    finished: usize,
}

impl Side {
    fn connect(
        siwd: &Daemon,
        guest: &Guest,
        plan: &Plan,
        program: &mut Option<Running>,
    ) -> (Side, ConnectionInfo) {
        let ctx = siwd.context();
        let pd = ctx.alloc_pd().unwrap();
        // Waits block instead of spinning: the guest needs the core.
        let channel = CompletionChannel::new(&ctx).unwrap();
        let cq = Cq::new(&ctx, 2 * DEPTH as u32, Some((&channel, 1))).unwrap();
        let qp = pd.create_qp(&cq, &cq, &QpInit::default()).unwrap();
        let arena = Arena::alloc(&ctx, plan.length + ROOM, false).unwrap();
        let whole = 0..plan.length + ROOM;
        let mut side = Side {
            memory: pd.reg_mr(&arena, whole.clone(), ALL).unwrap(),
            inbox: std::array::from_fn(|_| pd.alloc_mr(whole.len(), ALL).unwrap()),
            cm: CmChannel::new(&ctx).unwrap(),
            length: plan.length,
            peer: (0, 0),
            arrived: Vec::new(),
            taken: 0,
            finished: 0,
            arena,
            pd,
            cq,
            qp,
        };
        (0..INBOXES).for_each(|n| side.post_inbox(n));

        let mut hello = side.memory.addr().to_be_bytes().to_vec();
        hello.extend(side.memory.rkey().to_be_bytes());
        hello.extend([0; 4]);
        let options = ConnectOptions {
            private_data: &hello,
            ord: plan.depth.0.into(),
            ird: plan.depth.1.into(),
            crc: Some(plan.crc),
            ..Default::default()
        };
        let start = |word: &str, addr: IpAddr, port: u16| {
            let (ord, ird) = plan.guest_depth;
            guest.start(&format!(
                "matrix {word} {addr} {port} {} {ord} {ird} {}",
                plan.length,
                plan.ops.join(" ")
            ))
        };
        let info = match plan.role {
            Role::Initiator => {
                *program = Some(start("listen", plan.them, plan.port));
                guest.run(&format!("wait-listen {}", plan.port));
                let to = SocketAddr::new(plan.them, plan.port);
                side.qp.connect(&side.cm, to, &options).unwrap();
                let info = side.established();
                side.learn(&info);
                info
            }
            Role::Responder => {
                let listen = ListenOptions {
                    crc: Some(plan.crc),
                    max_ord: Some(plan.depth.0),
                    max_ird: Some(plan.depth.1),
                    ..Default::default()
                };
                let at = SocketAddr::new(plan.us, 0);
                let listener = CmListener::new_with_options(&side.cm, at, &listen).unwrap();
                *program = Some(start("connect", plan.us, listener.local_addr().port()));
                match side.cm.get_event(Some(GUEST_PATIENCE)).unwrap() {
                    CmEvent::ConnectRequest(request) => {
                        side.learn(request.connection_info());
                        request.accept(&side.qp, None, &options).unwrap();
                    }
                    other => panic!("{other:?}"),
                }
                side.established()
            }
        };
        match plan.role {
            Role::Initiator => {
                side.say(0, 0);
                side.hear(0, "hello");
            }
            Role::Responder => {
                side.hear(0, "hello");
                side.say(0, 0);
            }
        }
        (side, info)
    }

    fn established(&self) -> ConnectionInfo {
        match self.cm.get_event(Some(GUEST_PATIENCE)).unwrap() {
            CmEvent::Established(info) => info,
            other => panic!("{other:?}"),
        }
    }

    fn disconnected(&self) {
        match self.cm.get_event(Some(GUEST_PATIENCE)).unwrap() {
            CmEvent::Disconnected(_) => {}
            other => panic!("{other:?}"),
        }
    }

    fn learn(&mut self, info: &ConnectionInfo) {
        let d = &info.private_data;
        let addr = d[..8].try_into().unwrap();
        let key = d[8..12].try_into().unwrap();
        self.peer = (u64::from_be_bytes(addr), u32::from_be_bytes(key));
    }

    fn post_inbox(&self, n: usize) {
        let mr = &self.inbox[n];
        let wr = RecvWr {
            wr_id: DEPTH + n as u64,
            sges: &[mr.sge(0, mr.len())],
        };
        self.qp.post_recv(&[wr]).unwrap();
    }

    fn any_completion(&self, patience: Duration) -> Option<Wc> {
        let mut wc = [Wc::default()];
        match self.cq.wait(&mut wc, Some(patience)) {
            Ok(_) => Some(wc[0]),
            Err(siw::Error::Timeout) => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// Takes the next completion, which must be a success, and records a received message. Returns
    /// false if none arrived in time.
    fn completion(&mut self, patience: Duration) -> bool {
        let Some(wc) = self.any_completion(patience) else {
            return false;
        };
        assert_eq!(wc.status, WcStatus::SUCCESS, "{wc:?}");
        if wc.wr_id < DEPTH {
            self.finished += 1;
        } else {
            self.arrived.push(wc);
        }
        true
    }

    fn transfer(&mut self, wr: SendWr<'_>) {
        let before = self.finished;
        self.qp.post_send(&[wr]).unwrap();
        self.wait_for(before + 1);
    }

    fn wait_for(&mut self, finished: usize) {
        while self.finished < finished {
            assert!(self.completion(GUEST_PATIENCE), "no completion");
        }
    }

    fn fill(&self, bytes: usize, n: u32) {
        let v: Vec<u8> = (0..bytes).map(|i| pattern(n, i)).collect();
        self.memory.write(0, &v).unwrap();
    }

    fn clear(&self, bytes: usize) {
        self.memory.write(0, &vec![0; bytes]).unwrap();
    }

    fn check(&self, bytes: usize, n: u32, op: &str) {
        let mut v = vec![0; bytes];
        self.memory.read(0, &mut v).unwrap();
        assert_pattern(&v, n, op);
    }

    /// Takes the next message: its completion and its bytes.
    fn message(&mut self, bytes: usize, n: u32, op: &str) -> (Wc, Vec<u8>) {
        while self.arrived.len() == self.taken {
            assert!(
                self.completion(GUEST_PATIENCE),
                "operation {n} ({op}): nothing comes"
            );
        }
        let (wc, at) = (self.arrived[self.taken], self.taken % INBOXES);
        self.taken += 1;
        assert_eq!(wc.wr_id, DEPTH + at as u64, "messages complete in order");
        assert_eq!(wc.byte_len as usize, bytes, "operation {n} ({op})");
        let mut v = vec![0; bytes];
        self.inbox[at].read(0, &mut v).unwrap();
        self.post_inbox(at);
        (wc, v)
    }

    fn say(&mut self, n: u32, key: u32) {
        let word = [n.to_be_bytes(), key.to_be_bytes()].concat();
        self.transfer(SendWr::send(0, SendData::Inline(&word)));
    }

    fn hear(&mut self, n: u32, op: &str) -> u32 {
        let (_, word) = self.message(8, n, op);
        assert_eq!(word[..4], n.to_be_bytes(), "operation {n} ({op})");
        u32::from_be_bytes(word[4..].try_into().unwrap())
    }

    fn operation(&mut self, n: u32, op: &str, lose: &mut dyn FnMut()) -> Vec<Wc> {
        let (kind, bytes) = op.split_at(1);
        let bytes: usize = bytes.parse().unwrap();
        let sge = [self.memory.sge(0, bytes)];
        let (addr, key) = self.peer;
        match kind {
            "w" => {
                self.hear(n, op);
                self.check(bytes, n, op);
                self.say(n, 0);
            }
            "W" => {
                self.fill(bytes, n);
                self.transfer(SendWr::write(0, SendData::Sges(&sge), addr, key));
                self.say(n, 0);
                self.hear(n, op);
            }
            "r" | "q" => {
                self.fill(bytes * reads(kind), n);
                self.say(n, 0);
                self.hear(n, op);
            }
            "R" | "Q" => {
                let count = reads(kind);
                self.hear(n, op);
                self.clear(bytes * count);
                let before = self.finished;
                let sges: Vec<_> = (0..count)
                    .map(|i| [self.memory.sge(i * bytes, bytes)])
                    .collect();
                let wrs: Vec<_> = (0..count)
                    .map(|i| SendWr::read(0, &sges[i], addr + (i * bytes) as u64, key))
                    .collect();
                self.qp.post_send(&wrs).unwrap();
                self.wait_for(before + count);
                self.check(bytes * count, n, op);
                self.say(n, 0);
            }
            "s" => {
                let (wc, v) = self.message(bytes, n, op);
                assert_eq!(wc.flags, WcFlags::NONE);
                assert_pattern(&v, n, op);
                self.say(n, 0);
            }
            "S" => {
                self.fill(bytes, n);
                self.transfer(SendWr::send(0, SendData::Sges(&sge)));
                self.hear(n, op);
            }
            "i" | "k" => {
                self.clear(bytes);
                let spare = self.pd.reg_mr(&self.arena, 0..self.length, ALL).unwrap();
                self.say(n, spare.rkey());
                let (wc, v) = self.message(bytes, n, op);
                assert!(wc.flags.contains(WcFlags::WITH_INV), "{wc:?}");
                assert_eq!(wc.imm, spare.lkey());
                assert_pattern(&v, n, op);
                self.check(bytes, n, op);
                self.say(n, 0);
                if kind == "k" {
                    self.disconnected();
                }
            }
            "I" | "K" => {
                let key = self.hear(n, op);
                self.fill(bytes, n);
                self.transfer(SendWr::write(0, SendData::Sges(&sge), addr, key));
                self.transfer(SendWr {
                    opcode: Opcode::SendWithInv,
                    imm: key,
                    ..SendWr::send(0, SendData::Sges(&sge))
                });
                self.hear(n, op);
                if kind == "K" {
                    self.qp
                        .post_send(&[SendWr::read(0, &sge, addr, key)])
                        .unwrap();
                    return self.everything(1);
                }
            }
            "b" => {
                self.clear(bytes);
                // A peer's WRITE raises no event, so poll the memory.
                let end = Instant::now() + GUEST_PATIENCE;
                while self.memory.read_byte(bytes - 1).unwrap() != pattern(n, bytes - 1) {
                    assert!(Instant::now() < end, "operation {n} ({op}): nothing comes");
                    std::thread::yield_now();
                }
                self.qp.reset().unwrap();
            }
            "B" => {
                self.fill(2 * bytes, n);
                for i in 0..BURST {
                    let wr = if i % 4 == 0 {
                        let sge = [self.memory.sge(bytes, bytes)];
                        self.qp
                            .post_send(&[SendWr::read(i, &sge, addr + bytes as u64, key)])
                    } else {
                        self.qp
                            .post_send(&[SendWr::write(i, SendData::Sges(&sge), addr, key)])
                    };
                    wr.unwrap();
                }
                let first = self.any_completion(GUEST_PATIENCE).unwrap();
                assert_eq!(first.status, WcStatus::SUCCESS, "{first:?}");
                lose();
                let mut all = vec![first];
                all.extend(self.everything(BURST as usize - 1));
                return all;
            }
            other => panic!("unknown operation {other}"),
        }
        Vec::new()
    }

    /// Takes the completions of `sends` requests and of all receives on a broken connection: each
    /// exactly once, and no more after them.
    fn everything(&mut self, sends: usize) -> Vec<Wc> {
        let all: Vec<Wc> = (0..sends + INBOXES)
            .map(|i| {
                self.any_completion(GUEST_PATIENCE)
                    .unwrap_or_else(|| panic!("{i} of {} completions came", sends + INBOXES))
            })
            .collect();
        self.disconnected();
        assert_eq!(self.cq.poll(&mut [Wc::default()]).unwrap(), 0, "once each");
        let mut ids: Vec<u64> = all.iter().map(|wc| wc.wr_id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), all.len(), "once each: {all:?}");
        all
    }
}

fn reads(kind: &str) -> usize {
    if kind.eq_ignore_ascii_case("q") {
        READS
    } else {
        1
    }
}
