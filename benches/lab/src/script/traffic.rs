//! Traffic between the lab and the agent: rounds of a Write, a Read of the same octets and a numbered Send, which the
//! agent answers with a Write and a Send. Both ends verify every octet.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{Level, Operator, Script, Value, Verdict};
use crate::case::Alternative;
use crate::stream::{Broken, Event, Region, Stream};
use crate::tcp::SegmentOptions;
use crate::wire::{FpduOptions, ReadRequest, Segment, opcode};

/// Time for all rounds, unless the step has `within=`.
const PATIENCE: Duration = Duration::from_secs(60);

/// Octets on their way: less than the window of a target that does not scale it.
const IN_FLIGHT: u64 = 48_000;

/// Longest silence before the lab looks at its windows and timers again.
const LOOK: Duration = Duration::from_millis(20);

/// Window that lets the target send.
const OPEN: u16 = u16::MAX;

/// Fields of `want traffic`.
struct Plan {
    rounds: u64,
    /// Octets of each message.
    size: u64,
    /// Rounds at once.
    depth: u64,
    /// Octets of each segment, whatever the FPDUs' boundaries; zero: an FPDU is a segment.
    chunk: usize,
    /// Payload of an FPDU.
    payload: usize,
    /// The lab writes, reads and sends; the agent writes before it answers.
    writes: bool,
    reads: bool,
    sends: bool,
    answers: bool,
    /// The lab's window shrinks, closes and opens all the time.
    games: bool,
    within: Duration,
}

/// Octet of a numbered message; the agent computes the same.
fn octet(round: u64, at: u64) -> u8 {
    if at < 4 {
        return (round >> (24 - 8 * at)) as u8;
    }
    let value = round
        .wrapping_mul(31)
        .wrapping_add(at.wrapping_mul(7))
        .wrapping_add((at >> 8).wrapping_mul(13));
    value.wrapping_add(5) as u8
}

struct Flow<'a> {
    plan: &'a Plan,
    stream: &'a mut Stream,
    region: Region,
    started: u64,
    responses: u64,
    written: u64,
    answers: u64,
    /// Payload of the unfinished messages.
    response: Vec<u8>,
    write: Vec<u8>,
    answer: Vec<u8>,
    sent_at: VecDeque<Instant>,
    took: Vec<Duration>,
    /// Octets that become segments of the same size.
    corked: Vec<u8>,
    looks: u64,
}

impl Flow<'_> {
    fn message(&self, round: u64) -> Vec<u8> {
        (0..self.plan.size).map(|at| octet(round, at)).collect()
    }

    /// Number of the content that a slot of the region has in a round.
    fn content(&self, round: u64) -> u64 {
        if self.plan.writes {
            round
        } else {
            round % self.plan.depth
        }
    }

    fn done(&self) -> u64 {
        match (self.plan.sends, self.plan.reads) {
            (true, true) => self.answers.min(self.responses),
            (true, false) => self.answers,
            (false, true) => self.responses,
            (false, false) if self.stream.tcp.all_acked() => self.started,
            (false, false) => self.started.saturating_sub(1),
        }
    }

    fn may_start(&self) -> bool {
        if self.started == self.plan.rounds {
            return false;
        }
        let in_flight = u64::from(self.stream.tcp.in_flight());
        let is_room = in_flight == 0 || in_flight + 2 * self.plan.size <= IN_FLIGHT;
        let is_answered = self.plan.sends || self.plan.reads;
        is_room && (!is_answered || self.started - self.done() < self.plan.depth)
    }

    fn emit(&mut self, segment: &Segment) {
        if self.plan.chunk == 0 {
            self.stream.send_segment(segment);
        } else {
            self.stream.tcp.note(true, segment.describe());
            let options = FpduOptions::default();
            let octets = self.stream.fpdu(&segment.encode(), &options, false);
            self.corked.extend(octets);
        }
    }

    fn uncork(&mut self) {
        let octets = std::mem::take(&mut self.corked);
        for piece in octets.chunks(self.plan.chunk.max(1)) {
            self.stream.tcp.send(piece, SegmentOptions::default());
        }
    }

    /// Sends a message in segments of the plan's payload.
    fn send_message(&mut self, first: &Segment, message: &[u8]) {
        for (index, piece) in message.chunks(self.plan.payload).enumerate() {
            let at = index * self.plan.payload;
            let mut segment = first.clone();
            segment.payload = piece.to_vec();
            segment.last = at + piece.len() == message.len();
            if segment.tagged {
                segment.to = segment.to.wrapping_add(at as u64);
            } else {
                segment.mo = at as u32;
            }
            self.emit(&segment);
        }
    }

    fn send_numbered(&mut self, round: u64) {
        let segment = self.stream.untagged(opcode::SEND, &[]);
        self.stream.msn[0] = self.stream.msn[0].wrapping_add(1);
        let message = self.message(round);
        self.send_message(&segment, &message);
    }

    fn start_round(&mut self) {
        let round = self.started;
        let slot = round % self.plan.depth * self.plan.size;
        if self.plan.writes || self.plan.reads && round < self.plan.depth {
            let mut segment = self.stream.untagged(opcode::WRITE, &[]);
            segment.tagged = true;
            segment.stag = self.region.stag;
            segment.to = self.region.base + slot;
            let message = self.message(self.content(round));
            self.send_message(&segment, &message);
        }
        if self.plan.reads {
            let read = ReadRequest {
                sink_stag: self.stream.lab_stag,
                sink_to: self.stream.lab_base + slot,
                size: self.plan.size as u32,
                source_stag: self.region.stag,
                source_to: self.region.base + slot,
            };
            let segment = self.stream.untagged(opcode::READ_REQUEST, &read.encode());
            self.stream.msn[1] = self.stream.msn[1].wrapping_add(1);
            self.emit(&segment);
        }
        if self.plan.sends {
            self.send_numbered(round);
        }
        self.started += 1;
        self.sent_at.push_back(Instant::now());
    }

    /// Takes a segment of the target; the error says what is wrong with it.
    fn take(&mut self, segment: &Segment) -> Result<(), String> {
        let (got, number, what) = match segment.opcode {
            opcode::READ_RESPONSE => {
                let slot = self.responses % self.plan.depth * self.plan.size;
                let place = self.stream.lab_base + slot + self.response.len() as u64;
                if (segment.stag, segment.to) != (self.stream.lab_stag, place) {
                    return Err(format!("Response {} has another place", self.responses));
                }
                (&mut self.response, &mut self.responses, "Response")
            }
            opcode::WRITE => (&mut self.write, &mut self.written, "Write"),
            opcode::SEND | opcode::SEND_SE => (&mut self.answer, &mut self.answers, "answer"),
            _ => return Err("another message than expected".into()),
        };
        got.extend(&segment.payload);
        if !segment.last {
            return Ok(());
        }
        let got = std::mem::take(got);
        let round = *number;
        *number += 1;
        let wanted = match segment.opcode {
            opcode::READ_RESPONSE => self.message(self.content(round)),
            _ => self.message(round),
        };
        match (0..got.len().max(wanted.len())).find(|at| got.get(*at) != wanted.get(*at)) {
            Some(at) => Err(format!("{what} {round} differs first at octet {at}")),
            None => Ok(()),
        }
    }

    fn play_with_the_window(&mut self, is_quiet: bool) {
        const WINDOWS: [u16; 6] = [OPEN, 300, 1, 4000, 0, 2000];
        self.looks += 1;
        let window = WINDOWS[self.looks as usize % WINDOWS.len()];
        self.stream.tcp.window = if is_quiet { OPEN } else { window };
        self.stream.tcp.send_ack();
    }

    fn run(&mut self) -> Result<(), Broken> {
        let until = Instant::now() + self.plan.within;
        let mut is_ending = false;
        loop {
            while self.may_start() {
                self.start_round();
            }
            if self.started == self.plan.rounds && self.done() == self.plan.rounds {
                if !self.plan.sends && !std::mem::replace(&mut is_ending, true) {
                    // The agent's answer shows that all of it has arrived.
                    self.send_numbered(0);
                }
                let answered = self.plan.sends || self.answers == 1;
                if answered && self.stream.tcp.all_acked() {
                    return Ok(());
                }
            }
            self.uncork();
            let before = self.done();
            let event = self.stream.event(LOOK);
            if self.plan.games {
                self.play_with_the_window(event == Event::Quiet);
            }
            let wrong = match &event {
                Event::Quiet if Instant::now() < until => None,
                Event::Quiet => Some("it is not done in time".to_owned()),
                Event::Fpdu(_, Some(segment)) => self.take(segment).err(),
                _ => Some("the stream does not go on".to_owned()),
            };
            if let Some(wrong) = wrong {
                let text = format!(
                    "{wrong}, after {} of {} rounds: {}",
                    self.done(),
                    self.plan.rounds,
                    event.describe()
                );
                let event = Box::new(event);
                return Err(Broken { text, event });
            }
            for _ in before..self.done() {
                let begun = self.sent_at.pop_front();
                self.took.extend(begun.map(|at| at.elapsed()));
            }
        }
    }

    fn figures(&mut self, took: Duration) -> String {
        let plan = self.plan;
        let messages = [
            plan.writes,
            plan.reads,
            plan.sends,
            plan.sends,
            plan.sends && plan.answers,
        ];
        let messages = messages.iter().filter(|used| **used).count() as u64;
        let bits = 8 * messages * plan.rounds * plan.size;
        self.took.sort_unstable();
        let percentile = |thousandth: usize| {
            let at = (self.took.len() * thousandth / 1000).min(self.took.len().saturating_sub(1));
            self.took.get(at).map_or(0, Duration::as_micros)
        };
        let mut text = format!(
            "{} rounds of {} octets, {} at once: {} ms, {:.1} Mbit/s; a round p50 {} us, p99 {} us, p99.9 {} us; {} ACKs without data",
            plan.rounds,
            plan.size,
            plan.depth,
            took.as_millis(),
            bits as f64 / took.as_secs_f64() / 1e6,
            percentile(500),
            percentile(990),
            percentile(999),
            self.stream.tcp.pure_acks,
        );
        if let Some((out, back)) = self.stream.tcp.impaired() {
            let lost = format!(
                "; lost {} of {} segments to the target, {} of {} from it",
                out.lost, out.segments, back.lost, back.segments
            );
            text.push_str(&lost);
        }
        text
    }
}

impl Script<'_> {
    fn plan(&mut self, wanted: &Alternative) -> Result<Plan> {
        let mut plan = Plan {
            rounds: 100,
            size: 2000,
            depth: 4,
            chunk: 0,
            payload: 1024,
            writes: true,
            reads: true,
            sends: true,
            answers: true,
            games: false,
            within: wanted.within.unwrap_or(PATIENCE),
        };
        for comparison in &wanted.comparisons {
            let (Operator::Equal, Value::Expr(expr)) = (comparison.operator, &comparison.value)
            else {
                bail!("want traffic takes numbers, as rounds=100");
            };
            let value = self.number(expr)?;
            match comparison.field.as_str() {
                "rounds" => plan.rounds = value,
                "size" => plan.size = value.max(1),
                "depth" => plan.depth = value.max(1),
                "chunk" => plan.chunk = value as usize,
                "payload" => plan.payload = value.max(1) as usize,
                "writes" => plan.writes = value != 0,
                "reads" => plan.reads = value != 0,
                "sends" => plan.sends = value != 0,
                "answers" => plan.answers = value != 0,
                "games" => plan.games = value != 0,
                other => bail!("{other} is no field of want traffic"),
            }
        }
        Ok(plan)
    }

    /// Runs the traffic of a step; returns its figures, or what broke it.
    pub(super) fn traffic(&mut self, wanted: &Alternative) -> Result<Result<String, Broken>> {
        let mut plan = self.plan(wanted)?;
        let stream = self.stream()?;
        let region = stream
            .region
            .context("want traffic needs a line with region r")?;
        if plan.reads {
            let depths = stream.theirs.as_ref().and_then(|reply| reply.depths());
            plan.depth = plan.depth.min(depths.map_or(1, |d| d.0.into())).max(1);
        }
        if (plan.writes || plan.reads) && plan.depth * plan.size > region.len.into() {
            bail!("region r has less than {} octets", plan.depth * plan.size);
        }
        let messages = if plan.sends { plan.rounds } else { 1 };
        let command = serde_json::json!({
            "do": "serve", "size": plan.size, "depth": plan.depth, "count": messages,
            "stag": stream.lab_stag, "to": stream.lab_base, "writes": u8::from(plan.answers),
            "ms": (plan.within + PATIENCE).as_millis() as u64,
        });
        self.ask(&command)?;
        let (Some(stream), Some(agent)) = (&mut self.stream, &mut self.agent) else {
            bail!("no stream");
        };
        agent.expect_another();
        stream.tcp.pure_acks = 0;
        let mut flow = Flow {
            plan: &plan,
            stream,
            region,
            started: 0,
            responses: 0,
            written: 0,
            answers: 0,
            response: Vec::new(),
            write: Vec::new(),
            answer: Vec::new(),
            sent_at: VecDeque::new(),
            took: Vec::new(),
            corked: Vec::new(),
            looks: 0,
        };
        let began = Instant::now();
        let result = flow.run();
        let took = began.elapsed();
        let figures = flow.figures(took);
        let tcp = &mut flow.stream.tcp;
        tcp.window = OPEN;
        if result.is_err() && tcp.ending.is_none() {
            // Ends the agent's part.
            tcp.send_reset(0);
        }
        let until = Instant::now() + self.target.patience * 2;
        let served = loop {
            // Acknowledges what arrives meanwhile.
            if let Some(served) = agent.answer_within(Duration::from_millis(5))? {
                break served;
            }
            if Instant::now() > until {
                bail!("the agent does not end its part of the traffic");
            }
            let soon = Instant::now() + Duration::from_millis(5);
            while tcp.pump(soon) {}
        };
        self.outcome
            .notes
            .push(format!("traffic: {figures}; the agent: {served}"));
        if served["bad"].as_u64() != Some(0) {
            let text = format!("the agent received wrong octets: {served}");
            let verdict = match self.case.level() {
                Level::May => Verdict::Recorded,
                _ => Verdict::Fail,
            };
            self.outcome.worsen(verdict, text);
        }
        Ok(match result {
            Ok(()) if served["ended"] != "" => Err(Broken {
                text: format!("the agent's stream ended: {served}"),
                event: Box::new(Event::Quiet),
            }),
            Ok(()) => Ok(figures),
            Err(broken) => Err(broken),
        })
    }

    /// Registers regions and looks at their keys: `count=`, `held=`, `size=` say what the agent does; `guessed` is the
    /// share of keys, in thousandths, that follow from the two before by a constant step; `reuse` the shortest distance
    /// of equal keys; `tops` the number of different first octets; `rate` registrations per second.
    pub(super) fn want_keys(&mut self, wanted: &Alternative) -> Result<bool> {
        let mut command = serde_json::json!({ "do": "keys" });
        for comparison in &wanted.comparisons {
            if let ("count" | "held" | "size", Value::Expr(expr)) =
                (comparison.field.as_str(), &comparison.value)
            {
                command[comparison.field.as_str()] = self.number(expr)?.into();
            }
        }
        let notes = self.outcome.notes.len();
        let answer = self.ask(&command)?;
        // Ten thousand keys are no note.
        self.outcome.notes.truncate(notes);
        let keys: Vec<u64> = answer["keys"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(serde_json::Value::as_u64)
            .collect();
        let last_seen = &mut std::collections::HashMap::new();
        let distance = |(at, key): (usize, &u64)| Some(at - last_seen.insert(*key, at)?);
        let reuse = keys.iter().enumerate().filter_map(distance).min();
        let step = |a: u64, b: u64| (b as u32).wrapping_sub(a as u32);
        let guessed = keys
            .windows(3)
            .filter(|k| step(k[0], k[1]) == step(k[1], k[2]))
            .count();
        let tops: std::collections::BTreeSet<u64> = keys.iter().map(|key| key >> 24).collect();
        let us = answer["us"].as_u64().unwrap_or(0).max(1);
        let found = [
            ("guessed", 1000 * guessed as u64 / keys.len().max(1) as u64),
            ("reuse", reuse.unwrap_or(keys.len()) as u64),
            ("tops", tops.len() as u64),
            ("rate", keys.len() as u64 * 1_000_000 / us),
        ];
        let mut good = true;
        for comparison in &wanted.comparisons {
            if let Some((_, value)) = found.iter().find(|(name, _)| *name == comparison.field) {
                good &= self.holds(comparison, &super::Found::Number(*value))?;
            }
        }
        let all = found.map(|(name, value)| format!("{name} {value}"));
        let actual = format!("{} keys: {}", keys.len(), all.join(", "));
        self.outcome.notes.push(actual.clone());
        self.decide(wanted, good, &actual)
    }

    /// Time since the steps began, or since the last `clock`.
    pub(super) fn want_elapsed(&mut self, wanted: &Alternative) -> Result<bool> {
        let elapsed = self.clock.elapsed();
        let mut good = true;
        for comparison in &wanted.comparisons {
            good &= self.holds(
                comparison,
                &super::Found::Number(elapsed.as_millis() as u64),
            )?;
        }
        self.decide(wanted, good, &format!("{} us", elapsed.as_micros()))
    }
}
