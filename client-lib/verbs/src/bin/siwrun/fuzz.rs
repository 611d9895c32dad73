//! `siwrun --fuzz SEED COUNT -- COMMAND`: runs a command under random plans, and makes the plans with which it
//! fails smaller.

use crate::faults::PlannedFaults;
use siw_faults::{Plan, random_plan, simpler_plans};
use std::process::{ExitCode, ExitStatus};

/// Most runs that make one plan smaller.
const MOST_STEPS: usize = 40;

/// Outcome of a run: how the command has ended; None: it was stopped at the time limit.
pub type Outcome = Option<ExitStatus>;

fn has_failed(outcome: &Outcome) -> bool {
    !outcome.is_some_and(|status| status.success())
}

fn describe(outcome: &Outcome) -> String {
    match outcome {
        Some(status) => format!("it ended with {status}"),
        None => "it did not end in time".to_owned(),
    }
}

/// A plan with which the command fails.
struct Failure {
    seed: u64,
    plan: Plan,
    outcome: Outcome,
}

/// Makes a plan smaller as long as the command fails with it.
fn shrink(
    failure: &mut Failure,
    run: &mut impl FnMut(Option<&PlannedFaults>) -> Result<Outcome, String>,
) -> Result<(), String> {
    let mut steps = 0;
    loop {
        let mut smaller = None;
        for plan in simpler_plans(&failure.plan) {
            steps += 1;
            if steps > MOST_STEPS {
                return Ok(());
            }
            let outcome = run(Some(&load(plan.clone())?))?;
            if has_failed(&outcome) {
                smaller = Some((plan, outcome));
                break;
            }
        }
        match smaller {
            Some((plan, outcome)) => (failure.plan, failure.outcome) = (plan, outcome),
            None => return Ok(()),
        }
    }
}

fn load(plan: Plan) -> Result<PlannedFaults, String> {
    PlannedFaults::of_plan(plan).map_err(|error| error.to_string())
}

/// Runs the command under `count` random plans, of the seeds from `seed` on. `run` runs it once.
pub fn run_plans(
    seed: u64,
    count: u64,
    mut run: impl FnMut(Option<&PlannedFaults>) -> Result<Outcome, String>,
) -> Result<ExitCode, String> {
    let without = run(None)?;
    if has_failed(&without) {
        let reason = describe(&without);
        return Err(format!("the command fails without a fault: {reason}"));
    }
    let mut failures = Vec::new();
    for seed in (0..count).map(|number| seed.wrapping_add(number)) {
        let plan = random_plan(seed);
        let outcome = run(Some(&load(plan.clone())?))?;
        if !has_failed(&outcome) {
            continue;
        }
        eprintln!("siwrun: seed {seed}: {}", describe(&outcome));
        let mut failure = Failure {
            seed,
            plan,
            outcome,
        };
        shrink(&mut failure, &mut run)?;
        failures.push(failure);
    }
    failures.sort_by_key(|failure| failure.plan.faults.len());
    for failure in &failures {
        let reason = describe(&failure.outcome);
        println!("# seed {}: {reason}", failure.seed);
        println!("{}", failure.plan.to_toml());
    }
    let seeds: Vec<_> = failures
        .iter()
        .map(|failure| failure.seed.to_string())
        .collect();
    let failed = seeds.len();
    match failed {
        0 => {
            eprintln!("siwrun: the command succeeded under {count} plans");
            Ok(ExitCode::SUCCESS)
        }
        _ => {
            let seeds = seeds.join(", ");
            eprintln!("siwrun: the command failed under {failed} of {count} plans: seeds {seeds}");
            Ok(ExitCode::FAILURE)
        }
    }
}
