//! Decisions: which faults happen at a call, or by now.

use crate::kind::{Kind, Operation, Scope, Site};
use crate::plan::{Fault, Plan};
use crate::random::Random;
use std::time::Duration;

/// A fault that happens now.
#[derive(Debug, Clone, PartialEq)]
pub struct Hit {
    /// Index of the fault in the plan.
    pub fault: usize,
    /// Effect.
    pub kind: Kind,
    /// A number that the effect may draw its own from.
    pub drawn: u64,
}

/// The object that a [`Decider`] decides for, as plans aim at it.
#[derive(Debug, Clone, Default)]
struct Target<'a> {
    device: Option<&'a str>,
    qp: Option<u32>,
    ordinal: u64,
}

impl Target<'_> {
    fn is_aimed_at(&self, fault: &Fault) -> bool {
        let aim = &fault.aim;
        let has_device = match (&aim.device, self.device) {
            (Some(wanted), Some(device)) => wanted == device,
            _ => true,
        };
        has_device
            && (aim.qp.is_none() || aim.qp == self.qp)
            && aim.nth.is_none_or(|nth| nth == self.ordinal)
    }
}

/// Progress of one fault at one object.
#[derive(Debug)]
struct Progress {
    fault: usize,
    calls: u64,
    happened: u64,
    random: Random,
}

impl Progress {
    fn new(plan: &Plan, fault: usize, scope: Scope, ordinal: u64) -> Progress {
        Progress {
            fault,
            calls: 0,
            happened: 0,
            random: Random::derive(plan.seed, &[fault as u64, scope as u64, ordinal]),
        }
    }

    /// Counts a call, and decides whether the fault happens. Draws the same numbers whatever the time is.
    fn decide(&mut self, fault: &Fault, elapsed: Duration) -> Option<u64> {
        let trigger = &fault.trigger;
        self.calls += 1;
        let counted = self.calls.checked_sub(trigger.after_calls + 1)?;
        // The last one of each group of `every` calls.
        if (counted + 1) % trigger.every != 0 {
            return None;
        }
        let (share, drawn) = (self.random.share(), self.random.next());
        let is_left = trigger.count.is_none_or(|count| self.happened < count);
        if share >= trigger.probability || !trigger.has_time(elapsed) || !is_left {
            return None;
        }
        self.happened += 1;
        Some(drawn)
    }
}

/// A call as [`Decider::decide`] takes it.
#[derive(Debug, Clone, Copy, Default)]
struct Call<'a> {
    operation: Option<Operation>,
    device: Option<&'a str>,
    port: Option<u16>,
}

impl Call<'_> {
    /// Whether a fault of the site is meant for the call: others do not count it.
    fn is_meant(&self, fault: &Fault) -> bool {
        let has_operation = match &fault.kind {
            Kind::Completion {
                operation: Some(wanted),
                ..
            } => self.operation == Some(*wanted),
            _ => true,
        };
        has_operation
            && (fault.aim.port.is_none() || fault.aim.port == self.port)
            && match (&fault.aim.device, self.device) {
                (Some(wanted), Some(device)) => wanted == device,
                _ => true,
            }
    }
}

/// The faults of one object, with their progress.
#[derive(Debug)]
pub struct Decider {
    faults: Vec<Progress>,
}

impl Decider {
    fn new(plan: &Plan, scope: Scope, target: &Target<'_>) -> Decider {
        let all = plan.faults.iter().enumerate();
        let meant = all.filter(|(_, fault)| {
            fault.kind.has_scope(scope) && !fault.is_timed() && target.is_aimed_at(fault)
        });
        let faults = meant.map(|(index, _)| Progress::new(plan, index, scope, target.ordinal));
        Decider {
            faults: faults.collect(),
        }
    }

    /// The faults of a queue pair of a device. `ordinal` counts the queue pairs of the process from 1.
    pub fn of_queue_pair(plan: &Plan, device: &str, number: u32, ordinal: u64) -> Decider {
        let target = Target {
            device: Some(device),
            qp: Some(number),
            ordinal,
        };
        Decider::new(plan, Scope::QueuePair, &target)
    }

    /// The faults of an object of another scope than queue pair and process. `ordinal` counts the objects of
    /// the scope in the process from 1.
    pub fn of_object(plan: &Plan, scope: Scope, device: &str, ordinal: u64) -> Decider {
        let target = Target {
            device: Some(device),
            qp: None,
            ordinal,
        };
        Decider::new(plan, scope, &target)
    }

    /// The faults of the process.
    pub fn of_process(plan: &Plan) -> Decider {
        Decider::new(plan, Scope::Process, &Target::default())
    }

    /// Whether no fault can happen.
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty()
    }

    fn decide_call(
        &mut self,
        plan: &Plan,
        site: Site,
        elapsed: Duration,
        call: Call<'_>,
    ) -> Vec<Hit> {
        let mut hits = Vec::new();
        for progress in &mut self.faults {
            let fault = &plan.faults[progress.fault];
            if fault.kind.site() != site || !call.is_meant(fault) {
                continue;
            }
            if let Some(drawn) = progress.decide(fault, elapsed) {
                hits.push(Hit {
                    fault: progress.fault,
                    kind: fault.kind.clone(),
                    drawn,
                });
            }
        }
        hits
    }

    /// Counts a call, `elapsed` after the start of the program, and returns the faults that happen, in the order
    /// of the plan.
    pub fn decide(&mut self, plan: &Plan, site: Site, elapsed: Duration) -> Vec<Hit> {
        self.decide_call(plan, site, elapsed, Call::default())
    }

    /// As [`Self::decide`], for a completion.
    pub fn decide_completion(
        &mut self,
        plan: &Plan,
        operation: Operation,
        elapsed: Duration,
    ) -> Vec<Hit> {
        let call = Call {
            operation: Some(operation),
            ..Call::default()
        };
        self.decide_call(plan, Site::Completion, elapsed, call)
    }

    /// As [`Self::decide`], for a call of the process that has a device or a port. Returns the first fault: a
    /// call fails once.
    pub fn decide_of_process(
        &mut self,
        plan: &Plan,
        site: Site,
        elapsed: Duration,
        device: Option<&str>,
        port: Option<u16>,
    ) -> Option<Hit> {
        let call = Call {
            device,
            port,
            ..Call::default()
        };
        let hits = self.decide_call(plan, site, elapsed, call);
        hits.into_iter().next()
    }
}

/// Progress of a fault at the frames of a device in one direction.
#[derive(Debug)]
pub struct FrameDecider(Progress);

impl FrameDecider {
    /// Begins a fault of a plan. `ordinal` distinguishes the queues of frames of siwd.
    pub fn new(plan: &Plan, fault: usize, ordinal: u64) -> FrameDecider {
        FrameDecider(Progress::new(plan, fault, Scope::Port, ordinal))
    }

    /// Counts a frame that the fault is meant for, `elapsed` after the plan was loaded, and decides whether the
    /// fault happens: returns a number that its effect may draw its own from.
    pub fn decide(&mut self, fault: &Fault, elapsed: Duration) -> Option<u64> {
        self.0.decide(fault, elapsed)
    }
}

/// Other numbers that an effect draws from the number that its fault has drawn.
#[derive(Debug)]
pub struct Draws(Random);

impl Draws {
    /// Begins with the number of a fault.
    pub fn new(drawn: u64) -> Draws {
        Draws(Random::derive(drawn, &[]))
    }

    /// Draws a number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0.below(end)
    }

    /// Draws a number from 0 to 1, without 1.
    pub fn share(&mut self) -> f64 {
        self.0.share()
    }
}

/// One fault of a [`Timetable`].
#[derive(Debug)]
struct Entry {
    fault: usize,
    /// Time since the start of the program at which it happens next, with the number that it has drawn; None: not any
    /// more.
    next: Option<(Duration, u64)>,
    happened: u64,
    random: Random,
}

/// Most times in a row at which a fault does not happen by its probability.
const MOST_MISSES: u32 = 1_000_000;

impl Entry {
    /// Finds the first time from `time` on at which the fault happens.
    fn advance(&mut self, fault: &Fault, mut time: Duration) {
        let trigger = &fault.trigger;
        self.next = None;
        if trigger.count.is_some_and(|count| self.happened >= count) {
            return;
        }
        for _ in 0..MOST_MISSES {
            let (share, drawn) = (self.random.share(), self.random.next());
            if share < trigger.probability {
                self.next = Some((time, drawn));
                return;
            }
            match trigger.repeat {
                Some(pause) => time += pause,
                None => return,
            }
        }
    }
}

/// The faults of a context that happen at a time.
#[derive(Debug)]
pub struct Timetable {
    entries: Vec<Entry>,
}

impl Timetable {
    /// The faults of a context of a device. `ordinal` counts the contexts of the process from 1.
    pub fn of_context(plan: &Plan, device: &str, ordinal: u64) -> Timetable {
        let target = Target {
            device: Some(device),
            qp: None,
            ordinal,
        };
        Timetable::new(plan, Scope::Context, &target)
    }

    /// The faults of siwd that happen at a time since the plan was loaded.
    pub fn of_daemon(plan: &Plan) -> Timetable {
        Timetable::new(plan, Scope::Daemon, &Target::default())
    }

    fn new(plan: &Plan, scope: Scope, target: &Target<'_>) -> Timetable {
        let all = plan.faults.iter().enumerate();
        let meant = all.filter(|(_, fault)| {
            fault.kind.has_scope(scope) && fault.is_timed() && target.is_aimed_at(fault)
        });
        let entries = meant.map(|(index, fault)| {
            let mut entry = Entry {
                fault: index,
                next: None,
                happened: 0,
                random: Random::derive(plan.seed, &[index as u64, scope as u64, target.ordinal]),
            };
            entry.advance(fault, fault.trigger.after);
            entry
        });
        Timetable {
            entries: entries.collect(),
        }
    }

    /// Time since the start of the program at which the next fault happens.
    pub fn next(&self) -> Option<Duration> {
        let times = self.entries.iter().filter_map(|entry| entry.next);
        times.map(|(time, _)| time).min()
    }

    /// Takes the faults that have happened `elapsed` after the start of the program, in the order of their
    /// times.
    pub fn take_due(&mut self, plan: &Plan, elapsed: Duration) -> Vec<Hit> {
        let mut due = Vec::new();
        for entry in &mut self.entries {
            let fault = &plan.faults[entry.fault];
            while let Some((time, drawn)) = entry.next.filter(|(time, _)| *time <= elapsed) {
                entry.happened += 1;
                let hit = Hit {
                    fault: entry.fault,
                    kind: fault.kind.clone(),
                    drawn,
                };
                due.push((time, hit));
                match fault.trigger.repeat {
                    Some(pause) => entry.advance(fault, time + pause),
                    None => entry.next = None,
                }
            }
        }
        due.sort_by_key(|(time, _)| *time);
        due.into_iter().map(|(_, hit)| hit).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::Place;
    use std::path::Path;

    fn plan(text: &str) -> Plan {
        Plan::parse(Path::new("plan.toml"), text, Place::Program).unwrap()
    }

    /// The numbers of the calls, from 1, at which a fault of the first queue pair happens.
    fn calls(plan: &Plan, number: u64, elapsed: impl Fn(u64) -> Duration) -> Vec<u64> {
        let mut decider = Decider::of_queue_pair(plan, "siw0", 7, 1);
        let all = 1..=number;
        all.filter(|call| {
            !decider
                .decide(plan, Site::PostSend, elapsed(*call))
                .is_empty()
        })
        .collect()
    }

    fn at_once(_: u64) -> Duration {
        Duration::ZERO
    }

    #[test]
    fn calls_are_counted() {
        let fault = "[[fault]]\nkind = \"post_send\"\n";
        assert_eq!(calls(&plan(fault), 3, at_once), [1, 2, 3]);
        let with = |more: &str| plan(&format!("{fault}{more}"));
        assert_eq!(calls(&with("after_calls = 2"), 4, at_once), [3, 4]);
        assert_eq!(calls(&with("every = 3"), 10, at_once), [3, 6, 9]);
        assert_eq!(
            calls(&with("after_calls = 1\nevery = 3"), 8, at_once),
            [4, 7]
        );
        assert_eq!(calls(&with("every = 2\ncount = 2"), 9, at_once), [2, 4]);
        assert_eq!(calls(&with("probability = 0"), 100, at_once), [0; 0]);
        let second = |call: u64| Duration::from_secs(call);
        assert_eq!(calls(&with("after = \"3s\"\ncount = 1"), 9, second), [3]);
    }

    #[test]
    fn the_same_seed_makes_the_same_decisions_at_any_time() {
        let text = "[[fault]]\nkind = \"post_send\"\nprobability = 0.2\n";
        let first = calls(&plan(text), 1000, at_once);
        assert_eq!(first, calls(&plan(text), 1000, Duration::from_secs));
        assert!((150..250).contains(&first.len()), "{}", first.len());
        let other = calls(&plan(&format!("seed = 2\n{text}")), 1000, at_once);
        assert_ne!(first, other);
        // Numbers are drawn before `after`, too.
        let late = plan(&format!("{text}after = \"500s\"\n"));
        let late = calls(&late, 1000, Duration::from_secs);
        let expected: Vec<_> = first.into_iter().filter(|call| *call >= 500).collect();
        assert_eq!(late, expected);
    }

    #[test]
    fn queue_pairs_have_generators_of_their_own() {
        let plan = plan("[[fault]]\nkind = \"post_send\"\nprobability = 0.5\n");
        let mut first = Decider::of_queue_pair(&plan, "siw0", 1, 1);
        let mut second = Decider::of_queue_pair(&plan, "siw0", 2, 2);
        let hit = |decider: &mut Decider| {
            !decider
                .decide(&plan, Site::PostSend, Duration::ZERO)
                .is_empty()
        };
        // The order of calls of different queue pairs does not matter.
        let in_turn: Vec<_> = (0..64)
            .map(|_| (hit(&mut first), hit(&mut second)))
            .collect();
        let mut first = Decider::of_queue_pair(&plan, "siw0", 9, 1);
        let mut second = Decider::of_queue_pair(&plan, "siw0", 8, 2);
        let alone: Vec<_> = (0..64).map(|_| hit(&mut second)).collect();
        assert_eq!(alone, in_turn.iter().map(|turn| turn.1).collect::<Vec<_>>());
        let alone: Vec<_> = (0..64).map(|_| hit(&mut first)).collect();
        assert_eq!(alone, in_turn.iter().map(|turn| turn.0).collect::<Vec<_>>());
        assert!(in_turn.iter().any(|turn| turn.0 != turn.1));
    }

    #[test]
    fn faults_are_aimed() {
        let plan = plan(
            "[[fault]]\nkind = \"post_send\"\ndevice = \"siw1\"\n\
             [[fault]]\nkind = \"post_send\"\nqp = 7\n\
             [[fault]]\nkind = \"post_send\"\nnth = 2\n\
             [[fault]]\nkind = \"completion\"\noperation = \"receive\"\n\
             [[fault]]\nkind = \"create\"\nobject = \"mr\"\n\
             [[fault]]\nkind = \"reject\"\nport = 9\n",
        );
        let hits = |device: &str, number, ordinal| {
            let mut decider = Decider::of_queue_pair(&plan, device, number, ordinal);
            let hits = decider.decide(&plan, Site::PostSend, Duration::ZERO);
            hits.iter().map(|hit| hit.fault).collect::<Vec<_>>()
        };
        assert_eq!(hits("siw0", 1, 1), [0; 0]);
        assert_eq!(hits("siw1", 7, 2), [0, 1, 2]);
        assert_eq!(hits("siw0", 7, 1), [1]);
        let mut decider = Decider::of_queue_pair(&plan, "siw0", 1, 1);
        let mut completes = |operation| decider.decide_completion(&plan, operation, Duration::ZERO);
        assert!(completes(Operation::Send).is_empty());
        assert_eq!(completes(Operation::Receive)[0].fault, 3);
        let mut process = Decider::of_process(&plan);
        let mut decide =
            |site, port| process.decide_of_process(&plan, site, Duration::ZERO, None, port);
        let created = Site::Creation;
        assert!(decide(created(crate::Object::Cq), None).is_none());
        assert_eq!(decide(created(crate::Object::Mr), None).unwrap().fault, 4);
        assert!(decide(Site::Connect, Some(8)).is_none());
        assert_eq!(decide(Site::Connect, Some(9)).unwrap().fault, 5);
    }

    #[test]
    fn events_happen_at_their_times() {
        let plan = plan(
            "[[fault]]\nkind = \"event\"\nevent = \"PORT_ERR\"\nafter = \"1s\"\nrepeat = \"2s\"\ncount = 2\n\
             [[fault]]\nkind = \"event\"\nevent = \"PORT_ACTIVE\"\nafter = \"2s\"\nrepeat = \"2s\"\n\
             [[fault]]\nkind = \"event\"\nevent = \"QP_FATAL\"\nafter_calls = 1\n",
        );
        let mut table = Timetable::of_context(&plan, "siw0", 1);
        assert_eq!(table.next(), Some(Duration::from_secs(1)));
        let mut due = |seconds| {
            let due = table.take_due(&plan, Duration::from_secs(seconds));
            due.iter().map(|hit| hit.fault).collect::<Vec<_>>()
        };
        assert_eq!(due(0), [0; 0]);
        assert_eq!(due(3), [0, 1, 0]);
        assert_eq!(due(6), [1, 1]);
        assert_eq!(table.next(), Some(Duration::from_secs(8)));
        let mut calls = Decider::of_object(&plan, Scope::Context, "siw0", 1);
        let post = Site::ContextPost;
        assert!(calls.decide(&plan, post, Duration::ZERO).is_empty());
        assert_eq!(calls.decide(&plan, post, Duration::ZERO)[0].fault, 2);
    }

    #[test]
    fn the_time_of_the_next_event_is_one_at_which_it_happens() {
        let event = "[[fault]]\nkind = \"event\"\nevent = \"GID_CHANGE\"\nrepeat = \"1ms\"\n";
        let never = plan(&format!("{event}probability = 0\n"));
        assert_eq!(Timetable::of_context(&never, "siw0", 1).next(), None);
        let plan = plan(&format!("{event}probability = 0.1\ncount = 50\n"));
        let mut table = Timetable::of_context(&plan, "siw0", 1);
        let mut times = Vec::new();
        while let Some(time) = table.next() {
            assert_eq!(table.take_due(&plan, time).len(), 1);
            times.push(time.as_millis());
        }
        assert_eq!(times.len(), 50);
        assert!((250..1000).contains(times.last().unwrap()), "{times:?}");
    }

    #[test]
    fn faults_of_frames_repeat_with_their_seed_and_end_with_their_time() {
        let text = "[[fault]]\nkind = \"wire_drop\"\nprobability = 0.5\nlasts = \"500ms\"\n";
        let plan = Plan::parse(Path::new("plan.toml"), text, Place::Daemon).unwrap();
        let drops = |ordinal| {
            let mut decider = FrameDecider::new(&plan, 0, ordinal);
            let all = 0..1000;
            let hit = |frame: &u64| {
                let elapsed = Duration::from_millis(*frame);
                decider.decide(&plan.faults[0], elapsed).is_some()
            };
            all.filter(hit).collect::<Vec<_>>()
        };
        let first = drops(1);
        assert_eq!(first, drops(1));
        assert_ne!(first, drops(2));
        assert!((200..300).contains(&first.len()) && first.iter().all(|frame| *frame < 500));
    }

    #[test]
    fn faults_of_the_daemon_happen_at_their_times() {
        let text = "[[fault]]\nkind = \"control_stall\"\nstall_ms = 5\nafter = \"1s\"\nrepeat = \"2s\"\n\
                    [[fault]]\nkind = \"daemon_end\"\nhow = \"stop\"\nafter = \"2s\"\n\
                    [[fault]]\nkind = \"wire_drop\"\n";
        let plan = Plan::parse(Path::new("plan.toml"), text, Place::Daemon).unwrap();
        let mut table = Timetable::of_daemon(&plan);
        let due = table.take_due(&plan, Duration::from_secs(3));
        let faults: Vec<_> = due.iter().map(|hit| hit.fault).collect();
        assert_eq!(faults, [0, 1, 0]);
        assert_eq!(table.next(), Some(Duration::from_secs(5)));
    }
}
