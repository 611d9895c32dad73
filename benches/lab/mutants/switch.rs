//! Mutants: faults that a test switches on, one at a time, while siwd runs. `siw-lab mutate` adds this file to
//! a copy of siwd's source.

use std::io::BufRead;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Returns whether the fault is switched on.
macro_rules! mutant {
    ($name:ident) => {
        $crate::mutant::is_selected($crate::mutant::Mutant::$name)
    };
}

/// Index of the mutant that is switched on; beyond the last: none.
static SELECTED: AtomicUsize = AtomicUsize::new(usize::MAX);

macro_rules! mutants {
    ($($name:ident)*) => {
        /// A fault.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub enum Mutant { $($name,)* }

        const NAMES: &[&str] = &[$(stringify!($name),)*];
    };
}

mutants! { @NAMES@ }

/// Returns whether a mutant is switched on.
#[inline]
pub fn is_selected(mutant: Mutant) -> bool {
    SELECTED.load(Ordering::Relaxed) == mutant as usize
}

/// Prints the names of all mutants, then switches by each line of stdin: the name of a mutant, or empty for
/// none. The answer is `mutant NAME` or `unknown NAME`.
pub fn switch_by_stdin() {
    println!("mutants {}", NAMES.join(" "));
    std::thread::spawn(|| {
        for name in std::io::stdin().lock().lines().map_while(Result::ok) {
            let index = NAMES.iter().position(|known| *known == name);
            if index.is_none() && !name.is_empty() {
                println!("unknown {name}");
                continue;
            }
            SELECTED.store(index.unwrap_or(usize::MAX), Ordering::Relaxed);
            println!("mutant {name}");
        }
    });
}
