//! The limits that `--check` holds every crate to, and nothing else.

/// Bindings of one letter, percent of all bindings of a crate.
pub const SINGLE_LETTER_BINDINGS_PERCENT: f64 = 8.0;
/// Functions named with one word, percent of all functions of a crate.
pub const ONE_WORD_FUNCTIONS_PERCENT: f64 = 25.0;
/// Public items with documentation, percent, at least.
pub const DOCUMENTED_ITEMS_PERCENT: f64 = 97.0;
/// Files of the largest circle of imports, in the crates of [`IMPORT_CIRCLE_CRATES`].
pub const IMPORT_CIRCLE_FILES: usize = 6;
/// Folders of the crates that [`IMPORT_CIRCLE_FILES`] holds for; the others are only counted.
pub const IMPORT_CIRCLE_CRATES: [&str; 5] =
    ["benches", "client-lib", "shm-api", "tcp", "tcp/drill"];
/// Lines of a file.
pub const FILE_LINES: usize = 600;
/// Lines of a function, from `fn` to its closing brace.
pub const FUNCTION_LINES: usize = 120;
/// Type names that every crate may declare once for itself, as Rust programmers expect.
pub const CONVENTIONAL_TYPE_NAMES: [&str; 2] = ["Error", "Result"];
