//! Calls the library at random: sequences of safe calls on the objects of two contexts, in any order
//! and with any objects, also those of the other context. No such program may have undefined
//! behaviour: memory that no peer has access to keeps its content, buffers come back whole, and both
//! contexts stay alive. Prints the number of calls that succeeded and that failed.
//!
//! `cargo run --example random_calls SOCKET FIRST_SEED SEQUENCES`; `deploy/sanitize client` runs it under
//! AddressSanitizer.

use siw::{
    Access, Arena, CmChannel, CmEvent, CmListener, CompletionChannel, ConnectOptions,
    ConnectionRequest, Context, Cq, Error, FastMr, Mr, Mw, OwnedMr, Pd, Qp, QpInit, QpState,
    RecvWr, RemoteSlice, ReregChange, SendData, SendWr, Sge, Srq, SrqInit, Wc, WindowType, WrFlags,
};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const CALLS: usize = 120;
const SHORT: Duration = Duration::from_millis(1);
const MARK: u8 = 0xa5;

struct Random(u64);

impl Random {
    /// xorshift64* (Vigna 2016).
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let value = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        value as usize % limit.max(1)
    }

    fn length(&mut self) -> usize {
        let bits = self.below(16);
        self.below(1 << bits)
    }

    fn access(&mut self) -> Access {
        // Rights of local and remote access, binding, and zero-based addresses.
        Access(self.below(64) as u32)
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        from.get(self.below(from.len()))
    }

    /// Drops one at random.
    fn drop_one<T>(&mut self, from: &mut Vec<T>) {
        if !from.is_empty() {
            from.swap_remove(self.below(from.len()));
        }
    }
}

/// The objects of one context.
struct Side {
    context: Context,
    pds: Vec<Pd>,
    channels: Vec<Arc<CompletionChannel>>,
    cqs: Vec<Cq>,
    srqs: Vec<Srq>,
    qps: Vec<Qp>,
    arenas: Vec<Arc<Arena>>,
    mrs: Vec<Mr>,
    buffers: Vec<OwnedMr<Vec<u8>>>,
    /// Regions that peers cannot access, with their content.
    private: Vec<(Mr, Vec<u8>)>,
    windows: Vec<Mw>,
    fast: Vec<FastMr>,
    events: Vec<CmChannel>,
    listeners: Vec<CmListener>,
    requests: Vec<ConnectionRequest>,
}

impl Side {
    fn new(socket: &Path) -> Result<Side, Error> {
        Ok(Side {
            context: Context::open(Some(socket))?,
            pds: Vec::new(),
            channels: Vec::new(),
            cqs: Vec::new(),
            srqs: Vec::new(),
            qps: Vec::new(),
            arenas: Vec::new(),
            mrs: Vec::new(),
            buffers: Vec::new(),
            private: Vec::new(),
            windows: Vec::new(),
            fast: Vec::new(),
            events: Vec::new(),
            listeners: Vec::new(),
            requests: Vec::new(),
        })
    }

    fn drop_one(&mut self, random: &mut Random) {
        match random.below(13) {
            0 => random.drop_one(&mut self.pds),
            1 => random.drop_one(&mut self.channels),
            2 => random.drop_one(&mut self.cqs),
            3 => random.drop_one(&mut self.srqs),
            4 => random.drop_one(&mut self.qps),
            5 => random.drop_one(&mut self.arenas),
            6 => random.drop_one(&mut self.mrs),
            7 => random.drop_one(&mut self.buffers),
            8 => random.drop_one(&mut self.windows),
            9 => random.drop_one(&mut self.fast),
            10 => random.drop_one(&mut self.events),
            11 => random.drop_one(&mut self.listeners),
            _ => random.drop_one(&mut self.requests),
        }
    }

    fn check_private(&self) {
        for (region, content) in &self.private {
            let mut found = vec![0; content.len()];
            region.read(0, &mut found).expect("a region can be read");
            assert_eq!(&found, content, "memory without remote access has changed");
        }
    }
}

/// A part of a region, often outside of it.
fn any_sge(random: &mut Random, side: &Side) -> Option<Sge> {
    let (start, len) = (random.length(), random.length());
    if random.below(2) == 0 {
        let region = random.pick(&side.mrs)?;
        let checked = region.slice(start..start.saturating_add(len)).ok();
        checked.or_else(|| Some(region.sge(start, len)))
    } else {
        let region = random.pick(&side.buffers)?;
        let checked = region.slice(start..start.saturating_add(len)).ok();
        checked.or_else(|| Some(region.sge(start, len)))
    }
}

/// Memory of a side, as it tells its peers.
fn any_remote(random: &mut Random, side: &Side) -> Option<RemoteSlice> {
    let whole = match random.below(2) {
        0 => random.pick(&side.mrs)?.remote(),
        _ => random.pick(&side.buffers)?.remote(),
    };
    let (start, len) = (random.length() as u64, random.length() as u64);
    whole.slice(start..start + len).ok().or(Some(whole))
}

fn post_send(random: &mut Random, side: &Side, peer: &Side) -> Option<bool> {
    let qp = random.pick(&side.qps)?;
    let sges = [any_sge(random, side)?];
    let remote = any_remote(random, peer)?;
    let text = vec![MARK; random.below(200)];
    let data = match random.below(3) {
        0 => SendData::Inline(&text),
        _ => SendData::Sges(&sges),
    };
    let key = random.pick(&side.mrs).map_or(0, Mr::lkey);
    let request = match random.below(6) {
        0 => Ok(SendWr::send(1, data)),
        1 => remote.write(2, data),
        2 => remote.read(3, &sges),
        3 => remote.fetch_add(4, sges[0], 1),
        4 => remote.cmp_swap(5, sges[0], 0, 1),
        _ => Ok(SendWr::local_inv(6, key)),
    };
    Some(request.is_ok_and(|request| qp.post_send(&[request]).is_ok()))
}

/// Takes one event of connections.
fn take_event(random: &mut Random, side: &mut Side) -> Option<bool> {
    let event = random.pick(&side.events)?.get_event(Some(SHORT));
    let Ok(event) = event else {
        return Some(false);
    };
    if let CmEvent::ConnectRequest(request) = event {
        side.requests.push(request);
    }
    Some(true)
}

/// Makes one call; None if it needs an object that does not exist.
fn call(
    random: &mut Random,
    side: &mut Side,
    peer: &mut Side,
    address: SocketAddr,
) -> Option<bool> {
    // Mostly objects of this context.
    let other: &Side = peer;
    let pd = match random.below(12) {
        0 => random.pick(&other.pds),
        _ => random.pick(&side.pds),
    };
    let cq = match random.below(12) {
        0 => random.pick(&other.cqs),
        _ => random.pick(&side.cqs),
    };
    fn keep<T, E>(list: &mut Vec<T>, made: Result<T, E>) -> Option<bool> {
        let is_made = made.is_ok();
        list.extend(made);
        Some(is_made)
    }
    match random.below(32) {
        0 | 1 => keep(&mut side.pds, side.context.alloc_pd()),
        2 => keep(&mut side.channels, CompletionChannel::new(&side.context)),
        3 => {
            let channel = random.pick(&side.channels).map(|channel| (channel, 1));
            let made = Cq::new(&side.context, random.length() as u32, channel);
            keep(&mut side.cqs, made)
        }
        4 => {
            let max_wr = random.below(64) as u32;
            let init = SrqInit {
                max_wr,
                ..SrqInit::default()
            };
            let made = pd?.create_srq(&init);
            keep(&mut side.srqs, made)
        }
        5 | 6 => {
            let init = QpInit {
                max_send_wr: random.below(64) as u32,
                max_recv_wr: random.below(64) as u32,
                ..QpInit::default()
            };
            let made = match (random.below(4), random.pick(&side.srqs)) {
                (0, Some(srq)) => pd?.create_qp_with_srq(cq?, cq?, srq, &init),
                _ => pd?.create_qp(cq?, cq?, &init),
            };
            keep(&mut side.qps, made)
        }
        7 => keep(
            &mut side.arenas,
            Arena::alloc(&side.context, random.length() * 8, false),
        ),
        8 => {
            let made = pd?.alloc_mr(random.length(), random.access());
            keep(&mut side.mrs, made)
        }
        9 => {
            let (start, len) = (random.length(), random.length());
            let arena = random.pick(&side.arenas)?;
            let made = pd?.reg_mr(arena, start..start + len, random.access());
            keep(&mut side.mrs, made)
        }
        10 | 11 => {
            let buffer = vec![MARK; random.length() + 1];
            let made = pd?.register(buffer, random.access());
            keep(&mut side.buffers, made)
        }
        12 => {
            if side.buffers.is_empty() {
                return None;
            }
            let at = random.below(side.buffers.len());
            let region = side.buffers.swap_remove(at);
            let (len, was_changeable) = (region.len(), region.region().access().0 & 0b1011 != 0);
            match region.dereg() {
                Ok(buffer) => {
                    assert_eq!(buffer.len(), len);
                    let is_whole = buffer.iter().all(|byte| *byte == MARK);
                    assert!(was_changeable || is_whole, "a buffer was changed");
                    Some(true)
                }
                Err(failed) => {
                    side.buffers.push(failed.object);
                    Some(false)
                }
            }
        }
        13 => {
            let len = random.length();
            let region = pd?.alloc_mr(len, Access::LOCAL_WRITE).ok()?;
            let content = (0..len)
                .map(|_| random.below(256) as u8)
                .collect::<Vec<u8>>();
            region.write(0, &content).expect("a region can be written");
            side.private.push((region, content));
            Some(true)
        }
        14 => {
            let at = random.below(side.mrs.len());
            let (offset, len) = (random.length(), random.length());
            let arena = random.pick(&side.arenas).cloned();
            let access = Some(random.access());
            let range = arena.as_ref().map(|arena| (arena, offset, len));
            let change = ReregChange {
                range,
                access,
                pd: None,
            };
            Some(side.mrs.get_mut(at)?.rereg(&change).is_ok())
        }
        15 => {
            let kind = [WindowType::One, WindowType::Two][random.below(2)];
            let made = pd?.alloc_mw(kind);
            keep(&mut side.windows, made)
        }
        16 => {
            let (start, len) = (random.length(), random.length());
            let access = random.access();
            let region = random.pick(&side.mrs)?;
            let binding = region.window(start..start + len, access).ok()?;
            let (window, qp) = (random.pick(&side.windows)?, random.pick(&side.qps)?);
            Some(window.post_bind(qp, 8, WrFlags::SIGNALED, &binding).is_ok())
        }
        17 => {
            let arena = random.pick(&side.arenas)?;
            let made = pd?.alloc_fast_mr(arena, random.below(64) as u32);
            keep(&mut side.fast, made)
        }
        18 => {
            let at = random.below(side.fast.len());
            let start = random.length();
            let len = random.length();
            let region = side.fast.get_mut(at)?;
            let range = start..start + len;
            Some(region.map_ranges(std::slice::from_ref(&range), 12).is_ok())
        }
        19 => keep(&mut side.events, CmChannel::new(&side.context)),
        20 => {
            let channel = random.pick(&side.events)?;
            let made = CmListener::new(channel, None, address, random.below(8) as u32, 3);
            keep(&mut side.listeners, made)
        }
        21 => {
            let to = random.pick(&other.listeners)?.local_addr();
            let qp = random.pick(&side.qps)?;
            let options = ConnectOptions::default();
            Some(qp.connect(random.pick(&side.events)?, to, &options).is_ok())
        }
        22 => take_event(random, side),
        23 => {
            let request = side.requests.pop()?;
            match random.below(4) {
                0 => Some(request.reject(b"no").is_ok()),
                _ => {
                    let qp = random.pick(&side.qps)?;
                    Some(request.accept(qp, None, &ConnectOptions::default()).is_ok())
                }
            }
        }
        24 | 25 => post_send(random, side, other),
        26 => {
            let sges = [any_sge(random, side)?];
            let request = RecvWr {
                wr_id: 9,
                sges: &sges,
            };
            match (random.below(3), random.pick(&side.srqs)) {
                (0, Some(srq)) => Some(srq.post_recv(&[request]).is_ok()),
                _ => Some(random.pick(&side.qps)?.post_recv(&[request]).is_ok()),
            }
        }
        27 => {
            let mut completions = [Wc::default(); 8];
            let cq = random.pick(&side.cqs)?;
            let armed = cq.req_notify(random.below(2) == 0).is_ok();
            Some(cq.poll(&mut completions).is_ok() && armed)
        }
        28 => Some(
            random
                .pick(&side.cqs)?
                .resize(random.length() as u32)
                .is_ok(),
        ),
        29 => {
            let qp = random.pick(&side.qps)?;
            let state = [
                QpState::Idle,
                QpState::Rts,
                QpState::Closing,
                QpState::Error,
                QpState::Sqd,
            ];
            Some(match random.below(4) {
                0 => qp.disconnect().is_ok(),
                1 => qp.query().is_ok(),
                2 => qp.drain_sq(SHORT, |_| {}).is_ok(),
                _ => qp.modify(*random.pick(&state)?).is_ok(),
            })
        }
        30 => Some(side.context.get_async_event(Some(SHORT)).is_ok()),
        _ => {
            side.drop_one(random);
            Some(true)
        }
    }
}

fn run_sequence(socket: &Path, seed: u64, outcomes: &mut BTreeMap<bool, u64>) -> Result<(), Error> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let (mut a, mut b) = (Side::new(socket)?, Side::new(socket)?);
    let device = a.context.query_device(0)?;
    let address = SocketAddr::new(device.ips[0], 0);
    for _ in 0..CALLS {
        let outcome = match random.below(2) {
            0 => call(&mut random, &mut a, &mut b, address),
            _ => call(&mut random, &mut b, &mut a, address),
        };
        if let Some(succeeded) = outcome {
            *outcomes.entry(succeeded).or_default() += 1;
        }
    }
    for side in [&a, &b] {
        side.check_private();
        side.context.await_releases()?;
        assert!(side.context.is_alive(), "the daemon closed a context");
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, first, sequences] = &arguments[..] else {
        return Err("usage: random_calls SOCKET FIRST_SEED SEQUENCES".into());
    };
    let (first, sequences): (u64, u64) = (first.parse()?, sequences.parse()?);
    let mut outcomes = BTreeMap::new();
    for seed in first..first + sequences {
        run_sequence(Path::new(socket), seed, &mut outcomes)
            .map_err(|error| format!("seed {seed}: {error}"))?;
        if (seed - first + 1).is_multiple_of(1000) {
            eprintln!("{} of {sequences} sequences", seed - first + 1);
        }
    }
    let count = |succeeded| outcomes.get(&succeeded).copied().unwrap_or(0);
    println!("{} calls succeeded, {} failed", count(true), count(false));
    Ok(())
}
