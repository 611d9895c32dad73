//! One line on the terminal that says how far a measurement is; nothing when stderr is no terminal.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

const REDRAW_INTERVAL: Duration = Duration::from_millis(250);

/// The line; removed from the terminal when dropped.
pub struct ProgressLine {
    enabled: bool,
    shown: bool,
    next_update: Instant,
}

impl Default for ProgressLine {
    fn default() -> Self {
        Self::new()
    }
}

impl ProgressLine {
    /// A line that has nothing to say yet.
    pub fn new() -> ProgressLine {
        ProgressLine {
            enabled: std::io::stderr().is_terminal(),
            shown: false,
            next_update: Instant::now(),
        }
    }

    /// A line that is never shown: something else is.
    pub fn hidden() -> ProgressLine {
        ProgressLine {
            enabled: false,
            ..ProgressLine::new()
        }
    }

    /// Shows `text` if the last update is long enough ago.
    #[inline]
    pub fn show_if_due(&mut self, now: Instant, text: impl FnOnce() -> String) {
        if self.enabled && now >= self.next_update {
            self.show_now(now, &text());
        }
    }

    #[cold]
    fn show_now(&mut self, now: Instant, text: &str) {
        self.next_update = now + REDRAW_INTERVAL;
        self.shown = true;
        let _ = write!(std::io::stderr(), "\r\x1b[K{text}");
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
