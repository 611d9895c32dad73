//! Measures the time from the arrival of a message at the receiver to its completion at the sender,
//! with no other traffic. The completion needs the receiver's ACK and must not depend on later
//! traffic. The clock starts at the receiver's completion, so the result is an upper bound for the
//! delay after the ACK is sent.
//!
//! `completion_delay SOCKET FROM-DEVICE TO-ADDRESS MESSAGES`. Prints one line of JSON with
//! microseconds, for `./benches/figures nics`.

mod sides;

use std::time::{Duration, Instant};

use siw::{RecvWr, SendData, SendWr, Wc, WcStatus};

use sides::{Contexts, Outcome, PATIENCE, Side, connect_sides};

/// Message size in bytes: several segments.
const SIZE: usize = 4096;

/// Waits for the next completion, which must be a success. The wait sleeps, because an emulator
/// needs the core that spinning would take.
fn await_success(side: &Side) -> Outcome<()> {
    let mut wc = [Wc::default()];
    side.cq.wait(&mut wc, Some(PATIENCE))?;
    match wc[0].status {
        WcStatus::SUCCESS => Ok(()),
        status => Err(format!("completed with {status:?}").into()),
    }
}

fn run(arguments: &[String]) -> Outcome<()> {
    let [socket, device, target, count] = arguments else {
        return Err("usage: completion_delay SOCKET FROM-DEVICE TO-ADDRESS MESSAGES".into());
    };
    let contexts = Contexts::open(socket, device, target)?;
    let from = Side::new(&contexts.from, SIZE)?;
    let to = Side::new(&contexts.to, SIZE)?;
    connect_sides(&from, &to, &contexts)?;
    let mut delays: Vec<Duration> = Vec::new();
    for id in 0..count.parse::<u64>()? {
        let sges = [to.memory.sge(0, SIZE)];
        to.qp.post_recv(&[RecvWr {
            wr_id: id,
            sges: &sges,
        }])?;
        let sges = [from.memory.sge(0, SIZE)];
        from.qp
            .post_send(&[SendWr::send(id, SendData::Sges(&sges))])?;
        await_success(&to)?;
        let arrived = Instant::now();
        await_success(&from)?;
        delays.push(arrived.elapsed());
    }
    delays.sort();
    let at = |percent: usize| {
        let index = delays.len().saturating_sub(1) * percent / 100;
        delays.get(index).map_or(0, Duration::as_micros)
    };
    println!(
        "{{\"messages\":{},\"delay_us\":{{\"p50\":{},\"p99\":{},\"max\":{}}}}}",
        delays.len(),
        at(50),
        at(99),
        at(100)
    );
    Ok(())
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Err(error) = run(&arguments) {
        eprintln!("completion_delay: {error}");
        std::process::exit(1);
    }
}
