//! Round trips, one message at a time. A WRITE is seen by polling its last byte, a
//! SEND by its completion; a READ is a round trip by itself.
//!
//! Each end has two slots: 0 is sent from (or read by the peer), 1 receives.

use crate::control_line::{END_LINE, OFF_DONE};
use crate::end::{End, STALL, check};
use crate::measurement::{Measured, bytes, histogram};
use crate::pattern;
use crate::plan::Op;
use crate::progress::Progress;
use siw::{Error, SendData, SendWr, Wc, WrFlags};
use std::time::{Duration, Instant};

const TX: u64 = 0;
const RX: u64 = 1;
/// Rounds between two looks for errors of unsignaled messages.
const LOOK: u64 = 256;
/// Polls between two looks at the clock while nothing comes.
const PATIENCE: u32 = 1 << 14;
/// Polls before the core is offered to others.
const YIELD: u32 = 1 << 10;

/// The last byte of round `i`: two rounds in a row differ, and none is 0.
fn tag(i: u64) -> u8 {
    (i % 255) as u8 + 1
}

/// Half of a ping-pong.
struct Half<'a> {
    end: &'a End,
    inline: [u8; siw_shm::wqe::MAX_INLINE],
    verified: u64,
}

impl<'a> Half<'a> {
    fn new(end: &'a End) -> Self {
        Half {
            end,
            inline: [0x5a; siw_shm::wqe::MAX_INLINE],
            verified: 0,
        }
    }

    /// Sends round `i`.
    #[inline]
    fn post(&mut self, i: u64) -> Result<(), String> {
        let end = self.end;
        let plan = &end.plan;
        let size = plan.size as usize;
        let peer = end.peers[0];
        let off = end.offset(0, TX);
        let oops = |e: Error| e.to_string();
        if plan.op != Op::Read {
            if plan.inline {
                if plan.verify {
                    pattern::bytes(0, i, 0, &mut self.inline[..size]);
                }
                self.inline[size - 1] = tag(i);
            } else {
                if plan.verify {
                    pattern::fill(&end.data, off, size, 0, i).map_err(oops)?;
                }
                end.data.write(off + size - 1, &[tag(i)]).map_err(oops)?;
            }
        } else if plan.verify {
            let rx = end.offset(0, RX);
            pattern::fill(&end.data, rx, size, 0, u64::MAX).map_err(oops)?;
        }
        let tx = [end.data.sge(off, size)];
        let rx = [end.data.sge(end.offset(0, RX), size)];
        let data = if plan.inline {
            SendData::Inline(&self.inline[..size])
        } else {
            SendData::Sges(&tx)
        };
        let wr = match plan.op {
            Op::Write => SendWr::write(0, data, peer.addr + plan.stride() as u64, peer.rkey)
                .with_flags(WrFlags::NONE),
            Op::Send => SendWr::send(0, data).with_flags(WrFlags::NONE),
            Op::Read => SendWr::read(0, &rx, peer.addr, peer.rkey),
        };
        let mut patience = Patience::new();
        loop {
            match end.qps[0].post_send(&[wr]) {
                Ok(()) => break,
                Err(e) if matches!(e.error, Error::QueueFull) => patience.spin(end)?,
                Err(e) => return Err(e.to_string()),
            }
        }
        if i.is_multiple_of(LOOK) && plan.op != Op::Read {
            end.check_unsignaled_sends()?;
        }
        Ok(())
    }

    /// Whether round `i` of the other half is here (of the own READ).
    #[inline]
    fn seen(&mut self, i: u64) -> Result<bool, String> {
        let end = self.end;
        let plan = &end.plan;
        let cq = match plan.op {
            Op::Write => {
                let last = end.offset(0, RX) + plan.size as usize - 1;
                return end
                    .data
                    .read_byte(last)
                    .map(|b| b == tag(i))
                    .map_err(|e| e.to_string());
            }
            Op::Read => &end.send_cq,
            Op::Send => &end.recv_cq,
        };
        let mut wc = [Wc::default()];
        if cq.poll(&mut wc).map_err(|e| e.to_string())? == 0 {
            return Ok(false);
        }
        check(&wc[0], plan.op.name())?;
        if plan.op == Op::Send {
            end.receive(0, RX, 1)?;
        }
        Ok(true)
    }

    /// Waits for round `i`; false when `stop` said so first.
    #[inline]
    fn wait(&mut self, i: u64, stop: impl Fn() -> Result<bool, String>) -> Result<bool, String> {
        let mut patience = Patience::new();
        let mut polls = 0u32;
        while !self.seen(i)? {
            patience.spin(self.end)?;
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(256) && stop()? {
                return Ok(false);
            }
        }
        if self.end.plan.verify {
            self.compare(i)?;
        }
        Ok(true)
    }

    #[cold]
    fn compare(&mut self, i: u64) -> Result<(), String> {
        let plan = &self.end.plan;
        let size = plan.size as usize;
        let (message, body) = match plan.op {
            Op::Read => (0, size),
            // The last byte is the tag.
            _ => (i, size - 1),
        };
        let off = self.end.offset(0, RX);
        let deadline = Instant::now() + Duration::from_secs(1);
        loop {
            let wrong = pattern::mismatch(&self.end.data, off, body, 0, message)
                .map_err(|e| e.to_string())?;
            let Some(at) = wrong else { break };
            // Bytes of one WRITE may become visible in any order (RFC 5040 section 5.5).
            if plan.op != Op::Write || Instant::now() > deadline {
                return Err(format!(
                    "{} round {i} has wrong data from byte {at} on",
                    plan.op.name().to_uppercase()
                ));
            }
        }
        self.verified += 1;
        Ok(())
    }
}

/// Notices when nothing moves any more.
struct Patience {
    polls: u32,
    since: Option<Instant>,
}

impl Patience {
    fn new() -> Self {
        Patience {
            polls: 0,
            since: None,
        }
    }

    #[inline]
    fn spin(&mut self, end: &End) -> Result<(), String> {
        std::hint::spin_loop();
        self.polls += 1;
        if self.polls.is_multiple_of(YIELD) {
            // The other end may be a process that needs this core.
            std::thread::yield_now();
        }
        if self.polls >= PATIENCE {
            self.look(end)?;
        }
        Ok(())
    }

    #[cold]
    fn look(&mut self, end: &End) -> Result<(), String> {
        self.polls = 0;
        if end.plan.op != Op::Read {
            end.check_unsignaled_sends()?;
        }
        end.check_peer_present()?;
        if !end.ctx.is_alive() {
            return Err("siwd is gone".into());
        }
        if self.since.get_or_insert_with(Instant::now).elapsed() > STALL {
            return Err(format!("no answer for {} s", STALL.as_secs()));
        }
        Ok(())
    }
}

/// Measures for `time` from the initiator; the target is in this process or another.
pub fn run(a: &End, b: Option<&End>, time: Duration) -> Result<Measured, String> {
    let plan = &a.plan;
    let mut ping = Half::new(a);
    let mut pong = b.map(Half::new);
    if let Some(b) = b {
        prepare(b)?;
    }
    let warm_up = (time / 4).min(Duration::from_millis(300));
    let mut latency = histogram()?;
    let mut progress = Progress::new();
    let mut begin = Instant::now();
    let mut last = begin;
    let mut counting = false;
    let mut i = 0u64;
    loop {
        ping.post(i)?;
        if let Some(pong) = &mut pong
            && plan.op != Op::Read
        {
            pong.wait(i, || Ok(false))?;
            pong.post(i)?;
        }
        ping.wait(i, || Ok(false))?;
        i += 1;
        let now = Instant::now();
        if counting {
            latency.saturating_record((now - last).as_nanos() as u64);
            if now - begin >= time {
                break;
            }
        } else if now - begin >= warm_up {
            (begin, counting) = (now, true);
        }
        last = now;
        progress.tick(now, || {
            format!(
                "{} {}: {:.2} us, {:.1} of {:.1} s",
                plan.op.name(),
                bytes(plan.size),
                latency.value_at_quantile(0.5) as f64 / 1e3,
                (now - begin).as_secs_f64(),
                time.as_secs_f64()
            )
        });
    }
    let measured = begin.elapsed();
    drop(progress);
    if b.is_none() {
        let mut line = [0; END_LINE];
        line[OFF_DONE] = 1;
        let mut patience = Patience::new();
        while !a.signal_peer(0, 0, &line)? {
            patience.spin(a)?;
        }
        // The target closes when it has seen it.
        let deadline = Instant::now() + STALL;
        while a.check_peer_present().is_ok() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(Measured {
        messages: latency.len(),
        bytes: latency.len() * u64::from(plan.size),
        time: measured,
        latency,
        verified: ping.verified + pong.map_or(0, |p| p.verified),
    })
}

/// What READs of this end bring.
fn prepare(end: &End) -> Result<(), String> {
    if end.plan.verify && end.plan.op == Op::Read {
        let off = end.offset(0, TX);
        pattern::fill(&end.data, off, end.plan.size as usize, 0, 0).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// Answers a measurement of another process until it is over.
pub fn serve(end: &End) -> Result<(), String> {
    prepare(end)?;
    let mut half = Half::new(end);
    let done = || end.control_byte(0, OFF_DONE).map(|b| b != 0);
    if end.plan.op == Op::Read {
        while !done()? {
            std::thread::sleep(Duration::from_millis(1));
            end.check_peer_present()?;
        }
    } else {
        let mut i = 0;
        while half.wait(i, done)? {
            half.post(i)?;
            i += 1;
        }
    }
    end.qps[0].disconnect().map_err(|e| e.to_string())
}
