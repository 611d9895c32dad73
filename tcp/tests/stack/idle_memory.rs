//! Memory of the queues of connections that are idle.

use std::time::Duration;

use siw_tcp_sim::{Impairment, SimNet, host_config, read_all};

#[test]
fn idle_queues_free_their_memory_only_after_a_rest() {
    let link = Impairment::perfect(Duration::from_micros(50));
    let hosts = [host_config(0), host_config(1)];
    let mut net = SimNet::<Vec<u8>>::new(3, hosts, [link; 2]);
    let now = net.now;
    net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let to = "10.0.0.2:80".parse().unwrap();
    let a = net.hosts[0].connect(now, None, None, to, 0).unwrap();
    net.run(Duration::from_millis(5), |_| false);
    let b = net.hosts[1].next_event().unwrap().0;
    for turn in 0..10 {
        let record = b"a turn".to_vec();
        net.hosts[0].push_record(a, 6, record, true).unwrap();
        net.flush(0, a);
        net.run(Duration::from_millis(1), |_| false);
        assert_eq!(read_all(&mut net.hosts[1], b), b"a turn");
        net.hosts[0].take_acked(a, drop);
        // Longer than any timer of the sent data; other connections have their turns meanwhile.
        net.run(Duration::from_millis(60), |_| false);
        assert!(net.hosts[0].holds_memory(a), "turn {turn}");
    }
    net.run(Duration::from_millis(2000), |_| false);
    assert!(!net.hosts[0].holds_memory(a));
}
