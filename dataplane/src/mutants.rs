//! `siwd-mutants`: siwd with faults that `siw-lab mutants` switches on. Each line of stdin is the name
//! of a mutant, or empty for none; stdout has the names of all first, and then answers with
//! `mutant NAME`, or `unknown NAME`.

#![forbid(unsafe_code)]

#[path = "main.rs"]
mod command_line;

use std::io::BufRead;
use std::process::ExitCode;

use siw_iwarp::mutant;

fn main() -> ExitCode {
    siw_heap::keep_free_memory();
    println!("mutants {}", mutant::NAMES.join(" "));
    std::thread::spawn(|| {
        for name in std::io::stdin().lock().lines().map_while(Result::ok) {
            let is_known = mutant::select((!name.is_empty()).then_some(name.as_str()));
            println!("{} {name}", if is_known { "mutant" } else { "unknown" });
        }
    });
    command_line::main()
}
