//! Runs many instances, several at once, each between two sane conversations.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use crate::case::Case;
use crate::link::mix;
use crate::script::{Outcome, Target, Verdict, run};
use crate::via::restart_by;

/// A sane conversation counts for so long.
const FRESH: Duration = Duration::from_secs(1);
/// Time for a target to converse after it was started again.
const RESTART: Duration = Duration::from_secs(60);

pub struct Instance<'a> {
    pub case: &'a Case,
    pub params: Vec<(String, String)>,
}

/// Puts instances in the order of a run. Those whose path is impaired come last: a target may take a path
/// that loses much for a narrow one (RFC 8899 section 4.3), and remember it for minutes. With
/// `by_settings`, each set of settings has a target of its own; the plain one comes first.
pub fn order(instances: &mut [Instance<'_>], by_settings: bool) {
    instances.sort_by_key(|instance| instance.case.impairs_path());
    if by_settings {
        instances.sort_by(|a, b| a.case.settings.cmp(&b.case.settings));
    }
}

struct Suite<'a> {
    target: &'a Target,
    instances: &'a [Instance<'a>],
    next: AtomicUsize,
    conversations: AtomicU64,
    /// When a conversation was last seen to work.
    sane_at: Mutex<Option<Instant>>,
    stopped: &'a AtomicBool,
    dead_groups: Mutex<BTreeSet<String>>,
    /// The last sane conversation failed, its repetitions included.
    failing: AtomicBool,
    lost: Mutex<Option<String>>,
}

/// State from which a target returned to a conversation that works.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Recovery {
    /// It conversed at once, or its program was started again: rping ends at some errors.
    NotNeeded,
    /// It did not answer at all: it died, and was started again by other means than `--restart`.
    FromSilence,
}

/// End of a run.
pub struct Ran {
    /// Of the first instances, in their order; of all of them unless the run was stopped or the target
    /// lost.
    pub outcomes: Vec<Outcome>,
    /// The target did not converse any more, also not in another group: since when, and the symptom.
    pub lost: Option<String>,
}

/// Runs all instances; `report` is called with each outcome as it comes.
pub fn run_all(
    target: &Target,
    instances: &[Instance],
    jobs: usize,
    stopped: &AtomicBool,
    report: &(dyn Fn(&Outcome) + Sync),
) -> Ran {
    let suite = Suite {
        target,
        instances,
        next: AtomicUsize::new(0),
        conversations: AtomicU64::new(0),
        sane_at: Mutex::new(None),
        stopped,
        dead_groups: Mutex::default(),
        failing: AtomicBool::new(false),
        lost: Mutex::default(),
    };
    let outcomes = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                while let Some((index, outcome)) = suite.step() {
                    report(&outcome);
                    outcomes.lock().push((index, outcome));
                }
            });
        }
    });
    let mut outcomes = outcomes.into_inner();
    outcomes.sort_by_key(|(index, _)| *index);
    Ran {
        outcomes: outcomes.into_iter().map(|(_, outcome)| outcome).collect(),
        lost: suite.lost.into_inner(),
    }
}

impl Suite<'_> {
    fn step(&self) -> Option<(usize, Outcome)> {
        if self.stopped.load(Ordering::Relaxed) || self.lost().is_some() {
            return None;
        }
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        let Instance { case, params } = self.instances.get(index)?;
        if self.dead(case.group()) {
            let mut outcome = Outcome::of(case, params);
            outcome.worsen(
                Verdict::Inconclusive,
                "skipped: the target died in this group".into(),
            );
            return Some((index, outcome));
        }
        let failing = self.failing.load(Ordering::Relaxed);
        let before = self.sane(true);
        if let Err(reason) = &before
            && !self.restart(reason)
        {
            let mut outcome = Outcome::of(case, params);
            if failing {
                self.lost()
                    .get_or_insert_with(|| format!("before {}: {reason}", outcome.name()));
            }
            outcome.worsen(
                Verdict::Inconclusive,
                format!("the target does not converse before the case: {reason}"),
            );
            self.bury(case.group());
            return Some((index, outcome));
        }
        let mut outcome = run(self.target, case, params);
        match self.sane(false) {
            Ok(Recovery::NotNeeded) => {}
            Ok(Recovery::FromSilence) => outcome.worsen(
                Verdict::Dead,
                "the target did not answer after the case, and was started again".into(),
            ),
            Err(reason) => {
                let name = outcome.name();
                outcome.worsen(
                    Verdict::Dead,
                    format!("the target does not converse after the case: {reason}"),
                );
                if !self.restart(&format!("after {name} {reason}")) {
                    self.bury(case.group());
                }
            }
        }
        if !matches!(before, Ok(Recovery::NotNeeded)) {
            outcome.worsen(
                Verdict::Inconclusive,
                "the target died before the case, and was started again".into(),
            );
        }
        Some((index, outcome))
    }

    fn dead(&self, group: &str) -> bool {
        self.dead_groups.lock().contains(group)
    }

    fn lost(&self) -> MutexGuard<'_, Option<String>> {
        self.lost.lock()
    }

    fn bury(&self, group: &str) {
        self.dead_groups.lock().insert(group.to_owned());
    }

    /// Holds a sane conversation, and repeats it while the target's program may be starting again.
    fn sane(&self, recent_counts: bool) -> Result<Recovery, String> {
        let last = *self.sane_at.lock();
        if recent_counts && last.is_some_and(|at| at.elapsed() < FRESH) {
            return Ok(Recovery::NotNeeded);
        }
        // Time in which the target's program may be started again.
        self.converse(Instant::now() + self.target.patience * 3 / 2)
    }

    /// Starts a dead target again; returns whether it converses then.
    fn restart(&self, reason: &str) -> bool {
        let Some(command) = &self.target.restart else {
            return false;
        };
        if self.stopped.load(Ordering::Relaxed) {
            return false;
        }
        eprintln!("siw-lab: starting the target again: {reason}");
        if let Err(error) = restart_by(command) {
            eprintln!("siw-lab: the target was not started again: {error:#}");
            return false;
        }
        if self.converse(Instant::now() + RESTART).is_err() {
            return false;
        }
        let Some(agent) = &self.target.agent else {
            return true;
        };
        let mut agent = agent.lock();
        if let Err(error) = agent.reconnect() {
            eprintln!("siw-lab: {error:#}");
            return false;
        }
        true
    }

    fn converse(&self, deadline: Instant) -> Result<Recovery, String> {
        let mut recovery = Recovery::NotNeeded;
        loop {
            let number = self.conversations.fetch_add(1, Ordering::Relaxed);
            match self
                .target
                .sane(mix(self.target.seed, &format!("sane {number}")))
            {
                Ok(()) => {
                    *self.sane_at.lock() = Some(Instant::now());
                    self.failing.store(false, Ordering::Relaxed);
                    return Ok(recovery);
                }
                Err(failed)
                    if Instant::now() > deadline || self.stopped.load(Ordering::Relaxed) =>
                {
                    self.failing.store(true, Ordering::Relaxed);
                    return Err(failed.reason);
                }
                Err(failed) => {
                    if failed.is_silent {
                        recovery = Recovery::FromSilence;
                    }
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }
}
