//! Address resolution, binding, listening and event channels of rdma_cm: routes, bindings,
//! backlogs, requests that outlive their listener, migration to another channel.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::common::{Daemon, End, PATIENCE};
use nix::libc;
use siw::{
    BindOptions, CmBinding, CmChannel, CmEvent, CmListener, ConnectOptions, ConnectionRequest,
    Context, Error, ListenOptions, RecvWr, SendData, SendWr, WcStatus,
};

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// The errno of a refused request, 0 for success.
fn errno<T>(result: Result<T, Error>) -> i32 {
    result.err().map_or(0, |error| error.errno())
}

/// Binds and listens on a channel.
fn listen(ctx: &Context, cm: &CmChannel, at: &str, bind: &BindOptions, backlog: u32) -> CmListener {
    let binding = CmBinding::new(ctx, addr(at), bind).unwrap();
    let options = ListenOptions {
        backlog,
        ..Default::default()
    };
    let listener = CmListener::from_binding(cm, binding, &options);
    listener.unwrap_or_else(|failed| panic!("{failed}"))
}

fn next_request(cm: &CmChannel) -> ConnectionRequest {
    match cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::ConnectRequest(request) => request,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_destination_leads_to_its_device_and_source_address() {
    let daemon = Daemon::loopback();
    let ctx = daemon.context();
    let resolve = |to, from: Option<&str>| ctx.resolve_address(addr(to), from.map(addr), None);
    let found = resolve("10.77.0.2:7", None).unwrap();
    assert_eq!((found.device, found.local), (1, addr("10.77.0.2:0")));
    let found = resolve("10.77.0.9:7", None).unwrap();
    assert_eq!((found.device, found.local), (0, addr("10.77.0.1:0")));
    let found = resolve("[fd77::9]:7", None).unwrap();
    assert_eq!((found.device, found.local), (0, addr("[fd77::1]:0")));
    let found = resolve("10.77.0.9:7", Some("10.77.0.2:5")).unwrap();
    assert_eq!((found.device, found.local), (1, addr("10.77.0.2:5")));
    assert_eq!(errno(resolve("192.0.2.1:7", None)), libc::EHOSTUNREACH);
    let nobodys = Some("192.0.2.1:0");
    assert_eq!(errno(resolve("10.77.0.2:7", nobodys)), libc::EADDRNOTAVAIL);
    let other_family = Some("[fd77::1]:0");
    assert_eq!(errno(resolve("10.77.0.2:7", other_family)), libc::EINVAL);
}

#[test]
fn a_bound_port_is_nobody_elses_and_free_again_afterwards() {
    let daemon = Daemon::loopback();
    let (ctx, other) = (daemon.context(), daemon.context());
    let plain = BindOptions::default();
    let binding = CmBinding::new(&ctx, addr("10.77.0.1:0"), &plain).unwrap();
    let at = binding.local_addr();
    assert_ne!(at.port(), 0);
    assert_eq!(errno(CmBinding::new(&other, at, &plain)), libc::EADDRINUSE);
    let any = SocketAddr::new([0, 0, 0, 0].into(), at.port());
    assert_eq!(errno(CmBinding::new(&other, any, &plain)), libc::EADDRINUSE);
    let elsewhere = SocketAddr::new([10, 77, 0, 2].into(), at.port());
    drop(CmBinding::new(&other, elsewhere, &plain).unwrap());
    binding.close().unwrap();
    drop(CmBinding::new(&other, any, &plain).unwrap());
    let nobodys = addr("192.0.2.1:0");
    let refused = CmBinding::new(&ctx, nobodys, &plain);
    assert_eq!(errno(refused), libc::EADDRNOTAVAIL);
    // Bindings with `reuse` share the address until one of them listens.
    let reuse = BindOptions {
        reuse: true,
        ..plain
    };
    let first = CmBinding::new(&ctx, at, &reuse).unwrap();
    let second = CmBinding::new(&other, at, &reuse).unwrap();
    let (cm, other_cm) = (
        CmChannel::new(&ctx).unwrap(),
        CmChannel::new(&other).unwrap(),
    );
    let options = ListenOptions::default();
    let _listener = CmListener::from_binding(&cm, first, &options);
    let refused = CmListener::from_binding(&other_cm, second, &options);
    assert_eq!(
        errno(refused.map_err(|failed| failed.error)),
        libc::EADDRINUSE
    );
    assert_eq!(errno(CmBinding::new(&other, at, &reuse)), libc::EADDRINUSE);
}

#[test]
fn a_wildcard_listens_on_all_devices_of_its_family() {
    let daemon = Daemon::loopback();
    let side = End::new(&daemon.context(), 64);
    let plain = BindOptions::default();
    let v6_only = BindOptions {
        v6_only: true,
        ..plain
    };
    let reached = |to: SocketAddr| {
        let client = End::new(&daemon.context(), 64);
        let options = ConnectOptions::default();
        client.qp.connect(&client.cm, to, &options).unwrap();
        let short = Some(Duration::from_millis(1));
        let end = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < end, "{to}: neither reached nor refused");
            match (client.cm.get_event(short), side.cm.get_event(short)) {
                (Ok(CmEvent::Rejected(_)), Err(Error::Timeout)) => return false,
                (Err(Error::Timeout), Ok(CmEvent::ConnectRequest(request))) => {
                    assert_eq!(request.connection_info().local, Some(to));
                    return true;
                }
                (Err(Error::Timeout), Err(Error::Timeout)) => {}
                other => panic!("{other:?}"),
            }
        }
    };
    let cases = [
        ("0.0.0.0:0", plain, true, false),
        ("[::]:0", v6_only, false, true),
        ("[::]:0", plain, true, true),
    ];
    for (at, bind, v4, v6) in cases {
        let listener = listen(&side.ctx, &side.cm, at, &bind, 8);
        let port = listener.local_addr().port();
        for (ip, expected) in [
            ("10.77.0.1", v4),
            ("10.77.0.2", v4),
            ("fd77::1", v6),
            ("fd77::2", v6),
        ] {
            let to = SocketAddr::new(ip.parse().unwrap(), port);
            assert_eq!(reached(to), expected, "{ip} of {at}");
        }
    }
}

#[test]
fn a_backlog_counts_requests_that_nobody_has_answered() {
    let daemon = Daemon::loopback();
    let (side, client) = (
        End::new(&daemon.context(), 64),
        End::new(&daemon.context(), 64),
    );
    let plain = BindOptions::default();
    let listener = listen(&side.ctx, &side.cm, "10.77.0.2:0", &plain, 2);
    let to = listener.local_addr();
    let clients: Vec<End> = (0..3).map(|_| client.another()).collect();
    for client in &clients[..2] {
        let options = ConnectOptions::default();
        client.qp.connect(&client.cm, to, &options).unwrap();
    }
    let (first, _second) = (next_request(&side.cm), next_request(&side.cm));
    let options = ConnectOptions::default();
    let third = &clients[2];
    third.qp.connect(&third.cm, to, &options).unwrap();
    let refused = third.cm.get_event(Some(PATIENCE)).unwrap();
    assert!(matches!(refused, CmEvent::Rejected(_)), "{refused:?}");
    // Accepting one request makes room in the backlog.
    first.accept(&side.qp, None, &options).unwrap();
    let third = client.another();
    third.qp.connect(&third.cm, to, &options).unwrap();
    let established = side.cm.get_event(Some(PATIENCE)).unwrap();
    assert!(
        matches!(established, CmEvent::Established(_)),
        "{established:?}"
    );
    drop(next_request(&side.cm));
}

#[test]
fn a_request_outlives_its_listener_and_may_be_posted_to_at_once() {
    let daemon = Daemon::loopback();
    let (side, client) = (
        End::new(&daemon.context(), 4096),
        End::new(&daemon.context(), 4096),
    );
    let plain = BindOptions::default();
    let listener = listen(&side.ctx, &side.cm, "10.77.0.2:0", &plain, 2);
    let options = ConnectOptions::default();
    let receive = [client.mr.sge(0, 64)];
    client
        .qp
        .post_recv(&[RecvWr {
            wr_id: 7,
            sges: &receive,
        }])
        .unwrap();
    client
        .qp
        .connect(&client.cm, listener.local_addr(), &options)
        .unwrap();
    let request = next_request(&side.cm);
    listener.close_keeping_requests().unwrap();
    let own = CmChannel::new(&side.ctx).unwrap();
    request.migrate(&own).unwrap();
    request.accept(&side.qp, None, &options).unwrap();
    // The ESTABLISHED event has not arrived yet.
    let sge = [side.mr.sge(0, 64)];
    let send = SendWr::send(1, SendData::Sges(&sge));
    side.qp.post_send(&[send]).unwrap();
    assert_eq!(client.wc().status, WcStatus::SUCCESS);
    assert_eq!(side.wc().status, WcStatus::SUCCESS);
    let established = own.get_event(Some(PATIENCE)).unwrap();
    assert!(
        matches!(established, CmEvent::Established(_)),
        "{established:?}"
    );
    // And back to the first channel.
    side.qp.migrate_events(&side.cm).unwrap();
    client.qp.disconnect().unwrap();
    let over = side.cm.get_event(Some(PATIENCE)).unwrap();
    assert!(matches!(over, CmEvent::Disconnected(_)), "{over:?}");
}

#[test]
fn a_connect_is_tried_again_until_somebody_listens() {
    let daemon = Daemon::loopback();
    let ends: [End; 3] = std::array::from_fn(|_| End::new(&daemon.context(), 4096));
    let [patient, impatient, server] = &ends;
    let listen = |port: u16| {
        let local = SocketAddr::from(([10, 77, 0, 2], port));
        CmListener::new(&server.cm, None, local, 8, 0).unwrap()
    };
    let free = listen(0).local_addr();
    let connect = |end: &End, refusals| {
        let options = ConnectOptions {
            device: Some(0),
            refusals,
            ..ConnectOptions::default()
        };
        end.qp.connect(&end.cm, free, &options).unwrap();
    };
    connect(patient, u8::MAX);
    connect(impatient, 0);
    // The earlier request was refused by then, too.
    let refused = impatient.cm.get_event(Some(PATIENCE)).unwrap();
    assert!(matches!(refused, CmEvent::Rejected(_)), "{refused:?}");
    let _listener = listen(free.port());
    let request = next_request(&server.cm);
    request
        .accept(&server.qp, None, &ConnectOptions::default())
        .unwrap();
    let connected = patient.cm.get_event(Some(PATIENCE)).unwrap();
    assert!(
        matches!(connected, CmEvent::Established(_)),
        "{connected:?}"
    );
}
