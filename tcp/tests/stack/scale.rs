//! Many connections in one stack: each works, none slows the others, and all resources are freed.

use std::time::Duration;

use siw_net::{ConnId, FrameInfo, Instant, RxChecksum, VecBuf};
use siw_tcp::{Events, Stack};
use siw_tcp_sim::{Pattern, VecSink, host_config};

const CONNECTIONS: usize = 100_000;
const AT_A_TIME: usize = 2_000;
const BYTES: u64 = 100;

type Host = Stack<VecBuf, Pattern>;

struct Net {
    now: Instant,
    hosts: [Host; 2],
    sinks: [VecSink; 2],
    /// Connection ids by the number of the connecting side, at each host.
    ids: [Vec<Option<ConnId>>; 2],
    received: [Vec<u64>; 2],
    acked: usize,
    closed: [usize; 2],
}

impl Net {
    fn new(max: usize) -> Net {
        let now = Instant::from_millis(1000);
        let host = |i| {
            let mut config = host_config(i);
            config.tcp.max_connections = max;
            config.tcp.tx_checksum = false;
            Host::new(config, now).unwrap()
        };
        let mut hosts = [host(0), host(1)];
        for port in [1, 2] {
            hosts[1].listen(None, port, AT_A_TIME, 0).unwrap();
        }
        Net {
            now,
            hosts,
            sinks: [VecSink::default(), VecSink::default()],
            ids: [vec![None; max], vec![None; max]],
            received: [vec![0; max], vec![0; max]],
            acked: 0,
            closed: [0; 2],
        }
    }

    /// Returns the number of a connection, derived from its ports, so that both ends agree.
    fn number(&self, host: usize, id: ConnId) -> usize {
        let info = self.hosts[host].tcp_info(id).unwrap();
        let (theirs, ours) = if host == 0 {
            (info.local, info.remote)
        } else {
            (info.remote, info.local)
        };
        usize::from(theirs.port()) - 1024 + 50_000 * (usize::from(ours.port()) - 1)
    }

    fn connect(&mut self, count: usize) {
        let to = format!("10.0.0.2:{}", 1 + count / 50_000).parse().unwrap();
        let port = Some(1024 + (count % 50_000) as u16);
        let id = self.hosts[0].connect(self.now, None, port, to, 0).unwrap();
        self.ids[0][count] = Some(id);
    }

    fn push(&mut self, host: usize, count: usize) {
        let record = Pattern {
            salt: (2 * count + host) as u64,
            start: 0,
        };
        let id = self.ids[host][count].unwrap();
        self.hosts[host]
            .push_record(id, BYTES as u32, record, true)
            .ok()
            .unwrap();
        self.hosts[host].flush(self.now, id, &mut self.sinks[host]);
    }

    /// Exchanges frames until none is left.
    fn exchange(&mut self) {
        loop {
            self.now = self.now + Duration::from_micros(10);
            for host in 0..2 {
                self.hosts[host].poll(self.now, &mut self.sinks[host]);
            }
            if self.sinks.iter().all(|sink| sink.frames.is_empty()) {
                return;
            }
            for host in 0..2 {
                let info = FrameInfo {
                    checksum: RxChecksum::Good,
                    rss_hash: 0,
                };
                let frames = self.sinks[1 - host].frames.drain(..);
                let frames = frames.map(|(frame, _)| (VecBuf::from(frame), info));
                self.hosts[host].receive_burst(self.now, frames);
                self.events(host);
            }
        }
    }

    fn events(&mut self, host: usize) {
        while let Some((id, _, events)) = self.hosts[host].next_event() {
            let count = self.number(host, id);
            if events.intersects(Events::CONNECTED | Events::ACCEPTED) {
                self.ids[host][count] = Some(id);
            }
            if events.contains(Events::READABLE) {
                let mut at = self.received[host][count];
                let rx = self.hosts[host].receive_queue(id).unwrap();
                for chunk in rx.chunks().flatten() {
                    assert_eq!(
                        *chunk,
                        Pattern::byte((2 * count + 1 - host) as u64, at),
                        "connection {count}"
                    );
                    at += 1;
                }
                rx.consume(usize::MAX);
                self.received[host][count] = at;
            }
            if events.contains(Events::ACKED) {
                let acked = &mut self.acked;
                self.hosts[host].take_acked(id, |_| *acked += 1);
            }
            if events.contains(Events::PEER_FIN) {
                self.hosts[host].close(self.now, id);
            }
            if events.contains(Events::CLOSED) {
                self.hosts[host].release(self.now, id);
                self.closed[host] += 1;
            }
        }
    }

    /// Measures the processor time of a fixed number of idle polls and round trips on one connection.
    fn effort(&mut self) -> Duration {
        let exchanges = || {
            for _ in 0..2000 {
                self.push(0, 0);
                self.exchange();
                self.received[1][0] = 0;
            }
        };
        crate::cpu_time::measure(exchanges).1
    }
}

#[test]
fn a_hundred_thousand_connections_leave_nothing() {
    let mut net = Net::new(CONNECTIONS);
    net.connect(0);
    net.exchange();
    let alone = (0..3).map(|_| net.effort()).min().unwrap();
    for first in (0..CONNECTIONS).step_by(AT_A_TIME) {
        for count in first.max(1)..first + AT_A_TIME {
            net.connect(count);
        }
        net.exchange();
    }
    assert_eq!(net.hosts[0].connection_count(), CONNECTIONS);
    assert_eq!(net.hosts[1].connection_count(), CONNECTIONS);
    assert_eq!(net.hosts[1].stats().tcp.curr_estab, CONNECTIONS as u64);

    // A scan over all connections would take thousands of times as long; cache misses do not.
    let among = (0..3).map(|_| net.effort()).min().unwrap();
    assert!(
        among < 20 * alone,
        "alone {alone:?}, among {CONNECTIONS} {among:?}"
    );

    net.acked = 0;
    for first in (0..CONNECTIONS).step_by(AT_A_TIME) {
        for count in first..first + AT_A_TIME {
            for host in 0..2 {
                net.push(host, count);
            }
        }
        net.exchange();
    }
    // Delayed ACKs.
    net.now = net.now + Duration::from_millis(2);
    net.exchange();
    assert!(net.received[0].iter().all(|&count| count == BYTES));
    assert!(net.received[1].iter().all(|&count| count == BYTES));
    assert_eq!(net.acked, 2 * CONNECTIONS);
    for host in 0..2 {
        let stats = net.hosts[host].stats();
        assert_eq!(
            (
                stats.tcp.retrans_segs,
                stats.tcp.timeouts,
                stats.tcp.out_rsts
            ),
            (0, 0, 0),
            "host {host}"
        );
    }

    for first in (0..CONNECTIONS).step_by(AT_A_TIME) {
        for count in first..first + AT_A_TIME {
            let id = net.ids[0][count].unwrap();
            net.hosts[0].close(net.now, id);
        }
        net.exchange();
    }
    assert_eq!(net.closed, [CONNECTIONS; 2]);
    assert_eq!(net.hosts[1].connection_count(), 0);
    net.now = net.now + Duration::from_secs(61);
    // A poll runs a part of the timers that are due.
    for _ in 0..CONNECTIONS {
        net.exchange();
        if net.hosts[0].connection_count() == 0 {
            break;
        }
    }
    assert_eq!(net.hosts[0].connection_count(), 0, "TIME-WAIT is over");
    assert!(net.hosts.iter().all(Host::is_idle));
}
