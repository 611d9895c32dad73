//! Work that must stay constant, and work that must not be deferred.

use super::*;

/// Found in smoltcp. The cost of a new connection must not grow with the number of idle ones.
#[test]
fn one_listener_accepts_many_connections() {
    // With a linear lookup, 10,000 idle connections would cost three orders of magnitude.
    let cost = |idle: usize| {
        let mut configs = [host_config(0), host_config(1)];
        configs.iter_mut().for_each(|config| {
            config.tcp.max_connections = idle + 10;
            config.net.control_rate = 1_000_000;
        });
        let mut lab = Lab::with(configs);
        let now = lab.net.now;
        lab.net.hosts[1].listen(None, 80, idle + 10, 0).unwrap();
        for _ in 0..idle {
            lab.net.hosts[0]
                .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
                .unwrap();
        }
        lab.run_ms(50);
        assert_eq!(lab.net.hosts[1].stats().tcp.curr_estab, idle as u64);
        let [client, server] = lab.connect();
        lab.seen.borrow_mut().clear();
        lab.net.filter = None;
        let exchanges = || {
            for _ in 0..3_000 {
                lab.send(0, client, &[7; 100]);
                lab.net.run(micros(200), |net| {
                    net.hosts[1].tcp_info(server).unwrap().readable > 0
                });
                lab.read(1, server);
                lab.net.hosts[0].take_acked(client, drop);
            }
        };
        cpu_time::measure(exchanges).1
    };
    let (few, many) = (cost(1), cost(10_000));
    assert!(many < 8 * few, "1 idle: {few:?}, 10,000 idle: {many:?}");
}

/// Found in smoltcp.
#[test]
fn data_is_delivered_in_the_buffer_it_came_in() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    lab.lose(|_, _| true);
    let from = seen(&lab);
    lab.send(0, client, b"in place");
    lab.net.poll();
    let frame = since(&lab, 0, from)[0].frame();
    let span = frame.as_ptr_range();
    let now = lab.net.now;
    lab.net.hosts[1].receive_burst(now, std::iter::once((VecBuf::from(frame), INFO)));
    let rx = lab.net.hosts[1].receive_queue(server).unwrap();
    let chunk = rx.chunks().next().unwrap();
    assert_eq!(chunk, b"in place");
    assert!(span.contains(&chunk.as_ptr()));
}

/// Found in TAS 15.
#[test]
fn the_last_data_is_sent_without_another_call() {
    // Userspace iWARP hung over TAS because the last of several sends was never flushed.
    for count in [1usize, 2, 3, 17] {
        let mut lab = Lab::new();
        let [client, server] = lab.connect();
        for k in 0..count {
            let record = vec![k as u8; 40];
            lab.net.hosts[0]
                .push_record(client, 40, record, k + 1 == count)
                .unwrap();
            if k % 2 == 0 {
                lab.net.hosts[0].take_acked(client, drop);
            }
        }
        assert!(!lab.net.hosts[0].is_idle() && lab.net.hosts[0].has_output());
        lab.run_ms(1);
        assert_eq!(lab.read(1, server).len(), 40 * count);
    }
}

/// Found in Demikernel.
#[test]
fn one_poll_sends_all_that_the_window_allows() {
    let mut lab = with(|config| config.tcp.initial_window = 64);
    let [client, _] = lab.connect();
    let from = seen(&lab);
    for chunk in pattern(64 * MSS).chunks(MSS) {
        lab.net.hosts[0]
            .push_record(client, MSS as u32, chunk.to_vec(), false)
            .unwrap();
    }
    lab.net.poll();
    assert_eq!(since(&lab, 0, from).len(), 64);
}

/// Found in xarxa 278.
#[test]
fn idle_connections_cost_a_poll_nothing() {
    let mut config = host_config(0);
    config.net.neighbours = NeighbourConfig::default();
    config.net.addresses = vec![IpCidr::new("10.0.0.1".parse().unwrap(), 24)];
    let mut lab = Lab::with([config, host_config(1)]);
    let ids = (0..100).map(|_| lab.connect()).collect::<Vec<_>>();
    lab.run_ms(100);
    assert!(!lab.net.hosts[0].has_output() && lab.net.hosts[0].is_idle());
    let from = seen(&lab);
    for _ in 0..1000 {
        lab.net.poll();
    }
    assert_eq!(seen(&lab), from);
    assert_eq!(ids.len(), 100);
}
