//! A client that attacks the daemon for a given time.
//!
//! ```text
//! siw-hostile-client KIND SOCKET SECONDS [SEED [COUNT]]
//! ```
//! COUNT is the number of objects or clients of the kinds that have many; each has a default.
//!
//! Prints `attacking` once its attack has started, and at the end one line of JSON with its
//! counters. The tests and `./benches/figures trust` run it together with honest clients. When the
//! daemon closes its connection or does not answer, it starts again: the daemon is supposed to do
//! that.
#![forbid(unsafe_code)]

mod attack;
mod attacks;
mod session;
mod slow_file;

use attack::Attack;
use siw_shm::control::codec::CallError;
use std::process::ExitCode;
use std::time::{Duration, Instant};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (kind, socket, seconds, more) = match &args[..] {
        [kind, socket, seconds, more @ ..] if more.len() <= 2 => (kind, socket, seconds, more),
        _ => return print_usage(),
    };
    let Some(attack) = attacks::by_name(kind) else {
        return print_usage();
    };
    let seed = more.first().map_or(Ok(1), |seed| seed.parse());
    let count = more.get(1).map(|count| count.parse()).transpose();
    let (Ok(seconds), Ok(seed), Ok(count)) = (seconds.parse(), seed, count) else {
        return print_usage();
    };
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let mut state = Attack::new(socket.into(), end, seed, count);
    loop {
        match attack(&mut state) {
            Ok(()) => {}
            Err(CallError::Refused { errno, reason }) => {
                eprintln!("{kind}: refused: {reason} ({errno})");
                state.refused += 1;
            }
            Err(error) => {
                if state.closed == 0 {
                    eprintln!("{kind}: {error}");
                }
                state.closed += 1;
            }
        }
        if Instant::now() >= state.end {
            break;
        }
    }
    println!(
        "{{\"kind\":\"{kind}\",\"rounds\":{},\"refused\":{},\"closed\":{}}}",
        state.rounds, state.refused, state.closed
    );
    ExitCode::SUCCESS
}

fn print_usage() -> ExitCode {
    let kinds: Vec<&str> = attacks::KINDS.iter().map(|(name, _)| *name).collect();
    eprintln!("usage: siw-hostile-client KIND SOCKET SECONDS [SEED [COUNT]]");
    eprintln!("kinds: {}", kinds.join(" "));
    ExitCode::from(2)
}
