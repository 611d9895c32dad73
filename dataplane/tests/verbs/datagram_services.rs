//! Datagram services of rdma_cm (RDMA_PS_UDP): found by port, answered, refused, silent, gone.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nix::libc;
use siw::{
    AhAttr, BindOptions, CmBinding, CmChannel, CmListener, Context, Error, GRH_LEN, ListenOptions,
    Qp, QpInit, RdmaCmEvent, RecvWr, ResolvedAddress, SERVICE_QKEY, SendData, SendWr, ServiceReply,
    ServiceRequest, ServiceSearch, WcStatus,
};

use crate::common::*;

const SHORT: Duration = Duration::from_millis(300);

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn bind(ctx: &Context, at: &str) -> Result<CmBinding, Error> {
    let options = BindOptions {
        datagrams: true,
        ..BindOptions::default()
    };
    CmBinding::new(ctx, addr(at), &options)
}

fn listen(cm: &CmChannel, binding: CmBinding, backlog: u32) -> CmListener {
    let options = ListenOptions {
        backlog,
        cookie: 7,
        ..ListenOptions::default()
    };
    let listener = CmListener::from_binding(cm, binding, &options);
    listener.map_err(|failed| failed.error).unwrap()
}

/// A channel, and the listener of a service on every device.
fn serve(ctx: &Context, backlog: u32) -> (CmChannel, CmListener) {
    let cm = CmChannel::new(ctx).unwrap();
    let listener = listen(&cm, bind(ctx, "[::]:0").unwrap(), backlog);
    (cm, listener)
}

/// A search from siw0.
fn search(cm: &CmChannel, to: SocketAddr, data: &[u8], timeout: Duration) -> ServiceSearch {
    let local = match to {
        SocketAddr::V4(_) => addr("10.77.0.1:4444"),
        SocketAddr::V6(_) => addr("[fd77::1]:4444"),
    };
    let from = ResolvedAddress { device: 0, local };
    ServiceSearch::start(cm, &from, to, data, Some(timeout), 9).unwrap()
}

fn request(cm: &CmChannel) -> ServiceRequest {
    match cm.get_rdma_cm_event(Some(PATIENCE)).unwrap() {
        RdmaCmEvent::ServiceRequest(request) => request,
        other => panic!("{other:?}"),
    }
}

fn reply(cm: &CmChannel) -> ServiceReply {
    match cm.get_rdma_cm_event(Some(PATIENCE)).unwrap() {
        RdmaCmEvent::ServiceReply(reply) => reply,
        other => panic!("{other:?}"),
    }
}

fn is_silent(cm: &CmChannel) {
    let event = cm.get_rdma_cm_event(Some(SHORT));
    assert!(matches!(event, Err(Error::Timeout)), "{event:?}");
}

fn errno<T>(result: Result<T, Error>) -> i32 {
    match result {
        Err(Error::Refused { errno, .. }) => errno,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("not refused"),
    }
}

/// Sends a datagram to the queue pair of an answer.
fn send_to(from: &End, reply: &ServiceReply, text: &[u8]) {
    let ah = AhAttr::new(reply.device, reply.info.peer.unwrap().ip());
    let ah = from.ctx.create_ah(&ah).unwrap();
    let request = SendWr::send(1, SendData::Inline(text));
    let request = request.with_destination(ah.number(), reply.qp_num, reply.qkey);
    from.qp.post_send(&[request]).unwrap();
    assert_eq!(from.wc().status, WcStatus::SUCCESS);
}

#[test]
fn a_service_names_its_queue_pair_to_peers_which_send_to_it() {
    let daemon = Daemon::loopback();
    let client = End::with(&daemon.context(), 4096, &QpInit::default());
    client.qp.start_datagrams(0, SERVICE_QKEY).unwrap();
    let cm = CmChannel::new(&client.ctx).unwrap();
    let server = End::with(&daemon.context(), 4096, &QpInit::default());
    server.qp.start_datagrams(1, 0x55).unwrap();
    let (server_cm, listener) = serve(&server.ctx, 8);
    // Both families, another device and the same.
    for (to, device, qkey) in [("10.77.0.2", 1, 0x55), ("fd77::2", 1, 0x56)] {
        let to = SocketAddr::new(to.parse().unwrap(), listener.local_addr().port());
        let search = search(&cm, to, b"who?", PATIENCE);
        let request = request(&server_cm);
        assert_eq!(request.device(), device);
        let info = request.info();
        assert_eq!((info.cookie, info.local), (7, Some(to)));
        assert_eq!(info.peer.unwrap().port(), 4444);
        assert_eq!(info.private_data.len(), 180);
        assert_eq!(info.private_data[..5], *b"who?\0");
        server.qp.start_datagrams(1, qkey).unwrap();
        request.accept(&server.qp, qkey, b"me").unwrap();
        let reply = reply(&cm);
        search.forget();
        assert_eq!(
            (reply.info.errno, reply.sidr_status, reply.device),
            (0, 0, 0)
        );
        assert_eq!((reply.info.cookie, reply.info.peer), (9, Some(to)));
        assert_eq!((reply.qp_num, reply.qkey), (server.qp.qp_num(), qkey));
        assert_eq!(reply.info.private_data.len(), 136);
        assert_eq!(reply.info.private_data[..3], *b"me\0");
        let sges = &[server.mr.sge(0, 100)];
        server.qp.post_recv(&[RecvWr { wr_id: 2, sges }]).unwrap();
        send_to(&client, &reply, b"hello");
        let got = server.wc();
        assert_eq!(
            (got.status, got.byte_len as usize),
            (WcStatus::SUCCESS, GRH_LEN + 5)
        );
    }
    // To its own device.
    let own = SocketAddr::new([10, 77, 0, 1].into(), listener.local_addr().port());
    let _search = search(&cm, own, b"", PATIENCE);
    let request = request(&server_cm);
    assert_eq!((request.device(), request.info().local), (0, Some(own)));
    request.accept(&server.qp, 1, b"").unwrap();
    assert_eq!(reply(&cm).qkey, 1);
    is_silent(&cm);
    is_silent(&server_cm);
    assert!(daemon.stop().success());
}

#[test]
fn refused_requests_and_unknown_services_are_told_apart() {
    let daemon = Daemon::loopback();
    let (client, server) = (daemon.context(), daemon.context());
    let cm = CmChannel::new(&client).unwrap();
    let (server_cm, listener) = serve(&server, 8);
    let to = SocketAddr::new([10, 77, 0, 2].into(), listener.local_addr().port());
    let expect = |status: u8, data: &[u8]| {
        let reply = reply(&cm);
        let told = (
            reply.sidr_status,
            reply.info.errno,
            reply.qp_num,
            reply.qkey,
        );
        assert_eq!(told, (status, libc::ECONNREFUSED, 0, 0));
        assert_eq!(reply.info.private_data[..data.len()], *data);
        assert!(!reply.info.reason.is_empty());
    };
    let _refused = search(&cm, to, b"", PATIENCE);
    request(&server_cm).reject(b"no").unwrap();
    expect(2, b"no");
    // Dropped without an answer.
    let _dropped = search(&cm, to, b"", PATIENCE);
    drop(request(&server_cm));
    expect(2, &[0; 136]);
    // With its listener; the port is free then.
    let _unanswered = search(&cm, to, b"", PATIENCE);
    let request = request(&server_cm);
    drop(listener);
    expect(2, &[0; 136]);
    let failed = request.reject(b"").unwrap_err();
    assert_eq!(errno::<()>(Err(failed.error)), libc::ENOENT);
    let _nothing = search(&cm, to, b"", PATIENCE);
    expect(1, &[0; 136]);
    is_silent(&cm);
    assert!(daemon.stop().success());
}

#[test]
fn a_search_without_an_answer_is_repeated_and_ends_in_time() {
    let daemon = Daemon::loopback();
    let (client, server) = (daemon.context(), daemon.context());
    let cm = CmChannel::new(&client).unwrap();
    let (server_cm, listener) = serve(&server, 1);
    let to = SocketAddr::new([10, 77, 0, 2].into(), listener.local_addr().port());
    let start = Instant::now();
    let timeout = Duration::from_secs(6);
    let _search = search(&cm, to, b"", timeout);
    let waiting = request(&server_cm);
    // The repetitions are of the same request.
    let timed_out = reply(&cm);
    assert_eq!(timed_out.info.errno, libc::ETIMEDOUT);
    assert!(start.elapsed() >= timeout);
    is_silent(&server_cm);
    // A host that does not exist.
    let nobody = addr("10.77.0.99:5");
    let _nobody = search(&cm, nobody, b"", SHORT);
    assert_eq!(reply(&cm).info.errno, libc::ETIMEDOUT);
    // The backlog is full: the next request is taken when it comes again.
    let second = search(&cm, to, b"second", PATIENCE);
    is_silent(&server_cm);
    drop(waiting);
    let taken = request(&server_cm);
    assert_eq!(taken.info().private_data[..6], *b"second");
    second.close().unwrap();
    drop(taken);
    is_silent(&cm);
    assert!(daemon.stop().success());
}

#[test]
fn ports_of_services_are_not_those_of_connections() {
    let daemon = Daemon::loopback();
    let (ctx, other) = (daemon.context(), daemon.context());
    let plain = CmBinding::new(&ctx, addr("10.77.0.1:0"), &BindOptions::default()).unwrap();
    let at = plain.local_addr().to_string();
    let service = bind(&ctx, &at).unwrap();
    assert_eq!(errno(bind(&other, &at)), libc::EADDRINUSE);
    drop(plain);
    assert_eq!(errno(bind(&other, &at)), libc::EADDRINUSE);
    let cm = CmChannel::new(&ctx).unwrap();
    let listener = listen(&cm, service, 4);
    // A connection finds nothing there.
    let end = End::new(&other, 4096);
    let connected = end
        .qp
        .connect_blocking(listener.local_addr(), &siw::ConnectOptions::default());
    assert!(connected.is_err());
    listener.close_keeping_requests().unwrap();
    let again = bind(&other, &at).unwrap();
    assert_eq!(again.local_addr(), addr(&at));
    assert!(daemon.stop().success());
}

#[test]
fn wrong_requests_are_refused_with_their_reason() {
    let daemon = Daemon::loopback();
    let (ctx, server) = (daemon.context(), daemon.context());
    let cm = CmChannel::new(&ctx).unwrap();
    let start = |device, from: &str, to: &str, data: &[u8]| {
        let local = addr(from);
        let from = ResolvedAddress { device, local };
        errno(ServiceSearch::start(&cm, &from, addr(to), data, None, 1))
    };
    let (here, there) = ("10.77.0.1:1", "10.77.0.2:1");
    assert_eq!(start(9, here, there, b""), libc::ENODEV);
    assert_eq!(start(1, here, there, b""), libc::EADDRNOTAVAIL);
    assert_eq!(start(0, here, "[fd77::2]:1", b""), libc::EINVAL);
    assert_eq!(start(0, here, "10.77.0.2:0", b""), libc::EINVAL);
    assert_eq!(start(0, here, "0.0.0.0:1", b""), libc::EINVAL);
    assert_eq!(start(0, here, "224.0.0.9:1", b""), libc::EINVAL);
    let from = ResolvedAddress {
        device: 0,
        local: addr(here),
    };
    let long = ServiceSearch::start(&cm, &from, addr(there), &[0; 181], None, 1);
    assert!(matches!(long, Err(Error::Invalid(_))));

    // Answers with another client's queue pair, and too long ones.
    let (server_cm, listener) = serve(&server, 8);
    let to = SocketAddr::new([10, 77, 0, 2].into(), listener.local_addr().port());
    let _search = search(&cm, to, b"", PATIENCE);
    let stranger = End::new(&ctx, 4096);
    let own = End::new(&server, 4096);
    let failed = |accepted: Result<(), siw::Failed<ServiceRequest>>| accepted.unwrap_err();
    let accept =
        |request: ServiceRequest, qp: &Qp, data: &[u8]| failed(request.accept(qp, 1, data));
    let refused = accept(request(&server_cm), &stranger.qp, b"");
    assert_eq!(refused.error.errno(), libc::EINVAL);
    let refused = accept(refused.object, &own.qp, &[0; 137]);
    assert_eq!(refused.error.errno(), libc::EINVAL);
    refused.object.accept(&own.qp, 1, &[1; 136]).unwrap();
    assert_eq!(reply(&cm).info.private_data, [1; 136]);
    assert!(daemon.stop().success());
}
