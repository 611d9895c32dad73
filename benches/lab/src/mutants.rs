//! The judge is judged by siwd: each mutant, a fault of `siwd-mutants`, has to turn the case red that the
//! file `mutants` names.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::case::{Case, Level};
use crate::script::{Outcome, Target, Verdict, run};
use crate::suite::Instance;
use crate::via::{Programs, Siwd};

/// The mutants that the lab knows.
const TABLE: &str = include_str!("../mutants");

/// Attempts of a case to pass without a mutant: rping may be starting again.
const ATTEMPTS: u32 = 4;
const PAUSE: Duration = Duration::from_millis(200);

/// A fault of siwd, and the instance of a case that has to find it.
pub struct Mutant<'a> {
    pub name: &'static str,
    pub fault: &'static str,
    pub instance: Instance<'a>,
}

/// Verdicts on a mutant.
#[derive(Serialize)]
pub struct Judged {
    pub mutant: &'static str,
    pub fault: &'static str,
    pub case: String,
    /// Verdict without the mutant.
    pub without: Verdict,
    /// Verdict with it; missing if the case does not pass without it.
    pub with: Option<Verdict>,
    pub reason: String,
    pub killed: bool,
}

/// All mutants against all of the lab's cases.
#[derive(Serialize)]
pub struct Summary {
    pub killed: usize,
    pub all: usize,
    pub seconds: f64,
    pub seed: u64,
    pub mutants: Vec<Judged>,
}

/// Reads the table of mutants.
pub fn table(cases: &[Case]) -> Result<Vec<Mutant<'_>>> {
    let mut mutants: Vec<Mutant> = Vec::new();
    for (index, line) in TABLE.lines().enumerate() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let context = || format!("mutants:{}: {line}", index + 1);
        let (name, rest) = line.split_once(' ').with_context(context)?;
        let (wanted, fault) = rest.trim_start().split_once(' ').with_context(context)?;
        if mutants.iter().any(|mutant| mutant.name == name) {
            bail!("{}: the name is taken", context());
        }
        let instance = find_instance(cases, wanted)
            .with_context(|| format!("{}: the case does not exist", context()))?;
        mutants.push(Mutant {
            name,
            fault: fault.trim_start(),
            instance,
        });
    }
    Ok(mutants)
}

/// The instance of this name; the first one if the name has no parameters.
fn find_instance<'a>(cases: &'a [Case], name: &str) -> Option<Instance<'a>> {
    let id = name.split('/').next()?;
    let case = cases.iter().find(|case| case.id == id)?;
    let mut all = case.instances().into_iter();
    let params = all.find(|params| id == name || Outcome::of(case, params).name() == name)?;
    Some(Instance { case, params })
}

/// A siwd with mutants that is started again after its end.
pub struct Subject {
    pub programs: Programs,
    pub output: PathBuf,
    siwd: Option<Siwd>,
}

impl Subject {
    /// Starts siwd, which has to know exactly these mutants; the namespaces were entered before.
    pub fn start(programs: Programs, output: &Path, mutants: &[Mutant]) -> Result<Subject> {
        let mut subject = Subject {
            programs,
            output: output.to_owned(),
            siwd: None,
        };
        let names = subject.siwd()?.mutants()?.names.clone();
        for name in &names {
            if mutants.iter().all(|mutant| mutant.name != name) {
                bail!("siwd's mutant {name} is missing in the lab's table of mutants");
            }
        }
        for mutant in mutants {
            if names.iter().all(|name| mutant.name != name) {
                bail!(
                    "siwd does not know the mutant {} of the lab's table",
                    mutant.name
                );
            }
        }
        Ok(subject)
    }

    fn siwd(&mut self) -> Result<&mut Siwd> {
        if self.siwd.as_mut().is_some_and(|siwd| !siwd.runs()) {
            self.siwd = None;
        }
        let started = match self.siwd.take() {
            Some(siwd) => siwd,
            None => Siwd::start_mutants(&self.programs, &self.output)?,
        };
        Ok(self.siwd.insert(started))
    }

    fn select(&mut self, name: &str) -> Result<()> {
        self.siwd()?.mutants()?.select(name)
    }

    /// Runs a mutant against its case: without the fault, then with it.
    pub fn judge(&mut self, target: &Target, mutant: &Mutant) -> Result<Judged> {
        let Instance { case, params } = &mutant.instance;
        let mut without = Outcome::of(case, params);
        for _ in 0..ATTEMPTS {
            self.select("")?;
            without = run(target, case, params);
            if without.verdict <= Verdict::Recorded {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        let mut judged = Judged {
            mutant: mutant.name,
            fault: mutant.fault,
            case: without.name(),
            without: without.verdict,
            with: None,
            reason: format!("without the mutant: {}", without.reason),
            killed: false,
        };
        if without.verdict > Verdict::Recorded {
            return Ok(judged);
        }
        self.select(mutant.name)?;
        let mut with = run(target, case, params);
        if !self.siwd.as_mut().is_some_and(Siwd::runs) {
            with.worsen(Verdict::Dead, "siwd ended".into());
        }
        // The worst verdict about a SHOULD.
        let worst = if case.level() == Level::Should {
            Verdict::Weak
        } else {
            Verdict::Fail
        };
        judged.killed = with.verdict >= Verdict::Fail || with.verdict == worst;
        judged.with = Some(with.verdict);
        judged.reason = with.reason;
        Ok(judged)
    }
}

/// Runs mutants, one after the other; `report` is called with each result as it comes.
pub fn judge_all(
    subject: &mut Subject,
    target: &Target,
    mutants: &[Mutant],
    is_stopped: &dyn Fn() -> bool,
    report: &dyn Fn(&Judged),
) -> Result<Summary> {
    let begin = Instant::now();
    let mut all = Vec::new();
    for mutant in mutants {
        if is_stopped() {
            bail!(
                "ended by a signal after {} of {} mutants",
                all.len(),
                mutants.len()
            );
        }
        let judged = subject.judge(target, mutant)?;
        report(&judged);
        all.push(judged);
    }
    Ok(Summary {
        killed: all.iter().filter(|judged| judged.killed).count(),
        all: all.len(),
        seconds: begin.elapsed().as_secs_f64(),
        seed: target.seed,
        mutants: all,
    })
}
