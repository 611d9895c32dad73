//! The MTU search on a narrow path, with whole connections: RFC 8899, RFC 4821.

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::time::Duration;

use crate::common::wire::{Lab, Seg, icmp_error};
use siw_tcp::{ConnId, Events, TsoLimits};
use siw_tcp_sim::{Pattern, host_config, read_all};

/// Layout of the sender's records.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Records {
    /// Parts of a byte stream, far longer than a segment.
    Long,
    /// FPDUs: each fills a segment, and one is longer when TCP asks for it.
    Fpdus,
    /// FPDUs from an owner that ignores the request for a longer one.
    Deaf,
    /// Small messages.
    Small,
}

/// A connection of host 0 that always has data to send, and the packets that its path dropped.
struct Bulk {
    lab: Lab,
    ids: [ConnId; 2],
    records: Records,
    sent: u64,
    got: u64,
    /// Stream offsets at which records begin.
    begins: HashSet<u64>,
    /// Sequence number of the stream's first byte.
    first: u32,
    /// Longest IP packet that passes; longer packets are dropped and kept here.
    mtu: Rc<RefCell<usize>>,
    lost: Rc<RefCell<Vec<Vec<u8>>>>,
    /// The congestion window has decreased between two steps.
    fell: bool,
    cwnd: u32,
    asked: u32,
}

impl Bulk {
    fn new(records: Records) -> Bulk {
        Bulk::with(Lab::new(), records, false)
    }

    fn with(mut lab: Lab, records: Records, v6: bool) -> Bulk {
        let to = if v6 { "[fd00::2]:80" } else { "10.0.0.2:80" };
        let now = lab.net.now;
        let _ = lab.net.hosts[1].listen(None, 80, 16, 0);
        let client = lab.net.hosts[0]
            .connect(now, None, None, to.parse().unwrap(), 0)
            .unwrap();
        lab.run_ms(5);
        let accepted = |events: &&(ConnId, Events)| events.1.contains(Events::ACCEPTED);
        let server = lab.events[1].iter().rev().find(accepted).unwrap().0;
        let first = if v6 { 0 } else { lab.last(0).seq };
        let mtu = Rc::new(RefCell::new(usize::MAX));
        let lost = Rc::new(RefCell::new(vec![]));
        let (path_mtu, k) = (mtu.clone(), lost.clone());
        lab.lose(move |from, frame| {
            let hit = from == 0 && frame.len() > path_mtu.borrow().saturating_add(14);
            if hit {
                k.borrow_mut().push(frame.to_vec());
            }
            hit
        });
        Bulk {
            lab,
            ids: [client, server],
            records,
            sent: 0,
            got: 0,
            begins: HashSet::new(),
            first,
            mtu,
            lost,
            fell: false,
            cwnd: 0,
            asked: 0,
        }
    }

    fn emss(&self) -> usize {
        self.lab.net.hosts[0].effective_mss(self.ids[0])
    }

    fn record(&mut self, count: usize) {
        let data = (self.sent..self.sent + count as u64).map(|i| Pattern::byte(5, i));
        self.begins.insert(self.sent);
        self.sent += count as u64;
        self.lab.net.hosts[0]
            .push_record(self.ids[0], count as u32, data.collect(), true)
            .unwrap();
    }

    fn fill(&mut self) {
        // A dozen segments per round trip are enough.
        let room = |bulk: &Bulk| {
            let info = bulk.lab.net.hosts[0].tcp_info(bulk.ids[0]).unwrap();
            let most = 12 * bulk.emss() as u32;
            let left = most.saturating_sub(info.in_flight) as usize;
            bulk.lab.net.hosts[0].send_room(bulk.ids[0]).min(left)
        };
        loop {
            let count = match self.records {
                Records::Long => 40_000,
                Records::Small => 300,
                _ => self.emss(),
            };
            if room(self) < count.min(self.emss()) {
                break;
            }
            self.record(count);
            // Small records are sent in batches.
            if self.records != Records::Small || self.begins.len().is_multiple_of(12) {
                self.lab.net.flush(0, self.ids[0]);
            }
        }
        self.lab.net.flush(0, self.ids[0]);
    }

    /// Runs for 20 us; returns the events of host 0.
    fn step(&mut self) -> Events {
        self.lab.net.run(Duration::from_micros(20), |_| false);
        self.lab.events[0].clear();
        self.lab.collect();
        let events = self.lab.got(0);
        if events.contains(Events::MTU_PROBE) && self.records == Records::Fpdus {
            self.asked += 1;
            let count = self.lab.net.hosts[0].mtu_probe_len(self.ids[0]);
            if let Some(count) = count {
                assert!(count > self.emss());
                self.record(count);
            }
        }
        for byte in read_all(&mut self.lab.net.hosts[1], self.ids[1]) {
            assert_eq!(byte, Pattern::byte(5, self.got), "byte {}", self.got);
            self.got += 1;
        }
        let cwnd = self.lab.net.hosts[0].tcp_info(self.ids[0]).unwrap().cwnd;
        self.fell |= cwnd < self.cwnd;
        self.cwnd = cwnd;
        events
    }

    /// Keeps sending for some virtual time.
    fn run_ms(&mut self, ms: u64) {
        let end = self.lab.net.now + Duration::from_millis(ms);
        while self.lab.net.now < end {
            self.fill();
            self.step();
        }
    }

    /// Waits until data in flight is delivered and acknowledged: an ACK still in transit when the clock is
    /// advanced would measure a round trip of minutes.
    fn drain(&mut self) {
        for _ in 0..50_000 {
            let info = self.lab.net.hosts[0].tcp_info(self.ids[0]).unwrap();
            if self.got == self.sent && info.in_flight == 0 {
                return;
            }
            self.step();
        }
        panic!("{} of {} bytes arrived", self.got, self.sent);
    }

    /// Silently reduces the path MTU to `mtu`, and waits until the connection detects it.
    fn narrow(&mut self, mtu: usize) {
        *self.mtu.borrow_mut() = mtu;
        let before = self.lab.net.hosts[0].stats().black_holes;
        for _ in 0..50_000 {
            if self.lab.net.hosts[0].stats().black_holes > before {
                break;
            }
            self.fill();
            self.step();
        }
        assert_eq!(self.lab.net.hosts[0].stats().black_holes, before + 1);
        self.lost.borrow_mut().clear();
        (self.fell, self.cwnd) = (false, 0);
    }

    fn stats(&self) -> siw_tcp::StackStats {
        self.lab.net.hosts[0].stats().clone()
    }

    /// Checks that segments of host 0 begin and end at record boundaries, except for records that were
    /// longer than a segment: these are split, counted from their start.
    fn assert_records_kept(&self) {
        let mut cut = HashSet::new();
        for seg in self.lab.seen.borrow().iter() {
            if seg.from != 0 || seg.payload.is_empty() {
                continue;
            }
            let from = u64::from(seg.seq.wrapping_sub(self.first));
            let to = from + seg.payload.len() as u64;
            assert!(
                self.begins.contains(&from) || cut.contains(&from),
                "a segment begins inside the record at {from}"
            );
            let inside = self
                .begins
                .iter()
                .any(|&boundary| boundary > from && boundary < to);
            if !self.begins.contains(&to) && to != self.sent {
                assert!(!inside, "a cut record shares its segment with others");
                cut.insert(to);
            }
        }
        // Only lost probes are split, into two at these sizes.
        assert!(
            cut.len() as u64 <= self.stats().mtu_probes_lost + self.stats().black_holes * 40,
            "{} cuts",
            cut.len()
        );
    }
}

const V4: usize = 52;

/// RFC 8899 section 5.3.
#[test]
fn the_search_costs_no_timeout_and_no_window() {
    for records in [Records::Long, Records::Fpdus, Records::Small] {
        for (mtu, exactly) in [
            (1500, true),
            (1492, true),
            (1400, true),
            (1280, true),
            (1337, false),
            (1209, false),
        ] {
            let mut bulk = Bulk::new(records);
            bulk.narrow(mtu.min(match records {
                Records::Small => 1240,
                _ => 1499,
            }));
            *bulk.mtu.borrow_mut() = mtu;
            assert_eq!(bulk.emss(), 1200 - V4);
            let before = bulk.stats();
            bulk.run_ms(60);
            let found = bulk.emss() + V4;
            let what = format!("{records:?} {mtu}: {found}");
            assert!(found <= mtu, "{what}");
            // The lengths of small records limit the sizes that they can add up to.
            let step = match (records, exactly) {
                (Records::Small, _) => 300,
                (_, true) => 1,
                _ => 8,
            };
            assert!(mtu - found < step, "{what}");
            let stats = bulk.stats();
            assert_eq!(stats.timeouts, before.timeouts, "{what}");
            assert_eq!(stats.fast_recovery, before.fast_recovery, "{what}");
            assert!(!bulk.fell, "{what}: a lost probe is no congestion");
            let lost = bulk.lost.borrow().len() as u64;
            assert_eq!(
                stats.mtu_probes_lost - before.mtu_probes_lost,
                lost,
                "{what}"
            );
            assert_eq!(stats.black_holes, 1, "{what}");
            bulk.drain();
            if records != Records::Long {
                bulk.assert_records_kept();
            }
        }
    }
}

#[test]
fn a_path_that_is_whole_again_is_used_after_one_probe() {
    let mut bulk = Bulk::new(Records::Fpdus);
    bulk.narrow(1300);
    *bulk.mtu.borrow_mut() = 1500;
    let probes = |bulk: &Bulk| (bulk.stats().mtu_probes_passed, bulk.stats().mtu_probes_lost);
    assert_eq!(probes(&bulk), (0, 0));
    bulk.run_ms(20);
    assert_eq!(bulk.emss(), 1448);
    assert_eq!(probes(&bulk), (1, 0));
    assert_eq!(bulk.asked, 1, "the owner is asked for one record");
    // Nothing of the search remains: a new connection starts with full segments.
    let [client, _] = bulk.lab.connect();
    assert_eq!(bulk.lab.net.hosts[0].effective_mss(client), 1448);
}

/// RFC 8899 section 5.1.
#[test]
fn three_lost_probes_end_the_search_for_ten_minutes() {
    let mut bulk = Bulk::new(Records::Fpdus);
    bulk.narrow(1200);
    bulk.run_ms(300);
    assert_eq!(bulk.emss(), 1200 - V4);
    let count = |bulk: &Bulk| {
        let mut sizes: Vec<_> = bulk
            .lost
            .borrow()
            .iter()
            .map(|frame| frame.len() - 14)
            .collect();
        sizes.sort_unstable();
        let all = sizes.clone();
        sizes.dedup();
        for size in &sizes {
            assert_eq!(
                all.iter().filter(|&other| other == size).count(),
                3,
                "MAX_PROBES of {size}"
            );
        }
        assert!(
            sizes.iter().any(|size| *size >= 1497),
            "the full size first: {sizes:?}"
        );
        sizes.len()
    };
    assert!(count(&bulk) >= 3);
    bulk.lost.borrow_mut().clear();
    bulk.drain();
    bulk.lab.net.now = bulk.lab.net.now + Duration::from_secs(595);
    bulk.run_ms(100);
    assert_eq!(bulk.lost.borrow().len(), 0, "SEARCH_COMPLETE");
    bulk.drain();
    bulk.lab.net.now = bulk.lab.net.now + Duration::from_secs(6);
    bulk.run_ms(150);
    assert!(count(&bulk) >= 3, "PMTU_RAISE_TIMER");
    assert_eq!(bulk.stats().black_holes, 1);
}

/// RFC 8899 section 4.6.2.
#[test]
fn an_icmp_error_gives_the_next_size_to_probe() {
    for records in [Records::Long, Records::Fpdus] {
        let mut bulk = Bulk::new(records);
        bulk.narrow(1333);
        let before = bulk.stats();
        let mut said = 0;
        for _ in 0..2000 {
            bulk.fill();
            bulk.step();
            let lost: Vec<_> = bulk.lost.borrow_mut().drain(..).collect();
            for frame in lost {
                let big = Seg::parse(0, &frame).unwrap();
                // Not about the probe: the MTU is larger than it, or the segment is not too long.
                bulk.lab.net.inject(1, icmp_error(&big, [3, 4], 1500));
                let mut other = big.clone();
                other.seq = other.seq.wrapping_add(big.payload.len() as u32);
                bulk.lab.net.inject(1, icmp_error(&other, [3, 4], 1333));
                bulk.lab.net.inject(1, icmp_error(&big, [3, 4], 1333));
                said += 1;
            }
        }
        assert_eq!(bulk.emss(), 1333 - V4);
        assert_eq!(said, 1);
        let stats = bulk.stats();
        assert_eq!(stats.mtu_probes_passed - before.mtu_probes_passed, 1);
        assert_eq!(stats.mtu_probes_lost, before.mtu_probes_lost);
        assert_eq!(
            (stats.timeouts, stats.fast_recovery),
            (before.timeouts, before.fast_recovery)
        );
        assert_eq!(stats.pmtu_reductions, 0, "what was in use stays in use");
        assert!(!bulk.fell);
        bulk.drain();
    }
}

#[test]
fn an_icmp_error_narrows_the_path_during_a_search() {
    let mut bulk = Bulk::new(Records::Fpdus);
    bulk.narrow(1300);
    *bulk.mtu.borrow_mut() = 1000;
    // The probe and the segments after it are dropped; the router reports each.
    for _ in 0..500 {
        bulk.fill();
        bulk.step();
        let lost: Vec<_> = bulk.lost.borrow_mut().drain(..).collect();
        for frame in lost {
            let segment = Seg::parse(0, &frame).unwrap();
            bulk.lab.net.inject(1, icmp_error(&segment, [3, 4], 1000));
        }
    }
    assert_eq!(bulk.emss(), 1000 - V4);
    let stats = bulk.stats();
    assert_eq!((stats.pmtu_reductions, stats.black_holes), (1, 1));
    assert!(!bulk.fell);
    bulk.drain();
}

#[test]
fn ipv6_searches_from_1280_rfc_8201() {
    for (mtu, found) in [(1400, 1400), (1280, 1280), (1500, 1500)] {
        let mut bulk = Bulk::with(Lab::new(), Records::Fpdus, true);
        bulk.narrow(mtu.min(1499));
        *bulk.mtu.borrow_mut() = mtu;
        assert_eq!(bulk.emss(), 1280 - 72);
        let before = bulk.stats();
        bulk.run_ms(150);
        assert_eq!(bulk.emss(), found - 72);
        let stats = bulk.stats();
        assert_eq!(
            (stats.timeouts, stats.fast_recovery),
            (before.timeouts, before.fast_recovery)
        );
        bulk.drain();
    }
}

#[test]
fn jumbo_frames_are_found_again_in_small_windows() {
    for records in [Records::Long, Records::Fpdus] {
        let mut configs = [host_config(0), host_config(1)];
        configs.iter_mut().for_each(|config| config.mtu = 9000);
        let mut bulk = Bulk::with(Lab::with(configs), records, false);
        bulk.narrow(1400);
        *bulk.mtu.borrow_mut() = 9000;
        bulk.run_ms(50);
        assert_eq!(bulk.emss(), 8948, "{records:?}");
        assert!(!bulk.fell);
        bulk.drain();
    }
}

#[test]
fn with_super_segments_too() {
    for mtu in [1400, 1500] {
        let mut configs = [host_config(0), host_config(1)];
        for config in &mut configs {
            config.tx_checksum = false;
            config.tso = Some(TsoLimits {
                max_segments: 32,
                max_bytes: 60_000,
            });
        }
        let mut bulk = Bulk::with(Lab::with(configs), Records::Fpdus, false);
        bulk.narrow(1300);
        *bulk.mtu.borrow_mut() = mtu;
        let before = bulk.stats();
        bulk.run_ms(150);
        assert_eq!(bulk.emss(), mtu - V4);
        let stats = bulk.stats();
        assert_eq!(
            (stats.timeouts, stats.fast_recovery),
            (before.timeouts, before.fast_recovery)
        );
        assert!(!bulk.fell);
        bulk.drain();
    }
}

/// RFC 1191 section 6.3.
#[test]
fn without_sack_full_segments_retry_after_ten_minutes() {
    let mut configs = [host_config(0), host_config(1)];
    configs.iter_mut().for_each(|config| config.sack = false);
    let mut bulk = Bulk::with(Lab::with(configs), Records::Fpdus, false);
    bulk.narrow(1300);
    *bulk.mtu.borrow_mut() = 1500;
    bulk.run_ms(50);
    let stats = bulk.stats();
    assert_eq!(bulk.emss(), 1200 - V4);
    assert_eq!(
        (stats.mtu_probes_passed, stats.mtu_probes_lost, bulk.asked),
        (0, 0, 0)
    );
    bulk.drain();
    for (seconds, payload) in [(580, 1200 - V4), (40, 1500 - V4)] {
        let end = bulk.lab.net.now + Duration::from_secs(seconds);
        bulk.lab.net.run(Duration::from_secs(seconds), |_| false);
        // No timer was due any more.
        bulk.lab.net.now = end;
        bulk.run_ms(5);
        assert_eq!(bulk.emss(), payload);
        bulk.drain();
    }
}

#[test]
fn an_owner_without_longer_records_keeps_sending() {
    let mut bulk = Bulk::new(Records::Deaf);
    bulk.narrow(1300);
    *bulk.mtu.borrow_mut() = 1500;
    let before = bulk.got;
    bulk.run_ms(150);
    assert_eq!(bulk.emss(), 1200 - V4);
    assert!(bulk.got - before > 1 << 20);
    bulk.drain();
    bulk.assert_records_kept();
}

/// RFC 8899 section 3 item 9.
#[test]
fn one_connection_probes_for_a_destination() {
    let mut bulk = Bulk::new(Records::Long);
    bulk.narrow(1400);
    let [client, server] = bulk.lab.connect();
    assert_eq!(bulk.lab.net.hosts[0].effective_mss(client), 1200 - V4);
    bulk.run_ms(150);
    let probes = (bulk.stats().mtu_probes_passed, bulk.stats().mtu_probes_lost);
    assert_eq!(bulk.emss(), 1400 - V4);
    bulk.lab.events[0].clear();
    bulk.lab.send(0, client, b"anything");
    bulk.lab.run_ms(1);
    assert_eq!(bulk.lab.net.hosts[0].effective_mss(client), 1400 - V4);
    let answered =
        |events: &&(ConnId, Events)| events.0 == client && events.1.contains(Events::MSS_CHANGED);
    assert!(bulk.lab.events[0].iter().any(|events| answered(&events)));
    assert_eq!(bulk.lab.read(1, server), b"anything");
    assert_eq!(
        probes,
        (bulk.stats().mtu_probes_passed, bulk.stats().mtu_probes_lost)
    );
    let [events, _] = bulk.lab.connect();
    assert_eq!(bulk.lab.net.hosts[0].effective_mss(events), 1400 - V4);
}

/// The loss is congestion (RFC 4821 section 7.6.4).
#[test]
fn a_probe_lost_with_others_proves_nothing() {
    let mut bulk = Bulk::new(Records::Long);
    bulk.narrow(1300);
    let before = bulk.stats();
    // The first probe's burst is lost except for its end.
    let left = Rc::new(RefCell::new(0));
    let still_lost = left.clone();
    bulk.lab.lose(move |from, frame| {
        let data = from == 0 && frame.len() > 1000;
        let mut left = still_lost.borrow_mut();
        if data && frame.len() > 14 + 1300 && *left == 0 {
            *left = 4;
        }
        let hit = data && *left > 1;
        *left -= i32::from(hit);
        hit
    });
    while *left.borrow() == 0 {
        bulk.fill();
        bulk.step();
    }
    for _ in 0..20 {
        bulk.fill();
        bulk.step();
    }
    let stats = bulk.stats();
    assert_eq!(stats.mtu_probes_lost, before.mtu_probes_lost);
    assert!(stats.fast_recovery + stats.timeouts > before.fast_recovery + before.timeouts);
    assert!(bulk.fell);
    bulk.lab.lose(|_, _| false);
    bulk.run_ms(100);
    assert_eq!(bulk.emss(), 1448);
    bulk.drain();
}

/// No timeout is needed.
#[test]
fn a_lost_probe_at_the_end_is_resent_in_parts() {
    let mut bulk = Bulk::new(Records::Fpdus);
    bulk.narrow(1300);
    let before = bulk.stats();
    for round in 1..=3 {
        // The owner sends until it is asked; then its longer record is the last.
        let mut asked = bulk.asked;
        while bulk.asked == asked {
            bulk.fill();
            bulk.step();
        }
        asked = bulk.asked;
        bulk.lab.net.flush(0, bulk.ids[0]);
        bulk.drain();
        let stats = bulk.stats();
        assert_eq!(bulk.asked, asked);
        assert_eq!(stats.mtu_probes_lost - before.mtu_probes_lost, round);
        assert_eq!(
            (stats.timeouts, stats.fast_recovery),
            (before.timeouts, before.fast_recovery)
        );
        bulk.lab.net.now = bulk.lab.net.now + Duration::from_millis(5);
    }
    bulk.assert_records_kept();
}
