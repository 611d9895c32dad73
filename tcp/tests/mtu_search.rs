//! The search for a narrow path's MTU, through whole connections: RFC 8899, RFC 4821.

mod common;

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::time::Duration;

use common::wire::{Lab, Seg, icmp_error};
use siw_tcp::sim::{Pattern, host_config, read_all};
use siw_tcp::{ConnId, Events, TsoLimits};

/// How the sender's records look.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Records {
    /// Parts of a byte stream, far longer than a segment.
    Long,
    /// As FPDUs: each fills a segment, and one is longer when TCP asks for it.
    Fpdus,
    /// The same, from an owner that does not answer.
    Deaf,
    /// Small messages.
    Small,
}

/// A connection of host 0 that has always something to send, and what its path swallowed.
struct Bulk {
    l: Lab,
    ids: [ConnId; 2],
    records: Records,
    sent: u64,
    got: u64,
    /// Where records begin in the stream.
    begins: HashSet<u64>,
    /// Sequence number of the stream's first byte.
    first: u32,
    /// Longest IP packet that passes; longer ones are kept here.
    mtu: Rc<RefCell<usize>>,
    lost: Rc<RefCell<Vec<Vec<u8>>>>,
    /// Least congestion window, in parts of the largest before it.
    fell: bool,
    cwnd: u32,
    asked: u32,
}

impl Bulk {
    fn new(records: Records) -> Bulk {
        Bulk::with(Lab::new(), records, false)
    }

    fn with(mut l: Lab, records: Records, v6: bool) -> Bulk {
        let to = if v6 { "[fd00::2]:80" } else { "10.0.0.2:80" };
        let now = l.net.now;
        let _ = l.net.hosts[1].listen(None, 80, 16, 0);
        let a = l.net.hosts[0]
            .connect(now, None, None, to.parse().unwrap(), 0)
            .unwrap();
        l.run_ms(5);
        let accepted = |e: &&(ConnId, Events)| e.1.contains(Events::ACCEPTED);
        let b = l.events[1].iter().rev().find(accepted).unwrap().0;
        let first = if v6 { 0 } else { l.last(0).seq };
        let mtu = Rc::new(RefCell::new(usize::MAX));
        let lost = Rc::new(RefCell::new(vec![]));
        let (m, k) = (mtu.clone(), lost.clone());
        l.lose(move |from, f| {
            let hit = from == 0 && f.len() > m.borrow().saturating_add(14);
            if hit {
                k.borrow_mut().push(f.to_vec());
            }
            hit
        });
        Bulk {
            l,
            ids: [a, b],
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
        self.l.net.hosts[0].effective_mss(self.ids[0])
    }

    fn record(&mut self, n: usize) {
        let data = (self.sent..self.sent + n as u64).map(|i| Pattern::byte(5, i));
        self.begins.insert(self.sent);
        self.sent += n as u64;
        self.l.net.hosts[0]
            .push_record(self.ids[0], n as u32, data.collect(), true)
            .unwrap();
    }

    fn fill(&mut self) {
        // A dozen segments a round trip are enough.
        let room = |b: &Bulk| {
            let c = b.l.net.hosts[0].tcp_info(b.ids[0]).unwrap();
            let most = 12 * b.emss() as u32;
            let left = most.saturating_sub(c.in_flight) as usize;
            b.l.net.hosts[0].send_room(b.ids[0]).min(left)
        };
        loop {
            let n = match self.records {
                Records::Long => 40_000,
                Records::Small => 300,
                _ => self.emss(),
            };
            if room(self) < n.min(self.emss()) {
                break;
            }
            self.record(n);
            // Small ones leave in company.
            if self.records != Records::Small || self.begins.len().is_multiple_of(12) {
                self.l.net.flush(0, self.ids[0]);
            }
        }
        self.l.net.flush(0, self.ids[0]);
    }

    /// 20 us; returns the events of host 0.
    fn step(&mut self) -> Events {
        self.l.net.run(Duration::from_micros(20), |_| false);
        self.l.events[0].clear();
        self.l.collect();
        let events = self.l.got(0);
        if events.contains(Events::MTU_PROBE) && self.records == Records::Fpdus {
            self.asked += 1;
            let n = self.l.net.hosts[0].mtu_probe_len(self.ids[0]);
            if let Some(n) = n {
                assert!(n > self.emss());
                self.record(n);
            }
        }
        for b in read_all(&mut self.l.net.hosts[1], self.ids[1]) {
            assert_eq!(b, Pattern::byte(5, self.got), "byte {}", self.got);
            self.got += 1;
        }
        let cwnd = self.l.net.hosts[0].tcp_info(self.ids[0]).unwrap().cwnd;
        self.fell |= cwnd < self.cwnd;
        self.cwnd = cwnd;
        events
    }

    /// Sends all the time for some virtual time.
    fn run_ms(&mut self, ms: u64) {
        let end = self.l.net.now + Duration::from_millis(ms);
        while self.l.net.now < end {
            self.fill();
            self.step();
        }
    }

    /// What is out arrives.
    fn drain(&mut self) {
        for _ in 0..50_000 {
            if self.got == self.sent {
                return;
            }
            self.step();
        }
        panic!("{} of {} bytes arrived", self.got, self.sent);
    }

    /// The path becomes `mtu` bytes narrow silently, and the connection finds out.
    fn narrow(&mut self, mtu: usize) {
        *self.mtu.borrow_mut() = mtu;
        let before = self.l.net.hosts[0].stats().black_holes;
        for _ in 0..50_000 {
            if self.l.net.hosts[0].stats().black_holes > before {
                break;
            }
            self.fill();
            self.step();
        }
        assert_eq!(self.l.net.hosts[0].stats().black_holes, before + 1);
        self.lost.borrow_mut().clear();
        (self.fell, self.cwnd) = (false, 0);
    }

    fn stats(&self) -> siw_tcp::StackStats {
        self.l.net.hosts[0].stats().clone()
    }

    /// Segments of host 0 begin and end where records do, but for those of records that were
    /// longer than a segment: these are cut, from their start on.
    fn assert_records_kept(&self) {
        let mut cut = HashSet::new();
        for s in self.l.seen.borrow().iter() {
            if s.from != 0 || s.payload.is_empty() {
                continue;
            }
            let from = u64::from(s.seq.wrapping_sub(self.first));
            let to = from + s.payload.len() as u64;
            assert!(
                self.begins.contains(&from) || cut.contains(&from),
                "a segment begins inside the record at {from}"
            );
            let inside = self.begins.iter().any(|&b| b > from && b < to);
            if !self.begins.contains(&to) && to != self.sent {
                assert!(!inside, "a cut record shares its segment with others");
                cut.insert(to);
            }
        }
        // Only probes that were lost are cut, into two at these sizes.
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
            let mut b = Bulk::new(records);
            b.narrow(mtu.min(match records {
                Records::Small => 1240,
                _ => 1499,
            }));
            *b.mtu.borrow_mut() = mtu;
            assert_eq!(b.emss(), 1200 - V4);
            let before = b.stats();
            b.run_ms(60);
            let found = b.emss() + V4;
            let what = format!("{records:?} {mtu}: {found}");
            assert!(found <= mtu, "{what}");
            // Small records add up to what their lengths allow.
            let step = match (records, exactly) {
                (Records::Small, _) => 300,
                (_, true) => 1,
                _ => 8,
            };
            assert!(mtu - found < step, "{what}");
            let s = b.stats();
            assert_eq!(s.timeouts, before.timeouts, "{what}");
            assert_eq!(s.fast_recovery, before.fast_recovery, "{what}");
            assert!(!b.fell, "{what}: a lost probe is no congestion");
            let lost = b.lost.borrow().len() as u64;
            assert_eq!(s.mtu_probes_lost - before.mtu_probes_lost, lost, "{what}");
            assert_eq!(s.black_holes, 1, "{what}");
            b.drain();
            if records != Records::Long {
                b.assert_records_kept();
            }
        }
    }
}

#[test]
fn a_path_that_is_whole_again_is_used_after_one_probe() {
    let mut b = Bulk::new(Records::Fpdus);
    b.narrow(1300);
    *b.mtu.borrow_mut() = 1500;
    let probes = |b: &Bulk| (b.stats().mtu_probes_passed, b.stats().mtu_probes_lost);
    assert_eq!(probes(&b), (0, 0));
    b.run_ms(20);
    assert_eq!(b.emss(), 1448);
    assert_eq!(probes(&b), (1, 0));
    assert_eq!(b.asked, 1, "the owner is asked for one record");
    // Nothing is left of it: a new connection starts with full segments.
    let [c, _] = b.l.connect();
    assert_eq!(b.l.net.hosts[0].effective_mss(c), 1448);
}

/// RFC 8899 section 5.1.
#[test]
fn three_lost_probes_end_the_search_for_ten_minutes() {
    let mut b = Bulk::new(Records::Fpdus);
    b.narrow(1200);
    b.run_ms(300);
    assert_eq!(b.emss(), 1200 - V4);
    let count = |b: &Bulk| {
        let mut sizes: Vec<_> = b.lost.borrow().iter().map(|f| f.len() - 14).collect();
        sizes.sort_unstable();
        let all = sizes.clone();
        sizes.dedup();
        for s in &sizes {
            assert_eq!(
                all.iter().filter(|&x| x == s).count(),
                3,
                "MAX_PROBES of {s}"
            );
        }
        assert!(
            sizes.iter().any(|s| *s >= 1497),
            "the full size first: {sizes:?}"
        );
        sizes.len()
    };
    assert!(count(&b) >= 3);
    b.lost.borrow_mut().clear();
    b.drain();
    b.l.net.now = b.l.net.now + Duration::from_secs(595);
    b.run_ms(100);
    assert_eq!(b.lost.borrow().len(), 0, "SEARCH_COMPLETE");
    b.drain();
    b.l.net.now = b.l.net.now + Duration::from_secs(6);
    b.run_ms(150);
    assert!(count(&b) >= 3, "PMTU_RAISE_TIMER");
    assert_eq!(b.stats().black_holes, 1);
}

/// RFC 8899 section 4.6.2.
#[test]
fn an_icmp_error_gives_the_next_size_to_probe() {
    for records in [Records::Long, Records::Fpdus] {
        let mut b = Bulk::new(records);
        b.narrow(1333);
        let before = b.stats();
        let mut said = 0;
        for _ in 0..2000 {
            b.fill();
            b.step();
            let lost: Vec<_> = b.lost.borrow_mut().drain(..).collect();
            for f in lost {
                let big = Seg::parse(0, &f).unwrap();
                // Not about the probe: longer than it, or about a segment that is not too long.
                b.l.net.inject(1, icmp_error(&big, [3, 4], 1500));
                let mut other = big.clone();
                other.seq = other.seq.wrapping_add(big.payload.len() as u32);
                b.l.net.inject(1, icmp_error(&other, [3, 4], 1333));
                b.l.net.inject(1, icmp_error(&big, [3, 4], 1333));
                said += 1;
            }
        }
        assert_eq!(b.emss(), 1333 - V4);
        assert_eq!(said, 1);
        let s = b.stats();
        assert_eq!(s.mtu_probes_passed - before.mtu_probes_passed, 1);
        assert_eq!(s.mtu_probes_lost, before.mtu_probes_lost);
        assert_eq!(
            (s.timeouts, s.fast_recovery),
            (before.timeouts, before.fast_recovery)
        );
        assert_eq!(s.pmtu_reductions, 0, "what was in use stays in use");
        assert!(!b.fell);
        b.drain();
    }
}

#[test]
fn an_icmp_error_narrows_the_path_during_a_search() {
    let mut b = Bulk::new(Records::Fpdus);
    b.narrow(1300);
    *b.mtu.borrow_mut() = 1000;
    // The probe and what follows it vanish; the router says so of all.
    for _ in 0..500 {
        b.fill();
        b.step();
        let lost: Vec<_> = b.lost.borrow_mut().drain(..).collect();
        for f in lost {
            let s = Seg::parse(0, &f).unwrap();
            b.l.net.inject(1, icmp_error(&s, [3, 4], 1000));
        }
    }
    assert_eq!(b.emss(), 1000 - V4);
    let s = b.stats();
    assert_eq!((s.pmtu_reductions, s.black_holes), (1, 1));
    assert!(!b.fell);
    b.drain();
}

#[test]
fn ipv6_searches_from_1280_rfc_8201() {
    for (mtu, found) in [(1400, 1400), (1280, 1280), (1500, 1500)] {
        let mut b = Bulk::with(Lab::new(), Records::Fpdus, true);
        b.narrow(mtu.min(1499));
        *b.mtu.borrow_mut() = mtu;
        assert_eq!(b.emss(), 1280 - 72);
        let before = b.stats();
        b.run_ms(150);
        assert_eq!(b.emss(), found - 72);
        let s = b.stats();
        assert_eq!(
            (s.timeouts, s.fast_recovery),
            (before.timeouts, before.fast_recovery)
        );
        b.drain();
    }
}

#[test]
fn jumbo_frames_are_found_again_in_small_windows() {
    for records in [Records::Long, Records::Fpdus] {
        let mut c = [host_config(0), host_config(1)];
        c.iter_mut().for_each(|c| c.mtu = 9000);
        let mut b = Bulk::with(Lab::with(c), records, false);
        b.narrow(1400);
        *b.mtu.borrow_mut() = 9000;
        b.run_ms(50);
        assert_eq!(b.emss(), 8948, "{records:?}");
        assert!(!b.fell);
        b.drain();
    }
}

#[test]
fn with_super_segments_too() {
    for mtu in [1400, 1500] {
        let mut c = [host_config(0), host_config(1)];
        for c in &mut c {
            c.tx_checksum = false;
            c.tso = Some(TsoLimits {
                max_segments: 32,
                max_bytes: 60_000,
            });
        }
        let mut b = Bulk::with(Lab::with(c), Records::Fpdus, false);
        b.narrow(1300);
        *b.mtu.borrow_mut() = mtu;
        let before = b.stats();
        b.run_ms(150);
        assert_eq!(b.emss(), mtu - V4);
        let s = b.stats();
        assert_eq!(
            (s.timeouts, s.fast_recovery),
            (before.timeouts, before.fast_recovery)
        );
        assert!(!b.fell);
        b.drain();
    }
}

/// RFC 1191 section 6.3.
#[test]
fn without_sack_full_segments_retry_after_ten_minutes() {
    let mut c = [host_config(0), host_config(1)];
    c.iter_mut().for_each(|c| c.sack = false);
    let mut b = Bulk::with(Lab::with(c), Records::Fpdus, false);
    b.narrow(1300);
    *b.mtu.borrow_mut() = 1500;
    b.run_ms(50);
    let s = b.stats();
    assert_eq!(b.emss(), 1200 - V4);
    assert_eq!((s.mtu_probes_passed, s.mtu_probes_lost, b.asked), (0, 0, 0));
    b.drain();
    for (seconds, payload) in [(580, 1200 - V4), (40, 1500 - V4)] {
        let end = b.l.net.now + Duration::from_secs(seconds);
        b.l.net.run(Duration::from_secs(seconds), |_| false);
        // Nothing was due any more.
        b.l.net.now = end;
        b.run_ms(5);
        assert_eq!(b.emss(), payload);
        b.drain();
    }
}

#[test]
fn an_owner_without_longer_records_keeps_sending() {
    let mut b = Bulk::new(Records::Deaf);
    b.narrow(1300);
    *b.mtu.borrow_mut() = 1500;
    let before = b.got;
    b.run_ms(150);
    assert_eq!(b.emss(), 1200 - V4);
    assert!(b.got - before > 1 << 20);
    b.drain();
    b.assert_records_kept();
}

/// RFC 8899 section 3 item 9.
#[test]
fn one_connection_probes_for_a_destination() {
    let mut b = Bulk::new(Records::Long);
    b.narrow(1400);
    let [c, d] = b.l.connect();
    assert_eq!(b.l.net.hosts[0].effective_mss(c), 1200 - V4);
    b.run_ms(150);
    let probes = (b.stats().mtu_probes_passed, b.stats().mtu_probes_lost);
    assert_eq!(b.emss(), 1400 - V4);
    b.l.events[0].clear();
    b.l.send(0, c, b"anything");
    b.l.run_ms(1);
    assert_eq!(b.l.net.hosts[0].effective_mss(c), 1400 - V4);
    let told = |e: &&(ConnId, Events)| e.0 == c && e.1.contains(Events::MSS_CHANGED);
    assert!(b.l.events[0].iter().any(|e| told(&e)));
    assert_eq!(b.l.read(1, d), b"anything");
    assert_eq!(
        probes,
        (b.stats().mtu_probes_passed, b.stats().mtu_probes_lost)
    );
    let [e, _] = b.l.connect();
    assert_eq!(b.l.net.hosts[0].effective_mss(e), 1400 - V4);
}

/// It is congestion (RFC 4821 section 7.6.4).
#[test]
fn a_probe_lost_with_others_proves_nothing() {
    let mut b = Bulk::new(Records::Long);
    b.narrow(1300);
    let before = b.stats();
    // The first probe's burst is lost but for its end.
    let left = Rc::new(RefCell::new(0));
    let l = left.clone();
    b.l.lose(move |from, f| {
        let data = from == 0 && f.len() > 1000;
        let mut left = l.borrow_mut();
        if data && f.len() > 14 + 1300 && *left == 0 {
            *left = 4;
        }
        let hit = data && *left > 1;
        *left -= i32::from(hit);
        hit
    });
    while *left.borrow() == 0 {
        b.fill();
        b.step();
    }
    for _ in 0..20 {
        b.fill();
        b.step();
    }
    let s = b.stats();
    assert_eq!(s.mtu_probes_lost, before.mtu_probes_lost);
    assert!(s.fast_recovery + s.timeouts > before.fast_recovery + before.timeouts);
    assert!(b.fell);
    b.l.lose(|_, _| false);
    b.run_ms(100);
    assert_eq!(b.emss(), 1448);
    b.drain();
}

/// Without a timeout.
#[test]
fn a_lost_probe_at_the_end_is_resent_in_parts() {
    let mut b = Bulk::new(Records::Fpdus);
    b.narrow(1300);
    let before = b.stats();
    for round in 1..=3 {
        // Until the owner is asked, it sends; then its longer record is the last.
        let mut asked = b.asked;
        while b.asked == asked {
            b.fill();
            b.step();
        }
        asked = b.asked;
        b.l.net.flush(0, b.ids[0]);
        b.drain();
        let s = b.stats();
        assert_eq!(b.asked, asked);
        assert_eq!(s.mtu_probes_lost - before.mtu_probes_lost, round);
        assert_eq!(
            (s.timeouts, s.fast_recovery),
            (before.timeouts, before.fast_recovery)
        );
        b.l.net.now = b.l.net.now + Duration::from_millis(5);
    }
    b.assert_records_kept();
}
