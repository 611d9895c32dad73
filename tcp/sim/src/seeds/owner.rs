//! The owner of one end of a connection: reads and checks received data, and follows its script.

use std::collections::VecDeque;

use siw_net::{ConnId, Instant};
use siw_tcp::{Events, TcpState};

use crate::seeds::plan::OwnerStep;
use crate::{Pattern, Rng, SimNet};

/// One end of a connection, and the progress of its owner.
pub(super) struct ScriptedOwner {
    pub(super) id: ConnId,
    pub(super) host: usize,
    script: VecDeque<OwnerStep>,
    /// Time of the network at which the script continues.
    ready_at: Instant,
    pub(super) reads_from: Instant,
    read_step: usize,
    salt: u64,
    peer_salt: u64,
    pub(super) pushed: u64,
    /// Pushed records that are not fully acknowledged: number of acknowledged units, and of all units.
    unacked_units: VecDeque<(u16, u16)>,
    pub(super) received: u64,
    pub(super) events: Events,
    pub(super) is_closed: bool,
    pub(super) is_aborted: bool,
    pub(super) released_at: Option<Instant>,
    /// Bytes that were not acknowledged when the connection was released.
    pub(super) unacked_at_release: u32,
    pub(super) opened_at: Instant,
}

impl ScriptedOwner {
    pub(super) fn new(
        id: ConnId,
        host: usize,
        now: Instant,
        script: &[OwnerStep],
        read_step: usize,
        [salt, peer_salt]: [u64; 2],
    ) -> Self {
        ScriptedOwner {
            id,
            host,
            script: script.iter().copied().collect(),
            ready_at: now,
            reads_from: now,
            read_step,
            salt,
            peer_salt,
            pushed: 0,
            unacked_units: VecDeque::new(),
            received: 0,
            events: Events::NONE,
            is_closed: false,
            is_aborted: false,
            released_at: None,
            unacked_at_release: 0,
            opened_at: now,
        }
    }

    /// Returns whether the owner reads received data.
    pub(super) fn is_reading(&self, now: Instant) -> bool {
        now >= self.reads_from
    }

    /// Returns when the owner acts next without an event; `None`: it waits for one.
    pub(super) fn next_action(&self, now: Instant) -> Option<Instant> {
        let script = (!self.script.is_empty()).then_some(self.ready_at);
        let all = [script, Some(self.reads_from)];
        all.into_iter().flatten().filter(|at| *at > now).min()
    }

    /// Returns whether the script is finished or the connection released.
    pub(super) fn is_done(&self) -> bool {
        self.script.is_empty() || self.released_at.is_some()
    }

    /// Reads and checks received data, and continues the script.
    pub(super) fn work(&mut self, net: &mut SimNet<Pattern>, rng: &mut Rng) -> Result<(), String> {
        if self.released_at.is_some() {
            return Ok(());
        }
        let now = net.now;
        self.take_acked(net)?;
        if self.is_reading(now) {
            self.read(net)?;
        }
        if self.events.contains(Events::CLOSED) {
            self.is_closed = true;
            net.hosts[self.host].take_unacked(self.id, drop);
            self.release(net);
            return Ok(());
        }
        let waits = Events::CONNECTED | Events::ACCEPTED;
        while now >= self.ready_at && self.events.intersects(waits) {
            let Some(step) = self.script.pop_front() else {
                break;
            };
            if !self.take_step(net, rng, step) {
                break;
            }
        }
        if self.released_at.is_none() {
            net.flush(self.host, self.id);
        }
        Ok(())
    }

    /// Checks that every unit of every record is acknowledged once, in order.
    fn take_acked(&mut self, net: &mut SimNet<Pattern>) -> Result<(), String> {
        let (host, unacked) = (self.host, &mut self.unacked_units);
        let mut result = Ok(());
        net.hosts[host].take_acked_units(self.id, |_, range| match unacked.front_mut() {
            Some((acked, units)) if *acked == range.start && range.end <= *units => {
                *acked = range.end;
                if range.end == *units {
                    unacked.pop_front();
                }
            }
            front => result = Err(format!("host {host}: {range:?} acknowledged of {front:?}")),
        });
        result
    }

    fn read(&mut self, net: &mut SimNet<Pattern>) -> Result<(), String> {
        let Some(queue) = net.hosts[self.host].receive_queue(self.id) else {
            return Ok(());
        };
        let most = if self.read_step > 0 {
            self.read_step
        } else {
            usize::MAX
        };
        let count = queue.len_bytes().min(most);
        let (mut at, mut wrong) = (self.received, None);
        queue.for_each_chunk(0, count, |chunk| {
            wrong = wrong.or_else(|| Pattern::first_difference(self.peer_salt, at, chunk));
            at += chunk.len() as u64;
        });
        if let Some(at) = wrong {
            return Err(format!(
                "host {} received byte {at} with another value",
                self.host
            ));
        }
        queue.consume(count);
        self.received = at;
        Ok(())
    }

    /// Performs a step; returns `false` if it or the next step must wait.
    fn take_step(&mut self, net: &mut SimNet<Pattern>, rng: &mut Rng, step: OwnerStep) -> bool {
        let now = net.now;
        match step {
            OwnerStep::Send { bytes, record } => {
                let left = self.push(net, rng, bytes, record);
                if left > 0 {
                    self.script.push_front(OwnerStep::Send {
                        bytes: left,
                        record,
                    });
                }
                left == 0
            }
            OwnerStep::Trickle {
                records,
                size,
                pause,
            } => {
                let left = self.push(net, rng, size, size);
                let records = records - u32::from(left == 0);
                if records > 0 {
                    self.script.push_front(OwnerStep::Trickle {
                        records,
                        size,
                        pause,
                    });
                }
                self.ready_at = now + pause;
                false
            }
            OwnerStep::Wait(time) => {
                self.ready_at = now + time;
                false
            }
            OwnerStep::StopReading(time) => {
                self.reads_from = now + time;
                true
            }
            OwnerStep::WaitForFin => {
                let done = self.events.contains(Events::PEER_FIN);
                if !done {
                    self.script.push_front(step);
                }
                done
            }
            OwnerStep::Close => {
                let clock = net.clock(self.host);
                net.hosts[self.host].close(clock, self.id);
                true
            }
            OwnerStep::Abort => {
                let clock = net.clock(self.host);
                self.is_aborted = true;
                net.hosts[self.host].abort(clock, self.id);
                self.release(net);
                false
            }
            OwnerStep::Release => {
                self.release(net);
                false
            }
        }
    }

    /// Releases the connection unless already released.
    pub(super) fn release(&mut self, net: &mut SimNet<Pattern>) {
        if self.released_at.is_none() {
            let (clock, stack) = (net.clock(self.host), &mut net.hosts[self.host]);
            if let Some(info) = stack.tcp_info(self.id) {
                self.unacked_at_release = info.unsent + info.in_flight;
            }
            stack.release(clock, self.id);
            self.released_at = Some(net.now);
        }
    }

    /// Pushes records of `bytes` bytes in total, some as runs; returns how many bytes found no room.
    fn push(&mut self, net: &mut SimNet<Pattern>, rng: &mut Rng, bytes: u32, record: u32) -> u32 {
        let stack = &mut net.hosts[self.host];
        let mut left = bytes;
        while left > 0 {
            let Some(info) = stack.tcp_info(self.id) else {
                return 0;
            };
            if !matches!(info.state, TcpState::Established | TcpState::CloseWait) {
                return 0; // closing: no more data can be sent
            }
            let longest = if record > 0 {
                record
            } else {
                info.effective_mss as u32
            };
            let len = longest.min(left).max(1);
            let room = stack.send_room(self.id) as u32;
            if room < len && (room == 0 || info.unsent > 0) {
                break;
            }
            let start = self.pushed;
            let push = len == left || rng.chance(0.2);
            let record = Pattern {
                salt: self.salt,
                start,
            };
            let most = (left / len).min(room / len).clamp(1, 40);
            let units = if rng.chance(0.3) {
                rng.below(u64::from(most)) as u16 + 1
            } else {
                1
            };
            let pushed = stack.push_records(self.id, |records| {
                records.push_run((len, units), record, push);
            });
            if pushed.is_none() {
                return 0;
            }
            self.unacked_units.push_back((0, units));
            let len = len * u32::from(units);
            self.pushed += u64::from(len);
            left -= len;
        }
        left
    }
}
