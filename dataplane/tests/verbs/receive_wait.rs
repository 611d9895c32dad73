//! SENDs that arrive before a receive work request is posted: with `receive_wait_ms` they wait,
//! from any peer, for at most this time.

use crate::common::{Daemon, End, LOOPBACK, PATIENCE, connect_with, pair};
use siw::{CmEvent, ConnectOptions, RecvWr, SendData, SendWr, WcStatus};

/// The loopback pair; the second device has `receive_wait_ms`.
fn daemon_with_wait(milliseconds: u32) -> Daemon {
    let config = format!("{LOOPBACK}[device.mpa]\nreceive_wait_ms = {milliseconds}\n");
    Daemon::start(&config, &[])
}

fn count(end: &End, name: &str) -> u64 {
    let statistics = end.ctx.read_stats().unwrap();
    let json: serde_json::Value = serde_json::from_str(&statistics).unwrap();
    let workers = json["workers"].as_array().unwrap();
    let counts = workers.iter().map(|worker| worker[name].as_u64().unwrap());
    counts.sum()
}

#[test]
fn sends_wait_for_their_receives_and_arrive_in_order() {
    const SENDS: u64 = 48;
    let daemon = daemon_with_wait(30_000);
    let (client, server) = pair(&daemon, 64 * 4096);
    client.fill(7);
    // More than TCP's receive window: the whole stream is held, not only one message.
    for number in 0..SENDS {
        let sge = [client.mr.sge(number as usize * 4096, 4096)];
        let send = SendWr::send(number, SendData::Sges(&sge));
        client.qp.post_send(&[send]).unwrap();
    }
    // The server's worker has seen the first message when it counts a wait.
    let start = std::time::Instant::now();
    while count(&server, "receive_waits") == 0 {
        assert!(start.elapsed() < PATIENCE, "nothing waits");
    }
    for number in 0..SENDS {
        let sge = [server.mr.sge(number as usize * 4096, 4096)];
        let receive = RecvWr {
            wr_id: number,
            sges: &sge,
        };
        server.qp.post_recv(&[receive]).unwrap();
        let done = server.wc();
        assert_eq!((done.wr_id, done.status), (number, WcStatus::SUCCESS));
    }
    for number in 0..SENDS {
        let done = client.wc();
        assert_eq!((done.wr_id, done.status), (number, WcStatus::SUCCESS));
    }
    let length = SENDS as usize * 4096;
    assert_eq!(client.read(0, length), server.read(0, length));
    assert_eq!(count(&server, "receive_wait_timeouts"), 0);
}

#[test]
fn a_send_that_waits_too_long_ends_the_connection() {
    let daemon = daemon_with_wait(50);
    let (client, server) = pair(&daemon, 4096);
    let sge = [client.mr.sge(0, 64)];
    let send = SendWr::send(1, SendData::Sges(&sge));
    client.qp.post_send(&[send]).unwrap();
    match client.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::Disconnected(info) => assert!(info.reason.contains("Terminate"), "{info:?}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(count(&server, "receive_wait_timeouts"), 1);
}

#[test]
fn a_consumer_may_want_waits_that_its_device_does_not() {
    let daemon = Daemon::loopback();
    let [client, server] = [0; 2].map(|_| End::new(&daemon.context(), 4096));
    let options = ConnectOptions {
        wait_for_receives: true,
        ..ConnectOptions::default()
    };
    let to = "10.77.0.2:0".parse().unwrap();
    connect_with(&client, &server, "siw0", to, &options);
    server.fill(3);
    let sge = [server.mr.sge(0, 64)];
    let send = SendWr::send(1, SendData::Sges(&sge));
    server.qp.post_send(&[send]).unwrap();
    let start = std::time::Instant::now();
    while count(&client, "receive_waits") == 0 {
        assert!(start.elapsed() < PATIENCE, "nothing waits");
    }
    let sge = [client.mr.sge(0, 64)];
    let receive = RecvWr {
        wr_id: 2,
        sges: &sge,
    };
    client.qp.post_recv(&[receive]).unwrap();
    assert_eq!(client.wc().status, WcStatus::SUCCESS);
    assert_eq!(server.wc().status, WcStatus::SUCCESS);
    assert_eq!(client.read(0, 64), server.read(0, 64));
}
