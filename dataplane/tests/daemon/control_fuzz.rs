//! Random sequences of requests: the daemon answers each of them, and after each the account of the
//! user is the sum of those of its clients. After the end of a client its account is empty.
//!
//! `SIW_FUZZ_SECONDS` sets the duration; without it the test takes some seconds.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::common::*;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use siw::Context;
use siw_shm::SharedMemory;
use siw_shm::control::messages as m;
use siw_shm::control::{ControlSocket, Message, codec};
use siw_shm::shared_memory::PageSize;

/// Kind of a request, and material for its fields.
type Step = (u8, u32, u32, u64);

/// Duration of a test without `SIW_FUZZ_SECONDS`.
const SHORT: Duration = Duration::from_secs(5);

/// Columns of a client in the statistics, and of its user.
const COLUMNS: [(&str, &str); 5] = [
    ("memory_bytes", "bytes of memory"),
    ("heap_bytes", "bytes of siwd's own memory"),
    ("descriptors", "descriptors"),
    ("connections", "connections"),
    ("listeners", "listeners"),
];

/// Sums over the clients, and the amounts of their user, in the order of [`COLUMNS`].
fn accounts(observer: &Context) -> ([u64; 5], [u64; 5]) {
    let text = observer.read_stats().unwrap();
    let stats: serde_json::Value = serde_json::from_str(&text).unwrap();
    let uid = nix::unistd::geteuid().to_string();
    let clients = stats["clients"].as_array().unwrap();
    let of_clients = COLUMNS.map(|(column, _)| {
        let amounts = clients
            .iter()
            .map(|client| client[column].as_u64().unwrap());
        amounts.sum()
    });
    let of_user = COLUMNS.map(|(_, row)| stats["users"][&uid][row].as_u64().unwrap());
    (of_clients, of_user)
}

/// A client that makes requests, and the numbers that it got in the replies.
struct Fuzzer {
    conn: ControlSocket,
    seq: u32,
    numbers: Vec<u32>,
    _kept: Vec<OwnedFd>,
}

impl Fuzzer {
    fn new(d: &Daemon) -> Fuzzer {
        let conn = ControlSocket::connect_to(&d.socket).unwrap();
        conn.set_call_timeout(PATIENCE).unwrap();
        let hello = m::ClientHello::new("fuzz");
        let (_, kept) = conn.call_and_wait(1, &hello, &[]).unwrap();
        let (seq, numbers) = (1, Vec::new());
        Fuzzer {
            conn,
            seq,
            numbers,
            _kept: kept,
        }
    }

    /// A number from a reply, or any.
    fn number(&self, choice: u32) -> u32 {
        let place = (choice >> 3) as usize;
        match self.numbers.len() {
            count if count > 0 && !choice.is_multiple_of(8) => self.numbers[place % count],
            _ => choice,
        }
    }

    /// Makes a request. Returns whether the daemon answered and keeps the connection.
    fn call<M: Message>(&mut self, request: &M, fds: &[&OwnedFd]) -> bool {
        self.seq += 1;
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        match self.conn.call_and_wait(self.seq, request, &fds) {
            Ok((reply, _)) => {
                // Numbers of objects come first, in 32 bits.
                let first = bytemuck::bytes_of(&reply).first_chunk().copied();
                self.numbers.extend(first.map(u32::from_ne_bytes));
                true
            }
            Err(codec::CallError::Refused { .. }) => true,
            Err(codec::CallError::Closed) => false,
            Err(error) => panic!("no answer: {error}"),
        }
    }

    fn step(&mut self, (kind, a, b, c): Step) -> bool {
        let [x, y, z] = [a, b, c as u32].map(|choice| self.number(choice));
        let (reserved, len) = (0, c % (8 << 20));
        let (small, flags) = (b % 300, c as u32 % 9);
        let address = match c % 4 {
            0 => m::Addr::NONE,
            1 => m::Addr {
                port: b as u16,
                ..m::Addr::NONE
            },
            host => {
                let to = format!("10.77.0.{}:{}", host - 1, b as u16 % 64);
                to.parse::<std::net::SocketAddr>().unwrap().into()
            }
        };
        let extent = m::MemoryExtent {
            arena: x,
            len: len % 4096,
            ..Default::default()
        };
        let extents = [extent; m::MAX_EXTENTS];
        let none: [&OwnedFd; 0] = [];
        match kind % 51 {
            0 => self.call(
                &m::QueryDevice {
                    index: a % 3,
                    flags: 0,
                },
                &none,
            ),
            1 => self.call(
                &m::AllocPd {
                    device: a % 3,
                    reserved,
                },
                &none,
            ),
            2 => self.call(&m::DeallocPd { pd: x, reserved }, &none),
            3 => self.call(
                &m::AllocArena {
                    len,
                    huge: b % 2,
                    reserved,
                },
                &none,
            ),
            4 => self.call(&m::FreeArena { arena: x, reserved }, &none),
            5 | 6 => {
                let (offset, access) = (c >> 50, b % 64);
                let request = m::RegMr {
                    pd: y,
                    arena: x,
                    offset,
                    len: len % 8192,
                    va: c,
                    access,
                    reserved,
                };
                self.call(&request, &none)
            }
            7 => self.call(
                &m::DeregMr {
                    lkey: x,
                    flags: b % 3,
                },
                &none,
            ),
            8 => {
                let (offset, va, access) = (c >> 50, c, small);
                let request = m::ReregMr {
                    lkey: x,
                    flags,
                    pd: y,
                    arena: z,
                    offset,
                    len,
                    va,
                    access,
                    reserved,
                };
                self.call(&request, &none)
            }
            9 => self.call(
                &m::AddExtents {
                    count: b % 140,
                    reserved,
                    extents,
                },
                &none,
            ),
            10 => {
                let count = b % 8;
                let reason = m::Text::new(&format!("{a}"));
                let len = u64::from(count) * (len % 4096);
                let request = m::RegMemory {
                    pd: y,
                    access: 1,
                    len,
                    va: 0,
                    count,
                    reserved,
                    reason,
                    extents,
                };
                self.call(&request, &none)
            }
            11 | 12 => {
                let file = SharedMemory::create_memfd("fuzz", 1 << 20, PageSize::Normal).unwrap();
                let file = file.memfd().unwrap().try_clone_to_owned().unwrap();
                let request = m::ImportMemory {
                    kind: if a % 4 == 0 { a } else { m::IMPORT_FILE },
                    writable: b % 2,
                    offset: c % 3 * 4096,
                    len: len % (2 << 20),
                };
                self.call(&request, &[&file])
            }
            13 => self.call(
                &m::AllocFastMr {
                    pd: y,
                    arena: x,
                    max_pages: small,
                    reserved,
                },
                &none,
            ),
            14 => self.call(&m::AllocMw { pd: x, kind: b % 4 }, &none),
            15 => self.call(&m::DeallocMw { rkey: x, reserved }, &none),
            16 => self.call(&m::CreateChannel { reserved: 0 }, &none),
            17 => self.call(
                &m::DestroyChannel {
                    channel: x,
                    reserved,
                },
                &none,
            ),
            18 | 19 => {
                let channel = if a % 2 == 0 { 0 } else { x };
                self.call(
                    &m::CreateCq {
                        cqe: b % 5000,
                        channel,
                        cookie: c,
                    },
                    &none,
                )
            }
            20 => self.call(&m::DestroyCq { cq: x, reserved }, &none),
            21 => self.call(
                &m::ResizeCq {
                    cq: x,
                    cqe: b % 5000,
                },
                &none,
            ),
            22 => self.call(
                &m::FreeCqRing {
                    cq: x,
                    notify: flags,
                },
                &none,
            ),
            23 => self.call(
                &m::ModerateCq {
                    cq: x,
                    count: a as u16,
                    period: b as u16,
                },
                &none,
            ),
            24 | 25 => {
                let request = m::CreateQp {
                    pd: x,
                    send_cq: y,
                    recv_cq: if c % 2 == 0 { y } else { z },
                    max_send_wr: small,
                    max_recv_wr: small,
                    max_send_sge: flags,
                    max_recv_sge: flags,
                    max_inline: small,
                    sq_sig_all: 0,
                    srq: if a % 2 == 0 { 0 } else { z },
                    final_send: m::FinalSend::default(),
                };
                self.call(&request, &none)
            }
            26 => self.call(
                &m::QueryQp {
                    qp_num: x,
                    reserved,
                },
                &none,
            ),
            27 => self.call(
                &m::DestroyQp {
                    qp_num: x,
                    reserved,
                },
                &none,
            ),
            28 => {
                let request = m::CreateSrq {
                    pd: x,
                    max_wr: small,
                    max_sge: flags,
                    limit: b % 9,
                    share: 0,
                    reserved,
                };
                self.call(&request, &none)
            }
            29 => self.call(&m::QuerySrq { srq: x, reserved }, &none),
            30 => self.call(&m::DestroySrq { srq: x, reserved }, &none),
            31 => self.call(&m::CreateCmChannel { flags: 0 }, &none),
            32 => self.call(
                &m::DestroyCmChannel {
                    channel: x,
                    reserved,
                },
                &none,
            ),
            33 => {
                let params = raw_client::connection_parameters(4);
                let request = m::Connect {
                    qp_num: x,
                    device: if a % 2 == 0 { m::ANY_DEVICE } else { b % 3 },
                    cm_channel: y,
                    timeout_ms: 1 + small,
                    cookie: c,
                    dst: address,
                    src: m::Addr::NONE,
                    params,
                    stream: if c % 4 == 0 { small } else { 0 },
                    reserved,
                };
                self.call(&request, &none)
            }
            34 => {
                let request = m::PairQp {
                    qp_num: x,
                    peer_qp_num: y,
                    device: b % 3,
                    ord: flags,
                    ird: flags,
                    denied_access: 0,
                    local: address,
                    peer: address,
                };
                self.call(&request, &none)
            }
            35 => self.call(
                &m::Bind {
                    device: m::ANY_DEVICE,
                    flags: b % 9,
                    addr: address,
                },
                &none,
            ),
            36 => {
                let request = m::Listen {
                    device: m::ANY_DEVICE,
                    backlog: small,
                    cm_channel: x,
                    binding: if a % 2 == 0 { 0 } else { y },
                    cookie: c,
                    mpa: m::MpaOptions::BY_DEVICE,
                    addr: address,
                    flags: b % 2,
                    reserved,
                };
                self.call(&request, &none)
            }
            37 => self.call(
                &m::Unlisten {
                    listener: x,
                    flags: b % 2,
                },
                &none,
            ),
            38 => {
                let request = m::MigrateCm {
                    cm_channel: x,
                    qp_num: y,
                    listener: z,
                    request: 0,
                    search: 0,
                };
                self.call(&request, &none)
            }
            39 => {
                let request = m::StartDatagrams {
                    qp_num: x,
                    device: b % 3,
                    qkey: 1,
                    reserved,
                };
                self.call(&request, &none)
            }
            40 => {
                let request = m::FindService {
                    device: b % 3,
                    cm_channel: x,
                    timeout_ms: small,
                    reserved,
                    cookie: c,
                    dst: address,
                    src: "10.77.0.1:9"
                        .parse::<std::net::SocketAddr>()
                        .unwrap()
                        .into(),
                    private_data: m::PrivateData::new(&[1; 7]).unwrap(),
                    reserved2: 0,
                };
                self.call(&request, &none)
            }
            41 => self.call(
                &m::EndFindService {
                    search: x,
                    reserved,
                },
                &none,
            ),
            42 => {
                let request = m::AnswerFindService {
                    request: small,
                    accepts: a % 3,
                    qp_num: x,
                    qkey: 1,
                    private_data: m::PrivateData::new(&[2; 9]).unwrap(),
                };
                self.call(&request, &none)
            }
            46 => {
                let request = m::OpenStream {
                    device: m::ANY_DEVICE,
                    cm_channel: x,
                    timeout_ms: 1 + small,
                    idle_timeout_ms: small,
                    cookie: c,
                    dst: address,
                    src: m::Addr::NONE,
                };
                self.call(&request, &none)
            }
            47 => {
                let request = m::SendStream {
                    stream: small,
                    len: b % 5000,
                    bytes: [a as u8; m::STREAM_BYTES],
                };
                self.call(&request, &none)
            }
            48 => {
                let len = b % 5000;
                self.call(&m::ReceiveStream { stream: small, len }, &none)
            }
            49 => {
                let request = m::TurnStream {
                    stream: small,
                    cm_channel: x,
                    cookie: c,
                };
                self.call(&request, &none)
            }
            50 => {
                let flags = b % 5;
                self.call(
                    &m::EndStream {
                        stream: small,
                        flags,
                    },
                    &none,
                )
            }
            43 | 44 => {
                let group = m::Addr::from(std::net::IpAddr::from([239, 1, 1, b as u8 % 3]));
                let reserved = 0;
                match kind % 2 {
                    0 => self.call(
                        &m::AttachGroup {
                            qp_num: x,
                            reserved,
                            group,
                        },
                        &none,
                    ),
                    _ => self.call(
                        &m::DetachGroup {
                            qp_num: x,
                            reserved,
                            group,
                        },
                        &none,
                    ),
                }
            }
            _ => self.call(
                &m::Disconnect {
                    qp_num: x,
                    flags: reserved,
                },
                &none,
            ),
        }
    }
}

/// Waits until `is_right` holds for the accounts; workers and helpers may still free objects.
fn wait_for_accounts(
    observer: &Context,
    is_right: impl Fn(&([u64; 5], [u64; 5])) -> bool,
) -> Result<(), TestCaseError> {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let found = accounts(observer);
        if is_right(&found) {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(TestCaseError::fail(format!("clients, user: {found:?}")));
        }
        std::thread::yield_now();
    }
}

/// Runs a sequence of requests in a new daemon.
fn run_steps(steps: &[Step]) -> Result<(), TestCaseError> {
    let d = Daemon::loopback();
    let observer = d.context();
    accounts(&observer);
    let (before, _) = accounts(&observer);
    let mut fuzzer = Fuzzer::new(&d);
    for step in steps {
        let stays = fuzzer.step(*step);
        if !stays {
            fuzzer = Fuzzer::new(&d);
        }
        let balanced = |(clients, user): &([u64; 5], [u64; 5])| clients == user;
        wait_for_accounts(&observer, balanced)?;
    }
    drop(fuzzer);
    wait_for_accounts(&observer, |(clients, user)| {
        *clients == before && *user == before
    })?;
    prop_assert!(d.stop().success());
    Ok(())
}

#[test]
fn random_requests_are_answered_and_charged() {
    let seconds = std::env::var("SIW_FUZZ_SECONDS").ok();
    let seconds = seconds.map(|text| text.parse().expect("SIW_FUZZ_SECONDS: a number"));
    let end = Instant::now() + seconds.map_or(SHORT, Duration::from_secs);
    let steps = proptest::collection::vec(any::<Step>(), 1..400);
    let config = Config {
        cases: 1,
        max_shrink_iters: 60,
        failure_persistence: None,
        ..Config::default()
    };
    let mut runner = TestRunner::new(config);
    let mut cases = 0;
    while Instant::now() < end {
        runner.run(&steps, |steps| run_steps(&steps)).unwrap();
        cases += 1;
    }
    println!("{cases} sequences");
}
