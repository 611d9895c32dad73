//! A connection whose two ends are the same: one TCB that receives what it sends.

use std::net::IpAddr;
use std::time::Duration;

use siw_net::{ConnId, FrameInfo, Instant, RxChecksum, VecBuf};
use siw_tcp::{Events, Stack, StackError, TcpState};
use siw_tcp_sim::{Pattern, VecSink, host_config, read_all};

/// One host whose frames come back to it, except those that are lost.
struct Looped {
    host: Stack<VecBuf, Pattern>,
    now: Instant,
    /// Every frame with a number divisible by this is lost; 0: none.
    lose_each: u64,
    sent: u64,
    lost: u64,
}

impl Looped {
    fn new(lose_each: u64) -> Looped {
        let now = Instant::from_millis(1_000_000);
        Looped {
            host: Stack::new(host_config(0), now).unwrap(),
            now,
            lose_each,
            sent: 0,
            lost: 0,
        }
    }

    fn address(number: usize) -> IpAddr {
        host_config(0).net.addresses[number].addr
    }

    /// Sends what is due, and delivers it after a millisecond.
    fn step(&mut self) {
        let mut sink = VecSink::default();
        self.host.poll(self.now, &mut sink);
        self.now = self.now + Duration::from_millis(1);
        for (frame, meta) in sink.frames {
            assert!(meta.self_addressed, "nothing leaves the host");
            self.sent += 1;
            if self.lose_each > 0 && self.sent.is_multiple_of(self.lose_each) {
                self.lost += 1;
                continue;
            }
            let info = FrameInfo {
                checksum: RxChecksum::Unknown,
                rss_hash: 0,
            };
            let received = (VecBuf::from(frame), info);
            self.host.receive_burst(self.now, std::iter::once(received));
        }
    }

    /// Steps until this event of the connection; returns all that were reported.
    fn await_event(&mut self, conn: ConnId, wanted: Events) -> Events {
        let mut seen = Events(0);
        for _ in 0..20_000 {
            while let Some((id, _, events)) = self.host.next_event() {
                assert_eq!(id, conn);
                seen.0 |= events.0;
            }
            if seen.contains(wanted) {
                return seen;
            }
            self.step();
        }
        panic!("{seen:?} without {wanted:?}");
    }

    fn state(&self, conn: ConnId) -> TcpState {
        self.host.tcp_info(conn).unwrap().state
    }
}

#[test]
fn what_it_sends_arrives_at_itself() {
    const RECORDS: u64 = 2000;
    const LEN: u32 = 1000;
    for (lose_each, family) in [(0, 0), (0, 1), (11, 0), (3, 0)] {
        let mut looped = Looped::new(lose_each);
        let address = Looped::address(family);
        let now = looped.now;
        let conn = looped.host.connect_to_itself(now, address, 5).unwrap();
        let events = looped.await_event(conn, Events::CONNECTED);
        assert!(
            !events.intersects(Events::ACCEPTED | Events::CLOSED),
            "{events:?}"
        );
        let info = looped.host.tcp_info(conn).unwrap();
        assert_eq!(
            (info.state, info.local),
            (TcpState::Established, info.remote)
        );
        assert_eq!(info.local.ip(), address);
        let (mut pushed, mut acked, mut received) = (0, 0, 0);
        while acked < RECORDS || received < RECORDS * u64::from(LEN) {
            while pushed < RECORDS && pushed < acked + 64 {
                let start = pushed * u64::from(LEN);
                let record = Pattern { salt: 3, start };
                looped.host.push_record(conn, LEN, record, true).unwrap();
                pushed += 1;
            }
            looped.step();
            for byte in read_all(&mut looped.host, conn) {
                assert_eq!(byte, Pattern::byte(3, received));
                received += 1;
            }
            looped.host.take_acked(conn, |_| acked += 1);
        }
        assert_eq!(looped.lost > 0, lose_each > 0);
        // Its FIN is also the peer's.
        let now = looped.now;
        looped.host.close(now, conn);
        let events = looped.await_event(conn, Events::CLOSED);
        assert!(events.contains(Events::PEER_FIN));
        assert!(
            !events.intersects(Events::RESET | Events::TIMED_OUT),
            "{events:?}"
        );
        assert_eq!(looped.state(conn), TcpState::TimeWait);
        // No segments are exchanged for ever.
        (0..1000).for_each(|_| looped.step());
        let sent = looped.sent;
        (0..1000).for_each(|_| looped.step());
        assert_eq!(looped.sent, sent);
    }
}

#[test]
fn an_idle_one_is_silent() {
    let mut looped = Looped::new(0);
    let now = looped.now;
    let conn = looped
        .host
        .connect_to_itself(now, Looped::address(0), 0)
        .unwrap();
    looped.await_event(conn, Events::CONNECTED);
    (0..10).for_each(|_| looped.step());
    let sent = looped.sent;
    (0..5000).for_each(|_| looped.step());
    assert_eq!(looped.sent, sent);
    assert_eq!(looped.state(conn), TcpState::Established);
}

/// The reset of an aborted one finds no connection, and nothing answers it.
#[test]
fn an_aborted_one_leaves_nothing() {
    let mut looped = Looped::new(0);
    let now = looped.now;
    let conn = looped
        .host
        .connect_to_itself(now, Looped::address(0), 0)
        .unwrap();
    looped.await_event(conn, Events::CONNECTED);
    for start in 0..8 {
        let record = Pattern { salt: 1, start };
        looped.host.push_record(conn, 1000, record, true).unwrap();
    }
    let mut sink = VecSink::default();
    let now = looped.now;
    looped.host.flush(now, conn, &mut sink);
    looped.host.abort(now, conn);
    looped.host.release(now, conn);
    for (frame, _) in sink.frames {
        let info = FrameInfo {
            checksum: RxChecksum::Unknown,
            rss_hash: 0,
        };
        let received = (VecBuf::from(frame), info);
        looped.host.receive_burst(now, std::iter::once(received));
    }
    (0..100).for_each(|_| looped.step());
    assert_eq!(looped.host.connection_count(), 0);
    assert!(looped.sent < 20, "{} frames", looped.sent);
}

#[test]
fn many_have_different_ports_and_only_own_addresses() {
    let mut looped = Looped::new(0);
    let now = looped.now;
    let mut ports = std::collections::HashSet::new();
    for _ in 0..500 {
        let conn = looped
            .host
            .connect_to_itself(now, Looped::address(0), 0)
            .unwrap();
        ports.insert(looped.host.tcp_info(conn).unwrap().local.port());
    }
    assert_eq!(ports.len(), 500);
    let foreign = "10.0.0.9".parse().unwrap();
    let error = looped.host.connect_to_itself(now, foreign, 0).unwrap_err();
    assert!(matches!(error, StackError::NotOurAddress(address) if address == foreign));
}
