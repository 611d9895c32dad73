//! One device, several workers: flows reach their worker, and all workers learn what one receives.

use std::sync::Arc;

use siw_net::{Destination, FrameInfo, Instant, RxChecksum, Steering, VecBuf, WorkerSteering};
use siw_tcp::Stack;
use siw_tcp_sim::{VecSink, host_config};

type Host = Stack<VecBuf, siw_tcp_sim::Pattern>;

const NOW: Instant = Instant(1_000_000);

fn worker(steering: &Arc<Steering>, worker: usize) -> Host {
    let mut config = host_config(0);
    config.net.steering = Some(WorkerSteering {
        steering: steering.clone(),
        worker,
    });
    Stack::new(config, NOW).unwrap()
}

fn sent(host: &mut Host) -> Vec<Vec<u8>> {
    let mut sink = VecSink::default();
    host.poll(NOW, &mut sink);
    sink.frames.drain(..).map(|frame| frame.0).collect()
}

fn give(host: &mut Host, frame: &[u8]) {
    let info = FrameInfo {
        checksum: RxChecksum::Unknown,
        rss_hash: 0,
    };
    host.receive_burst(NOW, std::iter::once((VecBuf::from(frame.to_vec()), info)));
}

#[test]
fn source_ports_steer_flows_to_their_worker() {
    let steering = Arc::new(Steering::new(4, 0));
    let remote = std::net::SocketAddr::new(host_config(1).net.addresses[0].addr, 7174);
    for number in 0..4 {
        let mut host = worker(&steering, number);
        for _ in 0..300 {
            let client = host.connect(NOW, None, None, remote, 0).unwrap();
            let info = host.tcp_info(client).unwrap();
            assert_eq!(steering.owner_of(info.local, info.remote), number);
        }
    }
}

#[test]
fn workers_learn_neighbours_from_each_others_copies() {
    let steering = Arc::new(Steering::new(2, 0));
    let mut workers = [worker(&steering, 0), worker(&steering, 1)];
    let mut peer: Host = Stack::new(host_config(1), NOW).unwrap();
    let remote = std::net::SocketAddr::new(host_config(1).net.addresses[0].addr, 7174);
    workers[1].connect(NOW, None, None, remote, 0).unwrap();
    let question = sent(&mut workers[1]);
    assert_eq!(question.len(), 1, "an ARP request");
    give(&mut peer, &question[0]);
    let answer = sent(&mut peer);
    assert_eq!(steering.classify_frame(&answer[0]), Destination::AllWorkers);
    give(&mut workers[0], &answer[0]);
    workers[1].receive_copy(NOW, VecBuf::from(answer[0].clone()), RxChecksum::Unknown);
    let syn = sent(&mut workers[1]);
    assert_eq!(syn.len(), 1);
    assert_eq!(steering.classify_frame(&syn[0]), Destination::Worker(1));
}

#[test]
fn who_overhears_a_question_does_not_answer_it() {
    let steering = Arc::new(Steering::new(2, 0));
    let mut workers = [worker(&steering, 0), worker(&steering, 1)];
    let mut peer: Host = Stack::new(host_config(1), NOW).unwrap();
    let remote = std::net::SocketAddr::new(host_config(0).net.addresses[0].addr, 7174);
    peer.connect(NOW, None, None, remote, 0).unwrap();
    let question = sent(&mut peer);
    give(&mut workers[0], &question[0]);
    workers[1].receive_copy(NOW, VecBuf::from(question[0].clone()), RxChecksum::Unknown);
    assert_eq!(sent(&mut workers[0]).len(), 1);
    assert!(sent(&mut workers[1]).is_empty());
    // It has learned the sender's address and need not solicit it.
    let back = std::net::SocketAddr::new(host_config(1).net.addresses[0].addr, 9);
    workers[1].connect(NOW, None, None, back, 0).unwrap();
    let first = sent(&mut workers[1]);
    assert!(
        first
            .iter()
            .any(|frame| steering.classify_frame(frame) == Destination::Worker(1)),
        "a SYN at once"
    );
}
