//! The plan of one run, drawn entirely from the seed.

use std::time::Duration;

use siw_tcp::{CongestionControl, Keepalive, StackConfig, TsoLimits};

use crate::{Impairment, Rng, host_config};

/// A step of an owner's script; steps are carried out in order.
#[derive(Clone, Copy, Debug)]
pub(super) enum OwnerStep {
    /// Pushes `bytes` bytes in records of at most `record` bytes (0: one segment), as room permits.
    Send { bytes: u32, record: u32 },
    /// Pushes small records at a steady pace.
    Trickle {
        records: u32,
        size: u32,
        pause: Duration,
    },
    /// Only reads for this time.
    Wait(Duration),
    /// Stops reading for this time and continues with the next step.
    StopReading(Duration),
    /// Waits until the peer has closed.
    WaitForFin,
    /// Closes its direction.
    Close,
    /// Resets the connection.
    Abort,
    /// Releases the connection, even with queued or unread data.
    Release,
}

/// Something that happens to the network or to a host.
#[derive(Clone, Copy, Debug)]
pub(super) enum NetEvent {
    /// Frames that this host sends are lost from now on (or again carried).
    Cut { from: usize, is_cut: bool },
    /// ARP and NDP messages are lost from now on (or again carried).
    LoseNeighbours { is_lost: bool },
    /// The host stops for good.
    Die { host: usize },
    /// The host restarts with no knowledge of its connections.
    Restart { host: usize },
    /// The delay of the path changes.
    Delay { delay: Duration },
    /// Packets longer than `mtu` are dropped, with an ICMP error at probability `icmp_error`.
    Narrow {
        from: usize,
        mtu: u16,
        icmp_error: f64,
    },
    /// A router reports a soft error about the last segment that this host sent.
    SoftError { to: usize, kind: usize },
    /// The host drops all data received out of order, though it has reported it.
    Renege { host: usize },
    /// SYNs of others fill the backlog of the listener for this connection.
    FillBacklog { connection: usize },
    /// An attacker repeats old segments of the first connection towards this host.
    Flood { to: usize, frames: u32 },
}

#[derive(Clone, Debug)]
pub(super) struct ConnectionPlan {
    pub(super) at: Duration,
    pub(super) opener: usize,
    pub(super) is_v6: bool,
    pub(super) local_port: u16,
    pub(super) remote_port: u16,
    /// Script of each host.
    pub(super) scripts: [Vec<OwnerStep>; 2],
    pub(super) read_step: [usize; 2],
}

/// The whole plan of a run.
#[derive(Clone, Debug)]
pub(super) struct SeedPlan {
    pub(super) configs: [StackConfig; 2],
    pub(super) links: [Impairment; 2],
    /// Approximate initial time of each host's clock.
    pub(super) clocks: [u64; 2],
    pub(super) connections: Vec<ConnectionPlan>,
    pub(super) events: Vec<(Duration, NetEvent)>,
    /// Distance of the initial sequence number of each end of the first connection from its wrap.
    pub(super) before_wrap: [u32; 2],
    /// No frame is lost, late, damaged or cut, and no host dies.
    pub(super) is_clean: bool,
    /// Connections that may wait on a listener.
    pub(super) backlog: usize,
    /// The seed draws peers and paths of other kinds, and a reset needs a reason even if it comes from a
    /// peer that has released its connection.
    pub(super) is_varied: bool,
    /// The path carries a few megabits per second.
    pub(super) is_slow: bool,
}

/// First seed that also draws peers and paths of other kinds. A seed below draws the same run
/// as before they existed, so that the numbers of seeds that once failed remain valid.
pub const FIRST_VARIED_SEED: u64 = 1 << 32;

fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

impl SeedPlan {
    /// Draws the plan of a seed.
    pub(super) fn draw(seed: u64) -> SeedPlan {
        let mut rng = Rng::new(seed ^ 0x5eed_5eed_5eed_5eed);
        let rng = &mut rng;
        let is_clean = rng.chance(0.15);
        // One-way delay, half of the round trip: up to 150 ms.
        let delay = Duration::from_micros(rng.log_uniform(5, 150_000));
        let mut links = [link(rng, delay, is_clean), link(rng, delay, is_clean)];
        let mut configs = [host_config(0), host_config(1)];
        let mtu = [1500, 1500, 9000, 1280][rng.below(4) as usize];
        let vlan = rng.chance(0.1).then_some(7);
        for config in &mut configs {
            (config.net.mtu, config.net.vlan) = (mtu, vlan);
            configure(rng, config, delay);
        }
        if rng.chance(0.02) {
            // A window of tens of megabytes, for which a single loss matters.
            for config in &mut configs {
                config.tcp.initial_window = 2_000 + rng.below(10_000) as u32;
                config.tcp.recv_window = 128 << 20;
            }
            links
                .iter_mut()
                .for_each(|link| link.loss = link.loss.min(0.0005));
        }
        let clocks = [clock(rng), clock(rng)];
        let mut connections = vec![];
        for _ in 0..1 + rng.below(4) * rng.below(3) {
            connections.push(connection(rng, delay, &connections));
        }
        let mut events = vec![];
        if !is_clean {
            misfortunes(rng, delay, &mut events, mtu);
        }
        if rng.chance(0.05) {
            let first = &connections[0];
            let at = first.at + delay.mul_f64(1.0 + rng.below(400) as f64 / 100.0);
            let kind = rng.below(4) as usize;
            events.push((
                at,
                NetEvent::SoftError {
                    to: first.opener,
                    kind,
                },
            ));
        }
        if rng.chance(0.03) {
            flood(rng, &mut configs, &mut connections, &mut events, delay);
        }
        events.sort_by_key(|(at, _)| *at);
        let most = first_message(&connections[0], connections[0].opener);
        let before_wrap = [0, 1].map(|_| match rng.below(3) {
            0 => rng.below(4) as u32,
            _ => 1 + rng.below(u64::from(most.max(1))) as u32,
        });
        let mut plan = SeedPlan {
            configs,
            links,
            clocks,
            connections,
            events,
            before_wrap,
            is_clean,
            backlog: 32,
            is_varied: seed >= FIRST_VARIED_SEED,
            is_slow: false,
        };
        if plan.is_varied {
            plan.vary(&mut Rng::new(seed ^ 0x00de_f1ec_7ed5));
        }
        plan
    }

    /// Draws peers of other kinds: ports that coalesce received segments, delayed ACKs as of other
    /// systems, no D-SACK, receivers that renege; listeners that answer with cookies; slow links.
    fn vary(&mut self, rng: &mut Rng) {
        for host in 0..2 {
            let (config, link) = (&mut self.configs[host], &mut self.links[host]);
            if rng.chance(0.4) {
                // Linux, and the largest of others.
                config.tcp.delayed_ack = millis([40, 40, 200][rng.below(3) as usize]);
            }
            if rng.chance(0.3) {
                link.coalesce = Duration::from_micros(rng.log_uniform(1, 200));
            }
            link.strips_dsack = rng.chance(0.3);
        }
        if rng.chance(0.15) {
            self.slow_down(rng);
        }
        if rng.chance(0.2) {
            self.configs
                .iter_mut()
                .for_each(|config| config.tcp.syn_cookies = true);
            self.backlog = 2;
            let ends = |plan: &ConnectionPlan| (plan.opener, plan.local_port, plan.remote_port);
            for (connection, plan) in self.connections.iter().enumerate() {
                let same = self.connections.iter().filter(|it| ends(it) == ends(plan));
                // No cookie replaces a connection in TIME-WAIT: its number would not be above the old.
                if same.count() == 1 {
                    self.events
                        .push((plan.at, NetEvent::FillBacklog { connection }));
                }
            }
        }
        if !self.is_clean && rng.chance(0.3) {
            let host = rng.below(2) as usize;
            for _ in 0..1 + rng.below(20) {
                let at = Duration::from_micros(rng.log_uniform(100, 5_000_000));
                self.events.push((at, NetEvent::Renege { host }));
            }
        }
        self.events.sort_by_key(|(at, _)| *at);
    }

    /// Makes the path slow, with room for everything that may be in flight, and lets hosts wait as
    /// long as the frames of all connections take.
    fn slow_down(&mut self, rng: &mut Rng) {
        self.is_slow = true;
        let rate = rng.log_uniform(1_000_000, 20_000_000);
        for link in &mut self.links {
            (link.rate, link.queue, link.mark) = (rate, 1_000_000, 0);
        }
        for config in &mut self.configs {
            config.tcp.recv_window = config.tcp.recv_window.min(128 << 10);
            config.tcp.initial_window = config.tcp.initial_window.min(10);
            config.tcp.user_timeout = config.tcp.user_timeout.max(millis(40_000));
            config.tcp.orphan_timeout = config.tcp.user_timeout;
            (config.tcp.rto_initial, config.tcp.rto_max) = (millis(1_000), millis(60_000));
            config.tcp.syn_retries = 6;
            config.net.neighbours.retransmit = millis(10_000);
            config.tcp.keepalive = None;
        }
    }
}

/// Minimum number of bytes that an owner sends first.
fn first_message(plan: &ConnectionPlan, host: usize) -> u32 {
    let sent = plan.scripts[host].iter().find_map(|step| match step {
        OwnerStep::Send { bytes, .. } => Some(*bytes),
        OwnerStep::Trickle { records, size, .. } => Some(records * size),
        _ => None,
    });
    sent.unwrap_or(1)
}

fn link(rng: &mut Rng, delay: Duration, is_clean: bool) -> Impairment {
    let mut link = Impairment::perfect(delay);
    if is_clean {
        return link;
    }
    let percent = |rng: &mut Rng, most: u64| rng.below(most * 100) as f64 / 10_000.0;
    if rng.chance(0.6) {
        link.loss = if rng.chance(0.7) {
            percent(rng, 4)
        } else {
            percent(rng, 30)
        };
    }
    if rng.chance(0.15) {
        link.burst = (0.01, 0.2);
    }
    if rng.chance(0.3) {
        link.reorder = percent(rng, 15);
    }
    if rng.chance(0.3) {
        link.jitter = delay.mul_f64(rng.below(100) as f64 / 100.0);
    }
    if rng.chance(0.3) {
        link.duplicate = percent(rng, 20);
    }
    if rng.chance(0.3) {
        link.corrupt = percent(rng, 10);
        link.corrupt_bits = 2 + rng.below(40) as u32;
    }
    if rng.chance(0.15) {
        link.rate = 20_000_000 + rng.below(10_000_000_000);
        link.queue = 20 + rng.below(200) as usize;
        link.mark = rng.below(40) as usize;
    }
    if rng.chance(0.08) {
        link.shrink = percent(rng, 20);
    }
    link
}

fn configure(rng: &mut Rng, config: &mut StackConfig, delay: Duration) {
    config.tcp.congestion = match rng.below(3) {
        0 => CongestionControl::NewReno,
        1 => CongestionControl::Dctcp,
        _ => CongestionControl::Cubic,
    };
    config.tcp.ecn = rng.chance(0.4);
    config.tcp.timestamps = !rng.chance(0.15);
    config.tcp.sack = !rng.chance(0.15);
    if rng.chance(0.2) {
        config.tcp.tx_checksum = false;
        config.tcp.tso = Some(TsoLimits {
            max_segments: 2 + rng.below(60) as u16,
            max_bytes: 5_000 + rng.below(60_000) as u32,
        });
    }
    config.tcp.recv_window = 4096 << rng.below(10);
    if rng.chance(0.1) {
        config.tcp.max_recv_buffers = 64 + rng.below(100) as usize;
    }
    if rng.chance(0.1) {
        config.tcp.max_held_buffers = 64 + rng.below(100) as usize;
    }
    config.tcp.rto_min = millis([5, 5, 20, 200][rng.below(4) as usize]);
    // One second before the first sample (RFC 6298), less where the path is known to be short.
    config.tcp.rto_initial = if delay < millis(10) && rng.chance(0.5) {
        millis(50)
    } else {
        millis(1000)
    };
    config.tcp.rto_max =
        millis([1_000, 2_000, 60_000][rng.below(3) as usize]).max(config.tcp.rto_initial);
    config.tcp.user_timeout = millis(1_000 * (2 + rng.below(40)));
    config.tcp.orphan_timeout = config.tcp.user_timeout;
    config.tcp.syn_retries = 2 + rng.below(5) as u8;
    config.tcp.time_wait = millis(100 + rng.below(5_000));
    config.net.neighbours.reachable = millis(rng.log_uniform(20, 30_000));
    config.net.neighbours.retransmit = millis(rng.log_uniform(50, 1_000)).max(3 * delay);
    if rng.chance(0.4) {
        config.tcp.keepalive = Some(Keepalive {
            idle: millis(50 + rng.below(5_000)),
            interval: millis(20 + rng.below(2_000)).max(6 * delay + millis(20)),
            probes: 3 + rng.below(4) as u8,
        });
    }
    config.tcp.initial_window = [10, 10, 2, 40][rng.below(4) as usize];
    config.tcp.syn_cookies = false;
    config.tcp.isn_key = std::array::from_fn(|_| rng.next_u64() as u8);
    config.tcp.hash_key = std::array::from_fn(|_| rng.next_u64() as u8);
}

/// Draws the start of a clock: zero, shortly before 32 bits of ticks or nanoseconds wrap, or late.
fn clock(rng: &mut Rng) -> u64 {
    let near =
        |rng: &mut Rng, bits: u32| (1u64 << bits) - rng.below(3_000_000_000).min(1 << (bits - 1));
    match rng.below(6) {
        0 => 0,
        1 => near(rng, 52), // ticks of 2^20 ns in 32 bits
        2 => near(rng, 51),
        3 => near(rng, 47), // ticks of 2^15 ns in 32 bits
        4 => near(rng, 32),
        _ => rng.below(1 << 60),
    }
}

fn connection(rng: &mut Rng, delay: Duration, before: &[ConnectionPlan]) -> ConnectionPlan {
    let opener = rng.below(2) as usize;
    let late = rng.chance(0.3);
    let at = if late {
        millis(rng.below(3_000))
    } else {
        Duration::from_micros(rng.below(1_000))
    };
    let mut plan = ConnectionPlan {
        at,
        opener,
        is_v6: rng.chance(0.3),
        local_port: 1024 + rng.below(64_000) as u16,
        remote_port: 1 + rng.below(1_000) as u16,
        scripts: [script(rng, delay), script(rng, delay)],
        read_step: [0, 1].map(|_| {
            if rng.chance(0.2) {
                200 + rng.below(5_000) as usize
            } else {
                0
            }
        }),
    };
    if let Some(last) = before.last()
        && rng.chance(0.3)
    {
        // The same endpoints once more.
        (plan.opener, plan.is_v6) = (last.opener, last.is_v6);
        (plan.local_port, plan.remote_port) = (last.local_port, last.remote_port);
        plan.at = last.at + millis(rng.below(8_000));
    }
    plan
}

fn script(rng: &mut Rng, delay: Duration) -> Vec<OwnerStep> {
    let mut steps = vec![];
    for _ in 0..rng.below(7) {
        let record = if rng.chance(0.3) {
            1 + rng.below(20_000) as u32
        } else {
            0
        };
        steps.push(match rng.below(10) {
            0..=4 => OwnerStep::Send {
                bytes: rng.log_uniform(1, 500_000) as u32,
                record,
            },
            5 => OwnerStep::Trickle {
                records: 2 + rng.below(60) as u32,
                size: 1 + rng.below(400) as u32,
                pause: (delay / 2).mul_f64(rng.below(600) as f64 / 100.0)
                    + Duration::from_micros(100),
            },
            6 | 7 => OwnerStep::Wait(millis(rng.log_uniform(1, 4_000))),
            8 => OwnerStep::StopReading(millis(rng.log_uniform(10, 6_000))),
            _ => OwnerStep::Wait(4 * delay),
        });
    }
    match rng.below(20) {
        0 => steps.push(OwnerStep::Abort),
        1..=4 => steps.push(OwnerStep::Release),
        5 => steps.insert(0, OwnerStep::StopReading(Duration::from_secs(3_600))),
        6 => {}
        7..=9 => {
            steps.push(OwnerStep::WaitForFin);
            steps.push(OwnerStep::Release);
        }
        10 => steps.extend([OwnerStep::Close, OwnerStep::Release]),
        _ => {
            steps.push(OwnerStep::Close);
            steps.push(OwnerStep::WaitForFin);
        }
    }
    steps
}

/// Draws cuts, deaths, restarts and path changes.
fn misfortunes(rng: &mut Rng, delay: Duration, events: &mut Vec<(Duration, NetEvent)>, mtu: u16) {
    let soon = |rng: &mut Rng| {
        delay.mul_f64(rng.below(4_000) as f64 / 100.0) + millis(rng.log_uniform(1, 3_000))
    };
    if rng.chance(0.2) {
        let at = soon(rng);
        let until = at + millis(rng.log_uniform(1, 20_000));
        let both = rng.chance(0.5);
        for from in 0..2 {
            if both || from == rng.below(2) as usize {
                events.push((at, NetEvent::Cut { from, is_cut: true }));
                events.push((
                    until,
                    NetEvent::Cut {
                        from,
                        is_cut: false,
                    },
                ));
            }
        }
    }
    if rng.chance(0.1) {
        let at = if rng.chance(0.3) {
            Duration::ZERO
        } else {
            soon(rng)
        };
        events.push((at, NetEvent::LoseNeighbours { is_lost: true }));
        if rng.chance(0.6) {
            let until = at + millis(rng.log_uniform(10, 20_000));
            events.push((until, NetEvent::LoseNeighbours { is_lost: false }));
        }
    }
    if rng.chance(0.12) {
        let host = rng.below(2) as usize;
        let at = soon(rng);
        if rng.chance(0.6) {
            events.push((at, NetEvent::Die { host }));
        } else {
            events.push((at, NetEvent::Die { host }));
            events.push((
                at + millis(rng.log_uniform(1, 5_000)),
                NetEvent::Restart { host },
            ));
        }
    }
    if rng.chance(0.1) {
        let delay = Duration::from_micros(rng.log_uniform(5, 150_000));
        events.push((soon(rng), NetEvent::Delay { delay }));
    }
    if rng.chance(0.08) && mtu > 1280 {
        let icmp_error = rng.below(3) as f64 / 2.0;
        let from = rng.below(2) as usize;
        let mtu = 1280 + rng.below(400) as u16;
        events.push((
            soon(rng),
            NetEvent::Narrow {
                from,
                mtu,
                icmp_error,
            },
        ));
    }
}

/// Floods the connection of one peer while that of another depends on keepalive probes being
/// answered.
fn flood(
    rng: &mut Rng,
    configs: &mut [StackConfig; 2],
    connections: &mut Vec<ConnectionPlan>,
    events: &mut Vec<(Duration, NetEvent)>,
    delay: Duration,
) {
    let to = rng.below(2) as usize;
    configs[to].net.control_rate = 20 + rng.below(100) as u32;
    configs[1 - to].tcp.keepalive = Some(Keepalive {
        idle: millis(200) + 4 * delay,
        interval: millis(100) + 4 * delay,
        probes: 4,
    });
    let rest = [
        OwnerStep::Send {
            bytes: 100,
            record: 0,
        },
        OwnerStep::Wait(millis(4_000)),
    ];
    let mut idle = connection(rng, delay, &[]);
    idle.at = Duration::ZERO;
    idle.scripts = [rest.to_vec(), rest.to_vec()];
    connections.push(idle.clone());
    idle.local_port = idle.local_port.wrapping_add(1).max(1024);
    connections.insert(0, idle);
    for tick in 0..150 {
        events.push((
            4 * delay + millis(20 * tick),
            NetEvent::Flood { to, frames: 5 },
        ));
    }
}
