//! The limits that `--check` enforces, and the lengths above which files and functions are counted.

/// Maximum share of single-letter bindings among all bindings of a crate.
pub const SINGLE_LETTER_BINDINGS_PERCENT: f64 = 8.0;
/// Maximum share of one-word names among all functions of a crate.
pub const ONE_WORD_FUNCTIONS_PERCENT: f64 = 25.0;
/// Minimum share of documented public items.
pub const DOCUMENTED_ITEMS_PERCENT: f64 = 97.0;
/// Lines above which a file counts as long. Reported only: a file may be long if it is one thing.
pub const FILE_LINES: usize = 600;
/// Lines above which a function counts as long, from `fn` to its closing brace. Reported only.
pub const FUNCTION_LINES: usize = 120;
/// Type names that every crate may declare once, as is conventional in Rust.
pub const CONVENTIONAL_TYPE_NAMES: [&str; 2] = ["Error", "Result"];
/// Maximum lines of README.md.
pub const README_LINES: usize = 150;
/// Maximum size of README.md.
pub const README_BYTES: usize = 8192;
/// Maximum characters of a line of README.md.
pub const README_LINE_LENGTH: usize = 200;
