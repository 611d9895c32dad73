//! Bandwidth: the initiator keeps `depth` messages in flight on each QP, the target receives.
//! In one process a single thread drives both ends in turn.

mod initiator;
mod target;

use crate::control_line::{COMPARED_OFFSET, DONE_OFFSET, FINAL_LINE_BYTES};
use crate::end::{STALL_TIMEOUT, TransferEnd, sleep_until_completion};
use crate::live::LiveSample;
use crate::measurement::{Measurement, RunOptions, format_bytes, gigabits_per_second};
use crate::plan::{MeasurementPlan, Operation};
use crate::progress::ProgressLine;
use anyhow::{anyhow, bail};
use hdrhistogram::Histogram;
use initiator::BandwidthInitiator;
use siw::{CmEvent, Error};
use std::time::{Duration, Instant};
use target::BandwidthTarget;

/// Runs the measurement on the initiator; the target is in this process or another. Messages of a
/// concurrent `load` are counted too.
pub fn measure_bandwidth(
    initiator_end: &TransferEnd,
    target_end: Option<&TransferEnd>,
    run: &mut RunOptions,
    mut load: Option<&mut BulkLoad<'_>>,
) -> anyhow::Result<Measurement> {
    let plan = &initiator_end.plan;
    let limits = run.limits;
    let mut now = Instant::now();
    let mut target = target_end
        .map(|end| BandwidthTarget::new(end, false))
        .transpose()?;
    let mut initiator = BandwidthInitiator::new(initiator_end, now)?;
    let warm_up = limits.warm_up();
    let mut progress = match run.live {
        Some(_) => ProgressLine::hidden(),
        None => ProgressLine::new(),
    };
    let mut begin = now;
    let mut warm_up_messages = 0;
    let (mut counted, mut alive) = (None::<Instant>, now);
    initiator.post_to_all(now, true)?;
    let mut series = IntervalCounter::new(run.interval);
    let mut measured = None;
    let mut spins = 0u32;
    loop {
        now = Instant::now();
        let more = measured.is_none();
        let mut completions = initiator.poll_and_post(now, more, target.as_ref())?;
        if let Some(target) = &mut target {
            completions += target.poll_and_repost()?;
            if let Some(error) = target.first_wrong.take() {
                bail!(error);
            }
        }
        if let Some(load) = &mut load {
            completions += load.poll()?;
        }
        if completions > 0 {
            alive = now;
        } else {
            spins = spins.wrapping_add(1);
            let is_due = plan.events || spins.is_multiple_of(1024);
            if is_due && now - alive > IDLE_CHECK_TIME {
                check_stall(&initiator, target.as_ref(), now - alive)?;
            }
            match plan.events {
                true => sleep_until_completion(&all_ends(initiator_end, target_end, &load))?,
                false => std::hint::spin_loop(),
            }
            // The other process may need this core.
            if target.is_none() && spins.is_multiple_of(1024) {
                std::thread::yield_now();
            }
        }
        match (&mut measured, counted) {
            (None, None) if now - begin >= warm_up => {
                (begin, counted) = (now, Some(now));
                warm_up_messages = std::mem::take(&mut initiator.messages);
                if let Some(load) = &mut load {
                    load.begin_counting();
                }
                initiator.latency.reset();
                series.begin(now);
                if let Some(live) = &mut run.live {
                    live.begin_counting(now);
                }
            }
            (None, Some(_)) if limits.is_over(now - begin, initiator.messages) => {
                let messages = initiator.messages + load_messages(&load);
                measured = Some(Measurement {
                    messages,
                    bytes: messages * u64::from(plan.size),
                    time: now - begin,
                    all_messages: warm_up_messages + messages,
                    latency: all_latencies(&initiator, &load)?,
                    verified: 0,
                    series: std::mem::take(&mut series.counts),
                });
            }
            (Some(measurement), _)
                if initiator.in_flight() == 0 && all_received(&initiator, &target) =>
            {
                measurement.verified =
                    initiator.verified + target.as_ref().map_or(0, |target| target.verified);
                if target.is_none() {
                    measurement.verified += finish_with_peer(initiator_end, &initiator)?;
                }
                drop(progress);
                if measurement.messages == 0 {
                    bail!("no message completed; measure longer with --secs");
                }
                return measured.take().ok_or_else(|| anyhow!("no result"));
            }
            _ => {}
        }
        series.count_if_due(now, initiator.messages + load_messages(&load));
        if counted.is_some()
            && measured.is_none()
            && let Some(live) = &mut run.live
        {
            live.show_if_due(now, || LiveSample {
                messages: initiator.messages + load_messages(&load),
                latency: &initiator.latency,
                progress: limits.progress(now - begin, initiator.messages),
            });
        }
        progress.show_if_due(now, || {
            let messages = initiator.messages + load_messages(&load);
            let (done, all) = limits.progress(now - begin, initiator.messages);
            describe_progress(plan, messages, done, all)
        });
    }
}

/// Ends of this transfer and of the concurrent counted one.
fn all_ends<'a, 'load: 'a>(
    initiator: &'a TransferEnd,
    target: Option<&'a TransferEnd>,
    load: &Option<&mut BulkLoad<'load>>,
) -> Vec<&'a TransferEnd> {
    let of_load = load.as_ref().map(|load| load.ends());
    let ends = [Some(initiator), target].into_iter();
    ends.chain(of_load.into_iter().flatten())
        .flatten()
        .collect()
}

/// Latencies of this transfer and of the concurrent counted one.
fn all_latencies(
    initiator: &BandwidthInitiator<'_>,
    load: &Option<&mut BulkLoad<'_>>,
) -> anyhow::Result<Histogram<u64>> {
    let mut all = initiator.latency.clone();
    if let Some(load) = load {
        all.add(&load.initiator.latency)?;
    }
    Ok(all)
}

/// Text of the progress line.
fn describe_progress(
    plan: &MeasurementPlan,
    messages: u64,
    done: Duration,
    all: Duration,
) -> String {
    format!(
        "{} {}: {:.2} Gb/s, {:.1} of {:.1} s",
        plan.op.json_name(),
        format_bytes(plan.size),
        gigabits_per_second(
            messages * u64::from(plan.size),
            done.max(Duration::from_millis(1))
        ),
        done.as_secs_f64(),
        all.as_secs_f64()
    )
}

/// Messages of the concurrent counted transfer.
fn load_messages(load: &Option<&mut BulkLoad<'_>>) -> u64 {
    load.as_ref().map_or(0, |load| load.initiator.messages)
}

/// A bulk transfer in the background of another measurement, both ends in this process.
pub struct BulkLoad<'a> {
    initiator: BandwidthInitiator<'a>,
    target: BandwidthTarget<'a>,
    counted_since: Instant,
}

impl<'a> BulkLoad<'a> {
    /// Posts the initial messages.
    pub fn start(
        initiator_end: &'a TransferEnd,
        target_end: &'a TransferEnd,
    ) -> anyhow::Result<BulkLoad<'a>> {
        let now = Instant::now();
        let mut load = BulkLoad {
            initiator: BandwidthInitiator::new(initiator_end, now)?,
            target: BandwidthTarget::new(target_end, false)?,
            counted_since: now,
        };
        load.initiator.post_to_all(now, true)?;
        Ok(load)
    }

    /// Keeps the transfer going; must be called repeatedly.
    #[inline]
    pub fn poll(&mut self) -> anyhow::Result<usize> {
        let completions = self
            .initiator
            .poll_and_post(Instant::now(), true, Some(&self.target))?;
        let received = self.target.poll_and_repost()?;
        match self.target.first_wrong.take() {
            Some(error) => Err(anyhow!(error)),
            None => Ok(completions + received),
        }
    }

    /// Both ends of the transfer.
    fn ends(&self) -> [Option<&'a TransferEnd>; 2] {
        [Some(self.initiator.end), Some(self.target.end)]
    }

    /// Messages whose data was verified.
    pub fn verified(&self) -> u64 {
        self.initiator.verified + self.target.verified
    }

    /// Resets the counters.
    pub fn begin_counting(&mut self) {
        self.initiator.messages = 0;
        self.initiator.latency.reset();
        self.counted_since = Instant::now();
    }

    /// Gb/s since the counters were reset.
    pub fn gbps(&self) -> f64 {
        let bytes = self.initiator.messages * u64::from(self.initiator.end.plan.size);
        gigabits_per_second(bytes, self.counted_since.elapsed())
    }

    /// Ends the transfer: waits for the messages in flight, and posts no more. Returns the number
    /// of verified messages.
    pub fn finish(mut self) -> anyhow::Result<u64> {
        let deadline = Instant::now() + STALL_TIMEOUT;
        while self.initiator.in_flight() > 0 {
            self.initiator
                .poll_and_post(Instant::now(), false, Some(&self.target))?;
            self.target.poll_and_repost()?;
            if Instant::now() > deadline {
                return Err(describe_stall(&self.initiator));
            }
        }
        Ok(self.verified())
    }
}

/// Counts messages per time interval.
struct IntervalCounter {
    interval: Option<Duration>,
    next: Option<Instant>,
    before: u64,
    counts: Vec<u64>,
}

impl IntervalCounter {
    fn new(interval: Option<Duration>) -> IntervalCounter {
        IntervalCounter {
            interval,
            next: None,
            before: 0,
            counts: Vec::new(),
        }
    }

    /// Starts counting from zero messages.
    fn begin(&mut self, now: Instant) {
        self.next = self.interval.map(|interval| now + interval);
    }

    /// Records the messages of the current interval if it is over.
    #[inline]
    fn count_if_due(&mut self, now: Instant, messages: u64) {
        if let (Some(next), Some(interval)) = (self.next, self.interval)
            && now >= next
        {
            self.counts.push(messages - self.before);
            self.before = messages;
            self.next = Some(next + interval);
        }
    }
}

/// Time without completions after which the connections are checked.
const IDLE_CHECK_TIME: Duration = Duration::from_millis(200);

/// Fails if a connection was lost, or if nothing has completed for too long.
#[cold]
fn check_stall(
    initiator: &BandwidthInitiator,
    target: Option<&BandwidthTarget>,
    idle: Duration,
) -> anyhow::Result<()> {
    initiator.end.check_alive()?;
    if let Some(target) = target {
        target.end.check_alive()?;
    }
    match idle > STALL_TIMEOUT {
        true => Err(describe_stall(initiator)),
        false => Ok(()),
    }
}

#[cold]
fn describe_stall(initiator: &BandwidthInitiator) -> anyhow::Error {
    anyhow!(
        "no completion for {} s although the connection is up; {} messages are in flight",
        STALL_TIMEOUT.as_secs(),
        initiator.in_flight()
    )
}

/// Returns true if the target has every message: they are received shortly after they complete.
fn all_received(initiator: &BandwidthInitiator, target: &Option<BandwidthTarget>) -> bool {
    match target {
        Some(target) if target.end.plan.op.takes_receive() => {
            let mut pairs = target.queue_pairs.iter().zip(&initiator.queue_pairs);
            pairs.all(|(received, sent)| received.messages == sent.posted)
        }
        _ => true,
    }
}

/// Signals the end to the other process. Returns the number of messages that it verified.
fn finish_with_peer(end: &TransferEnd, initiator: &BandwidthInitiator) -> anyhow::Result<u64> {
    let deadline = Instant::now() + STALL_TIMEOUT;
    for (qp, queue_pair) in initiator.queue_pairs.iter().enumerate() {
        let mut line = [0; FINAL_LINE_BYTES];
        line[..8].copy_from_slice(&queue_pair.posted.to_le_bytes());
        line[DONE_OFFSET] = 1;
        while !end.signal_peer(qp as u32, 0, &line)? {
            check_deadline(deadline)?;
        }
    }
    while end.control_byte(0, DONE_OFFSET)? == 0 {
        check_deadline(deadline)?;
        std::thread::yield_now();
    }
    let wrong = end.control_u64(0, 0)?;
    if wrong > 0 {
        bail!("the peer found wrong data in {wrong} messages; see its output");
    }
    end.control_u64(0, COMPARED_OFFSET)
}

fn check_deadline(deadline: Instant) -> anyhow::Result<()> {
    if Instant::now() > deadline {
        bail!("the peer does not answer at the end of the measurement");
    }
    Ok(())
}

/// Serves a measurement of another process until it is over.
pub fn serve_bandwidth(end: &TransferEnd) -> anyhow::Result<()> {
    let mut target = BandwidthTarget::new(end, true)?;
    let mut done = 0;
    let mut last_check = Instant::now();
    while done < end.plan.qps {
        if target.poll_and_repost()? > 0 {
            continue;
        }
        if end.control_byte(done, DONE_OFFSET)? != 0 {
            let sent = end.control_u64(done, 0)?;
            let received = target.queue_pairs[done as usize].messages;
            if !end.plan.op.takes_receive() || received == sent {
                target.queue_pairs[done as usize].messages = sent;
                done += 1;
                continue;
            }
        }
        yield_and_check(end, &mut last_check)?;
    }
    if end.plan.verify && end.plan.op == Operation::Write {
        for qp in 0..end.plan.qps {
            let sent = target.queue_pairs[qp as usize].messages;
            for message in sent.saturating_sub(u64::from(end.plan.target_slots()))..sent {
                target.compare_message(qp, message, message)?;
            }
        }
    }
    let mut line = [0; FINAL_LINE_BYTES];
    line[..8].copy_from_slice(&target.wrong.to_le_bytes());
    line[COMPARED_OFFSET..][..8].copy_from_slice(&target.verified.to_le_bytes());
    line[DONE_OFFSET] = 1;
    let deadline = Instant::now() + STALL_TIMEOUT;
    while !end.signal_peer(0, 0, &line)? {
        check_deadline(deadline)?;
    }
    // The other end closes after it has read the answer.
    while Instant::now() < deadline {
        match end.channel.get_event(Some(STALL_TIMEOUT)) {
            Ok(CmEvent::Disconnected(_)) | Err(Error::Timeout) => break,
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
    }
    match target.first_wrong {
        Some(error) => Err(anyhow!(error)),
        None => Ok(()),
    }
}

/// Yields the core, and checks from time to time that the other end is still connected. A target of
/// WRITEs, READs and atomics has nothing else to do and sleeps.
fn yield_and_check(end: &TransferEnd, last_check: &mut Instant) -> anyhow::Result<()> {
    if end.plan.events {
        sleep_until_completion(&[end])?;
    } else if !end.plan.op.takes_receive() {
        std::thread::sleep(Duration::from_millis(1));
    } else {
        std::thread::yield_now();
    }
    let now = Instant::now();
    if now - *last_check < Duration::from_millis(50) {
        return Ok(());
    }
    *last_check = now;
    end.check_unsignaled_sends()?;
    end.check_peer_present()
}
