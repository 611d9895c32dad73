//! Cost of the drop-in libibverbs relative to the client library: the same WRITEs of one thread
//! through both, alternating, with the same daemon.
//!
//! `benches/programs/verbs_load.c` is the counterpart. It makes the same calls in the same order on
//! memory of the same kind, so that only the library differs. Called by `siw-figures`.

use crate::end::{STALL_TIMEOUT, failed_call, find_device};
use crate::summary::Spread;
use anyhow::{anyhow, bail};
use clap::ValueEnum;
use serde_json::Value;
use siw::{
    Access, Context, Cq, OwnedMr, PairOptions, Qp, QpInit, SendData, SendWr, Wc, WcStatus, WrFlags,
};
use std::process::Command;
use std::time::{Duration, Instant};

/// Maximum completions per poll.
const BATCH: usize = 16;
/// Longer than the daemon needs for the requests of a round.
const SETTLE: Duration = Duration::from_millis(1);

/// Quantity to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Load {
    /// Time of the calls that post a request and poll its completion.
    Cost,
    /// Throughput.
    Bandwidth,
}

/// Parameters of a load, as the program's arguments give them.
#[derive(Debug, Clone, Copy)]
pub struct LoadPlan {
    /// Quantity to measure.
    pub load: Load,
    /// Bytes of a WRITE.
    pub size: usize,
    /// Requests in flight; for [`Load::Cost`] the requests of a round.
    pub depth: u32,
    /// Seconds; for [`Load::Cost`] rounds.
    pub amount: f64,
}

/// One end: a queue pair and ordinary application memory.
struct LoadEnd {
    qp: Qp,
    cq: Cq,
    mr: OwnedMr<Vec<u8>>,
}

impl LoadEnd {
    fn new(context: &Context, plan: &LoadPlan) -> anyhow::Result<LoadEnd> {
        let pd = context
            .alloc_pd()
            .map_err(failed_call("protection domain"))?;
        let cq = Cq::new(context, plan.depth, None).map_err(failed_call("completion queue"))?;
        // Long enough that malloc takes fresh pages for it.
        let memory = vec![1u8; (plan.size * plan.depth as usize).max(1 << 20)];
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = pd
            .register(memory, access)
            .map_err(failed_call("memory region"))?;
        let init = QpInit {
            max_send_wr: plan.depth,
            max_recv_wr: 1,
            ..QpInit::default()
        };
        let qp = pd
            .create_qp(&cq, &cq, &init)
            .map_err(failed_call("queue pair"))?;
        Ok(LoadEnd { qp, cq, mr })
    }
}

/// Both ends, connected.
struct LoadPair {
    plan: LoadPlan,
    sender: LoadEnd,
    receiver: LoadEnd,
}

impl LoadPair {
    fn new(contexts: &[Context; 2], plan: &LoadPlan) -> anyhow::Result<LoadPair> {
        let pair = LoadPair {
            plan: *plan,
            sender: LoadEnd::new(&contexts[0], plan)?,
            receiver: LoadEnd::new(&contexts[1], plan)?,
        };
        let devices = [
            find_device(&contexts[0], "siw0")?,
            find_device(&contexts[1], "siw1")?,
        ];
        let ends = [&pair.sender, &pair.receiver];
        for (from, to) in [(0, 1), (1, 0)] {
            let ip = |device: usize| devices[device].ips.first().copied();
            let options = PairOptions {
                device: devices[from].index,
                local: ip(from).ok_or_else(|| anyhow!("the device has no address"))?,
                peer: ip(to).ok_or_else(|| anyhow!("the device has no address"))?,
                peer_qp_num: ends[to].qp.qp_num(),
                ord: 1,
                ird: 1,
                denied_access: siw::Access::NONE,
            };
            ends[from]
                .qp
                .connect_pair(&options)
                .map_err(failed_call("connection"))?;
        }
        // The connection is fully established once a request has completed.
        pair.post_write(0)?;
        pair.await_completions(&mut [Wc::default()])?;
        Ok(pair)
    }

    /// Posts a WRITE from the next slot.
    #[inline]
    fn post_write(&self, number: u64) -> anyhow::Result<()> {
        let slot = number as usize % self.plan.depth as usize;
        let offset = slot * self.plan.size;
        let sges = [self.sender.mr.sge(offset, self.plan.size)];
        let to = self.receiver.mr.addr() + offset as u64;
        let write = SendWr::write(number, SendData::Sges(&sges), to, self.receiver.mr.rkey());
        let posted = self
            .sender
            .qp
            .post_send(&[write.with_flags(WrFlags::SIGNALED)]);
        posted.map_err(|error| anyhow!("post_send: {error}"))
    }

    /// Polls until there are completions.
    fn await_completions(&self, completions: &mut [Wc]) -> anyhow::Result<usize> {
        let mut begun = None;
        loop {
            let polled = self.sender.cq.poll(completions);
            let got = polled.map_err(failed_call("poll"))?;
            if got > 0 {
                completions[..got].iter().try_for_each(check_completion)?;
                return Ok(got);
            }
            if begun.get_or_insert_with(Instant::now).elapsed() > STALL_TIMEOUT {
                bail!("no completion for {STALL_TIMEOUT:?}");
            }
        }
    }

    /// Nanoseconds to post a request and to poll its completion: medians over the rounds.
    ///
    /// The queue has room for all requests of a round, and their completions are present before the
    /// first poll. The worker shares the core and runs while this program sleeps, so the daemon has
    /// no effect on the time of a call: on another core it would contend for the queues' cache
    /// lines, depending on how well it keeps up. A round with a late completion does not count.
    fn measure_cost(&self) -> anyhow::Result<f64> {
        let (count, rounds) = (self.plan.depth, self.plan.amount as usize);
        let per_call = |time: Duration| time.as_secs_f64() * 1e9 / f64::from(count);
        let (mut posts, mut polls, mut posted) = (Vec::new(), Vec::new(), 0);
        for _ in 0..10 * rounds {
            let begun = Instant::now();
            for _ in 0..count {
                self.post_write(posted)?;
                posted += 1;
            }
            let post_time = begun.elapsed();
            std::thread::sleep(SETTLE);
            let mut completion = [Wc::default()];
            let mut missing = 0;
            let begun = Instant::now();
            for _ in 0..count {
                match self.sender.cq.poll(&mut completion) {
                    Ok(1) => check_completion(&completion[0])?,
                    _ => missing += 1,
                }
            }
            let poll_time = begun.elapsed();
            if missing == 0 {
                posts.push(per_call(post_time));
                polls.push(per_call(poll_time));
            }
            for _ in 0..missing {
                self.await_completions(&mut completion)?;
            }
            if posts.len() == rounds {
                break;
            }
        }
        match (Spread::of(posts), Spread::of(polls)) {
            (Some(post), Some(poll)) => Ok(post.median + poll.median),
            _ => Err(anyhow!("completions came late in all rounds")),
        }
    }

    /// Throughput in Gb/s.
    fn measure_bandwidth(&self) -> anyhow::Result<f64> {
        let mut completions = [Wc::default(); BATCH];
        let (mut posted, mut done) = (0, 0);
        while posted < u64::from(self.plan.depth) {
            self.post_write(posted)?;
            posted += 1;
        }
        let time = Duration::from_secs_f64(self.plan.amount);
        let begun = Instant::now();
        let passed = loop {
            let got = self.await_completions(&mut completions)?;
            done += got as u64;
            for _ in 0..got {
                self.post_write(posted)?;
                posted += 1;
            }
            let passed = begun.elapsed();
            if passed >= time {
                break passed;
            }
        };
        let rate = done as f64 * self.plan.size as f64 * 8e-9 / passed.as_secs_f64();
        while done < posted {
            done += self.await_completions(&mut completions)? as u64;
        }
        Ok(rate)
    }
}

#[inline]
fn check_completion(completion: &Wc) -> anyhow::Result<()> {
    match completion.status {
        WcStatus::SUCCESS => Ok(()),
        status => Err(anyhow!("completion: {status:?}")),
    }
}

/// Measures through the client library.
fn measure_client_lib(contexts: &[Context; 2], plan: &LoadPlan) -> anyhow::Result<f64> {
    let pair = LoadPair::new(contexts, plan)?;
    match plan.load {
        Load::Cost => pair.measure_cost(),
        Load::Bandwidth => pair.measure_bandwidth(),
    }
}

/// Measures through the drop-in library by running the program, given with its launcher.
fn measure_program(program: &[String], plan: &LoadPlan) -> anyhow::Result<f64> {
    let (name, arguments) = program
        .split_first()
        .ok_or_else(|| anyhow!("which program?"))?;
    let load = match plan.load {
        Load::Cost => "cost",
        Load::Bandwidth => "bandwidth",
    };
    let numbers = [plan.size as f64, plan.depth.into(), plan.amount];
    let out = Command::new(name)
        .args(arguments)
        .arg(load)
        .args(numbers.map(|number| number.to_string()))
        .output()
        .map_err(|error| anyhow!("{name}: {error}"))?;
    if !out.status.success() {
        bail!("{name}: {}", String::from_utf8_lossy(&out.stderr));
    }
    let result: Value =
        serde_json::from_slice(&out.stdout).map_err(|error| anyhow!("{name}: {error}"))?;
    let number = |key: &str| {
        result[key]
            .as_f64()
            .ok_or_else(|| anyhow!("{name} gave no {key}"))
    };
    match plan.load {
        Load::Cost => Ok(number("post_ns")? + number("poll_ns")?),
        Load::Bandwidth => number("gbps"),
    }
}

/// Compares the drop-in library with the client library over alternating rounds: for [`Load::Cost`]
/// the additional nanoseconds per request, for [`Load::Bandwidth`] its throughput divided by the
/// client library's. Uses medians of the rounds; prints each on standard error.
///
/// # Errors
/// A load fails, or the daemon does not have the devices `siw0` and `siw1`.
pub fn compare_drop_in(
    contexts: &[Context; 2],
    program: &[String],
    plan: &LoadPlan,
    rounds: u32,
) -> anyhow::Result<f64> {
    let (mut own, mut drop_in) = (Vec::new(), Vec::new());
    for round in 0..rounds.max(1) {
        // Alternates which one goes first.
        for turn in 0..2 {
            if (round + turn) % 2 == 0 {
                own.push(measure_client_lib(contexts, plan)?);
            } else {
                drop_in.push(measure_program(program, plan)?);
            }
        }
    }
    let spreads = Spread::of(own).zip(Spread::of(drop_in));
    let (own, drop_in) = spreads.ok_or_else(|| anyhow!("no round"))?;
    let shown = |name: &str, spread: &Spread| {
        let Spread { median, min, max } = spread;
        eprintln!("{name}: {median:.2} ({min:.2} to {max:.2})");
    };
    shown("client library", &own);
    shown("drop-in library", &drop_in);
    Ok(match plan.load {
        Load::Cost => drop_in.median - own.median,
        Load::Bandwidth => drop_in.median / own.median,
    })
}
