//! One line on the terminal that says how far a measurement is; nothing when
//! stderr is no terminal.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

const EVERY: Duration = Duration::from_millis(250);

/// The line. Gone when dropped.
pub struct Progress {
    on: bool,
    shown: bool,
    next: Instant,
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}

impl Progress {
    pub fn new() -> Progress {
        Progress {
            on: std::io::stderr().is_terminal(),
            shown: false,
            next: Instant::now(),
        }
    }

    /// Shows `text` if it is time to.
    #[inline]
    pub fn tick(&mut self, now: Instant, text: impl FnOnce() -> String) {
        if self.on && now >= self.next {
            self.show(now, &text());
        }
    }

    #[cold]
    fn show(&mut self, now: Instant, text: &str) {
        self.next = now + EVERY;
        self.shown = true;
        let _ = write!(std::io::stderr(), "\r\x1b[K{text}");
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
