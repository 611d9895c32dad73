//! Work queues, completion queues and doorbells over real mappings, with an
//! honest and with a hostile peer.

use proptest::prelude::*;
use siw_shm::completion_queue::{self as cq, CqGeometry};
use siw_shm::doorbell;
use siw_shm::work_queue::{self as wq, PushError};
use siw_shm::wqe::{MAX_SLOTS, RecvWr, SendData, WorkQueueElement, WorkRequest, WqeSlot};
use siw_shm::*;
use std::sync::Arc;

fn new_memory(len: usize) -> Arc<SharedMemory> {
    Arc::new(SharedMemory::new_anonymous(len).unwrap())
}

fn send_request(wr_id: u64, data: SendData<'_>) -> SendWr<'_> {
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

fn sample_sges(n: usize) -> Vec<Sge> {
    (0..n)
        .map(|i| Sge {
            addr: 0x1000 * i as u64,
            length: i as u32 + 1,
            lkey: 7 + i as u32,
        })
        .collect()
}

fn new_send_queue(slots: u32, max_wr: u32) -> (SqProducer, SqConsumer, Arc<SharedMemory>) {
    let memory = new_memory(wq::ring_len(slots));
    let producer = SqProducer::new(memory.clone(), 0, slots, max_wr).unwrap();
    (
        producer,
        SqConsumer::new(memory.clone(), 0, slots).unwrap(),
        memory,
    )
}

#[test]
fn requests_of_every_size_survive_the_wrap_of_the_ring() {
    let (mut producer, mut consumer, _memory) = new_send_queue(8, 8);
    let mut wqe = SendWqe::new();
    let bytes: Vec<u8> = (0..=255).collect();
    for round in 0..200u64 {
        let n = (round % 17) as usize;
        let list = sample_sges(n);
        let inline_len = (round * 7 % 257) as usize;
        let request = if round % 2 == 0 {
            send_request(round, SendData::Sges(&list))
        } else {
            send_request(round, SendData::Inline(&bytes[..inline_len]))
        };
        producer.push(&request).unwrap();
        assert_eq!(consumer.pop(&mut wqe), Ok(None), "not published yet");
        assert!(
            producer.publish_posted(),
            "the first post after a drain rings"
        );
        consumer.clear_pending();
        consumer.pop(&mut wqe).unwrap().unwrap();
        assert_eq!(wqe.wr_id, round);
        if round % 2 == 0 {
            assert_eq!(wqe.sges(), &list[..]);
            assert_eq!(wqe.length, list.iter().map(|sge| sge.length).sum::<u32>());
            assert_eq!(wqe.inline_data(), None);
        } else {
            assert_eq!(wqe.inline_data().unwrap(), &bytes[..inline_len]);
            assert!(wqe.sges().is_empty());
        }
        consumer.release_popped();
        consumer.complete_requests(1);
    }
}

#[test]
fn the_state_is_published_in_the_state_line() {
    let geometry = QpGeometry::new(4, 4, 1, 1, 0).unwrap();
    let at = wq::state_offset(geometry.rq_offset, geometry.rq_slots);
    assert_eq!(geometry.len, at + wq::STATE_LINE_LEN);
    let memory = new_memory(geometry.len);
    let producer = SqProducer::new(memory.clone(), 0, geometry.sq_slots, 4).unwrap();
    let consumer = SqConsumer::new(memory.clone(), 0, geometry.sq_slots)
        .and_then(|consumer| consumer.with_state_line(memory.clone(), at))
        .unwrap();
    let watch = producer.new_watch(memory.clone(), at).unwrap();
    consumer.set_worker(3);
    consumer.set_qp_state(2);
    assert_eq!((watch.qp_state(), watch.worker_index()), (2, 3));
    assert!(producer.new_watch(memory, 1 << 20).is_err());
}

#[test]
fn a_full_queue_refuses_until_slots_and_requests_are_done() {
    let (mut producer, mut consumer, _memory) = new_send_queue(4, 2);
    let request = send_request(1, SendData::Sges(&[]));
    producer.push(&request).unwrap();
    producer.push(&request).unwrap();
    assert_eq!(producer.push(&request), Err(PushError::Full), "max_send_wr");
    producer.publish_posted();
    let mut wqe = SendWqe::new();
    consumer.pop(&mut wqe).unwrap().unwrap();
    consumer.release_popped();
    assert_eq!(
        producer.push(&request),
        Err(PushError::Full),
        "popped is not done"
    );
    assert_eq!(producer.count_outstanding(), 2);
    consumer.complete_requests(1);
    producer.push(&request).unwrap();
    // 3 of 4 slots are written and 1 is released; a 3-slot request does not fit.
    consumer.complete_requests(2);
    let big = sample_sges(9);
    assert_eq!(
        producer.push(&send_request(2, SendData::Sges(&big))),
        Err(PushError::Full)
    );
    assert!(!producer.publish_posted(), "already pending");
}

#[test]
fn receive_requests_arrive_with_their_scatter_list() {
    let memory = new_memory(wq::ring_len(8));
    let mut producer = RqProducer::new(memory.clone(), 0, 8, 8).unwrap();
    let mut consumer = RqConsumer::new(memory, 0, 8).unwrap();
    let list = sample_sges(6);
    producer
        .push(&RecvWr {
            wr_id: 9,
            sges: &list,
        })
        .unwrap();
    producer.publish_posted();
    let mut wqe = RecvWqe::new();
    consumer.pop(&mut wqe).unwrap().unwrap();
    assert_eq!((wqe.wr_id, wqe.sges()), (9, &list[..]));
    assert_eq!(wqe.length, 21);
    assert!(consumer.is_empty().unwrap());
}

#[test]
fn a_producer_index_outside_of_the_ring_is_nonsense() {
    for tail in [9, 100, u32::MAX, 0x8000_0000] {
        let (_producer, mut consumer, memory) = new_send_queue(8, 8);
        memory.write(wq::OFF_TAIL, &u32::to_le_bytes(tail)).unwrap();
        assert_eq!(
            consumer.pop(&mut SendWqe::new()),
            Err(RingError::InvalidIndex),
            "tail {tail}"
        );
    }
}

#[test]
fn a_request_that_claims_slots_beyond_the_tail_is_truncated() {
    let (mut producer, mut consumer, memory) = new_send_queue(8, 8);
    let list = sample_sges(9);
    producer
        .push(&send_request(77, SendData::Sges(&list)))
        .unwrap();
    producer.publish_posted();
    memory.write(wq::OFF_TAIL, &1u32.to_le_bytes()).unwrap();
    assert_eq!(
        consumer.pop(&mut SendWqe::new()),
        Err(RingError::Wqe {
            wr_id: 77,
            error: WqeError::Truncated
        })
    );
}

#[test]
fn a_consumer_index_from_the_future_leaves_the_producer_without_room() {
    let (mut producer, _consumer, memory) = new_send_queue(2, 100);
    let request = send_request(1, SendData::Sges(&[]));
    producer.push(&request).unwrap();
    producer.push(&request).unwrap();
    memory.write(wq::OFF_HEAD, &1000u32.to_le_bytes()).unwrap();
    assert_eq!(producer.push(&request), Err(PushError::Full));
}

#[test]
fn rings_outside_of_their_region_are_refused() {
    let memory = new_memory(4096);
    assert!(
        SqProducer::new(memory.clone(), 0, 64, 1).is_err(),
        "too long"
    );
    assert!(
        SqProducer::new(memory.clone(), 8, 2, 1).is_err(),
        "misaligned"
    );
    assert!(
        SqConsumer::new(memory.clone(), 0, 3).is_err(),
        "not a power of two"
    );
    assert!(
        RqConsumer::new(memory.clone(), usize::MAX - 63, 2).is_err(),
        "wraps"
    );
    let geometry = CqGeometry::new(64, 1).unwrap();
    assert!(CqConsumer::new(memory.clone(), 0, geometry).is_err());
    assert!(DoorbellConsumer::new(memory, 0, 4096).is_err());
}

#[test]
fn what_the_daemon_could_not_parse_is_refused_at_post() {
    let (mut producer, _consumer, _memory) = new_send_queue(16, 16);
    let list = sample_sges(17);
    let refused = |error| Err(PushError::Wqe(error));
    assert_eq!(
        producer.push(&send_request(0, SendData::Sges(&list))),
        refused(WqeError::TooManySge(17))
    );
    assert_eq!(
        producer.push(&send_request(0, SendData::Inline(&[0; 257]))),
        refused(WqeError::InlineTooLong(257))
    );
    let mut request = send_request(0, SendData::Inline(&[1]));
    request.opcode = Opcode::Read;
    assert_eq!(producer.push(&request), refused(WqeError::InlineNotAllowed));
    request.opcode = Opcode::BindMw;
    assert_eq!(producer.push(&request), refused(WqeError::BadLocal));
    request.opcode = Opcode::CmpSwap;
    assert_eq!(producer.push(&request), refused(WqeError::BadAtomic));
    let operands = SendData::Atomic(sample_sges(1)[0], AtomicArgs::fetch_add(1));
    assert_eq!(
        producer.push(&send_request(0, operands)),
        refused(WqeError::BadAtomic)
    );
}

#[test]
fn atomics_carry_operands_and_masks_through_the_ring() {
    let (mut producer, mut consumer, _memory) = new_send_queue(8, 8);
    let mut wqe = SendWqe::new();
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
        let with = |request: SendWr<'static>| SendWr {
            data: SendData::Atomic(sge, masked),
            ..request
        };
        for (request, want, slots) in [
            (plain[0], AtomicArgs::fetch_add(5), 1),
            (plain[1], AtomicArgs::cmp_swap(6, 7), 1),
            (with(plain[0]), masked, 2),
            (with(plain[1]), masked, 2),
        ] {
            assert_eq!(request.slot_count(), Ok(slots));
            producer.push(&request).unwrap();
            producer.publish_posted();
            assert!(consumer.pop(&mut wqe).unwrap().is_some());
            assert_eq!(wqe.atomic_args(), Some(want));
            assert_eq!((wqe.sges(), wqe.length), (&[sge][..], 8));
            assert_eq!((wqe.wr_id, wqe.remote_addr, wqe.rkey), (round, 0x20, 9));
            consumer.release_popped();
            consumer.complete_requests(1);
        }
    }
    let mut slots = [WqeSlot([0; 8]); 2];
    SendWr::fetch_add(1, sge, 0, 0, 1).encode_slots(|i, slot| slots[i as usize] = *slot);
    // num_sge of the header, then the slot count.
    for (byte, value) in [(2, 0u64), (2, 2), (3, 0), (3, 3), (1, 8)] {
        let mut bad = slots;
        bad[0].0[0] = bad[0].0[0] & !(0xff << (8 * byte)) | value << (8 * byte);
        assert!(SendWqe::parse_slots(&bad).is_err(), "byte {byte} = {value}");
    }
}

/// The fast encoding of a single-slot request with one element equals the general one.
#[test]
fn both_encoders_write_the_same_plain_request() {
    fn check(request: &impl WorkRequest, is_plain: bool) {
        let mut slots = [WqeSlot([0; 8]); MAX_SLOTS];
        request.encode_slots(|i, slot| slots[i as usize] = *slot);
        let words = request.plain_words();
        assert_eq!(words.is_some(), is_plain);
        if let Some(words) = words {
            assert_eq!(words[..], slots[0].0[..words.len()]);
            assert_eq!(request.slot_count(), Ok(1));
        }
    }
    let sges = [
        Sge {
            addr: 0x1122_3344_5566_7788,
            length: 0x99aa_bbcc,
            lkey: 0xddee_ff01,
        },
        Sge::default(),
    ];
    let one = SendData::Sges(&sges[..1]);
    let flags = WrFlags::FENCE | WrFlags::INLINE | WrFlags::SOLICITED;
    check(&SendWr::write_with_imm(u64::MAX, one, 77, 5, 6), true);
    check(&SendWr::send(9, one).with_flags(flags), true);
    check(&SendWr::read(9, &sges[..1], 1 << 63, 5), true);
    check(&SendWr::send(9, SendData::Sges(&sges)), false);
    check(&SendWr::send(9, SendData::Sges(&[])), false);
    check(&SendWr::send(9, SendData::Inline(b"bytes")), false);
    check(&SendWr::fetch_add(9, sges[0], 1, 2, 3), false);
    let (wr_id, sges) = (3, &sges[..1]);
    check(&RecvWr { wr_id, sges }, true);
    check(&RecvWr { wr_id, sges: &[] }, false);
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
        SendWqe::from_wr(&send_request(0, SendData::Sges(&list))).unwrap_err(),
        WqeError::LengthOverflow
    );
}

#[test]
fn geometry_holds_the_promised_requests_at_their_largest() {
    let geometry = QpGeometry::new(10, 7, 16, 4, 256).unwrap();
    assert!(geometry.sq_slots >= 50 && geometry.rq_slots >= 14);
    let memory = new_memory(geometry.len);
    let mut producer = SqProducer::new(memory.clone(), 0, geometry.sq_slots, 10).unwrap();
    let list = sample_sges(16);
    for i in 0..10 {
        producer
            .push(&send_request(i, SendData::Sges(&list)))
            .unwrap();
    }
    assert!(RqConsumer::new(memory, geometry.rq_offset, geometry.rq_slots).is_ok());
    assert!(QpGeometry::new(u32::MAX, 1, 1, 1, 0).is_none());
    assert!(QpGeometry::new(1 << 20, 1, 16, 1, 0).is_none());
}

proptest! {
    #[test]
    fn random_slots_never_panic_the_parser(
        words in proptest::collection::vec(any::<[u64; 8]>(), 0..=MAX_SLOTS),
        opcode in 0u8..16, flags in any::<u8>(), num_sge in 0u8..20, slots in 0u8..8, length in 0u32..400,
    ) {
        let mut list: Vec<WqeSlot> = words.into_iter().map(WqeSlot).collect();
        let _ = SendWqe::parse_slots(&list);
        let _ = RecvWqe::parse_slots(&list);
        if let Some(first) = list.first_mut() {
            // Nearly valid headers reach further into the parser.
            let op = if opcode == 15 { 0x80 } else { opcode };
            first.0[0] = u64::from_le_bytes([op, flags & 15, num_sge, slots, 0, 0, 0, 0]);
            first.0[3] = u64::from(length) << 32;
        }
        if let Ok(wqe) = SendWqe::parse_slots(&list) {
            prop_assert!(wqe.sges().len() <= 16);
            if let Some(inline) = wqe.inline_data() {
                prop_assert_eq!(inline.len(), wqe.length as usize);
            } else if matches!(wqe.opcode, Opcode::RegMr | Opcode::BindMw) {
                // The single element holds the operands of the bind or registration and moves no
                // data.
                prop_assert_eq!((wqe.sges().len(), wqe.length), (1, 0));
            } else {
                let sum: u64 = wqe.sges().iter().map(|sge| u64::from(sge.length)).sum();
                prop_assert_eq!(sum, u64::from(wqe.length));
            }
        }
        let _ = RecvWqe::parse_slots(&list);
    }

    /// The fast parser and the general parser agree.
    #[test]
    fn both_parsers_make_the_same_of_a_plain_request(
        words in any::<[u64; 8]>(), opcode in 0u8..16, flags in 0u8..32, num_sge in 0u8..3, slots in 1u8..3,
    ) {
        let mut slot = WqeSlot(words);
        let op = if opcode == 15 { 0x80 } else { opcode };
        let imm = words[0] & !0xffff_ffff;
        slot.0[0] = imm | u64::from_le_bytes([op, flags, num_sge, slots, 0, 0, 0, 0]);
        let whole = SendWqe::parse_slots(&[slot]);
        let mut plain = SendWqe::new();
        let is_plain = plain.parse_plain(|i| slot.0[i]);
        let is_expected = whole.as_ref().is_ok_and(|wqe| {
            !wqe.opcode.is_atomic()
                && !matches!(wqe.opcode, Opcode::RegMr | Opcode::BindMw)
                && wqe.sges().len() == 1
        });
        prop_assert_eq!(is_plain, is_expected);
        if let (true, Ok(whole)) = (is_plain, whole) {
            prop_assert_eq!(format!("{plain:?}"), format!("{whole:?}"));
            prop_assert_eq!((plain.imm, plain.only_sge()), (whole.imm, whole.only_sge()));
        }
        let whole = RecvWqe::parse_slots(&[slot]);
        let mut plain = RecvWqe::new();
        let is_plain = plain.parse_plain(|i| slot.0[i]);
        prop_assert_eq!(is_plain, whole.as_ref().is_ok_and(|wqe| wqe.sges().len() == 1));
        if let (true, Ok(whole)) = (is_plain, whole) {
            prop_assert_eq!(format!("{plain:?}"), format!("{whole:?}"));
        }
    }

    #[test]
    fn random_rings_never_panic_the_worker(bytes in proptest::collection::vec(any::<u8>(), wq::ring_len(8)..=wq::ring_len(8))) {
        let memory = new_memory(bytes.len());
        memory.write(0, &bytes).unwrap();
        memory.write(wq::OFF_TAIL, &(bytes[0] as u32 % 10).to_le_bytes()).unwrap();
        let mut consumer = SqConsumer::new(memory, 0, 8).unwrap();
        let mut wqe = SendWqe::new();
        while let Ok(Some(())) = consumer.pop(&mut wqe) {}
    }
}

fn completion_of(wr_id: u64) -> Wc {
    Wc {
        wr_id,
        qp_num: 3,
        ..Wc::default()
    }
}

#[test]
fn completions_come_in_order_through_many_laps() {
    let geometry = CqGeometry::new(4, 1).unwrap();
    let memory = new_memory(geometry.len);
    let mut producer = CqProducer::new(memory.clone(), 0, geometry, 0).unwrap();
    let mut consumer = CqConsumer::new(memory, 0, geometry).unwrap();
    let mut out = [Wc::default(); 3];
    assert_eq!(consumer.poll(&mut out), 0);
    let mut next = 0;
    for i in 0..100 {
        producer.push(&completion_of(2 * i)).unwrap();
        producer.push(&completion_of(2 * i + 1)).unwrap();
        let n = consumer.poll(&mut out);
        for entry in &out[..n] {
            assert_eq!((entry.wr_id, entry.qp_num), (next, 3));
            next += 1;
        }
    }
    assert_eq!(next, 200);
}

#[test]
fn a_client_that_does_not_poll_overflows_its_own_queue() {
    let geometry = CqGeometry::new(2, 1).unwrap();
    let memory = new_memory(geometry.len);
    let mut producer = CqProducer::new(memory.clone(), 0, geometry, 0).unwrap();
    let mut consumer = CqConsumer::new(memory.clone(), 0, geometry).unwrap();
    producer.push(&completion_of(0)).unwrap();
    producer.push(&completion_of(1)).unwrap();
    assert_eq!(producer.push(&completion_of(2)), Err(CqOverflow));
    producer.set_error(75);
    assert_eq!(consumer.error_code(), 75);
    assert_eq!(consumer.poll(&mut [Wc::default(); 4]), 2);
    producer.push(&completion_of(2)).unwrap();
    // An invalid consumer index also looks like a full ring.
    memory
        .write(cq::HEADER, &0x7000_0000u32.to_le_bytes())
        .unwrap();
    producer.push(&completion_of(3)).unwrap();
    assert_eq!(producer.push(&completion_of(4)), Err(CqOverflow));
}

#[test]
fn a_poll_serves_the_rings_of_all_workers_in_turn() {
    let geometry = CqGeometry::new(8, 64).unwrap();
    let memory = new_memory(geometry.len);
    let mut consumer = CqConsumer::new(memory.clone(), 0, geometry).unwrap();
    let workers = [0, 5, 63];
    for worker in workers {
        let mut producer = CqProducer::new(memory.clone(), 0, geometry, worker).unwrap();
        for _ in 0..3 {
            producer.push(&completion_of(u64::from(worker))).unwrap();
        }
    }
    let mut got = Vec::new();
    let mut out = [Wc::default(); 1];
    for _ in 0..200 {
        if consumer.poll(&mut out) == 1 {
            got.push(out[0].wr_id);
        }
    }
    assert_eq!(got.len(), 9);
    for worker in workers {
        assert_eq!(
            got.iter()
                .filter(|wr_id| **wr_id == u64::from(worker))
                .count(),
            3
        );
    }
    assert_ne!(
        got[..3],
        [got[0]; 3],
        "one ring is not drained before the next"
    );
    assert!(CqProducer::new(memory, 0, geometry, 64).is_err());
}

#[test]
fn only_the_completions_that_were_asked_for_raise_an_event() {
    let geometry = CqGeometry::new(64, 1).unwrap();
    let memory = new_memory(geometry.len);
    let mut producer = CqProducer::new(memory.clone(), 0, geometry, 0).unwrap();
    let consumer = CqConsumer::new(memory, 0, geometry).unwrap();
    let solicited = Wc {
        flags: WcFlags::SOLICITED,
        ..completion_of(1)
    };
    let failed = Wc {
        status: WcStatus::WR_FLUSH_ERR,
        ..completion_of(1)
    };
    producer.push(&completion_of(0)).unwrap();
    assert!(!producer.take_event(), "not armed");
    consumer.arm_event(true);
    producer.push(&completion_of(0)).unwrap();
    assert!(!producer.take_event(), "armed for solicited ones");
    producer.push(&solicited).unwrap();
    assert!(producer.take_event());
    producer.push(&solicited).unwrap();
    assert!(!producer.take_event(), "one event per arming");
    consumer.arm_event(true);
    producer.push(&failed).unwrap();
    assert!(producer.take_event(), "failures count as solicited");
    consumer.arm_event(false);
    consumer.arm_event(true);
    producer.push(&completion_of(0)).unwrap();
    assert!(
        producer.take_event(),
        "a later solicited arming does not weaken the first"
    );
    consumer.arm_event(false);
    assert!(!producer.take_event(), "no completion since");
}

#[test]
fn doorbells_name_each_pending_queue_once() {
    let memory = new_memory(doorbell::ring_len(4) * 2);
    let off = doorbell::ring_offset(1, 4);
    let producer = DoorbellProducer::new(memory.clone(), off, 4).unwrap();
    let mut consumer = DoorbellConsumer::new(memory, off, 4).unwrap();
    assert!(!consumer.has_work());
    for lap in 0..10 {
        producer.ring_doorbell(lap, || panic!("the ring is full"));
        producer.ring_doorbell(0xff_ffff, || panic!("the ring is full"));
        assert!(consumer.has_work());
        assert_eq!(
            (consumer.pop(), consumer.pop(), consumer.pop()),
            (Some(lap), Some(0xff_ffff), None)
        );
    }
}

#[test]
fn doorbells_of_more_queues_than_slots_all_arrive_and_a_full_ring_is_waited_for() {
    const THREADS: u32 = 4;
    const EACH: u32 = 10_000;
    let memory = new_memory(doorbell::ring_len(64));
    let producer = DoorbellProducer::new(memory.clone(), 0, 64).unwrap();
    let mut consumer = DoorbellConsumer::new(memory, 0, 64).unwrap();
    let waits = std::sync::atomic::AtomicU32::new(0);
    let mut seen = vec![0; (THREADS * EACH) as usize];
    let mut take_all = |consumer: &mut DoorbellConsumer, count: u32| {
        for _ in 0..count {
            let number = loop {
                match consumer.pop() {
                    Some(number) => break number,
                    None => std::thread::yield_now(),
                }
            };
            seen[number as usize] += 1;
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (producer, waits) = (&producer, &waits);
            scope.spawn(move || {
                for number in thread * EACH..(thread + 1) * EACH {
                    producer.ring_doorbell(number, || {
                        waits.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        std::thread::yield_now();
                        true
                    });
                }
            });
        }
        // Nothing is taken until the ring was full once.
        while waits.load(std::sync::atomic::Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        take_all(&mut consumer, THREADS * EACH);
    });
    assert!(seen.iter().all(|times| *times == 1), "each arrives once");
    assert!(!consumer.has_work());
    // A worker that takes nothing any more ends the wait.
    for number in 0..64 {
        producer.ring_doorbell(number, || panic!("the ring is full"));
    }
    let mut waited = 0;
    producer.ring_doorbell(64, || {
        waited += 1;
        waited < 3
    });
    assert_eq!((waited, consumer.pop()), (3, Some(0)));
}

#[test]
fn a_doorbell_ring_full_of_garbage_only_yields_numbers() {
    let memory = new_memory(doorbell::ring_len(4));
    memory.write(0, &[0xff; 80]).unwrap();
    let mut consumer = DoorbellConsumer::new(memory, 0, 4).unwrap();
    let got: Vec<u32> = std::iter::from_fn(|| consumer.pop()).collect();
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
    assert_eq!(
        [0, 1, 2].map(|worker| view.must_wake(worker)),
        [false, false, true]
    );
    flag.announce_awake();
    assert!(!view.must_wake(2));
}

#[test]
fn a_stream_of_requests_crosses_between_two_threads() {
    let (mut producer, mut consumer, _memory) = new_send_queue(64, 64);
    let n = 20_000u64;
    let worker = std::thread::spawn(move || {
        let mut wqe = SendWqe::new();
        for expect in 0..n {
            while consumer.pop(&mut wqe).unwrap().is_none() {
                std::hint::spin_loop();
            }
            assert_eq!(wqe.wr_id, expect);
            assert_eq!(wqe.inline_data().unwrap(), expect.to_le_bytes());
            consumer.release_popped();
            consumer.complete_requests(1);
        }
    });
    for i in 0..n {
        let bytes = i.to_le_bytes();
        while producer.push(&send_request(i, SendData::Inline(&bytes))) == Err(PushError::Full) {
            std::thread::yield_now();
        }
        producer.publish_posted();
    }
    worker.join().unwrap();
}
