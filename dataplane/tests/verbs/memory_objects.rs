//! Memory regions, windows and fast registrations, end to end against a running daemon.

use crate::common::*;
use siw::{
    Access, Arena, CmEvent, Failed, FastMr, Mr, MwBind, Opcode, RecvWr, ReregChange, SendData,
    SendWr, Sge, WcOpcode, WcStatus, WindowType, WrFlags, inc_rkey,
};

const BINDABLE: Access = Access(1 | 2 | 4 | 8 | 16);
const READ: Access = Access::REMOTE_READ;
const WRITE: Access = Access::REMOTE_WRITE;

/// Writes `len` bytes of `a` to the peer; returns the status.
fn write(a: &End, to: u64, rkey: u32, len: usize) -> WcStatus {
    let sge = [a.mr.sge(0, len)];
    let wr = SendWr::write(1, SendData::Sges(&sge), to, rkey);
    if a.qp.post_send(&[wr]).is_err() {
        return WcStatus::WR_FLUSH_ERR;
    }
    let wc = a.wc();
    if wc.status != WcStatus::SUCCESS {
        return wc.status;
    }
    // A Write completes when its bytes are acknowledged; only the answer to a Read shows that they
    // were placed.
    read(a, to, rkey, 0)
}

fn read(a: &End, from: u64, rkey: u32, len: usize) -> WcStatus {
    let sge = [a.mr.sge(0, len)];
    a.qp.post_send(&[SendWr::read(2, &sge, from, rkey)])
        .map_or(WcStatus::WR_FLUSH_ERR, |()| a.wc().status)
}

fn bytes(mr: &Mr, off: usize, len: usize) -> Vec<u8> {
    let mut v = vec![0; len];
    mr.read(off, &mut v).unwrap();
    v
}

fn refused(s: WcStatus) -> bool {
    matches!(
        s,
        WcStatus::REM_ACCESS_ERR | WcStatus::WR_FLUSH_ERR | WcStatus::REM_OP_ERR
    )
}

fn done(e: &End, what: WcOpcode) {
    let wc = e.wc();
    assert_eq!((wc.status, wc.opcode), (WcStatus::SUCCESS, what));
}

#[test]
fn a_region_answers_to_the_address_that_was_chosen_for_it() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    a.fill(3);
    let arena = Arena::alloc(&b.ctx, 16_384, false).unwrap();
    let relaxed = ALL | Access::RELAXED_ORDERING;
    let iova = 0xdead_0000_1234;
    let chosen = b.pd.reg_mr_iova(&arena, 100..300, iova, relaxed).unwrap();
    assert_eq!(chosen.addr(), iova);
    assert_eq!(write(&a, iova + 192, chosen.rkey(), 8), WcStatus::SUCCESS);
    assert_eq!(bytes(&chosen, 192, 8), a.read(0, 8));
    let zero = ALL | Access::ZERO_BASED;
    let zero = b.pd.reg_mr(&arena, 4096..4196, zero).unwrap();
    assert_eq!(
        (write(&a, 92, zero.rkey(), 8), zero.addr()),
        (WcStatus::SUCCESS, 0)
    );
    assert_eq!(bytes(&zero, 92, 8), a.read(0, 8));
    // Bounds are exact to the byte.
    assert!(refused(write(&a, 93, zero.rkey(), 8)));
    assert_eq!(bytes(&zero, 93, 7), a.read(1, 7));
}

#[test]
fn a_buffer_for_writing_alone_cannot_be_read_and_the_other_way_round() {
    let daemon = Daemon::loopback();
    for (access, may_write) in [(Access(1 | 2), true), (Access(1 | 4), false)] {
        let (a, b) = pair(&daemon, 4096);
        let mr = b.pd.alloc_mr(4096, access).unwrap();
        a.fill(9);
        let before = a.read(0, 8);
        if may_write {
            assert_eq!(write(&a, mr.addr(), mr.rkey(), 8), WcStatus::SUCCESS);
            assert!(refused(read(&a, mr.addr(), mr.rkey(), 8)));
            assert_eq!(a.read(0, 8), before, "nothing came");
        } else {
            assert_eq!(read(&a, mr.addr(), mr.rkey(), 8), WcStatus::SUCCESS);
            assert!(refused(write(&a, mr.addr(), mr.rkey(), 8)));
            assert_eq!(bytes(&mr, 0, 8), [0; 8]);
        }
    }
}

#[test]
fn a_region_is_registered_anew_in_every_way_and_its_old_key_is_dead() {
    let daemon = Daemon::loopback();
    for what in 1..8 {
        let (a, b) = pair(&daemon, 4096);
        let other = b.ctx.alloc_pd().unwrap();
        let arena = Arena::alloc(&b.ctx, 8192, false).unwrap();
        arena.write(5000, b"elsewhere").unwrap();
        let mut mr = b.pd.reg_mr(&arena, 0..64, Access(1)).unwrap();
        let (old, from) = (mr.rkey(), mr.addr());
        mr.rereg(&ReregChange {
            range: (what & 1 != 0).then_some((&arena, 5000, 9)),
            pd: (what & 2 != 0).then_some(&other),
            access: (what & 4 != 0).then_some(ALL),
        })
        .unwrap();
        assert_ne!(mr.rkey(), old);
        let moved = what & 1 != 0;
        assert_eq!(
            (mr.len(), mr.addr() != from),
            (if moved { 9 } else { 64 }, moved)
        );
        let works = what & 4 != 0 && what & 2 == 0;
        if works {
            assert_eq!(read(&a, mr.addr(), mr.rkey(), mr.len()), WcStatus::SUCCESS);
            assert_eq!(moved, a.read(0, 9) == b"elsewhere");
            assert!(refused(read(&a, mr.addr(), old, 9)));
        } else {
            assert!(refused(read(&a, mr.addr(), mr.rkey(), 9)), "case {what}");
        }
    }
    let (_, b) = pair(&daemon, 4096);
    let mut mr = b.pd.alloc_mr(64, ALL).unwrap();
    let key = mr.rkey();
    let bad = ReregChange {
        access: Some(Access(2)),
        ..ReregChange::default()
    };
    let error = mr.rereg(&bad).unwrap_err().to_string();
    assert!(error.contains("local write"), "{error}");
    assert_eq!(mr.rkey(), key, "refused, and as it was");
    mr.rereg(&ReregChange::default()).unwrap_err();
}

#[test]
fn a_type_1_window_shows_its_part_to_every_stream_under_a_new_key_each_time() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    a.fill(5);
    let mr = b.pd.alloc_mr(8192, BINDABLE).unwrap();
    let mw = b.pd.alloc_mw(WindowType::One).unwrap();
    let mut last = mw.rkey();
    for (off, len) in [(100, 50), (4000, 8)] {
        let to = mr.window(off..off + len, READ | WRITE).unwrap();
        let key = mw.post_bind(&b.qp, 7, WrFlags::SIGNALED, &to).unwrap();
        assert_eq!((key, mw.rkey()), (inc_rkey(last), key));
        last = key;
        done(&b, WcOpcode::BIND_MW);
        assert_eq!(
            write(&a, to.addr + to.length - 8, key, 8),
            WcStatus::SUCCESS
        );
        assert_eq!(bytes(&mr, off + len - 8, 8), a.read(0, 8));
    }
    // While a window is bound, neither deregistration nor a change of access is possible.
    let Failed {
        object: mr,
        error: e,
    } = mr.dereg().unwrap_err();
    assert_eq!(e.errno(), 16, "{e}");
    let mut mr = mr;
    assert_eq!(
        mr.rereg(&ReregChange {
            access: Some(ALL),
            ..ReregChange::default()
        })
        .unwrap_err()
        .errno(),
        16
    );
    // A second stream of the same protection domain.
    let a2 = End::new(&a.ctx, 4096);
    let b2 = b.another();
    connect(&a2, &b2, "siw0", "10.77.0.2:0".parse().unwrap());
    let at = mr.addr() + 4000;
    assert_eq!(read(&a2, at, last, 8), WcStatus::SUCCESS);
    // One byte beyond the window, inside the region.
    assert!(refused(write(&a2, at + 1, last, 8)));
    // Length 0 unbinds.
    mw.post_bind(&b.qp, 8, WrFlags::SIGNALED, &MwBind::NONE)
        .unwrap();
    done(&b, WcOpcode::BIND_MW);
    assert!(refused(read(&a, at, last, 8)));
    mr.dereg().unwrap();
}

#[test]
fn a_type_2_window_serves_its_stream_alone_until_the_peer_invalidates_it() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let (a2, b2) = (End::new(&a.ctx, 4096), b.another());
    connect(&a2, &b2, "siw0", "10.77.0.2:0".parse().unwrap());
    let mr = b.pd.alloc_mr(8192, BINDABLE).unwrap();
    mr.write(64, b"window").unwrap();
    let mw = b.pd.alloc_mw(WindowType::Two).unwrap();
    let to = mr.window(64..70, READ | Access::ZERO_BASED).unwrap();
    let key = mw.post_bind(&b.qp, 1, WrFlags::SIGNALED, &to).unwrap();
    done(&b, WcOpcode::BIND_MW);
    assert_eq!(read(&a, 0, key, 6), WcStatus::SUCCESS);
    assert_eq!(a.read(0, 6), b"window");
    assert!(refused(read(&a2, 0, key, 6)), "another stream");
    let sge = [b.mr.sge(0, 8)];
    b.qp.post_recv(&[RecvWr {
        wr_id: 3,
        sges: &sge,
    }])
    .unwrap();
    a.qp.post_send(&[SendWr {
        opcode: Opcode::SendWithInv,
        imm: key,
        ..SendWr::send(4, SendData::Inline(b"done"))
    }])
    .unwrap();
    let wc = b.wc();
    assert_eq!((wc.status, wc.imm), (WcStatus::SUCCESS, key));
    done(&a, WcOpcode::SEND);
    // Unbound again: bound with a key chosen by the consumer, then invalidated locally.
    let chosen = key ^ 0x3c;
    mw.post_bind_with_key(&b.qp, 5, WrFlags::SIGNALED, &to, chosen)
        .unwrap();
    done(&b, WcOpcode::BIND_MW);
    assert_eq!(read(&a, 0, chosen, 6), WcStatus::SUCCESS);
    b.qp.post_send(&[SendWr::local_inv(6, chosen)]).unwrap();
    done(&b, WcOpcode::LOCAL_INV);
    assert!(refused(read(&a, 0, chosen, 6)));
    mr.dereg().unwrap();
}

#[test]
fn a_bind_that_the_region_does_not_allow_ends_the_queue_pair() {
    let daemon = Daemon::loopback();
    let cases: [(Access, Access, usize, usize); 5] = [
        (ALL, READ, 0, 8),
        (Access(1 | 16), Access(1), 0, 8),
        (Access(4 | 16), WRITE, 0, 8),
        (Access(4 | 16), Access::REMOTE_ATOMIC, 0, 8),
        (BINDABLE, READ, 4090, 7),
    ];
    for (region, window, off, len) in cases {
        let (_a, b) = pair(&daemon, 64);
        let mr = b.pd.alloc_mr(4096, region).unwrap();
        let mw = b.pd.alloc_mw(WindowType::Two).unwrap();
        let to = MwBind {
            lkey: mr.lkey(),
            addr: mr.addr() + off as u64,
            length: len as u64,
            access: window,
        };
        mw.post_bind(&b.qp, 1, WrFlags::NONE, &to).unwrap();
        assert_eq!(
            b.wc().status,
            WcStatus::MW_BIND_ERR,
            "{region:?} {window:?}"
        );
        mr.dereg().unwrap();
    }
    // A bound window of type 2; a window of another protection domain.
    let (_a, b) = pair(&daemon, 64);
    let mr = b.pd.alloc_mr(4096, BINDABLE).unwrap();
    let mw = b.pd.alloc_mw(WindowType::Two).unwrap();
    let to = mr.window(0..8, READ).unwrap();
    for i in 0..2 {
        mw.post_bind(&b.qp, i, WrFlags::SIGNALED, &to).unwrap();
    }
    done(&b, WcOpcode::BIND_MW);
    assert_eq!(b.wc().status, WcStatus::MW_BIND_ERR);
    let (_a, b) = pair(&daemon, 64);
    let mr = b.pd.alloc_mr(4096, BINDABLE).unwrap();
    let mw = b.ctx.alloc_pd().unwrap().alloc_mw(WindowType::One).unwrap();
    mw.post_bind(&b.qp, 1, WrFlags::NONE, &mr.window(0..8, READ).unwrap())
        .unwrap();
    assert_eq!(b.wc().status, WcStatus::MW_BIND_ERR);
}

/// Each bind names the key of the one before it, so keys and posts have one order.
#[test]
fn threads_bind_one_window_in_some_order() {
    const ROUNDS: usize = 200;
    const THREADS: usize = 3;
    const BINDS: usize = 10;
    let daemon = Daemon::loopback();
    let (_a, b) = pair(&daemon, 64);
    let mr = b.pd.alloc_mr(4096, BINDABLE).unwrap();
    let to = &mr.window(0..8, READ).unwrap();
    let qp = &b.qp;
    for _ in 0..ROUNDS {
        let mw = &b.pd.alloc_mw(WindowType::One).unwrap();
        let start = &std::sync::Barrier::new(THREADS);
        let bind_often = move || {
            start.wait();
            [0; BINDS].map(|_| mw.post_bind(qp, 1, WrFlags::SIGNALED, to).unwrap())
        };
        let mut keys: Vec<u32> = std::thread::scope(|scope| {
            let threads = [0; THREADS].map(|_| scope.spawn(bind_often));
            let keys = threads.map(|thread| thread.join().unwrap());
            keys.into_iter().flatten().collect()
        });
        for _ in 0..keys.len() {
            done(&b, WcOpcode::BIND_MW);
        }
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), THREADS * BINDS);
    }
}

#[test]
fn a_window_goes_with_the_queue_pair_it_was_bound_through_or_when_it_is_freed() {
    let daemon = Daemon::loopback();
    let (_a, b) = pair(&daemon, 64);
    let mr = b.pd.alloc_mr(4096, BINDABLE).unwrap();
    let two = b.pd.alloc_mw(WindowType::Two).unwrap();
    let one = b.pd.alloc_mw(WindowType::One).unwrap();
    let to = mr.window(0..8, READ).unwrap();
    for mw in [&two, &one] {
        mw.post_bind(&b.qp, 1, WrFlags::SIGNALED, &to).unwrap();
        done(&b, WcOpcode::BIND_MW);
    }
    let End { qp, .. } = b;
    drop(qp);
    let Failed {
        object: mr,
        error: e,
    } = mr.dereg().unwrap_err();
    assert!(e.to_string().contains("1 memory windows"), "{e}");
    drop(one);
    mr.dereg().unwrap();
}

/// Makes a fast registration of every second page of an arena, from inside the first to inside the
/// last.
fn scattered(b: &End) -> (FastMr, Vec<std::ops::Range<usize>>) {
    let arena = Arena::alloc(&b.ctx, 64 * 4096, false).unwrap();
    let mut ranges: Vec<_> = (0..16).map(|i| i * 8192..i * 8192 + 4096).collect();
    ranges[0].start += 1000;
    ranges[15].end -= 96;
    let mut fast = b.pd.alloc_fast_mr(&arena, 16).unwrap();
    assert_eq!(fast.map_ranges(&ranges, 12).unwrap(), 16);
    assert_eq!(fast.len(), 16 * 4096 - 1096);
    (fast, ranges)
}

#[test]
fn scattered_pages_are_one_buffer_for_writes_reads_sends_and_receives() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 70_000);
    a.fill(77);
    let (mut fast, ranges) = scattered(&b);
    let (key, iova) = (inc_rkey(fast.key()), 0x7000_0000_0123);
    let wr = fast.register_request(1, key, iova, ALL).unwrap();
    b.qp.post_send(&[wr]).unwrap();
    done(&b, WcOpcode::LOCAL_INV);
    let len = fast.len();
    assert_eq!(write(&a, iova, key, len), WcStatus::SUCCESS);
    let mut all = Vec::new();
    for r in &ranges {
        let mut v = vec![0; r.len()];
        fast.arena().read(r.start, &mut v).unwrap();
        all.extend(v);
    }
    assert_eq!(all, a.read(0, len));
    let mut between = [1; 4096];
    fast.arena().read(4096, &mut between).unwrap();
    assert_eq!(between, [0; 4096], "pages that are not in the list");
    a.mr.write(0, &vec![0; len]).unwrap();
    assert_eq!(read(&a, iova, key, len), WcStatus::SUCCESS);
    assert_eq!(a.read(0, len), all);
    // As the source of a SEND across page boundaries, and as a receive buffer.
    let sge = [a.mr.sge(0, 70_000)];
    a.qp.post_recv(&[RecvWr {
        wr_id: 2,
        sges: &sge,
    }])
    .unwrap();
    let local = [Sge {
        addr: iova + 50,
        length: 60_000,
        lkey: key,
    }];
    b.qp.post_send(&[SendWr::send(3, SendData::Sges(&local))])
        .unwrap();
    assert_eq!(
        (a.wc().byte_len, b.wc().status),
        (60_000, WcStatus::SUCCESS)
    );
    assert_eq!(a.read(0, 60_000), all[50..60_050]);
    // One byte beyond the part of the last page.
    assert!(refused(read(&a, iova + 1, key, len)));
}

#[test]
fn registration_use_and_invalidation_follow_the_order_of_the_send_queue() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 70_000);
    b.fill(8);
    let (mut fast, _) = scattered(&a);
    let mut key = fast.key();
    for round in 0..20u64 {
        key = inc_rkey(key);
        let iova = 0x1000 * round;
        let reg = fast
            .register_request(round, key, iova, Access::LOCAL_WRITE)
            .unwrap();
        let sink = [Sge {
            addr: iova,
            length: 60_000,
            lkey: key,
        }];
        let from = (b.mr.addr(), b.mr.rkey());
        let wrs = [
            reg.with_flags(WrFlags::NONE),
            SendWr::read(round, &sink, from.0, from.1).with_flags(WrFlags::NONE),
            SendWr::local_inv(round, key).with_flags(WrFlags::SIGNALED | WrFlags::FENCE),
        ];
        a.qp.post_send(&wrs).unwrap();
        done(&a, WcOpcode::LOCAL_INV);
    }
    let mut v = vec![0; 3096];
    fast.arena().read(1000, &mut v).unwrap();
    assert_eq!(v, b.read(0, 3096));
    // A READ with invalidate invalidates the key.
    key = inc_rkey(key);
    let reg = fast
        .register_request(1, key, 0, Access::LOCAL_WRITE)
        .unwrap();
    let sink = [Sge {
        addr: 0,
        length: 9000,
        lkey: key,
    }];
    a.qp.post_send(&[
        reg.with_flags(WrFlags::NONE),
        SendWr::read_with_inv(2, &sink, b.mr.addr(), b.mr.rkey()),
    ])
    .unwrap();
    done(&a, WcOpcode::RDMA_READ);
    a.qp.post_send(&[SendWr::send(3, SendData::Sges(&sink))])
        .unwrap();
    assert_eq!(a.wc().status, WcStatus::LOC_PROT_ERR);
}

#[test]
fn a_peer_that_is_done_takes_the_fast_key_with_its_send() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 70_000);
    let (mut fast, _) = scattered(&b);
    let key = inc_rkey(fast.key());
    let wr = fast.register_request(1, key, 0, ALL).unwrap();
    b.qp.post_send(&[wr]).unwrap();
    done(&b, WcOpcode::LOCAL_INV);
    let sge = [b.mr.sge(0, 8)];
    b.qp.post_recv(&[RecvWr {
        wr_id: 3,
        sges: &sge,
    }])
    .unwrap();
    a.qp.post_send(&[SendWr {
        opcode: Opcode::SendWithInv,
        imm: key,
        ..SendWr::send(4, SendData::Inline(b"done"))
    }])
    .unwrap();
    assert_eq!((b.wc().imm, a.wc().status), (key, WcStatus::SUCCESS));
    assert!(refused(write(&a, 0, key, 8)));
}

/// The page list lies in memory that its client can write at any time.
#[test]
fn a_page_list_that_points_elsewhere_is_refused() {
    let daemon = Daemon::loopback();
    for bad in [1u64, 4095, 64 * 4096, u64::MAX - 4095, u64::MAX, 1 << 63] {
        let (a, b) = pair(&daemon, 64);
        let (mut fast, _) = scattered(&b);
        let (list, at) = fast.list();
        list.write(at + 5 * 8, &bad.to_le_bytes()).unwrap();
        let key = inc_rkey(fast.key());
        let wr = fast.register_request(1, key, 0, ALL).unwrap();
        b.qp.post_send(&[wr]).unwrap();
        assert_eq!(b.wc().status, WcStatus::MW_BIND_ERR, "{bad:#x}");
        drop(a);
    }
}

/// The list is copied and then checked: changes after the completion of REG_MR have no effect.
#[test]
fn a_page_list_is_copied_before_it_is_checked() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 64);
    a.fill(1);
    let (mut fast, _) = scattered(&b);
    let key = inc_rkey(fast.key());
    let wr = fast.register_request(1, key, 0, ALL).unwrap();
    b.qp.post_send(&[wr]).unwrap();
    done(&b, WcOpcode::LOCAL_INV);
    let (list, at) = fast.list();
    list.write(at, &u64::MAX.to_le_bytes()).unwrap();
    assert_eq!(write(&a, 0, key, 64), WcStatus::SUCCESS);
    let mut v = [0; 64];
    fast.arena().read(1000, &mut v).unwrap();
    assert_eq!(v[..], a.read(0, 64));
}

#[test]
fn a_key_that_works_is_not_registered_again_nor_one_of_another_kind() {
    let daemon = Daemon::loopback();
    for case in 0..3 {
        let (_a, b) = pair(&daemon, 64);
        let (mut fast, _) = scattered(&b);
        let own = inc_rkey(fast.key());
        let key = match case {
            0 => own,
            1 => b.mr.lkey(),
            _ => own ^ 0x0100,
        };
        let first = fast.register_request(1, own, 0, ALL).unwrap();
        let second = fast.register_request(2, key, 0, ALL).unwrap();
        b.qp.post_send(&[first, second]).unwrap();
        done(&b, WcOpcode::LOCAL_INV);
        assert_eq!(b.wc().status, WcStatus::MW_BIND_ERR);
    }
}

#[test]
fn limits_and_nonsense_are_refused_in_words() {
    let daemon = Daemon::loopback();
    let ctx = daemon.context();
    let pd = ctx.alloc_pd().unwrap();
    let arena = Arena::alloc(&ctx, 4096, false).unwrap();
    for pages in [0, ctx.limits().max_fast_pages + 1] {
        let error = pd.alloc_fast_mr(&arena, pages).err().unwrap().to_string();
        assert!(error.contains("1 to 512"), "{error}");
    }
    let error = pd.reg_mr(&arena, 0..1, Access(64)).err().unwrap();
    assert!(
        error.to_string().contains("unknown access bits 0x40"),
        "{error}"
    );
    let mut fast = pd.alloc_fast_mr(&arena, 1).unwrap();
    assert!(fast.register_request(1, fast.key(), 0, ALL).is_err());
    assert!(fast.map_ranges(&[0..1, 4096..4097], 11).is_err());
    let error = pd
        .reg_mr_iova(&arena, 0..4096, u64::MAX, ALL)
        .err()
        .unwrap();
    assert!(error.to_string().contains("wraps"), "{error}");
}

/// The objects of a client that ends without freeing anything are released.
#[test]
fn windows_and_regions_of_a_lost_client_are_freed_whatever_is_bound() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 64);
    for _ in 0..3 {
        let b2 = End::new(&daemon.context(), 64);
        let a2 = End::new(&a.ctx, 64);
        connect(&a2, &b2, "siw0", "10.77.0.2:0".parse().unwrap());
        let mr = b2.pd.alloc_mr(4096, BINDABLE).unwrap();
        let mw = b2.pd.alloc_mw(WindowType::Two).unwrap();
        let to = mr.window(0..8, READ).unwrap();
        mw.post_bind(&b2.qp, 1, WrFlags::SIGNALED, &to).unwrap();
        done(&b2, WcOpcode::BIND_MW);
        // Deregistering the bound region is refused silently; it is freed with the client.
        drop(mr);
        drop((mw, b2));
        match a2.cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::Disconnected(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(write(&a, b.mr.addr(), b.mr.rkey(), 8), WcStatus::SUCCESS);
}
