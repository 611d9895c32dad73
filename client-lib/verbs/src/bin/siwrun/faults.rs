//! `siwrun --faults PLAN`: the plan is checked before the program starts, the library lets its faults happen,
//! and the counts of all processes of the program are reported at its end.

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};
use serde::Serialize;
use siw_faults::{
    BuiltIn, COUNTS_VARIABLE, PLAN_VARIABLE, Place, Plan, PlanError, SEED_VARIABLE, built_in_plans,
};
use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

/// Word that lists the built-in plans in place of the name of one.
pub const LIST: &str = "list";

#[derive(Debug, thiserror::Error)]
pub enum FaultsError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("the name of the plan is no UTF-8: {0:?}")]
    Name(std::ffi::OsString),
    #[error("cannot create a file in memory for the faults: {0}")]
    Counts(io::Error),
    #[error("cannot write the report of faults to {path}: {error}", path = path.display())]
    Report { path: PathBuf, error: io::Error },
}

/// The plan of a program, with the counts of its faults.
pub struct PlannedFaults {
    /// Absolute path, or name of a built-in plan.
    name: String,
    /// The file of a plan that is in memory.
    _file: Option<OwnedFd>,
    plan: Plan,
    seed: Option<u64>,
    /// A file in memory that the processes of the program map: one number for each fault.
    counts: OwnedFd,
}

/// Report for programs.
#[derive(Serialize)]
struct Report<'a> {
    plan: &'a str,
    seed: u64,
    injected: u64,
    faults: Vec<FaultReport<'a>>,
}

#[derive(Serialize)]
struct FaultReport<'a> {
    number: usize,
    name: Option<&'a str>,
    kind: String,
    injected: u64,
}

/// Prints the built-in plans with their descriptions.
pub fn list_plans() {
    for plan in built_in_plans(Place::Program) {
        println!("{:<22}{}", plan.name, BuiltIn::description(&plan));
    }
}

/// Path of a file in memory for other processes, as long as this one has it open.
fn path_of(file: &OwnedFd) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

/// Creates the counts of a plan's faults.
fn create_counts(plan: &Plan) -> Result<OwnedFd, FaultsError> {
    let length = (plan.faults.len() * size_of::<u64>()) as u64;
    memfd_create("siw-faults", MemfdFlags::CLOEXEC)
        .and_then(|file| {
            ftruncate(&file, length)?;
            Ok(file)
        })
        .map_err(|error| FaultsError::Counts(error.into()))
}

impl PlannedFaults {
    /// Reads and checks a plan.
    pub fn load(name: &OsStr, seed: Option<u64>) -> Result<PlannedFaults, FaultsError> {
        let text = name
            .to_str()
            .ok_or_else(|| FaultsError::Name(name.to_owned()))?;
        let mut plan = Plan::find(text, Place::Program)?;
        plan.seed = seed.unwrap_or(plan.seed);
        let is_built_in = built_in_plans(Place::Program).any(|built_in| built_in.name == text);
        // The program may change its working folder.
        let path = std::path::absolute(text).unwrap_or_else(|_| PathBuf::from(text));
        let name = match is_built_in {
            true => text.to_owned(),
            false => path.to_string_lossy().into_owned(),
        };
        let counts = create_counts(&plan)?;
        Ok(PlannedFaults {
            name,
            _file: None,
            plan,
            seed,
            counts,
        })
    }

    /// Takes a plan that is in no file.
    pub fn of_plan(plan: Plan) -> Result<PlannedFaults, FaultsError> {
        let file = memfd_create("siw-plan", MemfdFlags::CLOEXEC)
            .and_then(|file| {
                // Files in memory take all that is written.
                pwrite(&file, plan.to_toml().as_bytes(), 0)?;
                Ok(file)
            })
            .map_err(|error| FaultsError::Counts(error.into()))?;
        let counts = create_counts(&plan)?;
        Ok(PlannedFaults {
            name: path_of(&file),
            _file: Some(file),
            plan,
            seed: None,
            counts,
        })
    }

    /// Sets the plan for a program. This process has to stay until its end.
    pub fn set_for(&self, command: &mut Command) {
        command
            .env(PLAN_VARIABLE, &self.name)
            .env(COUNTS_VARIABLE, path_of(&self.counts));
        match self.seed {
            Some(seed) => command.env(SEED_VARIABLE, seed.to_string()),
            None => command.env_remove(SEED_VARIABLE),
        };
    }

    /// Removes the plan of an outer siwrun from a program.
    pub fn unset_for(command: &mut Command) {
        for variable in [PLAN_VARIABLE, COUNTS_VARIABLE, SEED_VARIABLE] {
            command.env_remove(variable);
        }
    }

    /// The number of times that each fault was injected.
    fn read_counts(&self) -> Vec<u64> {
        let faults = 0..self.plan.faults.len();
        let read = |fault: usize| {
            let mut count = [0; size_of::<u64>()];
            let offset = (fault * size_of::<u64>()) as u64;
            // The file has this length, so that nothing is missing.
            let _ = pread(&self.counts, &mut count, offset);
            u64::from_ne_bytes(count)
        };
        faults.map(read).collect()
    }

    /// One line about the faults that were injected.
    pub fn summary(&self) -> String {
        let counts = self.read_counts();
        let total: u64 = counts.iter().sum();
        let seed = self.plan.seed;
        let parts = counts.iter().enumerate().filter(|(_, count)| **count > 0);
        let parts = parts.map(|(fault, count)| {
            let kind = &self.plan.faults[fault].kind;
            format!("{count} of {} ({kind})", self.plan.name_of(fault))
        });
        match total {
            0 => format!("no fault of {} was injected (seed {seed})", self.name),
            1 => format!(
                "1 fault was injected: {} (seed {seed})",
                parts.collect::<String>()
            ),
            _ => format!(
                "{total} faults were injected: {} (seed {seed})",
                parts.collect::<Vec<_>>().join(", ")
            ),
        }
    }

    /// Writes the counts as JSON.
    pub fn write_report(&self, path: &Path) -> Result<(), FaultsError> {
        let counts = self.read_counts();
        let all = self.plan.faults.iter().zip(&counts).enumerate();
        let faults = all.map(|(index, (fault, injected))| FaultReport {
            number: index + 1,
            name: fault.name.as_deref(),
            kind: fault.kind.to_string(),
            injected: *injected,
        });
        let report = Report {
            plan: &self.name,
            seed: self.plan.seed,
            injected: counts.iter().sum(),
            faults: faults.collect(),
        };
        let text = serde_json::to_string_pretty(&report).unwrap_or_default() + "\n";
        fs::write(path, text).map_err(|error| FaultsError::Report {
            path: path.to_owned(),
            error,
        })
    }
}
