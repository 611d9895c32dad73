//! Parameters and counters of an attack.

use siw_shm::control::codec::CallError;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

/// Result of an attack; an error ended it early.
pub type Ended = Result<(), CallError>;

/// Parameters and counters of an attack.
pub struct Attack {
    pub socket: PathBuf,
    /// Time at which the attack ends.
    pub end: Instant,
    /// Number of objects or clients, if the caller chose one.
    pub count: Option<usize>,
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
    /// Creates an attack on the daemon at this socket.
    pub fn new(socket: PathBuf, end: Instant, seed: u64, count: Option<usize>) -> Attack {
        Attack {
            socket,
            end,
            count,
            random: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
            announced: false,
            rounds: 0,
            refused: 0,
            closed: 0,
        }
    }

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

    /// Whether the attack's time is over, without counting a round.
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.end
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
