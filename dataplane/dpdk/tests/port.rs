//! Ports: the loopback pair, virtual devices, and errors for unusable ones.

mod common;

use common::{as_ext, bytes, eal, filled, pattern, pool, start, unique};
use dpdk::{
    BURST, ChainBuilder, Error, ExternalRegion, IovaSpace, Mbuf, MbufCache, Offloads, Port,
    PortConfig, RxBatch, TrackerPool, TxBatch,
};

fn pair(queues: u16, size: u32) -> (Port, Port) {
    Port::create_ring_pair(eal(), &unique("t"), queues, size).expect("a ring pair")
}

#[test]
fn a_ring_pair_carries_frames_in_order_both_ways_on_each_queue() {
    let pool = pool(511);
    let mut cache = MbufCache::new(&pool);
    let (mut a, mut b) = pair(2, 256);
    let (mut qa, mut qb) = (start(&mut a, &pool, 2), start(&mut b, &pool, 2));
    for q in 0..2 {
        for back in [false, true] {
            let (from, to) = if back {
                (&mut qb, &mut qa)
            } else {
                (&mut qa, &mut qb)
            };
            let (mut out, mut inn) = (TxBatch::new(), RxBatch::new());
            for i in 0..50u8 {
                out.push(filled(&mut cache, &[i, q as u8])).unwrap();
            }
            assert_eq!(from[q].1.tx_burst(&mut out), 50);
            assert!(out.is_empty());
            assert_eq!(
                to[1 - q].0.rx_burst(&mut inn),
                0,
                "the other queue stays empty"
            );
            assert_eq!(to[q].0.rx_burst(&mut inn), 50);
            for (i, m) in inn.drain().enumerate() {
                assert_eq!(m.data(), [i as u8, q as u8]);
                cache.free(m);
            }
        }
    }
    let stats = b.read_counters().unwrap();
    assert_eq!((stats.rx_packets, stats.tx_packets), (100, 100));
}

#[test]
fn a_frame_arrives_as_the_chain_that_was_sent_and_counts_until_freed() {
    let pool = pool(63);
    let memory = pattern();
    let mut trackers = TrackerPool::new(1);
    let tracker = trackers.alloc(as_ext(&memory)).unwrap();
    let mut cache = MbufCache::new(&pool);
    let (mut a, mut b) = pair(1, 64);
    let mut tx = start(&mut a, &pool, 1).remove(0).1;
    let mut rx = start(&mut b, &pool, 1).remove(0).0;

    let mut chain = ChainBuilder::new(filled(&mut cache, b"header"));
    let mut payload = cache.alloc().unwrap();
    assert!(tracker.attach(&mut payload, 100, 5));
    chain.push(payload).unwrap();
    chain.push(filled(&mut cache, b"crc!")).unwrap();
    let mut out = TxBatch::new();
    out.push(chain.finish()).unwrap();
    assert_eq!(tx.tx_burst(&mut out), 1);
    assert_eq!(tracker.outstanding_mbufs(), 1, "on the link");

    let mut inn = RxBatch::new();
    assert_eq!(rx.rx_burst(&mut inn), 1);
    let frame = inn.pop().unwrap();
    assert_eq!((frame.nb_segs(), frame.pkt_len()), (3, 15));
    assert_eq!(bytes(&frame), b"header\x64\x65\x66\x67\x68crc!");
    assert_eq!(tracker.outstanding_mbufs(), 1, "in the receiver's hands");
    cache.free(frame);
    assert_eq!(tracker.outstanding_mbufs(), 0);
}

#[test]
fn what_a_full_ring_does_not_take_stays_in_the_batch_in_order() {
    let pool = pool(255);
    let mut cache = MbufCache::new(&pool);
    let (mut a, mut b) = pair(1, 32);
    let mut tx = start(&mut a, &pool, 1).remove(0).1;
    let mut rx = start(&mut b, &pool, 1).remove(0).0;
    let mut out = TxBatch::new();
    for i in 0..BURST {
        out.push(filled(&mut cache, &[i as u8])).unwrap();
    }
    assert!(out.is_full());
    let refused = out.push(filled(&mut cache, b"x"));
    cache.free(refused.unwrap_err());
    let mut sent = tx.tx_burst(&mut out);
    assert!(sent > 0 && sent < BURST);
    assert_eq!(out.len(), BURST - sent);
    // A slot freed at the front can be used at the end.
    out.push(filled(&mut cache, &[BURST as u8])).unwrap();
    let mut expected = 0u8;
    let mut inn = RxBatch::new();
    while expected <= BURST as u8 {
        let n = rx.rx_burst(&mut inn);
        assert!(n > 0, "{expected} frames came, {sent} were sent");
        for m in inn.drain() {
            assert_eq!(m.data(), [expected]);
            expected += 1;
            cache.free(m);
        }
        sent += tx.tx_burst(&mut out);
    }
}

#[test]
fn a_port_with_queues_in_use_is_not_changed_under_them() {
    let pool = pool(63);
    let (mut a, _b) = pair(1, 64);
    let queues = start(&mut a, &pool, 1);
    let err = a.stop().unwrap_err();
    assert!(matches!(err, Error::QueuesInUse { queues: 2, .. }), "{err}");
    assert!(a.start().is_err());
    assert!(
        a.configure(&PortConfig::default(), std::slice::from_ref(&pool))
            .is_err()
    );
    drop(queues);
    a.stop().unwrap();
    assert_eq!(start(&mut a, &pool, 1).len(), 1, "it can be set up again");
}

/// Two threads, each with a handle, start the port at the same time: one of them gets all queues.
#[test]
fn no_queue_is_handed_to_two_threads() {
    let pool = pool(63);
    let (mut a, _b) = pair(1, 64);
    let config = PortConfig::default();
    for _ in 0..200 {
        a.configure(&config, std::slice::from_ref(&pool)).unwrap();
        let at_once = std::sync::Barrier::new(2);
        let attempt = |mut handle: Port| {
            at_once.wait();
            let outcome = handle.start();
            // Neither thread drops its queues before both have tried.
            at_once.wait();
            outcome.map(|queues| queues.len())
        };
        let (ours, theirs) = (a.share(), a.share());
        let outcomes = std::thread::scope(|scope| {
            let other = scope.spawn(|| attempt(theirs));
            [attempt(ours), other.join().unwrap()]
        });
        let started = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        assert_eq!(started, 1, "{outcomes:?}");
        let refused = outcomes.into_iter().find_map(Result::err).unwrap();
        assert!(
            matches!(refused, Error::QueuesInUse { queues: 2, .. }),
            "{refused}"
        );
    }
}

#[test]
fn frames_on_the_link_return_to_their_pool_when_the_pair_closes() {
    let pool = pool(63);
    let mut cache = MbufCache::new(&pool);
    let name = unique("t");
    for round in 0..3 {
        let (mut a, b) = Port::create_ring_pair(eal(), &name, 1, 64)
            .unwrap_or_else(|e| panic!("the name is free again in round {round}: {e}"));
        let mut tx = start(&mut a, &pool, 1).remove(0).1;
        let mut out = TxBatch::new();
        for _ in 0..20 {
            out.push(filled(&mut cache, b"lost")).unwrap();
        }
        assert_eq!(tx.tx_burst(&mut out), 20);
        a.close();
        drop(tx);
        b.close();
    }
    drop(cache);
    assert_eq!(pool.available_buffers(), 63);
}

#[test]
fn a_queue_keeps_its_port_open() {
    let pool = pool(63);
    let mut cache = MbufCache::new(&pool);
    let (mut a, mut b) = pair(1, 64);
    let mut tx = start(&mut a, &pool, 1).remove(0).1;
    let mut rx = start(&mut b, &pool, 1).remove(0).0;
    a.close();
    b.close();
    let mut batch = TxBatch::new();
    batch.push(filled(&mut cache, b"still")).unwrap();
    assert_eq!(tx.tx_burst(&mut batch), 1);
    assert_eq!(rx.rx_burst(&mut batch), 1);
    assert_eq!(batch.peek(0).unwrap().data(), b"still");
}

#[test]
fn two_workers_exchange_frames_over_their_own_queues() {
    const FRAMES: u32 = 20_000;
    let pool = pool(1023);
    let (mut a, mut b) = pair(1, 128);
    let mut qa = start(&mut a, &pool, 1).remove(0);
    let mut qb = start(&mut b, &pool, 1).remove(0);
    let there = pool.clone();
    let echo = std::thread::spawn(move || {
        let _registered = eal().register_thread().unwrap();
        let mut cache = MbufCache::new(&there);
        let (mut batch, mut back, mut seen) = (RxBatch::new(), TxBatch::new(), 0);
        while seen < FRAMES || !back.is_empty() {
            if qb.0.rx_burst(&mut batch) == 0 {
                std::thread::yield_now();
            }
            while back.free_slots() > 0 {
                let Some(m) = batch.pop() else { break };
                assert_eq!(m.data(), seen.to_be_bytes());
                seen += 1;
                let mut answer = cache.alloc().expect("the pool is large enough");
                assert!(answer.append_slice(m.data()));
                cache.free(m);
                back.push(answer).unwrap();
            }
            qb.1.tx_burst(&mut back);
        }
    });
    let mut cache = MbufCache::new(&pool);
    let (mut out, mut inn, mut sent, mut seen) = (TxBatch::new(), RxBatch::new(), 0u32, 0u32);
    while seen < FRAMES {
        while sent < FRAMES && sent - seen < 100 && !out.is_full() {
            out.push(filled(&mut cache, &sent.to_be_bytes())).unwrap();
            sent += 1;
        }
        qa.1.tx_burst(&mut out);
        if qa.0.rx_burst(&mut inn) == 0 {
            std::thread::yield_now();
        }
        for m in inn.drain() {
            assert_eq!(m.data(), seen.to_be_bytes());
            seen += 1;
            cache.free(m);
        }
    }
    echo.join().unwrap();
    drop(cache);
    assert_eq!(pool.available_buffers(), 1023);
}

#[test]
fn a_ring_pair_grants_chains_and_refuses_what_it_lacks() {
    let pool = pool(63);
    let (mut a, _b) = pair(1, 64);
    let caps = a
        .configure(&PortConfig::default(), std::slice::from_ref(&pool))
        .unwrap();
    assert!(caps.offloads.multi_segs && caps.offloads.scatter);
    assert!(!caps.offloads.tso && !caps.offloads.tx_checksum && !caps.offloads.rss);
    a.start().unwrap();
    assert!(!a.granted_caps().unwrap().offloads.rx_interrupt);
    assert_eq!(a.device_info().unwrap().driver, "net_ring");
    assert!(
        a.set_mac_address([2, 0, 0, 0, 0, 9])
            .unwrap_err()
            .is_unsupported()
    );
    assert!(a.link_status().unwrap().up);
    a.set_promiscuous(true).unwrap();

    let jumbo = PortConfig {
        mtu: 9000,
        ..PortConfig::default()
    };
    assert!(a.configure(&jumbo, std::slice::from_ref(&pool)).is_ok());
    let strict = PortConfig {
        offloads: Offloads::NONE,
        ..jumbo
    };
    let err = a
        .configure(&strict, std::slice::from_ref(&pool))
        .unwrap_err();
    assert!(err.to_string().contains("data room of 9022"), "{err}");
    let many = PortConfig {
        rx_queues: 200,
        ..PortConfig::default()
    };
    let err = a.configure(&many, &[pool]).unwrap_err().to_string();
    assert!(err.contains("number of receive queues `200`"), "{err}");
}

#[test]
fn a_virtual_device_is_attached_at_run_time_and_removed() {
    let pool = pool(255);
    for _ in 0..2 {
        let mut port = match Port::attach_vdev(eal(), "net_null7,size=100") {
            Ok(port) => port,
            Err(e) => return println!("skipped: this DPDK has no net_null: {e}"),
        };
        let again = Port::attach_vdev(eal(), "net_null7")
            .map(|_| ())
            .unwrap_err();
        assert!(again.to_string().contains("exists already"), "{again}");
        let (mut rx, mut tx) = start(&mut port, &pool, 1).remove(0);
        let mut batch = RxBatch::new();
        assert_eq!(rx.rx_burst(&mut batch), BURST);
        assert_eq!(batch.peek(0).unwrap().pkt_len(), 100);
        assert_eq!(tx.tx_burst(&mut batch), BURST);
        tx.done_cleanup(0);
    }
    assert_eq!(pool.available_buffers(), 255);
}

#[test]
fn a_wrong_device_is_told_what_is_wrong() {
    for (devargs, expected) in [
        ("net_nosuchdriver0", "net_nosuchdriver0"),
        ("net_af_packet9", "it needs iface=NAME"),
        (
            "net_af_packet9,iface=nosuch0",
            "there is no interface `nosuch0`",
        ),
        ("net_memif9,role=boss", "net_memif9"),
        ("", "the name of the device is missing"),
        ("net_null\0", "NUL"),
    ] {
        let err = Port::attach_vdev(eal(), devargs).map(|_| ()).unwrap_err();
        assert!(err.to_string().contains(expected), "{devargs}: {err}");
    }
    for (address, expected) in [
        ("eth0", "0000:03:00.0"),
        ("0000:ff:1f.7", "there is no PCI device 0000:ff:1f.7"),
    ] {
        let err = Port::attach_pci(eal(), address).map(|_| ()).unwrap_err();
        assert!(err.to_string().contains(expected), "{address}: {err}");
    }
}

#[test]
fn a_wrong_ring_pair_is_refused() {
    for (name, queues) in [
        ("", 1),
        ("a,b", 1),
        ("seventeen-bytes-x", 1),
        ("q0", 0),
        ("q17", 17),
    ] {
        assert!(
            Port::create_ring_pair(eal(), name, queues, 64).is_err(),
            "{name}"
        );
    }
    let name = unique("t");
    let _pair = Port::create_ring_pair(eal(), &name, 1, 64).unwrap();
    assert!(Port::create_ring_pair(eal(), &name, 1, 64).is_err());
    assert!(Port::create_ring_pair(eal(), &unique("t"), 1, u32::MAX).is_err());
}

#[test]
fn external_memory_is_registered_once_and_needs_whole_pages() {
    let memory = pattern();
    let space = IovaSpace::new(48);
    let err = ExternalRegion::register(eal(), as_ext(&memory), 100, 4096, &space).map(|_| ());
    assert!(err.unwrap_err().to_string().contains("multiples of 4096"));
    let len = memory.len();
    assert!(ExternalRegion::register(eal(), as_ext(&memory), len + 4096, 4096, &space).is_err());
    let (a, _b) = pair(1, 64);
    let mut region = ExternalRegion::register(eal(), as_ext(&memory), len, 4096, &space).unwrap();
    region.map_for(&a).unwrap();
    assert!(ExternalRegion::register(eal(), as_ext(&memory), len, 4096, &space).is_err());
    drop(region);
    assert!(ExternalRegion::register(eal(), as_ext(&memory), len, 4096, &space).is_ok());
}

#[test]
fn packets_of_a_batch_are_changed_where_they_are() {
    let pool = pool(63);
    let mut cache = MbufCache::new(&pool);
    let mut batch = TxBatch::new();
    for number in 0..4 {
        batch.push(filled(&mut cache, &[number])).unwrap();
    }
    cache.free(batch.pop().unwrap());
    for packet in batch.packets_mut() {
        packet.data_mut()[0] += 10;
    }
    let bytes: Vec<u8> = batch.drain().map(|packet| packet.data()[0]).collect();
    assert_eq!(bytes, [11, 12, 13]);
    assert!(batch.packets_mut().is_empty());
}

#[test]
fn a_batch_frees_what_is_left_in_it() {
    let pool = pool(63);
    let mut batch = TxBatch::new();
    for _ in 0..30 {
        batch.push(Mbuf::alloc(&pool).unwrap()).unwrap();
    }
    drop(batch.drain().take(10).collect::<Vec<_>>());
    assert_eq!(batch.len(), 20);
    drop(batch);
    assert_eq!(pool.available_buffers(), 63);
}
