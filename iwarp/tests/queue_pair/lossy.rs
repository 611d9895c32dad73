//! The queue pairs over the project's own TCP, on a simulated network that loses, reorders,
//! duplicates and corrupts: set-up, random traffic and close, in virtual time. Retransmissions are
//! rebuilt from work requests. Also serves as an example of driving both crates together.
use crate::common::model::*;
use crate::common::*;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use siw_iwarp::mpa::{InitiatorStep, MpaInitiator, MpaResponder, ResponderStep};
use siw_iwarp::*;
use siw_net::{ConnId, VecBuf};
use siw_shm::WcStatus;
use siw_tcp::{Events, ReceiveQueue};
use siw_tcp_sim::{Impairment, RecordBytes, Rng, SimNet, host_config};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

struct Rx<'a>(&'a mut ReceiveQueue<VecBuf>);

impl RxStream for Rx<'_> {
    fn available(&self) -> usize {
        self.0.len_bytes()
    }
    fn peek(&self, off: usize, out: &mut [u8]) {
        self.0.copy_to_slice(off, out);
    }
    fn for_each_slice(&self, off: usize, len: usize, visit: impl FnMut(&[u8])) {
        self.0.for_each_chunk(off, len, visit);
    }
    fn consume(&mut self, len: usize) {
        self.0.consume(len);
    }
}

/// A record as TCP keeps it, with access to its bytes.
struct Rec(TxRecord, Rc<RefCell<Side>>);

impl RecordBytes for Rec {
    fn read(&self, offset: u32, len: u32, out: &mut Vec<u8>) {
        let (from, to) = (offset as usize, (offset + len) as usize);
        match &self.0 {
            TxRecord::Stream(bytes) => out.extend_from_slice(&bytes[from..to]),
            TxRecord::Fpdus(run) => {
                let unit_len = run.unit_len();
                let units = offset / unit_len..(offset + len).div_ceil(unit_len);
                let skip = (offset - units.start * unit_len) as usize;
                let units = units.start as u16..units.end as u16;
                let built = self.1.borrow().end.build_units(run, units);
                // Flushed meanwhile: the reset is about to be sent.
                let bytes = built.unwrap_or_else(|_| vec![0; skip + len as usize]);
                out.extend_from_slice(&bytes[skip..skip + len as usize]);
            }
        }
    }
}

enum Phase {
    Connecting(MpaInitiator),
    Accepting(MpaResponder),
    Rts,
    Over,
}

struct Host {
    side: Rc<RefCell<Side>>,
    id: Option<ConnId>,
    phase: Phase,
    fin: bool,
    ended: Option<CloseReason>,
    closing: bool,
}

type Net = SimNet<Rec>;

impl Host {
    fn push(&self, net: &mut Net, i: usize, id: ConnId, rec: TxRecord, len: u32, push: bool) {
        let rec = if RESTARTS { restored(&rec) } else { rec };
        let rec = Rec(rec, self.side.clone());
        assert!(
            net.hosts[i].push_record(id, len, rec, push).is_ok(),
            "room was there"
        );
    }

    fn stream(&self, net: &mut Net, i: usize, id: ConnId, bytes: Box<[u8]>) {
        let len = bytes.len() as u32;
        self.push(net, i, id, TxRecord::Stream(bytes), len, true);
    }

    /// Saves, drops and restores the state of this host, if the tests are about that.
    fn restart(&mut self) {
        self.side.borrow_mut().end.restart();
        if RESTARTS {
            match &mut self.phase {
                Phase::Connecting(initiator) => *initiator = restored(initiator),
                Phase::Accepting(responder) => *responder = restored(responder),
                Phase::Rts | Phase::Over => {}
            }
        }
    }

    fn work(&mut self, net: &mut Net, i: usize) {
        self.restart();
        while let Some((id, _, ev)) = net.hosts[i].next_event() {
            self.id = Some(id);
            if ev.contains(Events::CONNECTED)
                && let Phase::Connecting(initiator) = &self.phase
            {
                let request = initiator.request_frame();
                self.stream(net, i, id, request);
            }
            self.fin |= ev.contains(Events::PEER_FIN);
            if ev.contains(Events::RESET) {
                self.ended = Some(CloseReason::Reset);
            } else if ev.contains(Events::TIMED_OUT) {
                self.ended = Some(CloseReason::TimedOut);
            } else if ev.contains(Events::CLOSED) {
                self.ended.get_or_insert(CloseReason::Closed);
            }
        }
        let Some(id) = self.id else { return };
        self.set_up(net, i, id);
        if matches!(self.phase, Phase::Rts) {
            self.transfer(net, i, id);
        }
        net.flush(i, id);
    }

    fn set_up(&mut self, net: &mut Net, i: usize, id: ConnId) {
        let emss = net.hosts[i].effective_mss(id) as u32;
        let Some(rx) = net.hosts[i].receive_queue(id) else {
            return;
        };
        let mut rx = Rx(rx);
        let (negotiated, reply) = match &mut self.phase {
            Phase::Connecting(initiator) => match initiator.on_stream(&mut rx) {
                InitiatorStep::NeedMore => return,
                InitiatorStep::Accepted {
                    negotiated,
                    private_data,
                } => {
                    assert_eq!(private_data, b"pong");
                    (negotiated, None)
                }
                step => panic!("{step:?}"),
            },
            Phase::Accepting(responder) => match responder.on_stream(&mut rx) {
                ResponderStep::NeedMore => return,
                ResponderStep::Request(request) => {
                    assert_eq!(request.private_data, b"ping");
                    let (frame, negotiated) = responder.accept(2, 2, b"pong").expect("fits");
                    (negotiated, Some(frame))
                }
                step => panic!("{step:?}"),
            },
            _ => return,
        };
        if let Some(frame) = reply {
            self.stream(net, i, id, frame);
        }
        self.side.borrow_mut().end.qp.set_rts(negotiated, emss);
        self.phase = Phase::Rts;
    }

    fn transfer(&mut self, net: &mut Net, i: usize, id: ConnId) {
        let side = self.side.clone();
        {
            let mut borrowed = side.borrow_mut();
            let End { qp, env, .. } = &mut borrowed.end;
            qp.set_emss(net.hosts[i].effective_mss(id) as u32);
            let mut left = 0;
            if let Some(rx) = net.hosts[i].receive_queue(id) {
                let mut rx = Rx(rx);
                qp.receive_in_order(env, &mut rx);
                left = rx.available();
            }
            net.hosts[i].take_acked_units(id, |record, units| {
                if let TxRecord::Fpdus(run) = &record.0 {
                    qp.on_fpdus_acked(run, units);
                    qp.complete_acked(env);
                }
            });
            if self.fin {
                qp.on_peer_fin(env, left);
            }
            if let Some(why) = self.ended {
                qp.on_tcp_closed(env, why);
                self.phase = Phase::Over;
                return;
            }
        }
        let room = net.hosts[i].send_room(id);
        let pushed = net.hosts[i].push_records(id, |records| {
            let mut borrowed = side.borrow_mut();
            let End { qp, env, .. } = &mut borrowed.end;
            qp.next_records(env, room, u32::MAX, |run, _| {
                let record = TxRecord::Fpdus(run);
                let record = if RESTARTS { restored(&record) } else { record };
                let record = Rec(record, side.clone());
                records.push_run((run.unit_len(), run.count()), record, run.ends_messages());
            });
        });
        if pushed.is_some() {
            net.flush(i, id);
        }
        let wants = side.borrow().end.qp.requested_close();
        match wants {
            Some(CloseKind::Graceful) if !self.closing => {
                self.closing = true;
                net.hosts[i].close(net.now, id);
            }
            Some(CloseKind::Abort) => net.hosts[i].abort(net.now, id),
            _ => {}
        }
    }
}

fn micros(count: u64) -> Duration {
    Duration::from_micros(count)
}

fn link(rng: &mut Rng) -> Impairment {
    let mut impairment = Impairment::perfect(micros(5 + rng.below(500)));
    if rng.chance(0.7) {
        impairment.loss = rng.below(100) as f64 / 1000.0;
        impairment.reorder = rng.below(100) as f64 / 1000.0;
        impairment.jitter = micros(rng.below(200));
        impairment.duplicate = rng.below(100) as f64 / 1000.0;
        impairment.corrupt = rng.below(20) as f64 / 1000.0;
    }
    impairment
}

fn start(seed: u64) -> (Net, [Host; 2]) {
    let mut rng = Rng::new(seed);
    let mtu = [1500, 9000, 1280][rng.below(3) as usize];
    let configs = [0, 1].map(|i| {
        let mut config = host_config(i);
        config.net.mtu = mtu;
        config.tcp.user_timeout = Duration::from_secs(3600);
        config.tcp.syn_retries = 30;
        config.tcp.rto_initial = Duration::from_millis(50);
        config.tcp.rto_max = Duration::from_secs(1);
        config.net.neighbours.probes = 50;
        config.net.neighbours.retransmit = Duration::from_millis(20);
        config
    });
    let links = [link(&mut rng), link(&mut rng)];
    let mut net = Net::new(seed, configs, links);
    let crc = if rng.chance(0.8) {
        mpa::MpaCrcPolicy::Asked
    } else {
        mpa::MpaCrcPolicy::IfAsked
    };
    let markers = if rng.chance(0.3) {
        MarkerPolicy::Request
    } else {
        MarkerPolicy::Accept
    };
    let cfg = MpaConfig {
        crc,
        markers,
        ..MpaConfig::default()
    };
    net.hosts[1].listen(None, 7174, 4, 0).expect("free");
    let to = std::net::SocketAddr::from(([10, 0, 0, 2], 7174));
    net.hosts[0]
        .connect(net.now, None, None, to, 0)
        .expect("a route");
    let host = |i: usize, phase| {
        let mut end_side = side(i == 0);
        end_side.end.qp = QueuePair::new(init_attr());
        Host {
            side: Rc::new(RefCell::new(end_side)),
            id: None,
            phase,
            fin: false,
            ended: None,
            closing: false,
        }
    };
    let initiator = MpaInitiator::new(&cfg, 2, 2, b"ping").expect("fits");
    let hosts = [
        host(0, Phase::Connecting(initiator)),
        host(1, Phase::Accepting(MpaResponder::new(&cfg))),
    ];
    // The same operations for the same seed.
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = proptest::test_runner::TestRng::from_seed(
        proptest::test_runner::RngAlgorithm::ChaCha,
        &bytes,
    );
    let mut runner = TestRunner::new_with_rng(Default::default(), rng);
    for (a, b) in [(0, 1), (1, 0)] {
        let ops = proptest::collection::vec(op(), 0..60)
            .new_tree(&mut runner)
            .expect("a value")
            .current();
        let (a, b): (&Host, &Host) = (&hosts[a], &hosts[b]);
        post(&mut a.side.borrow_mut(), &mut b.side.borrow_mut(), &ops);
    }
    (net, hosts)
}

fn run(net: &mut Net, hosts: &mut [Host; 2], secs: u64, done: impl Fn(&[Host; 2]) -> bool) -> bool {
    net.run(Duration::from_secs(secs), |net| {
        for (i, host) in hosts.iter_mut().enumerate() {
            host.work(net, i);
        }
        done(hosts)
    })
}

fn all_sent(hosts: &[Host; 2]) -> bool {
    hosts.iter().all(|host| {
        let borrowed = host.side.borrow();
        borrowed.end.env.sent.len() == borrowed.posted.len()
    })
}

#[test]
fn everything_arrives_over_a_lossy_network() {
    let (mut lost, mut completed) = (0, 0);
    for seed in 0..200 {
        let (mut net, mut hosts) = start(seed);
        assert!(
            run(&mut net, &mut hosts, 600, all_sent),
            "seed {seed} wedged"
        );
        for host in &hosts {
            let borrowed = host.side.borrow();
            check_order(&borrowed, true);
            assert!(
                borrowed
                    .end
                    .env
                    .sent
                    .iter()
                    .flatten()
                    .all(|wc| wc.status == WcStatus::SUCCESS)
            );
            assert!(
                contents(&borrowed.mem, MEM) == borrowed.model,
                "seed {seed}: memory equals the model"
            );
        }
        hosts[(seed % 2) as usize]
            .side
            .borrow_mut()
            .end
            .qp
            .disconnect();
        let over = |hosts: &[Host; 2]| hosts.iter().all(|host| matches!(host.phase, Phase::Over));
        assert!(
            run(&mut net, &mut hosts, 600, over),
            "seed {seed} does not close"
        );
        for host in &hosts {
            let borrowed = host.side.borrow();
            assert_eq!(borrowed.end.qp.state(), RdmapState::Idle, "seed {seed}");
            assert!(borrowed.end.env.events.is_empty() && borrowed.end.env.live.is_empty());
            completed += borrowed.posted.len();
        }
        lost += net.lost;
    }
    println!("{completed} work requests completed, {lost} frames lost");
    assert!(lost > 500 && completed > 5000, "the network did its part");
}

#[test]
fn abort_completes_everything_once_on_both_sides() {
    for seed in 0..60 {
        let (mut net, mut hosts) = start(seed);
        run(&mut net, &mut hosts, 600, |hosts| {
            hosts[0].side.borrow().end.env.sent.len() >= (seed % 7) as usize
                && matches!(hosts[0].phase, Phase::Rts)
                && matches!(hosts[1].phase, Phase::Rts)
        });
        {
            let mut borrowed = hosts[0].side.borrow_mut();
            let End { qp, env, .. } = &mut borrowed.end;
            qp.modify_to_error(env);
        }
        // A RST may be lost; the other side then learns of it from the answer to its own segments, or
        // is closed by its owner.
        let over = |hosts: &[Host; 2]| hosts.iter().all(|host| matches!(host.phase, Phase::Over));
        if !run(&mut net, &mut hosts, 60, over) {
            let mut borrowed = hosts[1].side.borrow_mut();
            let End { qp, env, .. } = &mut borrowed.end;
            qp.modify_to_error(env);
        }
        for host in &hosts {
            let mut borrowed = host.side.borrow_mut();
            let End { qp, env, .. } = &mut borrowed.end;
            assert!(env.live.is_empty(), "seed {seed}");
            assert_eq!(qp.state(), RdmapState::Error);
            check_order(&borrowed, true);
        }
    }
}
