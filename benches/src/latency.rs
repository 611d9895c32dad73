//! Round trips, one message at a time. The target of a WRITE polls the message's last byte, that of
//! a SEND or of a WRITE with immediate data its completion queue; a READ is a round trip by itself.
//!
//! Each end has two message slots: slot 0 for sending (or for READs by the peer), slot 1 for
//! receiving.

use crate::bandwidth::BulkLoad;
use crate::control_line::{DONE_OFFSET, FINAL_LINE_BYTES};
use crate::end::{STALL_TIMEOUT, TransferEnd, check_completion, sleep_until_completion};
use crate::live::LiveSample;
use crate::measurement::{Measurement, RunOptions, format_bytes, new_histogram};
use crate::pattern;
use crate::plan::Operation;
use crate::progress::ProgressLine;
use anyhow::bail;
use siw::{Error, SendData, SendWr, Wc, WrFlags};
use std::time::{Duration, Instant};

/// Slot for sending, or for READs by the peer.
const TX_SLOT: u64 = 0;
/// Slot for receiving.
const RX_SLOT: u64 = 1;
/// Rounds between two checks for errors of unsignaled messages.
const ROUNDS_PER_ERROR_CHECK: u64 = 256;
/// Unsuccessful polls between two clock readings.
const POLLS_PER_CLOCK_CHECK: u32 = 1 << 14;
/// Unsuccessful polls before yielding the core.
const POLLS_PER_YIELD: u32 = 1 << 10;

/// Last byte of a round's message: consecutive rounds differ, and it is never 0.
fn round_tag(round: u64) -> u8 {
    (round % 255) as u8 + 1
}

/// One end of a ping-pong.
struct PingPongEnd<'a> {
    end: &'a TransferEnd,
    inline: [u8; siw_shm::wqe::MAX_INLINE],
    verified: u64,
}

impl<'a> PingPongEnd<'a> {
    fn new(end: &'a TransferEnd) -> Self {
        PingPongEnd {
            end,
            inline: [0x5a; siw_shm::wqe::MAX_INLINE],
            verified: 0,
        }
    }

    /// Posts the message of round `round`.
    #[inline]
    fn post_round(&mut self, round: u64) -> anyhow::Result<()> {
        let end = self.end;
        let plan = &end.plan;
        let size = plan.size as usize;
        let peer = end.peers[0];
        let offset = end.slot_offset(0, TX_SLOT);
        if !plan.op.has_response() {
            if plan.inline {
                if plan.verify {
                    pattern::write_bytes(0, round, 0, &mut self.inline[..size]);
                }
                self.inline[size - 1] = round_tag(round);
            } else {
                if plan.verify {
                    pattern::fill_memory(&end.data, offset, size, 0, round)?;
                }
                end.data.write(offset + size - 1, &[round_tag(round)])?;
            }
        } else if plan.verify {
            let rx = end.slot_offset(0, RX_SLOT);
            pattern::fill_memory(&end.data, rx, size, 0, u64::MAX)?;
        }
        let tx = [end.data.sge(offset, size)];
        let rx = [end.data.sge(end.slot_offset(0, RX_SLOT), size)];
        let data = if plan.inline {
            SendData::Inline(&self.inline[..size])
        } else {
            SendData::Sges(&tx)
        };
        let wr = match plan.op {
            Operation::Write => {
                SendWr::write(0, data, peer.addr + plan.slot_stride() as u64, peer.rkey)
                    .with_flags(WrFlags::NONE)
            }
            Operation::WriteImm => {
                let remote = peer.addr + plan.slot_stride() as u64;
                SendWr::write_with_imm(0, data, remote, peer.rkey, round as u32)
                    .with_flags(WrFlags::NONE)
            }
            Operation::Send => SendWr::send(0, data).with_flags(WrFlags::NONE),
            Operation::Read => SendWr::read(0, &rx, peer.addr, peer.rkey),
            Operation::FetchAdd => SendWr::fetch_add(0, rx[0], peer.addr, peer.rkey, 1),
            Operation::CompareSwap => {
                let old = plan.value_before(round);
                SendWr::cmp_swap(0, rx[0], peer.addr, peer.rkey, old, old.wrapping_add(1))
            }
        };
        let mut stall_detector = StallDetector::new();
        loop {
            match end.qps[0].post_send(&[wr]) {
                Ok(()) => break,
                Err(error) if matches!(error.error, Error::QueueFull) => {
                    stall_detector.spin_once(end)?
                }
                Err(error) => return Err(error.into()),
            }
        }
        if round.is_multiple_of(ROUNDS_PER_ERROR_CHECK) && !plan.op.has_response() {
            end.check_unsignaled_sends()?;
        }
        Ok(())
    }

    /// Returns true if the message of round `round` has arrived: the other end's, or the data of
    /// this end's READ.
    #[inline]
    fn has_arrived(&mut self, round: u64) -> anyhow::Result<bool> {
        let end = self.end;
        let plan = &end.plan;
        let cq = match plan.op {
            Operation::Write => {
                let last = end.slot_offset(0, RX_SLOT) + plan.size as usize - 1;
                return end
                    .data
                    .read_byte(last)
                    .map(|byte| byte == round_tag(round))
                    .map_err(anyhow::Error::new);
            }
            Operation::Read | Operation::FetchAdd | Operation::CompareSwap => &end.send_cq,
            Operation::Send | Operation::WriteImm => &end.recv_cq,
        };
        let mut wc = [Wc::default()];
        if cq.poll(&mut wc)? == 0 {
            return Ok(false);
        }
        check_completion(&wc[0], plan.op.json_name())?;
        if plan.op.takes_receive() {
            end.post_receives(0, RX_SLOT, 1)?;
        }
        Ok(true)
    }

    /// Waits for the message of round `round`, calling `poll_others` meanwhile. False if `stop`
    /// returned true first.
    #[inline]
    fn wait_for_round(
        &mut self,
        round: u64,
        mut poll_others: impl FnMut() -> anyhow::Result<()>,
        stop: impl Fn() -> anyhow::Result<bool>,
    ) -> anyhow::Result<bool> {
        let mut stall_detector = StallDetector::new();
        let mut polls = 0u32;
        while !self.has_arrived(round)? {
            if self.end.plan.events {
                sleep_until_completion(&[self.end])?;
            }
            stall_detector.spin_once(self.end)?;
            poll_others()?;
            polls = polls.wrapping_add(1);
            if (self.end.plan.events || polls.is_multiple_of(256)) && stop()? {
                return Ok(false);
            }
        }
        if self.end.plan.verify {
            self.compare_round(round)?;
        }
        Ok(true)
    }

    /// Verifies the data of round `round`.
    #[cold]
    fn compare_round(&mut self, round: u64) -> anyhow::Result<()> {
        let plan = &self.end.plan;
        let size = plan.size as usize;
        if plan.op.is_atomic() {
            let offset = self.end.slot_offset(0, RX_SLOT);
            if self.end.read_word(offset)? != plan.value_before(round) {
                bail!(
                    "{} round {round} returned a wrong value",
                    plan.op.json_name().to_uppercase()
                );
            }
            self.verified += 1;
            return Ok(());
        }
        let (message, body) = match plan.op {
            Operation::Read => (0, size),
            // The last byte is the tag.
            _ => (round, size - 1),
        };
        let offset = self.end.slot_offset(0, RX_SLOT);
        let deadline = Instant::now() + Duration::from_secs(1);
        loop {
            let wrong = pattern::find_mismatch(&self.end.data, offset, body, 0, message)?;
            let Some(at) = wrong else { break };
            // Bytes of one WRITE may become visible in any order (RFC 5040 section 5.5).
            if plan.op != Operation::Write || Instant::now() > deadline {
                bail!(
                    "{} round {round} has wrong data from byte {at} on",
                    plan.op.json_name().to_uppercase()
                );
            }
        }
        self.verified += 1;
        Ok(())
    }
}

/// Polls, and detects when nothing has arrived for too long.
struct StallDetector {
    polls: u32,
    since: Option<Instant>,
}

impl StallDetector {
    fn new() -> Self {
        StallDetector {
            polls: 0,
            since: None,
        }
    }

    /// Pauses between two polls; reads the clock only once in many calls.
    #[inline]
    fn spin_once(&mut self, end: &TransferEnd) -> anyhow::Result<()> {
        std::hint::spin_loop();
        self.polls += 1;
        if self.polls.is_multiple_of(POLLS_PER_YIELD) {
            // The other end may be a process that needs this core.
            std::thread::yield_now();
        }
        if self.polls >= POLLS_PER_CLOCK_CHECK {
            self.check_progress(end)?;
        }
        Ok(())
    }

    /// Fails if the daemon or the peer disconnected, or nothing arrived for [`STALL_TIMEOUT`].
    #[cold]
    fn check_progress(&mut self, end: &TransferEnd) -> anyhow::Result<()> {
        self.polls = 0;
        if !end.plan.op.has_response() {
            end.check_unsignaled_sends()?;
        }
        end.check_alive()?;
        if self.since.get_or_insert_with(Instant::now).elapsed() > STALL_TIMEOUT {
            bail!(
                "no answer for {} s although the connection is up",
                STALL_TIMEOUT.as_secs()
            );
        }
        Ok(())
    }
}

/// Runs the measurement on the initiator; the target is in this process or another. `load`
/// continues meanwhile, in the same thread.
pub fn measure_latency(
    initiator_end: &TransferEnd,
    target_end: Option<&TransferEnd>,
    run: &mut RunOptions,
    mut load: Option<&mut BulkLoad<'_>>,
) -> anyhow::Result<Measurement> {
    let plan = &initiator_end.plan;
    let limits = run.limits;
    let mut ping = PingPongEnd::new(initiator_end);
    let mut pong = target_end.map(PingPongEnd::new);
    if let Some(target_end) = target_end {
        prepare_read_source(target_end)?;
    }
    let warm_up = limits.warm_up();
    let mut latency = new_histogram()?;
    let mut progress = match run.live {
        Some(_) => ProgressLine::hidden(),
        None => ProgressLine::new(),
    };
    let mut begin = Instant::now();
    let mut last = begin;
    let mut counting = false;
    let mut round = 0u64;
    let mut keep_load = || load.as_mut().map_or(Ok(()), |load| load.poll().map(drop));
    loop {
        ping.post_round(round)?;
        if let Some(pong) = &mut pong
            && !plan.op.has_response()
        {
            pong.wait_for_round(round, &mut keep_load, || Ok(false))?;
            pong.post_round(round)?;
        }
        ping.wait_for_round(round, &mut keep_load, || Ok(false))?;
        round += 1;
        let now = Instant::now();
        if counting {
            latency.saturating_record((now - last).as_nanos() as u64);
            if limits.is_over(now - begin, latency.len()) {
                break;
            }
        } else if now - begin >= warm_up {
            (begin, counting) = (now, true);
            if let Some(live) = &mut run.live {
                live.begin_counting(now);
            }
        }
        let was_shown = counting
            && run.live.as_mut().is_some_and(|live| {
                live.show_if_due(now, || LiveSample {
                    messages: latency.len(),
                    latency: &latency,
                    progress: limits.progress(now - begin, latency.len()),
                })
            });
        last = match run.pause {
            Some(pause) => stay_silent(now, pause),
            // Excludes the query of the daemon's counters from the round trip.
            None if was_shown => Instant::now(),
            None => now,
        };
        progress.show_if_due(now, || {
            let (done, all) = limits.progress(now - begin, latency.len());
            format!(
                "{} {}: {:.2} us, {:.1} of {:.1} s",
                plan.op.json_name(),
                format_bytes(plan.size),
                latency.value_at_quantile(0.5) as f64 / 1e3,
                done.as_secs_f64(),
                all.as_secs_f64()
            )
        });
    }
    let measured = begin.elapsed();
    drop(progress);
    if target_end.is_none() {
        let mut line = [0; FINAL_LINE_BYTES];
        line[DONE_OFFSET] = 1;
        let mut stall_detector = StallDetector::new();
        while !initiator_end.signal_peer(0, 0, &line)? {
            stall_detector.spin_once(initiator_end)?;
        }
        // The target closes when it has seen the end marker.
        let deadline = Instant::now() + STALL_TIMEOUT;
        while initiator_end.check_peer_present().is_ok() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(Measurement {
        messages: latency.len(),
        bytes: latency.len() * u64::from(plan.size),
        time: measured,
        all_messages: round,
        latency,
        verified: ping.verified + pong.map_or(0, |pong| pong.verified),
        series: Vec::new(),
    })
}

/// Waits without yielding the core, so that waking this thread is not measured; returns the time
/// afterwards.
fn stay_silent(since: Instant, pause: Duration) -> Instant {
    loop {
        let now = Instant::now();
        if now - since >= pause {
            return now;
        }
        std::hint::spin_loop();
    }
}

/// Writes the data that READs of this end's memory return.
fn prepare_read_source(end: &TransferEnd) -> anyhow::Result<()> {
    if end.plan.verify && end.plan.op == Operation::Read {
        let offset = end.slot_offset(0, TX_SLOT);
        pattern::fill_memory(&end.data, offset, end.plan.size as usize, 0, 0)?;
    }
    Ok(())
}

/// Serves a measurement of another process until it is over.
pub fn serve_latency(end: &TransferEnd) -> anyhow::Result<()> {
    prepare_read_source(end)?;
    let mut pong = PingPongEnd::new(end);
    let done = || end.control_byte(0, DONE_OFFSET).map(|byte| byte != 0);
    if end.plan.op.has_response() {
        while !done()? {
            std::thread::sleep(Duration::from_millis(1));
            end.check_peer_present()?;
        }
    } else {
        let mut round = 0;
        while pong.wait_for_round(round, || Ok(()), done)? {
            pong.post_round(round)?;
            round += 1;
        }
    }
    end.qps[0].disconnect().map_err(anyhow::Error::new)
}
