//! A client that attacks the daemon for a given time.
//!
//! ```text
//! siw-hostile-client KIND SOCKET SECONDS [SEED]
//! ```
//! Prints `attacking` once its attack has started, and at the end one line of JSON with its
//! counters. The tests and `./benches/figures trust` run it together with honest clients. When the
//! daemon closes its connection or does not answer, it starts again: the daemon is supposed to do
//! that.
#![forbid(unsafe_code)]

mod attacks;
mod session;

use siw_shm::control::codec::CallError;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Parameters and counters of an attack.
pub struct Attack {
    pub socket: PathBuf,
    /// Time at which the attack ends.
    pub end: Instant,
    random: u64,
    announced: bool,
    /// Rounds of the attack.
    pub rounds: u64,
    /// Requests that the daemon refused.
    pub refused: u64,
    /// Times that the daemon closed this client or did not answer it.
    pub closed: u64,
}

impl Attack {
    /// Whether there is time for another round. The first call prints that the attack has started.
    pub fn begin_round(&mut self) -> bool {
        if !self.announced {
            self.announced = true;
            println!("attacking");
            // The reader of this line may have exited, and then the line is not needed.
            let _ = std::io::stdout().flush();
        }
        self.rounds += 1;
        Instant::now() < self.end
    }

    /// A pseudo-random number.
    pub fn next_random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Pseudo-random bytes.
    pub fn random_bytes(&mut self, len: usize) -> Vec<u8> {
        let words = len.div_ceil(8);
        let bytes = (0..words).flat_map(|_| self.next_random().to_le_bytes());
        bytes.take(len).collect()
    }

    /// Counts the refusal of a request; other errors end the session.
    pub fn count_refusal<T>(
        &mut self,
        result: Result<T, CallError>,
    ) -> Result<Option<T>, CallError> {
        match result {
            Ok(reply) => Ok(Some(reply)),
            Err(CallError::Refused { .. }) => {
                self.refused += 1;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (kind, socket, seconds, seed) = match &args[..] {
        [kind, socket, seconds] => (kind, socket, seconds, "1"),
        [kind, socket, seconds, seed] => (kind, socket, seconds, seed.as_str()),
        _ => return print_usage(),
    };
    let Some(attack) = attacks::by_name(kind) else {
        return print_usage();
    };
    let (Ok(seconds), Ok(seed)) = (seconds.parse::<f64>(), seed.parse::<u64>()) else {
        return print_usage();
    };
    let mut state = Attack {
        socket: socket.into(),
        end: Instant::now() + Duration::from_secs_f64(seconds),
        random: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
        announced: false,
        rounds: 0,
        refused: 0,
        closed: 0,
    };
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
    eprintln!("usage: siw-hostile-client KIND SOCKET SECONDS [SEED]");
    eprintln!("kinds: {}", kinds.join(" "));
    ExitCode::from(2)
}
