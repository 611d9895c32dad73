//! Bandwidth: the initiator keeps `depth` messages in flight on each QP, the target
//! receives. In one process a single thread steps both.
//!
//! Control lines, one a QP, are written by RDMA WRITE when the ends are two
//! processes:
//! ```text
//!  at the target     0: messages sent u64                                   31: done
//!  at the initiator  0: wrong messages u64  8: credits u8  16: compared u64  31: done
//! ```
//! A SEND without a posted receive ends an iWARP stream, so SENDs need credits: the
//! target's count of posted receives, in batches, modulo 256.

use crate::bounds::gbps;
use crate::end::{End, check};
use crate::plan::{Op, Plan};
use crate::progress::Progress;
use crate::report::{self, Measured, bytes};
use crate::{pattern, session};
use hdrhistogram::Histogram;
use siw::{CmEvent, Data, Error, SendWr, Sge, Wc};
use std::time::{Duration, Instant};

/// Completions taken at once.
const POLL: usize = 32;
/// Work requests posted at once.
const POST: usize = 16;
/// No completion for this long is an error.
pub const STALL: Duration = Duration::from_secs(10);
/// How long placed data may take to be seen after its message completed.
const PLACED: Duration = Duration::from_secs(1);
const OFF_CREDITS: usize = 8;
const OFF_COMPARED: usize = 16;
pub(crate) const OFF_DONE: usize = 31;
/// A control line as it is written at the end.
pub(crate) const END_LINE: usize = 32;

/// Receives in one credit.
fn batch(plan: &Plan) -> u64 {
    u64::from(plan.target_slots() / 8).max(1)
}

struct Lane {
    posted: u64,
    completed: u64,
    /// Messages that may have been posted in all.
    allowed: u64,
    credit: u8,
    /// When the message in each slot was posted.
    since: Vec<Instant>,
}

/// The posting end.
struct Initiator<'a> {
    end: &'a End,
    lanes: Vec<Lane>,
    /// QPs that may post again: they wait for credits.
    waiting: Vec<u32>,
    latency: Histogram<u64>,
    messages: u64,
    verified: u64,
    inline: [u8; siw_shm::wqe::MAX_INLINE],
}

/// The answering end.
struct Target<'a> {
    end: &'a End,
    /// The initiator is another process and has to be told of credits.
    remote: bool,
    lanes: Vec<Received>,
    verified: u64,
    wrong: u64,
    first_wrong: Option<String>,
}

#[derive(Clone, Copy)]
struct Received {
    messages: u64,
    posted: u64,
    /// Credits the peer has been told of.
    told: u64,
}

fn describe(op: Op, qp: u32, message: u64, at: usize) -> String {
    format!(
        "{} message {message} on queue pair {qp} has wrong data from byte {at} on",
        op.name().to_uppercase()
    )
}

impl<'a> Initiator<'a> {
    fn new(end: &'a End, now: Instant) -> Result<Self, String> {
        let plan = &end.plan;
        let allowed = match plan.op {
            Op::Send => u64::from(plan.target_slots()),
            _ => u64::MAX,
        };
        Ok(Initiator {
            end,
            lanes: (0..plan.qps)
                .map(|_| Lane {
                    posted: 0,
                    completed: 0,
                    allowed,
                    credit: 0,
                    since: vec![now; plan.slots() as usize],
                })
                .collect(),
            waiting: Vec::with_capacity(plan.qps as usize),
            latency: report::histogram()?,
            messages: 0,
            verified: 0,
            inline: [0x5a; siw_shm::wqe::MAX_INLINE],
        })
    }

    /// Fills the queues for the first time.
    fn start(&mut self, now: Instant) -> Result<(), String> {
        for qp in 0..self.end.plan.qps {
            self.post(qp, now)?;
        }
        Ok(())
    }

    /// Takes completions, and posts again if `more`.
    #[inline]
    fn step(&mut self, now: Instant, more: bool, target: Option<&Target>) -> Result<usize, String> {
        let mut wcs = [Wc::default(); POLL];
        let n = self.end.send_cq.poll(&mut wcs).map_err(|e| e.to_string())?;
        let mut last = None;
        for wc in &wcs[..n] {
            check(wc, self.end.plan.op.name())?;
            let qp = wc.wr_id as u32;
            if last != Some(qp)
                && let Some(before) = last.replace(qp)
                && more
            {
                self.post(before, now)?;
            }
            self.completed(qp, now, target)?;
        }
        if more {
            if let Some(qp) = last {
                self.post(qp, now)?;
            }
            if !self.waiting.is_empty() {
                self.retry(now, target)?;
            }
        }
        Ok(n)
    }

    #[inline]
    fn completed(&mut self, qp: u32, now: Instant, target: Option<&Target>) -> Result<(), String> {
        let lane = &mut self.lanes[qp as usize];
        let message = lane.completed;
        let slots = lane.since.len() as u64;
        let posted = lane.since[(message % slots) as usize];
        self.latency
            .saturating_record((now - posted).as_nanos() as u64);
        lane.completed += 1;
        self.messages += 1;
        if self.end.plan.verify {
            self.verify(qp, message, target.map(|t| t.end))?;
        }
        Ok(())
    }

    /// Compares what a completed message brought, where this process can see it.
    #[cold]
    fn verify(&mut self, qp: u32, message: u64, target: Option<&End>) -> Result<(), String> {
        let plan = &self.end.plan;
        let (end, want) = match (plan.op, target) {
            (Op::Write, Some(target)) => (target, message),
            (Op::Read, _) => (self.end, message % u64::from(plan.target_slots())),
            _ => return Ok(()),
        };
        let size = plan.size as usize;
        let deadline = Instant::now() + PLACED;
        loop {
            let off = end.offset(qp, message);
            match pattern::mismatch(&end.data, off, size, qp, want).map_err(|e| e.to_string())? {
                None => break,
                // ACKed is not placed: a WRITE may complete a little earlier.
                Some(_) if plan.op == Op::Write && Instant::now() < deadline => {}
                Some(at) => return Err(describe(plan.op, qp, message, at)),
            }
        }
        self.verified += 1;
        Ok(())
    }

    /// Posts as many messages as the QP may have in flight.
    #[inline]
    fn post(&mut self, qp: u32, now: Instant) -> Result<(), String> {
        let plan = &self.end.plan;
        let size = plan.size as usize;
        let lane = &mut self.lanes[qp as usize];
        loop {
            let room = u64::from(plan.depth) - (lane.posted - lane.completed);
            let n = room.min(lane.allowed - lane.posted).min(POST as u64) as usize;
            if n == 0 {
                if room > 0 && !self.waiting.contains(&qp) {
                    self.waiting.push(qp);
                }
                return Ok(());
            }
            let n = if plan.verify { 1 } else { n };
            let peer = self.end.peers[qp as usize];
            let sges: [Sge; POST] = std::array::from_fn(|i| {
                let off = self.end.offset(qp, lane.posted + i as u64);
                self.end.data.sge(off, size)
            });
            if plan.verify {
                let off = self.end.offset(qp, lane.posted);
                prepare(self.end, qp, lane.posted, off, &mut self.inline)?;
            }
            let inline = &self.inline[..if plan.inline { size } else { 0 }];
            let list: [SendWr; POST] = std::array::from_fn(|i| {
                let slot = (lane.posted + i as u64) % u64::from(plan.target_slots());
                let remote = peer.addr + slot * plan.stride() as u64;
                let sge = std::slice::from_ref(&sges[i]);
                let data = if plan.inline {
                    Data::Inline(inline)
                } else {
                    Data::Sges(sge)
                };
                let id = u64::from(qp);
                match plan.op {
                    Op::Write => SendWr::write(id, data, remote, peer.rkey),
                    Op::Read => SendWr::read(id, sge, remote, peer.rkey),
                    Op::Send => SendWr::send(id, data),
                }
            });
            let done = match self.end.qps[qp as usize].post_send(&list[..n]) {
                Ok(()) => n,
                Err(e) if matches!(e.error, Error::QueueFull) => e.index,
                Err(e) => return Err(format!("queue pair {qp}: {e}")),
            };
            let slots = lane.since.len() as u64;
            for _ in 0..done {
                lane.since[(lane.posted % slots) as usize] = now;
                lane.posted += 1;
            }
            if done < n {
                return Ok(());
            }
        }
    }

    /// Looks for new credits of QPs that ran out of them.
    #[cold]
    fn retry(&mut self, now: Instant, target: Option<&Target>) -> Result<(), String> {
        let mut waiting = std::mem::take(&mut self.waiting);
        let slots = u64::from(self.end.plan.target_slots());
        for qp in waiting.drain(..) {
            let lane = &mut self.lanes[qp as usize];
            match target {
                Some(t) => lane.allowed = t.lanes[qp as usize].posted,
                None => {
                    let seen = self.end.control_byte(qp, OFF_CREDITS)?;
                    let new = u64::from(seen.wrapping_sub(lane.credit));
                    lane.credit = seen;
                    lane.allowed = (lane.allowed + new * batch(&self.end.plan))
                        .min(lane.completed + 2 * slots);
                }
            }
            self.post(qp, now)?;
        }
        Ok(())
    }

    fn in_flight(&self) -> u64 {
        self.lanes.iter().map(|l| l.posted - l.completed).sum()
    }
}

/// Puts the bytes of the next message where it is sent from; a READ's sink gets
/// bytes that the message does not have.
fn prepare(end: &End, qp: u32, message: u64, off: usize, inline: &mut [u8]) -> Result<(), String> {
    let size = end.plan.size as usize;
    if end.plan.inline {
        pattern::bytes(qp, message, 0, &mut inline[..size]);
        return Ok(());
    }
    let message = match end.plan.op {
        Op::Read => u64::MAX,
        _ => message,
    };
    pattern::fill(&end.data, off, size, qp, message).map_err(|e| e.to_string())
}

impl<'a> Target<'a> {
    fn new(end: &'a End, remote: bool) -> Result<Self, String> {
        let plan = &end.plan;
        let posted = match plan.op {
            Op::Send => u64::from(plan.target_slots()),
            _ => 0,
        };
        if plan.verify && plan.op == Op::Read {
            for qp in 0..plan.qps {
                for slot in 0..u64::from(plan.target_slots()) {
                    let off = end.offset(qp, slot);
                    pattern::fill(&end.data, off, plan.size as usize, qp, slot)
                        .map_err(|e| e.to_string())?;
                }
            }
        }
        let lane = Received {
            messages: 0,
            posted,
            told: posted,
        };
        Ok(Target {
            end,
            remote,
            lanes: vec![lane; plan.qps as usize],
            verified: 0,
            wrong: 0,
            first_wrong: None,
        })
    }

    /// Takes what came, and posts its receives again.
    #[inline]
    fn step(&mut self) -> Result<usize, String> {
        if self.end.plan.op != Op::Send {
            return Ok(0);
        }
        let mut wcs = [Wc::default(); POLL];
        let n = self.end.recv_cq.poll(&mut wcs).map_err(|e| e.to_string())?;
        for wc in &wcs[..n] {
            check(wc, "receive")?;
            let qp = wc.wr_id as u32;
            let lane = &mut self.lanes[qp as usize];
            let message = lane.messages;
            lane.messages += 1;
            if wc.byte_len != self.end.plan.size {
                return Err(format!(
                    "message {message} on queue pair {qp} has {} bytes, {} were sent",
                    wc.byte_len, self.end.plan.size
                ));
            }
            if self.end.plan.verify {
                self.compare(qp, message, message)?;
            }
            let lane = &mut self.lanes[qp as usize];
            self.end.receive(qp, lane.posted, 1)?;
            lane.posted += 1;
            if self.remote {
                self.tell(qp)?;
            }
        }
        Ok(n)
    }

    #[cold]
    fn compare(&mut self, qp: u32, slot: u64, message: u64) -> Result<(), String> {
        let off = self.end.offset(qp, slot);
        let size = self.end.plan.size as usize;
        let wrong =
            pattern::mismatch(&self.end.data, off, size, qp, message).map_err(|e| e.to_string())?;
        self.verified += 1;
        if let Some(at) = wrong {
            self.wrong += 1;
            let op = self.end.plan.op;
            self.first_wrong
                .get_or_insert_with(|| describe(op, qp, message, at));
        }
        Ok(())
    }

    /// Tells a peer in another process of its new credits.
    fn tell(&mut self, qp: u32) -> Result<(), String> {
        let batch = batch(&self.end.plan);
        let lane = &mut self.lanes[qp as usize];
        let new = (lane.posted - lane.told) / batch;
        if new == 0 {
            return Ok(());
        }
        let told = lane.told + new * batch;
        let first = u64::from(self.end.plan.target_slots());
        let value = ((told - first) / batch) as u8;
        // A full queue: with the next message.
        if self.end.signal_peer(qp, OFF_CREDITS as u64, &[value])? {
            lane.told = told;
        }
        Ok(())
    }
}

/// Measures for `time` from the initiator; the target is in this process or another.
pub fn run(a: &End, b: Option<&End>, time: Duration) -> Result<Measured, String> {
    let plan = &a.plan;
    let mut now = Instant::now();
    let mut target = b.map(|b| Target::new(b, false)).transpose()?;
    let mut initiator = Initiator::new(a, now)?;
    let warm_up = (time / 4).min(Duration::from_millis(300));
    let mut progress = Progress::new();
    let mut begin = now;
    let (mut counted, mut alive) = (None::<Instant>, now);
    initiator.start(now)?;
    let mut measured = None;
    let mut spins = 0u32;
    loop {
        now = Instant::now();
        let more = measured.is_none();
        let mut n = initiator.step(now, more, target.as_ref())?;
        if let Some(t) = &mut target {
            n += t.step()?;
            if let Some(e) = t.first_wrong.take() {
                return Err(e);
            }
        }
        if n > 0 {
            alive = now;
        } else {
            std::hint::spin_loop();
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(1024) && now - alive > STALL {
                return Err(stalled(&initiator));
            }
        }
        match (&mut measured, counted) {
            (None, None) if now - begin >= warm_up => {
                (begin, counted) = (now, Some(now));
                initiator.messages = 0;
                initiator.latency.reset();
            }
            (None, Some(_)) if now - begin >= time => {
                measured = Some(Measured {
                    messages: initiator.messages,
                    bytes: initiator.messages * u64::from(plan.size),
                    time: now - begin,
                    latency: initiator.latency.clone(),
                    verified: 0,
                });
            }
            (Some(m), _) if initiator.in_flight() == 0 && all_there(&initiator, &target) => {
                m.verified = initiator.verified + target.as_ref().map_or(0, |t| t.verified);
                if target.is_none() {
                    m.verified += finish(a, &initiator)?;
                }
                drop(progress);
                if m.messages == 0 {
                    return Err("no message completed; measure longer with --secs".into());
                }
                return measured.take().ok_or_else(|| "no result".into());
            }
            _ => {}
        }
        progress.tick(now, || {
            let done = initiator.messages * u64::from(plan.size);
            format!(
                "{} {}: {:.2} Gb/s, {:.1} of {:.1} s",
                plan.op.name(),
                bytes(plan.size),
                gbps(done, (now - begin).max(Duration::from_millis(1))),
                (now - begin).as_secs_f64(),
                time.as_secs_f64()
            )
        });
    }
}

#[cold]
fn stalled(i: &Initiator) -> String {
    format!(
        "no completion for {} s, {} messages are in flight",
        STALL.as_secs(),
        i.in_flight()
    )
}

/// SENDs are received a little after they complete.
fn all_there(i: &Initiator, target: &Option<Target>) -> bool {
    match target {
        Some(t) if t.end.plan.op == Op::Send => {
            let got = t.lanes.iter().zip(&i.lanes);
            got.clone().all(|(t, i)| t.messages == i.posted)
        }
        _ => true,
    }
}

/// Tells the other process that all is sent; how many messages it compared.
fn finish(end: &End, initiator: &Initiator) -> Result<u64, String> {
    let deadline = Instant::now() + STALL;
    for (qp, lane) in initiator.lanes.iter().enumerate() {
        let mut line = [0; END_LINE];
        line[..8].copy_from_slice(&lane.posted.to_le_bytes());
        line[OFF_DONE] = 1;
        while !end.signal_peer(qp as u32, 0, &line)? {
            late(deadline)?;
        }
    }
    while end.control_byte(0, OFF_DONE)? == 0 {
        late(deadline)?;
        std::hint::spin_loop();
    }
    let wrong = end.control_u64(0, 0)?;
    if wrong > 0 {
        return Err(format!(
            "the peer found wrong data in {wrong} messages; it says which"
        ));
    }
    end.control_u64(0, OFF_COMPARED)
}

fn late(deadline: Instant) -> Result<(), String> {
    if Instant::now() > deadline {
        return Err("the peer does not answer at the end of the measurement".into());
    }
    Ok(())
}

/// Answers a measurement of another process until it is over.
pub fn serve(end: &End) -> Result<(), String> {
    let mut target = Target::new(end, true)?;
    let mut done = 0;
    let mut look = Instant::now();
    while done < end.plan.qps {
        if target.step()? > 0 {
            continue;
        }
        if end.control_byte(done, OFF_DONE)? != 0 {
            let sent = end.control_u64(done, 0)?;
            if end.plan.op != Op::Send || target.lanes[done as usize].messages == sent {
                target.lanes[done as usize].messages = sent;
                done += 1;
                continue;
            }
        }
        idle(end, &mut look)?;
    }
    if end.plan.verify && end.plan.op == Op::Write {
        for qp in 0..end.plan.qps {
            let sent = target.lanes[qp as usize].messages;
            for message in sent.saturating_sub(u64::from(end.plan.target_slots()))..sent {
                target.compare(qp, message, message)?;
            }
        }
    }
    let mut line = [0; END_LINE];
    line[..8].copy_from_slice(&target.wrong.to_le_bytes());
    line[OFF_COMPARED..][..8].copy_from_slice(&target.verified.to_le_bytes());
    line[OFF_DONE] = 1;
    let deadline = Instant::now() + STALL;
    while !end.signal_peer(0, 0, &line)? {
        late(deadline)?;
    }
    // The other end closes when it has read the answer.
    while Instant::now() < deadline {
        match end.channel.get_event(Some(STALL)) {
            Ok(CmEvent::Disconnected(_)) | Err(Error::Timeout) => break,
            Ok(_) => {}
            Err(e) => return Err(e.to_string()),
        }
    }
    match target.first_wrong {
        Some(e) => Err(e),
        None => Ok(()),
    }
}

/// A receiver of WRITEs and READs has nothing to do: it leaves the core to others.
pub fn idle(end: &End, look: &mut Instant) -> Result<(), String> {
    if end.plan.op != Op::Send {
        std::thread::sleep(Duration::from_millis(1));
    } else {
        std::hint::spin_loop();
    }
    let now = Instant::now();
    if now - *look < Duration::from_millis(50) {
        return Ok(());
    }
    *look = now;
    errors(end)?;
    gone(end)
}

/// Completions of messages that complete only when they fail.
pub fn errors(end: &End) -> Result<(), String> {
    let mut wcs = [Wc::default(); 4];
    let n = end.send_cq.poll(&mut wcs).map_err(|e| e.to_string())?;
    wcs[..n]
        .iter()
        .try_for_each(|wc| check(wc, end.plan.op.name()))
}

/// Whether the other end went away before it was done.
pub fn gone(end: &End) -> Result<(), String> {
    match session::take(&end.channel)? {
        Some(CmEvent::Disconnected(_)) => Err("the other end went away".into()),
        _ => Ok(()),
    }
}
