//! Receive windows on long paths, and the buffers behind them.

use std::time::Duration;

use crate::common::configs;
use crate::common::wire::{Lab, pattern};
use siw_net::{FrameInfo, RxChecksum};
use siw_tcp_sim::{Impairment, Pattern, SimNet, host_config};

/// Goodput of a bulk transfer over 1 Gb/s and 100 ms as a share of the path, without its first five
/// seconds.
fn long_path_share() -> f64 {
    let mut link = Impairment::perfect(Duration::from_millis(50));
    link.rate = 1_000_000_000;
    link.queue = 8192;
    // As siwd with a pool of 16384 buffers.
    let mut configs = configs();
    for config in &mut configs {
        config.tcp.recv_window = 1 << 20;
        config.tcp.recv_window_doublings = 5;
        config.tcp.max_held_buffers = 11_776;
    }
    let mut net = SimNet::<Pattern>::new(7, configs, [link; 2]);
    net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let to = "10.0.0.2:80".parse().unwrap();
    let now = net.now;
    let from = net.hosts[0].connect(now, None, None, to, 0).unwrap();
    let (start, mut server, mut received) = (net.now, None, 0);
    let mut transfer_until = |seconds| {
        let limit = start + Duration::from_secs(seconds);
        while net.step(limit) {
            let emss = net.hosts[0].effective_mss(from);
            while net.hosts[0].send_room(from) >= emss {
                let record = Pattern { salt: 1, start: 0 };
                let pushed = net.hosts[0].push_record(from, emss as u32, record, false);
                if pushed.is_err() {
                    break;
                }
            }
            net.flush(0, from);
            net.hosts[0].take_acked(from, drop);
            server = server.or_else(|| net.hosts[1].next_event().map(|event| event.0));
            let queue = server.and_then(|server| net.hosts[1].receive_queue(server));
            received += queue.map_or(0, |queue| queue.consume(usize::MAX));
        }
        received
    };
    let before = transfer_until(5);
    let bits = 8 * (transfer_until(8) - before);
    bits as f64 / 3e9
}

#[test]
fn a_window_grows_until_a_long_path_is_full() {
    let share = long_path_share();
    println!("{:.0} Mb/s", share * 1000.0);
    assert!(share > 0.9, "{share}");
}

/// What the window promises is kept, whatever the length of segments.
#[test]
fn no_small_segment_in_the_window_is_refused() {
    let lens = [1, 40, 100, 700, 1100];
    for (len, is_common) in lens.into_iter().flat_map(|len| [(len, false), (len, true)]) {
        let mut configs = [host_config(0), host_config(1)];
        // The limit of one connection, or of all together, of which there is one.
        if is_common {
            configs[1].tcp.max_held_buffers = 1024;
        } else {
            configs[1].tcp.max_recv_buffers = 1024;
        }
        let mut lab = Lab::with(configs);
        let [_, server] = lab.connect();
        let mut segment = lab.forge(0);
        let info = FrameInfo {
            checksum: RxChecksum::Unknown,
            rss_hash: 0,
        };
        let mut sent = 0;
        // 700 KB are below the window, which the last ACK shows.
        while sent < 700_000.min(10_000 * len) {
            segment.payload = pattern(len);
            let now = lab.net.now;
            let frame = segment.frame().into();
            lab.net.hosts[1].receive_burst(now, std::iter::once((frame, info)));
            segment.seq = segment.seq.wrapping_add(len as u32);
            sent += len;
            lab.net.poll();
        }
        let host = &lab.net.hosts[1];
        assert_eq!(host.stats().tcp.rcv_q_drop, 0, "{len} bytes, {is_common}");
        assert_eq!(host.tcp_info(server).unwrap().readable, sent);
        assert!(host.held_buffers() <= 1024, "{}", host.held_buffers());
        let read = lab.read(1, server);
        let parts = read.chunks(len);
        assert!(parts.into_iter().all(|part| part == pattern(len)));
    }
}
