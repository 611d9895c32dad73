//! Work queues, completion queues and doorbells over real mappings, with an
//! honest and with a hostile peer.

use proptest::prelude::*;
use siw_shm::completion_queue::{self as cq, CqGeometry};
use siw_shm::doorbell;
use siw_shm::work_queue::{self as wq, PushError};
use siw_shm::wqe::WorkRequest;
use siw_shm::wqe::{MAX_SLOTS, RecvWr, SendData, WqeSlot};
use siw_shm::*;
use std::sync::Arc;

fn region(len: usize) -> Arc<SharedMemory> {
    Arc::new(SharedMemory::new_anonymous(len).unwrap())
}

fn send(wr_id: u64, data: SendData<'_>) -> SendWr<'_> {
    SendWr {
        opcode: Opcode::Send,
        flags: WrFlags::SIGNALED,
        wr_id,
        imm: 0,
        remote_addr: 0,
        rkey: 0,
        data,
    }
}

fn sges(n: usize) -> Vec<Sge> {
    (0..n)
        .map(|i| Sge {
            addr: 0x1000 * i as u64,
            length: i as u32 + 1,
            lkey: 7 + i as u32,
        })
        .collect()
}

fn sq(slots: u32, max_wr: u32) -> (SqProducer, SqConsumer, Arc<SharedMemory>) {
    let r = region(wq::ring_len(slots));
    let p = SqProducer::new(r.clone(), 0, slots, max_wr).unwrap();
    (p, SqConsumer::new(r.clone(), 0, slots).unwrap(), r)
}

#[test]
fn requests_of_every_size_survive_the_wrap_of_the_ring() {
    let (mut p, mut c, _r) = sq(8, 8);
    let mut w = SendWqe::new();
    let bytes: Vec<u8> = (0..=255).collect();
    for round in 0..200u64 {
        let n = (round % 17) as usize;
        let list = sges(n);
        let inline_len = (round * 7 % 257) as usize;
        let d = if round % 2 == 0 {
            send(round, SendData::Sges(&list))
        } else {
            send(round, SendData::Inline(&bytes[..inline_len]))
        };
        p.push(&d).unwrap();
        assert_eq!(c.pop(&mut w), Ok(None), "not published yet");
        assert!(p.publish_posted(), "the first post after a drain rings");
        c.clear_pending();
        c.pop(&mut w).unwrap().unwrap();
        assert_eq!(w.wr_id, round);
        if round % 2 == 0 {
            assert_eq!(w.sges(), &list[..]);
            assert_eq!(w.length, list.iter().map(|s| s.length).sum::<u32>());
            assert_eq!(w.inline_data(), None);
        } else {
            assert_eq!(w.inline_data().unwrap(), &bytes[..inline_len]);
            assert!(w.sges().is_empty());
        }
        c.release_popped();
        c.complete_requests(1);
    }
}

#[test]
fn a_full_queue_refuses_until_slots_and_requests_are_done() {
    let (mut p, mut c, _r) = sq(4, 2);
    let d = send(1, SendData::Sges(&[]));
    p.push(&d).unwrap();
    p.push(&d).unwrap();
    assert_eq!(p.push(&d), Err(PushError::Full), "max_send_wr");
    p.publish_posted();
    let mut w = SendWqe::new();
    c.pop(&mut w).unwrap().unwrap();
    c.release_popped();
    assert_eq!(p.push(&d), Err(PushError::Full), "popped is not done");
    assert_eq!(p.count_outstanding(), 2);
    c.complete_requests(1);
    p.push(&d).unwrap();
    // Slots: 3 of 4 are written, 1 is released; a 3-slot request does not fit.
    c.complete_requests(2);
    let big = sges(9);
    assert_eq!(p.push(&send(2, SendData::Sges(&big))), Err(PushError::Full));
    assert!(!p.publish_posted(), "already pending");
}

#[test]
fn receive_requests_arrive_with_their_scatter_list() {
    let r = region(wq::ring_len(8));
    let mut p = RqProducer::new(r.clone(), 0, 8, 8).unwrap();
    let mut c = RqConsumer::new(r, 0, 8).unwrap();
    let list = sges(6);
    p.push(&RecvWr {
        wr_id: 9,
        sges: &list,
    })
    .unwrap();
    p.publish_posted();
    let mut w = RecvWqe::new();
    c.pop(&mut w).unwrap().unwrap();
    assert_eq!((w.wr_id, w.sges()), (9, &list[..]));
    assert_eq!(w.length, 21);
    assert!(c.is_empty().unwrap());
}

#[test]
fn a_producer_index_outside_of_the_ring_is_nonsense() {
    for tail in [9, 100, u32::MAX, 0x8000_0000] {
        let (_p, mut c, r) = sq(8, 8);
        r.write(wq::OFF_TAIL, &u32::to_le_bytes(tail)).unwrap();
        assert_eq!(
            c.pop(&mut SendWqe::new()),
            Err(RingError::InvalidIndex),
            "tail {tail}"
        );
    }
}

#[test]
fn a_request_that_claims_slots_beyond_the_tail_is_truncated() {
    let (mut p, mut c, r) = sq(8, 8);
    let list = sges(9);
    p.push(&send(77, SendData::Sges(&list))).unwrap();
    p.publish_posted();
    r.write(wq::OFF_TAIL, &1u32.to_le_bytes()).unwrap();
    assert_eq!(
        c.pop(&mut SendWqe::new()),
        Err(RingError::Wqe {
            wr_id: 77,
            error: WqeError::Truncated
        })
    );
}

#[test]
fn a_consumer_index_from_the_future_leaves_the_producer_without_room() {
    let (mut p, _c, r) = sq(2, 100);
    let d = send(1, SendData::Sges(&[]));
    p.push(&d).unwrap();
    p.push(&d).unwrap();
    r.write(wq::OFF_HEAD, &1000u32.to_le_bytes()).unwrap();
    assert_eq!(p.push(&d), Err(PushError::Full));
}

#[test]
fn rings_outside_of_their_region_are_refused() {
    let r = region(4096);
    assert!(SqProducer::new(r.clone(), 0, 64, 1).is_err(), "too long");
    assert!(SqProducer::new(r.clone(), 8, 2, 1).is_err(), "misaligned");
    assert!(
        SqConsumer::new(r.clone(), 0, 3).is_err(),
        "not a power of two"
    );
    assert!(
        RqConsumer::new(r.clone(), usize::MAX - 63, 2).is_err(),
        "wraps"
    );
    let g = CqGeometry::new(64, 1).unwrap();
    assert!(CqConsumer::new(r.clone(), 0, g).is_err());
    assert!(DoorbellConsumer::new(r, 0, 4096).is_err());
}

#[test]
fn what_the_daemon_could_not_parse_is_refused_at_post() {
    let (mut p, _c, _r) = sq(16, 16);
    let list = sges(17);
    let err = |e| Err(PushError::Wqe(e));
    assert_eq!(
        p.push(&send(0, SendData::Sges(&list))),
        err(WqeError::TooManySge(17))
    );
    assert_eq!(
        p.push(&send(0, SendData::Inline(&[0; 257]))),
        err(WqeError::InlineTooLong(257))
    );
    let mut d = send(0, SendData::Inline(&[1]));
    d.opcode = Opcode::Read;
    assert_eq!(p.push(&d), err(WqeError::InlineNotAllowed));
    d.opcode = Opcode::BindMw;
    assert_eq!(p.push(&d), err(WqeError::BadLocal));
    d.opcode = Opcode::CmpSwap;
    assert_eq!(p.push(&d), err(WqeError::BadAtomic));
    let operands = SendData::Atomic(sges(1)[0], AtomicArgs::fetch_add(1));
    assert_eq!(p.push(&send(0, operands)), err(WqeError::BadAtomic));
}

#[test]
fn atomics_carry_operands_and_masks_through_the_ring() {
    let (mut p, mut c, _r) = sq(8, 8);
    let mut w = SendWqe::new();
    let sge = Sge {
        addr: 0x1000,
        length: 8,
        lkey: 7,
    };
    let masked = AtomicArgs {
        add_or_swap: 1,
        add_or_swap_mask: 2,
        compare: 3,
        compare_mask: 4,
    };
    for round in 0..10 {
        let plain = [
            SendWr::fetch_add(round, sge, 0x20, 9, 5),
            SendWr::cmp_swap(round, sge, 0x20, 9, 6, 7),
        ];
        let with = |d: SendWr<'static>| SendWr {
            data: SendData::Atomic(sge, masked),
            ..d
        };
        for (d, want, slots) in [
            (plain[0], AtomicArgs::fetch_add(5), 1),
            (plain[1], AtomicArgs::cmp_swap(6, 7), 1),
            (with(plain[0]), masked, 2),
            (with(plain[1]), masked, 2),
        ] {
            assert_eq!(d.slot_count(), Ok(slots));
            p.push(&d).unwrap();
            p.publish_posted();
            assert!(c.pop(&mut w).unwrap().is_some());
            assert_eq!(w.atomic_args(), Some(want));
            assert_eq!((w.sges(), w.length), (&[sge][..], 8));
            assert_eq!((w.wr_id, w.remote_addr, w.rkey), (round, 0x20, 9));
            c.release_popped();
            c.complete_requests(1);
        }
    }
    let mut slots = [WqeSlot([0; 8]); 2];
    SendWr::fetch_add(1, sge, 0, 0, 1).encode_slots(|i, s| slots[i as usize] = *s);
    // num_sge of the header, then the slot count.
    for (byte, v) in [(2, 0u64), (2, 2), (3, 0), (3, 3), (1, 8)] {
        let mut bad = slots;
        bad[0].0[0] = bad[0].0[0] & !(0xff << (8 * byte)) | v << (8 * byte);
        assert!(SendWqe::parse_slots(&bad).is_err(), "byte {byte} = {v}");
    }
}

#[test]
fn a_slot_never_written_is_no_request() {
    assert_eq!(
        SendWqe::parse_slots(&[WqeSlot([0; 8])]).unwrap_err(),
        WqeError::BadOpcode(0)
    );
    assert_eq!(
        RecvWqe::parse_slots(&[WqeSlot([0; 8])]).unwrap_err(),
        WqeError::BadOpcode(0)
    );
    assert_eq!(SendWqe::parse_slots(&[]).unwrap_err(), WqeError::Truncated);
}

#[test]
fn elements_of_4_gib_in_sum_are_refused() {
    let list = [
        Sge {
            addr: 0,
            length: u32::MAX,
            lkey: 1,
        },
        Sge {
            addr: 0,
            length: 1,
            lkey: 1,
        },
    ];
    assert_eq!(
        SendWqe::from_wr(&send(0, SendData::Sges(&list))).unwrap_err(),
        WqeError::LengthOverflow
    );
}

#[test]
fn geometry_holds_the_promised_requests_at_their_largest() {
    let g = QpGeometry::new(10, 7, 16, 4, 256).unwrap();
    assert!(g.sq_slots >= 50 && g.rq_slots >= 14);
    let r = region(g.len);
    let mut p = SqProducer::new(r.clone(), 0, g.sq_slots, 10).unwrap();
    let list = sges(16);
    for i in 0..10 {
        p.push(&send(i, SendData::Sges(&list))).unwrap();
    }
    assert!(RqConsumer::new(r, g.rq_offset, g.rq_slots).is_ok());
    assert!(QpGeometry::new(u32::MAX, 1, 1, 1, 0).is_none());
    assert!(QpGeometry::new(1 << 20, 1, 16, 1, 0).is_none());
}

proptest! {
    #[test]
    fn random_slots_never_panic_the_parser(
        words in proptest::collection::vec(any::<[u64; 8]>(), 0..=MAX_SLOTS),
        opcode in 0u8..16, flags in any::<u8>(), num_sge in 0u8..20, slots in 0u8..8, length in 0u32..400,
    ) {
        let mut s: Vec<WqeSlot> = words.into_iter().map(WqeSlot).collect();
        let _ = SendWqe::parse_slots(&s);
        let _ = RecvWqe::parse_slots(&s);
        if let Some(first) = s.first_mut() {
            // Nearly valid headers reach further into the parser.
            let op = if opcode == 15 { 0x80 } else { opcode };
            first.0[0] = u64::from_le_bytes([op, flags & 15, num_sge, slots, 0, 0, 0, 0]);
            first.0[3] = u64::from(length) << 32;
        }
        if let Ok(w) = SendWqe::parse_slots(&s) {
            prop_assert!(w.sges().len() <= 16);
            if let Some(d) = w.inline_data() {
                prop_assert_eq!(d.len(), w.length as usize);
            } else if matches!(w.opcode, Opcode::RegMr | Opcode::BindMw) {
                // The one element names what is bound or registered and moves nothing.
                prop_assert_eq!((w.sges().len(), w.length), (1, 0));
            } else {
                let sum: u64 = w.sges().iter().map(|s| u64::from(s.length)).sum();
                prop_assert_eq!(sum, u64::from(w.length));
            }
        }
        let _ = RecvWqe::parse_slots(&s);
    }

    #[test]
    fn random_rings_never_panic_the_worker(bytes in proptest::collection::vec(any::<u8>(), wq::ring_len(8)..=wq::ring_len(8))) {
        let r = region(bytes.len());
        r.write(0, &bytes).unwrap();
        r.write(wq::OFF_TAIL, &(bytes[0] as u32 % 10).to_le_bytes()).unwrap();
        let mut c = SqConsumer::new(r, 0, 8).unwrap();
        let mut w = SendWqe::new();
        while let Ok(Some(())) = c.pop(&mut w) {}
    }
}

fn completion(wr_id: u64) -> Wc {
    Wc {
        wr_id,
        qp_num: 3,
        ..Wc::default()
    }
}

#[test]
fn completions_come_in_order_through_many_laps() {
    let g = CqGeometry::new(4, 1).unwrap();
    let r = region(g.len);
    let mut p = CqProducer::new(r.clone(), 0, g, 0).unwrap();
    let mut c = CqConsumer::new(r, 0, g).unwrap();
    let mut out = [Wc::default(); 3];
    assert_eq!(c.poll(&mut out), 0);
    let mut next = 0;
    for i in 0..100 {
        p.push(&completion(2 * i)).unwrap();
        p.push(&completion(2 * i + 1)).unwrap();
        let n = c.poll(&mut out);
        for e in &out[..n] {
            assert_eq!((e.wr_id, e.qp_num), (next, 3));
            next += 1;
        }
    }
    assert_eq!(next, 200);
}

#[test]
fn a_client_that_does_not_poll_overflows_its_own_queue() {
    let g = CqGeometry::new(2, 1).unwrap();
    let r = region(g.len);
    let mut p = CqProducer::new(r.clone(), 0, g, 0).unwrap();
    let mut c = CqConsumer::new(r.clone(), 0, g).unwrap();
    p.push(&completion(0)).unwrap();
    p.push(&completion(1)).unwrap();
    assert_eq!(p.push(&completion(2)), Err(CqOverflow));
    p.set_error(75);
    assert_eq!(c.error_code(), 75);
    assert_eq!(c.poll(&mut [Wc::default(); 4]), 2);
    p.push(&completion(2)).unwrap();
    // A consumer index from the future is a full ring as well.
    r.write(cq::HEADER, &0x7000_0000u32.to_le_bytes()).unwrap();
    p.push(&completion(3)).unwrap();
    assert_eq!(p.push(&completion(4)), Err(CqOverflow));
}

#[test]
fn a_poll_serves_the_rings_of_all_workers_in_turn() {
    let g = CqGeometry::new(8, 64).unwrap();
    let r = region(g.len);
    let mut c = CqConsumer::new(r.clone(), 0, g).unwrap();
    let workers = [0, 5, 63];
    for w in workers {
        let mut p = CqProducer::new(r.clone(), 0, g, w).unwrap();
        for _ in 0..3 {
            p.push(&completion(u64::from(w))).unwrap();
        }
    }
    let mut got = Vec::new();
    let mut out = [Wc::default(); 1];
    for _ in 0..200 {
        if c.poll(&mut out) == 1 {
            got.push(out[0].wr_id);
        }
    }
    assert_eq!(got.len(), 9);
    for w in workers {
        assert_eq!(got.iter().filter(|g| **g == u64::from(w)).count(), 3);
    }
    assert_ne!(
        got[..3],
        [got[0]; 3],
        "one ring is not drained before the next"
    );
    assert!(CqProducer::new(r, 0, g, 64).is_err());
}

#[test]
fn only_the_completions_that_were_asked_for_raise_an_event() {
    let g = CqGeometry::new(64, 1).unwrap();
    let r = region(g.len);
    let mut p = CqProducer::new(r.clone(), 0, g, 0).unwrap();
    let c = CqConsumer::new(r, 0, g).unwrap();
    let solicited = Wc {
        flags: WcFlags::SOLICITED,
        ..completion(1)
    };
    let failed = Wc {
        status: WcStatus::WR_FLUSH_ERR,
        ..completion(1)
    };
    p.push(&completion(0)).unwrap();
    assert!(!p.take_event(), "not armed");
    c.arm_event(true);
    p.push(&completion(0)).unwrap();
    assert!(!p.take_event(), "armed for solicited ones");
    p.push(&solicited).unwrap();
    assert!(p.take_event());
    p.push(&solicited).unwrap();
    assert!(!p.take_event(), "one event per arming");
    c.arm_event(true);
    p.push(&failed).unwrap();
    assert!(p.take_event(), "failures count as solicited");
    c.arm_event(false);
    c.arm_event(true);
    p.push(&completion(0)).unwrap();
    assert!(
        p.take_event(),
        "a later solicited arming does not weaken the first"
    );
    c.arm_event(false);
    assert!(!p.take_event(), "no completion since");
}

#[test]
fn doorbells_name_each_pending_queue_once() {
    let r = region(doorbell::ring_len(4) * 2);
    let off = doorbell::ring_offset(1, 4);
    let p = DoorbellProducer::new(r.clone(), off, 4).unwrap();
    let mut c = DoorbellConsumer::new(r, off, 4).unwrap();
    assert!(!c.has_work());
    for lap in 0..10 {
        p.ring_doorbell(lap);
        p.ring_doorbell(0xff_ffff);
        assert!(c.has_work());
        assert_eq!(
            (c.pop(), c.pop(), c.pop()),
            (Some(lap), Some(0xff_ffff), None)
        );
    }
}

#[test]
fn a_doorbell_ring_full_of_garbage_only_yields_numbers() {
    let r = region(doorbell::ring_len(4));
    r.write(0, &[0xff; 80]).unwrap();
    let mut c = DoorbellConsumer::new(r, 0, 4).unwrap();
    let got: Vec<u32> = std::iter::from_fn(|| c.pop()).collect();
    assert_eq!(got, [u32::MAX - 1; 4]);
}

#[test]
fn clients_see_sleeping_workers_through_a_mapping_they_cannot_write() {
    let page = WorkerPage::create_sealed(3).unwrap();
    let fd = page
        .shared_memory()
        .memfd()
        .unwrap()
        .try_clone_to_owned()
        .unwrap();
    assert!(
        SharedMemory::map_fd(fd.try_clone().unwrap(), 1).is_err(),
        "sealed against new writers"
    );
    let view = SharedMemory::map_read_only(fd, 3 * doorbell::WORKER_LINE).unwrap();
    assert_eq!(view.write(0, &[1]), Err(OutOfBounds));
    let view = WorkerPageView::new(Arc::new(view), 3).unwrap();
    let flag = page.sleep_flag(2).unwrap();
    assert!(page.sleep_flag(3).is_none());
    flag.announce_sleep();
    assert_eq!([0, 1, 2].map(|w| view.must_wake(w)), [false, false, true]);
    flag.announce_awake();
    assert!(!view.must_wake(2));
}

#[test]
fn a_stream_of_requests_crosses_between_two_threads() {
    let (mut p, mut c, _r) = sq(64, 64);
    let n = 20_000u64;
    let worker = std::thread::spawn(move || {
        let mut w = SendWqe::new();
        for expect in 0..n {
            while c.pop(&mut w).unwrap().is_none() {
                std::hint::spin_loop();
            }
            assert_eq!(w.wr_id, expect);
            assert_eq!(w.inline_data().unwrap(), expect.to_le_bytes());
            c.release_popped();
            c.complete_requests(1);
        }
    });
    for i in 0..n {
        let b = i.to_le_bytes();
        while p.push(&send(i, SendData::Inline(&b))) == Err(PushError::Full) {
            std::thread::yield_now();
        }
        p.publish_posted();
    }
    worker.join().unwrap();
}
