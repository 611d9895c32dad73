//! A progress line on the terminal; nothing if stderr is not a terminal.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

const REDRAW_INTERVAL: Duration = Duration::from_millis(250);

/// The progress line, cleared from the terminal when dropped.
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
    /// Creates an empty line.
    pub fn new() -> ProgressLine {
        ProgressLine {
            enabled: std::io::stderr().is_terminal(),
            shown: false,
            next_update: Instant::now(),
        }
    }

    /// Creates a line that is never shown, for use with another display.
    pub fn hidden() -> ProgressLine {
        ProgressLine {
            enabled: false,
            ..ProgressLine::new()
        }
    }

    /// Shows `text` if an update is due.
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
