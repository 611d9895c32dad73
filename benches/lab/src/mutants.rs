//! The judge is judged by siwd: with each mutant, a fault of `siwd-mutants`, the case that
//! `mutants/table.toml` names has to fail each time, for the reason that stands there; without it the case
//! has to pass each time.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::case::{Case, Level};
use crate::script::{Outcome, Target, Verdict, run};
use crate::suite::Instance;
use crate::via::{Programs, Siwd};

/// The mutants that the lab knows.
const TABLE: &str = include_str!("../mutants/table.toml");

/// Time in which rping starts again after a try that ended it.
const READY: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);

/// A fault of siwd, and the instance of a case that has to find it.
pub struct Mutant<'a> {
    pub name: String,
    pub fault: String,
    /// Part of the reason of each failure.
    pub reason: String,
    pub instance: Instance<'a>,
}

#[derive(Deserialize)]
struct Table {
    mutant: Vec<Row>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: String,
    case: String,
    fault: String,
    reason: String,
}

/// Tries of a case.
#[derive(Serialize)]
pub struct Tries {
    /// Tries that ended as they have to, of `all`. The first other one is the last.
    pub right: u32,
    pub all: u32,
    /// Verdict and reason of the last one.
    pub verdict: Verdict,
    pub reason: String,
}

impl Tries {
    pub fn are_right(&self) -> bool {
        self.right == self.all
    }
}

/// Verdicts on a mutant.
#[derive(Serialize)]
pub struct Judged {
    pub mutant: String,
    pub fault: String,
    pub case: String,
    /// Tries without the mutant.
    pub without: Tries,
    /// Tries with it; missing if a try without it did not pass.
    pub with: Option<Tries>,
    pub killed: bool,
}

impl Judged {
    /// One line about the tries that decided.
    pub fn summary(&self) -> String {
        let (kind, tries) = match &self.with {
            Some(with) => ("with", with),
            None => ("without", &self.without),
        };
        format!(
            "{kind} it {} of {}, {}: {}",
            tries.right,
            tries.all,
            tries.verdict.name(),
            tries.reason
        )
    }
}

/// All mutants against all of the lab's cases.
#[derive(Serialize)]
pub struct Summary {
    pub killed: usize,
    pub all: usize,
    /// Tries without and with each mutant.
    pub tries: u32,
    pub seconds: f64,
    pub seed: u64,
    pub mutants: Vec<Judged>,
}

/// Reads the table of mutants.
pub fn table(cases: &[Case]) -> Result<Vec<Mutant<'_>>> {
    let rows: Table = toml::from_str(TABLE).context("benches/lab/mutants/table.toml")?;
    let mut mutants: Vec<Mutant> = Vec::new();
    for row in rows.mutant {
        let Row { name, case, .. } = &row;
        if mutants.iter().any(|mutant| mutant.name == *name) {
            bail!("the table of mutants has {name} twice");
        }
        if row.reason.is_empty() {
            bail!("the mutant {name} has no reason");
        }
        let instance = find_instance(cases, case)
            .with_context(|| format!("case {case} of the mutant {name} does not exist"))?;
        mutants.push(Mutant {
            name: row.name,
            fault: row.fault,
            reason: row.reason,
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
            if mutants.iter().all(|mutant| mutant.name != *name) {
                bail!("siwd's mutant {name} is missing in the lab's table of mutants");
            }
        }
        for mutant in mutants {
            if names.iter().all(|name| mutant.name != *name) {
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

    /// Waits until siwd without a mutant converses.
    fn await_sanity(&mut self, target: &Target) -> Result<()> {
        let deadline = Instant::now() + READY;
        loop {
            self.select("")?;
            match target.sane(target.seed) {
                Ok(()) => return Ok(()),
                Err(failed) if Instant::now() > deadline => {
                    bail!("siwd without a mutant does not converse: {failed}")
                }
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// Runs the case of a mutant `all` times with a mutant, or with none, until a try is not right.
    fn try_case(
        &mut self,
        target: &Target,
        instance: &Instance,
        selected: &str,
        all: u32,
        is_right: impl Fn(&Outcome) -> bool,
    ) -> Result<Tries> {
        let mut tries = Tries {
            right: 0,
            all,
            verdict: Verdict::Pass,
            reason: String::new(),
        };
        for _ in 0..all {
            self.await_sanity(target)?;
            self.select(selected)?;
            let mut outcome = run(target, instance.case, &instance.params);
            if !self.siwd.as_mut().is_some_and(Siwd::runs) {
                outcome.worsen(Verdict::Dead, "siwd ended".into());
            }
            let is_right = is_right(&outcome);
            (tries.verdict, tries.reason) = (outcome.verdict, outcome.reason);
            if !is_right {
                break;
            }
            tries.right += 1;
        }
        Ok(tries)
    }

    /// Runs a mutant against its case, `all` times without the fault and as often with it.
    pub fn judge(&mut self, target: &Target, mutant: &Mutant, all: u32) -> Result<Judged> {
        let Instance { case, params } = &mutant.instance;
        let is_passed = |outcome: &Outcome| outcome.verdict <= Verdict::Recorded;
        let without = self.try_case(target, &mutant.instance, "", all, is_passed)?;
        let is_killed = |outcome: &Outcome| {
            let is_weak = case.level() == Level::Should && outcome.verdict == Verdict::Weak;
            (is_weak || outcome.verdict >= Verdict::Fail) && outcome.reason.contains(&mutant.reason)
        };
        let with = match without.are_right() {
            true => Some(self.try_case(target, &mutant.instance, &mutant.name, all, is_killed)?),
            false => None,
        };
        Ok(Judged {
            mutant: mutant.name.clone(),
            fault: mutant.fault.clone(),
            case: Outcome::of(case, params).name(),
            killed: with.as_ref().is_some_and(Tries::are_right),
            without,
            with,
        })
    }
}

/// Runs mutants, one after the other; `report` is called with each result as it comes.
pub fn judge_all(
    subject: &mut Subject,
    target: &Target,
    mutants: &[Mutant],
    tries: u32,
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
        let judged = subject.judge(target, mutant, tries)?;
        report(&judged);
        all.push(judged);
    }
    Ok(Summary {
        killed: all.iter().filter(|judged| judged.killed).count(),
        all: all.len(),
        tries,
        seconds: begin.elapsed().as_secs_f64(),
        seed: target.seed,
        mutants: all,
    })
}
