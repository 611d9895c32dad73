//! The limits that `--check` enforces for every crate.

/// Maximum share of single-letter bindings among all bindings of a crate.
pub const SINGLE_LETTER_BINDINGS_PERCENT: f64 = 8.0;
/// Maximum share of one-word names among all functions of a crate.
pub const ONE_WORD_FUNCTIONS_PERCENT: f64 = 25.0;
/// Minimum share of documented public items.
pub const DOCUMENTED_ITEMS_PERCENT: f64 = 97.0;
/// Maximum files in the largest import cycle of the crates in [`IMPORT_CIRCLE_CRATES`].
pub const IMPORT_CIRCLE_FILES: usize = 6;
/// Folders of the crates to which [`IMPORT_CIRCLE_FILES`] applies; for others the cycle is only
/// counted.
pub const IMPORT_CIRCLE_CRATES: [&str; 5] =
    ["benches", "client-lib", "shm-api", "tcp", "tcp/drill"];
/// Maximum lines of a file.
pub const FILE_LINES: usize = 600;
/// Maximum lines of a function, from `fn` to its closing brace.
pub const FUNCTION_LINES: usize = 120;
/// Type names that every crate may declare once, as is conventional in Rust.
pub const CONVENTIONAL_TYPE_NAMES: [&str; 2] = ["Error", "Result"];
/// Maximum lines of README.md.
pub const README_LINES: usize = 150;
/// Maximum size of README.md.
pub const README_BYTES: usize = 8192;
/// Maximum characters of a line of README.md.
pub const README_LINE_LENGTH: usize = 200;
