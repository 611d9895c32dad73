//! Standard output of `siw-perf`.

use std::fmt;
use std::io::{ErrorKind, Write};

/// Prints to standard output like `print!`, by [`print_or_exit`].
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => {
        $crate::output::print_or_exit(format_args!($($text)*))
    };
}

/// Prints to standard output. If its reader is gone (`siw-perf ... | head -1`), ends the program
/// quietly with exit code 0; with 1 after other errors.
pub fn print_or_exit(text: fmt::Arguments<'_>) {
    let mut output = std::io::stdout();
    let result = output.write_fmt(text).and_then(|()| output.flush());
    if let Err(error) = result {
        std::process::exit((error.kind() != ErrorKind::BrokenPipe).into());
    }
}
