//! One run: carries out the plan step by step and applies the checks after each step.

use std::cell::{Cell, RefCell};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use siw_net::{Instant, VecBuf};
use siw_tcp::{Events, Stack, StackConfig};

use crate::forge::{Ends, Tcp};
use crate::seeds::SeedOutcome;
use crate::seeds::judge::RunJudge;
use crate::seeds::owner::ScriptedOwner;
use crate::seeds::plan::{ConnectionPlan, NetEvent, SeedPlan};
use crate::wire_oracle::{FlowEnds, WireOracle, salt_of};
use crate::wire_view::{self, tcp_view};
use crate::{Pattern, Rng, SimNet};

/// Time after the last event that owners have to finish before everything is released.
const ACTIVE_TIME: Duration = Duration::from_secs(60);
/// Time after which nothing may be left: longer than any deadline of the drawn configurations.
const DRAIN_TIME: Duration = Duration::from_secs(600);
/// Allowed wake-ups without a frame: a base number, and a number per second.
const IDLE_STEPS: u64 = 400;
const IDLE_STEPS_PER_SECOND: u64 = 50;

/// Delay of an ACK by a peer of another kind.
pub(super) const LATE_ACK: Duration = Duration::from_millis(40);

/// Type and code of soft errors: network and host unreachable (IPv6: no route, address unreachable),
/// time exceeded, parameter problem.
const SOFT_ERRORS_V4: [[u8; 2]; 4] = [[3, 0], [3, 1], [11, 0], [12, 0]];
const SOFT_ERRORS_V6: [[u8; 2]; 4] = [[1, 0], [1, 3], [3, 0], [4, 0]];

/// A connection of the plan, and its two owners once it is open.
pub(super) struct PlannedFlow {
    pub(super) plan: ConnectionPlan,
    pub(super) ends: FlowEnds,
    pub(super) owners: [Option<ScriptedOwner>; 2],
    pub(super) is_opened: bool,
    /// Another connection of the run has the same endpoints.
    pub(super) is_reused: bool,
}

/// Called with every frame: seconds since the start, host, whether the host sent it, and the frame.
type FrameListener = Box<dyn Fn(f64, usize, bool, &[u8])>;

pub(super) struct SeedRun {
    pub(super) plan: SeedPlan,
    pub(super) net: SimNet<Pattern>,
    pub(super) flows: Vec<PlannedFlow>,
    pub(super) start: Instant,
    pub(super) is_dead: [bool; 2],
    pub(super) least_delay: Duration,
    next_event: usize,
    /// Every owner releases its connection, also that of a connection accepted from now on.
    is_ending: bool,
    rng: Rng,
    cut: Rc<Cell<[bool; 2]>>,
    neighbours_lost: Rc<Cell<bool>>,
    last_frames: Rc<RefCell<[Vec<u8>; 2]>>,
    /// The last segment that each host sent.
    last_sent: Rc<RefCell<[Vec<u8>; 2]>>,
    listener: Rc<RefCell<Option<FrameListener>>>,
    judge: RunJudge,
    pub(super) outcome: SeedOutcome,
}

fn address(host: usize, is_v6: bool) -> IpAddr {
    let number = host as u8 + 1;
    if is_v6 {
        std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, number.into()).into()
    } else {
        std::net::Ipv4Addr::new(10, 0, 0, number).into()
    }
}

fn ends_of(plan: &ConnectionPlan) -> FlowEnds {
    let port = |host| {
        if host == plan.opener {
            plan.local_port
        } else {
            plan.remote_port
        }
    };
    [0, 1].map(|host| SocketAddr::new(address(host, plan.is_v6), port(host)))
}

/// Offset of each clock, chosen so that the initial sequence numbers of the first connection are as
/// far before their wrap as the plan says.
fn clock_offsets(plan: &SeedPlan, start: Instant) -> [Duration; 2] {
    let first = &plan.connections[0];
    let ends = ends_of(first);
    // The peer chooses its own when the SYN arrives, after an address resolution.
    let path = plan.links[0].delay + plan.links[1].delay + plan.links[first.opener].delay;
    [0, 1].map(|host| {
        let stack = Stack::<VecBuf, Pattern>::new(plan.configs[host].clone(), start);
        let later = if host == first.opener {
            Duration::ZERO
        } else {
            path
        };
        let at = start + Duration::from_nanos(plan.clocks[host]) + first.at + later;
        let drawn = stack
            .ok()
            .and_then(|stack| stack.initial_sequence(at, ends[host], ends[1 - host]));
        let wanted = plan.before_wrap[host].wrapping_neg();
        // The sequence clock ticks every 2^12 ns (RFC 6528).
        let ticks = wanted.wrapping_sub(drawn.unwrap_or(wanted));
        Duration::from_nanos(plan.clocks[host] + (u64::from(ticks) << 12))
    })
}

fn is_about_neighbours(frame: &[u8]) -> bool {
    let tagged = usize::from(frame[12..14] == [0x81, 0]) * 4;
    match frame[12 + tagged..14 + tagged] {
        [8, 6] => true,
        [0x86, 0xdd] => frame[20 + tagged] == 58 && (133..=137).contains(&frame[54 + tagged]),
        _ => false,
    }
}

impl SeedRun {
    pub(super) fn new(seed: u64) -> SeedRun {
        let plan = SeedPlan::draw(seed);
        let start = Instant::from_millis(1_000_000);
        let offsets = clock_offsets(&plan, start);
        let mut net = SimNet::with_clocks(seed, plan.configs.clone(), plan.links, offsets);
        let narrows = |event: &(Duration, NetEvent)| matches!(event.1, NetEvent::Narrow { .. });
        let mut oracle = WireOracle::new(plan.events.iter().any(narrows));
        oracle.sends_cookies = plan.configs.iter().any(|config| config.tcp.syn_cookies);
        net.oracle = Some(oracle);
        let (cut, neighbours_lost) = (Rc::new(Cell::new([false; 2])), Rc::new(Cell::new(false)));
        let (is_cut, is_lost) = (cut.clone(), neighbours_lost.clone());
        net.filter = Some(Box::new(move |from, frame| {
            !(is_cut.get()[from] || is_lost.get() && is_about_neighbours(frame))
        }));
        let last_frames = Rc::new(RefCell::new([vec![], vec![]]));
        let listener: Rc<RefCell<Option<FrameListener>>> = Rc::default();
        let last_sent = Rc::new(RefCell::new([vec![], vec![]]));
        let is_quoted =
            |event: &(Duration, NetEvent)| matches!(event.1, NetEvent::SoftError { .. });
        let quotes = plan.events.iter().any(is_quoted);
        let floods = plan
            .events
            .iter()
            .any(|event| matches!(event.1, NetEvent::Flood { .. }));
        let first_ends = ends_of(&plan.connections[0]);
        let (kept, quoted, shown) = (last_frames.clone(), last_sent.clone(), listener.clone());
        net.tap = Some(Box::new(move |at: Instant, host, sent, frame: &[u8]| {
            if let Some(listener) = &*shown.borrow() {
                listener(at.duration_since(start).as_secs_f64(), host, sent, frame);
            }
            if quotes && sent && tcp_view(frame).is_some() {
                quoted.borrow_mut()[host] = frame.to_vec();
            }
            if floods
                && sent
                && let Some(view) = tcp_view(frame)
                && (view.source, view.destination) == (first_ends[host], first_ends[1 - host])
                && view.flags == wire_view::ACK
            {
                kept.borrow_mut()[host] = frame.to_vec();
            }
        }));
        let flows = plan.connections.iter().map(|plan| PlannedFlow {
            ends: ends_of(plan),
            plan: plan.clone(),
            owners: [None, None],
            is_opened: false,
            is_reused: false,
        });
        let mut flows: Vec<_> = flows.collect();
        for index in 0..flows.len() {
            let same = flows
                .iter()
                .filter(|flow| flow.ends == flows[index].ends)
                .count();
            flows[index].is_reused = same > 1;
        }
        let mut run = SeedRun {
            least_delay: plan.links[0].delay + plan.links[1].delay,
            plan,
            net,
            flows,
            start,
            is_dead: [false; 2],
            next_event: 0,
            is_ending: false,
            rng: Rng::new(seed ^ 0x00c0_ffee),
            cut,
            neighbours_lost,
            last_frames,
            last_sent,
            listener,
            judge: RunJudge::default(),
            outcome: SeedOutcome::default(),
        };
        for host in 0..2 {
            run.listen(host);
        }
        run
    }

    /// Sets the listener that is called with every frame.
    pub(super) fn record_frames(&mut self, listener: impl Fn(f64, usize, bool, &[u8]) + 'static) {
        *self.listener.borrow_mut() = Some(Box::new(listener));
    }

    fn listen(&mut self, host: usize) {
        let ports: Vec<_> = (self.flows.iter().map(|flow| &flow.plan))
            .filter(|plan| plan.opener != host)
            .map(|plan| plan.remote_port)
            .collect();
        for port in ports {
            let backlog = self.plan.backlog;
            let _ = self.net.hosts[host].listen(None, port, backlog, 0); // the port may already be in use
        }
    }

    fn config_of(&self, host: usize) -> StackConfig {
        self.plan.configs[host].clone()
    }

    /// Runs the plan to its end, and on until nothing is left.
    pub(super) fn finish(mut self) -> Result<SeedOutcome, String> {
        let last = self
            .plan
            .events
            .last()
            .map_or(Duration::ZERO, |event| event.0);
        let opened = self.plan.connections.iter().map(|plan| plan.at).max();
        let limit = self.start + last + opened.unwrap_or_default() + ACTIVE_TIME;
        self.run_until(limit, |run| run.are_owners_done())?;
        // Owners who read release first: their connections must end even if the owner of the peer keeps
        // its window closed.
        let limit = self.net.now + DRAIN_TIME;
        self.release_owners(true);
        self.run_until(limit, Self::are_released_gone)?;
        self.is_ending = true;
        let limit = self.net.now + DRAIN_TIME;
        self.run_until(limit, |run| {
            (0..2).all(|host| run.find_leak(host).is_none())
        })?;
        for host in 0..2 {
            if let Some(leak) = self.find_leak(host) {
                return Err(format!("host {host} still has {leak}"));
            }
        }
        for host in 0..2 {
            self.account(host);
        }
        self.judge_totals()?;
        let oracle = self.net.oracle.take().unwrap_or_default();
        self.outcome.frames = self.net.carried;
        self.outcome.lost = self.net.lost;
        self.outcome.damaged = self.net.damaged;
        self.outcome.coalesced = self.net.coalesced;
        self.outcome.dsacks_stripped = self.net.dsacks_stripped;
        self.outcome.wraps = oracle.wraps;
        self.outcome.seconds = (self.net.now - self.start).as_secs();
        let owners = self
            .flows
            .iter()
            .flat_map(|flow| flow.owners.iter().flatten());
        self.outcome.bytes = owners.map(|owner| owner.received).sum();
        self.outcome.slow_closes = self.count_slow_closes();
        Ok(self.outcome)
    }

    /// Counts the connections of a slow path that were released with data on the way, all of which the
    /// peer received.
    fn count_slow_closes(&self) -> u64 {
        let pairs = self.flows.iter().filter(|_| self.plan.is_slow);
        let pairs = pairs.filter_map(|flow| match &flow.owners {
            [Some(zero), Some(one)] => Some([(zero, one), (one, zero)]),
            _ => None,
        });
        let is_graceful = |(owner, peer): &(&ScriptedOwner, &ScriptedOwner)| {
            owner.unacked_at_release > 0 && owner.pushed == peer.received
        };
        pairs.flatten().filter(is_graceful).count() as u64
    }

    fn release_owners(&mut self, only_readers: bool) {
        let now = self.net.now;
        for flow in &mut self.flows {
            for owner in flow.owners.iter_mut().flatten() {
                if !only_readers || owner.is_reading(now) {
                    owner.release(&mut self.net);
                }
            }
        }
    }

    /// Returns whether the slots of all released connections are free.
    fn are_released_gone(&self) -> bool {
        let mut owners = self
            .flows
            .iter()
            .flat_map(|flow| flow.owners.iter().flatten());
        owners.all(|owner| {
            let slot = self.net.hosts[owner.host].state_of_slot(owner.id);
            owner.released_at.is_none() || slot.is_none()
        })
    }

    fn find_leak(&self, host: usize) -> Option<String> {
        let stack = &self.net.hosts[host];
        if self.is_dead[host] {
            None
        } else {
            stack.find_leak()
        }
    }

    fn account(&mut self, host: usize) {
        let stats = self.net.hosts[host].stats();
        self.outcome.retransmits += stats.tcp.retrans_segs;
        self.outcome.timeouts += stats.tcp.timeouts;
        self.outcome.undone += stats.tcp.spurious;
        self.outcome.cookies += stats.tcp.cookies_recv;
        if self.plan.configs[host].tcp.delayed_ack >= LATE_ACK {
            self.outcome.late_acks += stats.tcp.delayed_acks;
        }
    }

    fn are_owners_done(&self) -> bool {
        self.next_event == self.plan.events.len()
            && self.flows.iter().all(|flow| {
                let done = |host: usize| {
                    let owner = &flow.owners[host];
                    self.is_dead[host] || owner.as_ref().is_some_and(|owner| owner.is_done())
                };
                flow.is_opened && (done(0) && done(1) || flow.owners[flow.plan.opener].is_none())
            })
    }

    fn run_until(&mut self, limit: Instant, is_over: impl Fn(&Self) -> bool) -> Result<(), String> {
        let (mut idle_steps, mut idle_since) = (0, self.net.now);
        let mut is_last_turn = false;
        loop {
            self.apply_due_events();
            self.open_due_connections();
            self.fetch_events()?;
            for flow in &mut self.flows {
                for owner in flow.owners.iter_mut().flatten() {
                    owner.work(&mut self.net, &mut self.rng)?;
                }
            }
            if self.is_ending {
                self.release_owners(false);
            }
            self.judge_step()?;
            if is_over(self) {
                return Ok(());
            }
            let next = self
                .next_action()
                .filter(|next| *next < limit)
                .unwrap_or(limit);
            // Frames that reach a dead host do not wake a stack.
            let moved = |net: &SimNet<Pattern>| net.carried + net.arrived + net.unheard;
            let before = moved(&self.net);
            let goes_on = self.net.step(next);
            if !goes_on {
                // The last timers may have raised events, which owners process first.
                if next >= limit && is_last_turn {
                    return Ok(());
                }
                is_last_turn = next >= limit;
                self.net.now = self.net.now.max(next);
            }
            if moved(&self.net) != before || !goes_on {
                (idle_steps, idle_since) = (0, self.net.now);
                continue;
            }
            idle_steps += 1;
            let idle = (self.net.now - idle_since).as_secs();
            if idle_steps > IDLE_STEPS + idle * IDLE_STEPS_PER_SECOND {
                return Err(format!("{idle_steps} needless wake-ups in {idle} s"));
            }
        }
    }

    /// Returns when the next connection opens, event of the plan occurs, or owner acts.
    fn next_action(&self) -> Option<Instant> {
        let event = self.plan.events.get(self.next_event);
        let event = event.map(|(at, _)| self.start + *at);
        let unopened = self.flows.iter().filter(|flow| !flow.is_opened);
        let opening = unopened.map(|flow| self.start + flow.plan.at).min();
        let owners = self
            .flows
            .iter()
            .flat_map(|flow| flow.owners.iter().flatten());
        let owners = owners.filter(|owner| owner.released_at.is_none());
        let step = owners
            .filter_map(|owner| owner.next_action(self.net.now))
            .min();
        [event, opening, step].into_iter().flatten().min()
    }

    fn open_due_connections(&mut self) {
        let now = self.net.now;
        for index in 0..self.flows.len() {
            let flow = &mut self.flows[index];
            if flow.is_opened || self.start + flow.plan.at > now {
                continue;
            }
            flow.is_opened = true;
            let (host, ends) = (flow.plan.opener, flow.ends);
            if self.is_dead[host] {
                continue;
            }
            let clock = self.net.clock(host);
            let (local, remote) = (ends[host], ends[1 - host]);
            let stack = &mut self.net.hosts[host];
            let opened = stack.connect(clock, Some(local.ip()), Some(local.port()), remote, 0);
            if let Ok(id) = opened {
                self.outcome.connections += 1;
                self.add_owner(index, host, id);
            }
        }
    }

    fn add_owner(&mut self, index: usize, host: usize, id: siw_net::ConnId) {
        let now = self.net.now;
        let flow = &mut self.flows[index];
        let salts = [host, 1 - host].map(|host| salt_of(&flow.ends, host));
        let (script, read_step) = (&flow.plan.scripts[host], flow.plan.read_step[host]);
        // Old segments may be taken for a connection several times (SYN cookies); the one before has
        // ended.
        if let Some(before) = &mut flow.owners[host] {
            before.release(&mut self.net);
        }
        flow.owners[host] = Some(ScriptedOwner::new(id, host, now, script, read_step, salts));
    }

    /// Passes events to the owners; creates the owner of an accepted connection.
    fn fetch_events(&mut self) -> Result<(), String> {
        for host in 0..2 {
            while let Some((id, _, events)) = self.net.hosts[host].next_event() {
                if events.contains(Events::ACCEPTED)
                    && let Some(info) = self.net.hosts[host].tcp_info(id)
                {
                    let is_it = |flow: &PlannedFlow| {
                        let ends = (flow.ends[host], flow.ends[1 - host]);
                        flow.plan.opener != host
                            && flow.is_opened
                            && ends == (info.local, info.remote)
                    };
                    let Some(index) = self.flows.iter().rposition(is_it) else {
                        return Err(format!(
                            "host {host} accepted an unexpected connection from {}",
                            info.remote
                        ));
                    };
                    self.add_owner(index, host, id);
                }
                let owned = self.flows.iter().position(|flow| {
                    let owner = flow.owners[host].as_ref();
                    owner.is_some_and(|owner| owner.id == id && owner.released_at.is_none())
                });
                let Some(index) = owned else { continue };
                if let Some(owner) = &mut self.flows[index].owners[host] {
                    owner.events |= events;
                }
                self.judge_events(index, host, events)?;
                self.outcome.resets += u64::from(events.contains(Events::RESET));
                self.outcome.timed_out += u64::from(events.contains(Events::TIMED_OUT));
                let unopened = Events::REFUSED | Events::UNREACHABLE;
                self.outcome.unopened += u64::from(events.intersects(unopened));
            }
        }
        Ok(())
    }

    fn apply_due_events(&mut self) {
        while let Some(&(at, event)) = self.plan.events.get(self.next_event) {
            if self.start + at > self.net.now {
                return;
            }
            self.next_event += 1;
            match event {
                NetEvent::Cut { from, is_cut } => {
                    let mut cut = self.cut.get();
                    cut[from] = is_cut;
                    self.cut.set(cut);
                }
                NetEvent::LoseNeighbours { is_lost } => self.neighbours_lost.set(is_lost),
                NetEvent::Die { host } => {
                    self.outcome.deaths += 1;
                    self.is_dead[host] = true;
                    self.net.set_up(host, false);
                    self.flows
                        .iter_mut()
                        .for_each(|flow| flow.owners[host] = None);
                }
                NetEvent::Restart { host } => {
                    self.account(host);
                    self.is_dead[host] = false;
                    self.net.restart(host, self.config_of(host));
                    if let Some(oracle) = &mut self.net.oracle {
                        oracle.on_restart(host);
                    }
                    self.judge.on_restart(host);
                    self.listen(host);
                }
                NetEvent::Delay { delay } => {
                    self.plan
                        .links
                        .iter_mut()
                        .for_each(|link| link.delay = delay);
                    self.least_delay = self.least_delay.min(2 * delay);
                    self.set_links();
                }
                NetEvent::Narrow {
                    from,
                    mtu,
                    icmp_error,
                } => {
                    let link = &mut self.plan.links[from];
                    (link.mtu, link.icmp_error) = (mtu, icmp_error);
                    self.set_links();
                }
                NetEvent::SoftError { to, kind } => self.report_soft_error(to, kind),
                NetEvent::Renege { host } => {
                    self.outcome.reneged += self.net.hosts[host].renege() as u64;
                }
                NetEvent::FillBacklog { connection } => self.fill_backlog(connection),
                NetEvent::Flood { to, frames } => self.flood(to, frames),
            }
        }
    }

    fn set_links(&mut self) {
        for from in 0..2 {
            self.net.set_link(from, self.plan.links[from]);
        }
    }

    /// Quotes the last segment of a host in a soft ICMP error (RFC 9293 section 3.9.2.2, RFC 1122
    /// section 4.2.3.9).
    fn report_soft_error(&mut self, to: usize, kind: usize) {
        let frame = self.last_sent.borrow()[to].clone();
        let Some(view) = tcp_view(&frame) else { return };
        let ip_header = if view.source.is_ipv4() { 20 } else { 40 };
        let quoted = &frame[view.tcp_offset - ip_header..view.tcp_offset + 20];
        let ends = Ends {
            mac: [[2, 0, 0, 0, 0, 2 - to as u8], [2, 0, 0, 0, 0, to as u8 + 1]],
            ip: [view.destination.ip(), view.source.ip()],
        };
        let (v4, v6) = (SOFT_ERRORS_V4[kind], SOFT_ERRORS_V6[kind]);
        let what = if view.source.is_ipv4() { v4 } else { v6 };
        let error = ends.icmp(what, [0; 4], quoted);
        self.net.inject_on_path(1 - to, error);
    }

    /// Sends SYNs of other hosts, which never answer, until the backlog of a listener is full.
    fn fill_backlog(&mut self, connection: usize) {
        let plan = &self.flows[connection].plan;
        let to = 1 - plan.opener;
        for other in 0..self.plan.backlog {
            let source: IpAddr = if plan.is_v6 {
                std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x99).into()
            } else {
                std::net::Ipv4Addr::new(10, 0, 0, 99).into()
            };
            let ends = Ends {
                mac: [[2, 0, 0, 0, 0, 0x99], [2, 0, 0, 0, 0, to as u8 + 1]],
                ip: [source, address(to, plan.is_v6)],
            };
            let mut syn = ends.tcp(&Tcp {
                ports: [1024 + other as u16, plan.remote_port],
                seq: 1,
                flags: wire_view::SYN,
                window: 1000,
                options: &[2, 4, 5, 180],
                ..Tcp::default()
            });
            if let Some(vlan) = self.plan.configs[to].net.vlan {
                let [high, low] = vlan.to_be_bytes();
                syn.splice(12..12, [0x81, 0, high, low]);
            }
            self.net.inject(1 - to, syn);
        }
    }

    /// Sends segments below the window, forged in the name of the first connection's peer.
    fn flood(&mut self, to: usize, frames: u32) {
        let frame = self.last_frames.borrow()[1 - to].clone();
        let Some(view) = tcp_view(&frame) else { return };
        let ends = Ends {
            mac: [[2, 0, 0, 0, 0, 2 - to as u8], [2, 0, 0, 0, 0, to as u8 + 1]],
            ip: [view.source.ip(), view.destination.ip()],
        };
        let mut options = vec![];
        if let Some((value, echo)) = view.timestamps {
            options.extend([1, 1, 8, 10]);
            options.extend(value.to_be_bytes());
            options.extend(echo.to_be_bytes());
        }
        let forged = ends.tcp(&Tcp {
            ports: [view.source.port(), view.destination.port()],
            seq: view.seq.wrapping_sub(1),
            ack: view.ack,
            flags: wire_view::ACK,
            window: view.window,
            options: &options,
            payload: &[],
        });
        for _ in 0..frames {
            self.net.inject_on_path(1 - to, forged.clone());
        }
    }

    pub(super) fn judge(&self) -> &RunJudge {
        &self.judge
    }

    pub(super) fn judge_mut(&mut self) -> &mut RunJudge {
        &mut self.judge
    }
}
