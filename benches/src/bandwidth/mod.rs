//! Bandwidth: the initiator keeps `depth` messages in flight on each QP, the target
//! receives. In one process a single thread steps both.

mod initiator;
mod target;

use crate::control_line::{END_LINE, OFF_COMPARED, OFF_DONE};
use crate::end::{End, STALL};
use crate::measurement::{Measured, bytes, gbps};
use crate::plan::Op;
use crate::progress::Progress;
use initiator::Initiator;
use siw::{CmEvent, Error};
use std::time::{Duration, Instant};
use target::Target;

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
            // The other process may need this core.
            if target.is_none() && spins.is_multiple_of(1024) {
                std::thread::yield_now();
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
        std::thread::yield_now();
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
        std::thread::yield_now();
    }
    let now = Instant::now();
    if now - *look < Duration::from_millis(50) {
        return Ok(());
    }
    *look = now;
    end.check_unsignaled_sends()?;
    end.check_peer_present()
}
