//! A program without unsafe code keeps its memory: regions own their buffers, windows end with their
//! region, and objects of another context are refused.

use std::sync::mpsc;
use std::time::Duration;

use crate::common::*;
use siw::{
    Access, AppMr, Arena, BindOptions, CmBinding, CmChannel, CmEvent, CmListener,
    CompletionChannel, ConnectOptions, Cq, Error, Failed, ListenOptions, MwBind, OwnedMr, QpInit,
    RecvWr, ReregChange, SendData, SendWr, SrqInit, WcStatus, WindowType, WrFlags,
};

const BINDABLE: Access = Access(1 | 2 | 4 | 16);

/// Writes 64 bytes of `a` to the peer, and reads one back, which shows that they were placed.
fn write(a: &End, to: u64, rkey: u32) -> WcStatus {
    let sge = [a.mr.sge(0, 64)];
    let requests = [
        SendWr::write(1, SendData::Sges(&sge), to, rkey),
        SendWr::read(2, &[], to, rkey),
    ];
    if let Err(error) = a.qp.post_send(&requests) {
        panic!("{error}");
    }
    let first = a.wc().status;
    let second = a.wc().status;
    if first == WcStatus::SUCCESS {
        second
    } else {
        first
    }
}

#[test]
fn a_registered_buffer_is_changed_by_peers_and_comes_back() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    a.fill(3);
    let mr = b.pd.register(vec![7u8; 100_000], ALL).unwrap();
    assert_eq!(mr.len(), 100_000);
    assert_eq!(write(&a, mr.addr() + 500, mr.rkey()), WcStatus::SUCCESS);
    let mut seen = [0; 66];
    mr.read(499, &mut seen).unwrap();
    assert_eq!(
        (seen[0], &seen[1..65], seen[65]),
        (7, &a.read(0, 64)[..], 7)
    );
    assert_eq!(mr.read_byte(500).unwrap(), seen[1]);
    mr.write(99_999, &[9]).unwrap();
    assert!(mr.write(99_999, &[9, 9]).is_err() && mr.read(100_000, &mut [0]).is_err());
    let buffer = mr.dereg().unwrap();
    assert_eq!((buffer[499], buffer[500..564].to_vec()), (7, a.read(0, 64)));
    assert_eq!((buffer.len(), buffer[99_999]), (100_000, 9));
    // Any buffer of numbers.
    let words =
        b.pd.register(vec![1u64; 4].into_boxed_slice(), ALL)
            .unwrap();
    words.write(8, &2u64.to_le_bytes()).unwrap();
    assert_eq!(words.dereg().unwrap()[..], [1, 2, 1, 1]);
    // A refused buffer comes back.
    let Failed { object, error } = b.pd.register(vec![5u8; 16], Access(2)).unwrap_err();
    assert_eq!((object, error.errno()), (Some(vec![5; 16]), 22));
}

/// Binds a new window to `length` bytes at `addr`.
fn bind_window(end: &End, kind: WindowType, lkey: u32, addr: u64, length: u64) -> siw::Mw {
    let mw = end.pd.alloc_mw(kind).unwrap();
    let to = MwBind {
        lkey,
        addr,
        length,
        access: Access::REMOTE_WRITE | Access::REMOTE_READ,
    };
    mw.post_bind(&end.qp, 1, WrFlags::SIGNALED, &to).unwrap();
    assert_eq!(end.wc().status, WcStatus::SUCCESS);
    mw
}

/// A window that is bound to a region is unbound when the region is dropped.
#[test]
fn a_window_ends_with_the_region_that_it_is_bound_to() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    a.fill(5);
    let bind = |lkey, addr| bind_window(&b, WindowType::One, lkey, addr, 65_536);
    let mr = b.pd.register(vec![0u8; 65_536], BINDABLE).unwrap();
    let (at, mw) = (mr.addr(), bind(mr.lkey(), mr.addr()));
    let Failed { object: mr, error } = mr.dereg().unwrap_err();
    assert_eq!(error.errno(), 16, "{error}");
    assert_eq!(write(&a, at, mw.rkey()), WcStatus::SUCCESS);
    drop(mr);
    b.ctx.await_releases().unwrap();
    assert_eq!(write(&a, at, mw.rkey()), WcStatus::REM_ACCESS_ERR);

    // As well by address, and memory of the daemon.
    let (a, b) = pair(&daemon, 4096);
    let bind = |lkey, addr| bind_window(&b, WindowType::Two, lkey, addr, 4096);
    let mut memory = vec![0u8; 65_536];
    // SAFETY: freed after the region, and not read before.
    let region: AppMr = unsafe { b.pd.reg_memory(memory.as_mut_ptr(), 65_536, BINDABLE) }.unwrap();
    let mw = bind(region.lkey(), region.addr());
    let at = region.addr();
    drop(region);
    let arena = b.pd.alloc_mr(4096, BINDABLE).unwrap();
    let of_arena = bind(arena.lkey(), arena.addr());
    drop(arena);
    let again = b.pd.alloc_mr(4096, BINDABLE).unwrap();
    assert_eq!(write(&a, at, mw.rkey()), WcStatus::REM_ACCESS_ERR);
    assert!(memory.iter().all(|byte| *byte == 0));
    let (a, _b) = pair(&daemon, 4096);
    assert_ne!(write(&a, again.addr(), of_arena.rkey()), WcStatus::SUCCESS);
    let mut bytes = [1; 64];
    again.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 64]);
}

/// True if something is mapped at this address.
fn is_mapped(address: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| {
        let (range, _) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let number = |hex| usize::from_str_radix(hex, 16).unwrap();
        (number(start)..number(end)).contains(&address)
    })
}

/// The peers of a stalled daemon could still write to the buffer when the daemon goes on.
#[test]
fn a_buffer_whose_deregistration_is_not_confirmed_is_leaked() {
    let daemon = Daemon::loopback();
    let ctx = daemon.context();
    let pd = ctx.alloc_pd().unwrap();
    // Freed, buffers of this length would be unmapped.
    let make = || vec![1u8; 64 << 20];
    let mr: OwnedMr<Vec<u8>> = pd.register(make(), ALL).unwrap();
    let confirmed = mr.region().as_ptr() as usize;
    drop(mr);
    ctx.await_releases().unwrap();
    assert!(!is_mapped(confirmed));
    let mr = pd.register(make(), ALL).unwrap();
    let lost = mr.region().as_ptr() as usize;
    ctx.set_call_timeout(Duration::from_millis(50)).unwrap();
    let paused = daemon.pause();
    drop(mr);
    let Failed { object, error } = pd.register(make(), ALL).unwrap_err();
    assert!(object.is_none(), "it may be registered: {error}");
    assert!(is_mapped(lost));
    drop(paused);
}

/// More than the control socket has room for while the daemon does not read.
const MANY: usize = 2000;

/// While the daemon is stalled, calls wait for it, and destructors do not. When it goes on, it frees
/// the objects before it serves the next call.
#[test]
fn no_destructor_waits_for_a_stalled_daemon() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let ctx = a.ctx.clone();
    let pd = ctx.alloc_pd().unwrap();
    // Receive requests are posted: the queue pair is not idle.
    let sges = [a.mr.slice(0..64).unwrap()];
    let (wr_id, sges) = (7, &sges[..]);
    a.qp.post_recv(&[RecvWr { wr_id, sges }]).unwrap();
    let regions = (0..MANY).map(|_| pd.alloc_mr(256, ALL).unwrap());
    let regions: Vec<_> = regions.collect();
    let owned = pd.register(vec![0u8; 8192], ALL).unwrap();
    let channel = CompletionChannel::new(&ctx).unwrap();
    let cq = Cq::new(&ctx, 16, Some((&channel, 0))).unwrap();
    let srq = pd.create_srq(&SrqInit::default()).unwrap();
    let served = pd.create_qp_with_srq(&cq, &cq, &srq, &QpInit::default());
    let window = pd.alloc_mw(WindowType::One).unwrap();
    let arena = Arena::alloc(&ctx, 1 << 20, false).unwrap();
    let fast = pd.alloc_fast_mr(&arena, 4).unwrap();
    let cm = CmChannel::new(&ctx).unwrap();
    let address = (a.ctx.query_device(0).unwrap().ips[0], 0).into();
    let listener = CmListener::new(&cm, Some(0), address, 1, 0).unwrap();
    let port = listener.local_addr();
    let mut held = Vec::new();
    while let Ok(more) = ctx.alloc_pd() {
        held.push(more);
    }

    let paused = daemon.pause();
    let (told, tell) = mpsc::channel();
    let dropping = std::thread::spawn(move || {
        drop((
            regions, owned, served, cq, channel, srq, window, fast, arena,
        ));
        drop((listener, cm, held));
        drop(a);
        told.send(()).unwrap();
    });
    // A call waits for 60 s.
    tell.recv_timeout(Duration::from_secs(30))
        .expect("a destructor waits for the daemon");
    dropping.join().unwrap();
    drop(paused);

    ctx.alloc_pd().expect("no domain was freed");
    let cm = CmChannel::new(&ctx).unwrap();
    CmListener::new(&cm, Some(0), port, 1, 0).expect("the port is still taken");
    drop((b, pd));
}

#[test]
fn the_longest_timeout_is_a_wait_without_a_limit() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    a.ctx.set_call_timeout(Duration::MAX).unwrap();
    let sges = [a.mr.slice(0..64).unwrap()];
    let remote = b.mr.remote();
    let request = remote.write(1, SendData::Sges(&sges)).unwrap();
    a.qp.post_send(&[request]).unwrap();
    let mut wc = [siw::Wc::default()];
    assert_eq!(a.cq.wait(&mut wc, Some(Duration::MAX)).unwrap(), 1);
    assert_eq!(wc[0].status, WcStatus::SUCCESS);
    a.qp.disconnect().unwrap();
    let event = a.cm.get_event(Some(Duration::MAX)).unwrap();
    assert!(matches!(event, CmEvent::Disconnected(_)), "{event:?}");
    a.qp.drain_sq(Duration::MAX, |_| {}).unwrap();
}

#[test]
fn objects_of_another_context_are_refused() {
    let daemon = Daemon::loopback();
    let ends = || End::new(&daemon.context(), 4096);
    let (own, other) = (ends(), ends());
    let arena = Arena::alloc(&other.ctx, 4096, false).unwrap();
    let own_arena = Arena::alloc(&own.ctx, 4096, false).unwrap();
    let options = ConnectOptions::default();
    let to = "10.77.0.2:0".parse().unwrap();
    let mut refused = Vec::new();
    let mut expect = |call: &str, error: Option<Error>| match error {
        Some(Error::OtherContext(_)) => {}
        error => refused.push(format!("{call}: {error:?}")),
    };
    expect("reg_mr", own.pd.reg_mr(&arena, 0..64, ALL).err());
    expect("alloc_fast_mr", own.pd.alloc_fast_mr(&arena, 1).err());
    let mut mr = own.pd.reg_mr(&own_arena, 0..64, ALL).unwrap();
    let change = ReregChange {
        range: Some((&arena, 0, 64)),
        ..ReregChange::default()
    };
    expect("rereg to an arena", mr.rereg(&change).err());
    let change = ReregChange {
        pd: Some(&other.pd),
        ..ReregChange::default()
    };
    expect("rereg to a PD", mr.rereg(&change).err());
    let channel = CompletionChannel::new(&other.ctx).unwrap();
    expect("Cq::new", Cq::new(&own.ctx, 8, Some((&channel, 1))).err());
    let init = QpInit::default();
    expect(
        "create_qp",
        own.pd.create_qp(&own.cq, &other.cq, &init).err(),
    );
    let srq = other.pd.create_srq(&SrqInit::default()).unwrap();
    let created = own.pd.create_qp_with_srq(&own.cq, &own.cq, &srq, &init);
    expect("create_qp_with_srq", created.err());
    expect("connect", own.qp.connect(&other.cm, to, &options).err());
    expect("migrate_events", own.qp.migrate_events(&other.cm).err());
    let mw = own.pd.alloc_mw(WindowType::One).unwrap();
    let bound = mw.post_bind(&other.qp, 1, WrFlags::NONE, &MwBind::NONE);
    expect("post_bind", bound.err().map(|posted| posted.error));
    let binding = CmBinding::new(&own.ctx, to, &BindOptions::default()).unwrap();
    let listened = CmListener::from_binding(&other.cm, binding, &ListenOptions::default());
    let Failed { object, error } = listened.err().unwrap();
    expect("from_binding", Some(error));
    let listener = CmListener::from_binding(&own.cm, object, &ListenOptions::default());
    let listener = listener.unwrap_or_else(|failed| panic!("{failed}"));
    expect("listener", listener.migrate(&other.cm).err());
    // A request comes back, and can still be accepted.
    let peer = ends();
    peer.qp
        .connect(&peer.cm, listener.local_addr(), &options)
        .unwrap();
    let CmEvent::ConnectRequest(request) = own.cm.get_event(Some(PATIENCE)).unwrap() else {
        panic!("not a request");
    };
    expect("request", request.migrate(&other.cm).err());
    let Failed { object, error } = request.accept(&other.qp, None, &options).unwrap_err();
    expect("accept with a queue pair", Some(error));
    let refusal = object.accept(&own.qp, Some(&other.cm), &options);
    let Failed { object, error } = refusal.unwrap_err();
    expect("accept with a channel", Some(error));
    let many = ConnectOptions {
        private_data: &[0; 513],
        ..options
    };
    let Failed { object, .. } = object.accept(&own.qp, None, &many).unwrap_err();
    object.accept(&own.qp, None, &options).unwrap();
    let event = peer.cm.get_event(Some(PATIENCE)).unwrap();
    assert!(matches!(event, CmEvent::Established(_)), "{event:?}");
    drop(CmChannel::new(&own.ctx).unwrap());
    assert!(refused.is_empty(), "not refused: {refused:?}");
}
