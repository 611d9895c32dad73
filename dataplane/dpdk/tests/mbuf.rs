//! Buffers: allocation, changes to chains, and their return to the pool.

mod common;

use common::{as_ext, bytes, eal, filled, pattern, pool};
use dpdk::{ChainBuilder, ChecksumStatus, HEADROOM, Mbuf, MbufCache, TrackerPool, TxOffload};

#[test]
fn an_exhausted_pool_gives_none_and_recovers() {
    let pool = pool(63);
    let mut held: Vec<Mbuf> = std::iter::from_fn(|| Mbuf::alloc(&pool)).collect();
    assert_eq!(held.len(), 63);
    assert_eq!(pool.available_buffers(), 0);
    let mut cache = MbufCache::new(&pool);
    assert!(cache.alloc().is_none());
    held.pop();
    assert!(cache.alloc().is_some());
    assert!(!Mbuf::alloc_bulk(&pool, &mut Vec::new(), 2));
    drop(held);
    drop(cache);
    assert_eq!(pool.available_buffers(), 63);
}

#[test]
fn a_workers_stack_leaves_the_last_buffers_to_the_ports() {
    let pool = pool(255);
    let mut cache = MbufCache::new(&pool);
    let held: Vec<Mbuf> = std::iter::from_fn(|| cache.alloc()).collect();
    assert_eq!((held.len(), pool.available_buffers()), (255, 0));
    let mut held = held.into_iter();
    held.by_ref().take(100).for_each(|m| cache.free(m));
    assert_eq!((cache.cached_buffers(), pool.available_buffers()), (100, 0));
    cache.return_surplus();
    // A port receives into the buffers that were returned.
    assert!(
        pool.available_buffers() > 80,
        "{}",
        pool.available_buffers()
    );
    assert_eq!(
        cache.cached_buffers() as u32 + pool.available_buffers(),
        100
    );
    // The cache still gives out its remaining buffers, and takes the rest from the pool again.
    let again: Vec<Mbuf> = std::iter::from_fn(|| cache.alloc()).collect();
    assert_eq!(again.len(), 100);
    drop((again, held, cache));
    assert_eq!(pool.available_buffers(), 255);
}

#[test]
fn a_bulk_allocation_is_all_or_nothing() {
    let pool = pool(15);
    let mut out = Vec::new();
    assert!(!Mbuf::alloc_bulk(&pool, &mut out, 16));
    assert!(out.is_empty());
    assert!(Mbuf::alloc_bulk(&pool, &mut out, 15));
    assert!(out.iter().all(|m| m.pkt_len() == 0 && m.nb_segs() == 1));
    assert_eq!(out[3].headroom(), HEADROOM);
    drop(out);
    assert_eq!(pool.available_buffers(), 15);
}

#[test]
fn data_grows_and_shrinks_at_both_ends() {
    let pool = pool(7);
    let mut m = Mbuf::alloc(&pool).unwrap();
    m.append(4).unwrap().copy_from_slice(b"data");
    m.prepend(3).unwrap().copy_from_slice(b"hdr");
    assert_eq!(m.data(), b"hdrdata");
    assert!(m.adj(2) && m.trim(1));
    assert_eq!(m.data(), b"rdat");
    m.data_mut()[0] = b'R';
    assert_eq!(bytes(&m), b"Rdat");
    assert!(!m.adj(5) && !m.trim(5));
    assert!(m.prepend(HEADROOM + 1).is_none());
    // The end moved by the four appended bytes and back by one trimmed byte.
    assert_eq!(m.tailroom(), 2048 - 3);
    assert!(m.append(2048 - 2).is_none());
    assert!(m.append(2048 - 3).is_some());
}

#[test]
fn chains_return_every_segment_to_the_pool_by_drop_and_by_cache() {
    let pool = pool(255);
    for by_cache in [false, true] {
        let mut cache = MbufCache::new(&pool);
        let mut chain = ChainBuilder::new(filled(&mut cache, b"head"));
        for i in 0..99u8 {
            assert!(chain.push(filled(&mut cache, &[i; 3])).is_ok());
        }
        let chain = chain.finish();
        assert_eq!((chain.nb_segs(), chain.pkt_len()), (100, 4 + 99 * 3));
        assert_eq!(chain.segments().count(), 100);
        if by_cache {
            cache.free(chain);
        } else {
            drop(chain);
        }
        drop(cache);
        assert_eq!(pool.available_buffers(), 255, "by_cache: {by_cache}");
    }
}

#[test]
fn a_cache_keeps_at_most_its_stack_and_gives_the_rest_back() {
    let pool = pool(2047);
    let mut held = Vec::new();
    assert!(Mbuf::alloc_bulk(&pool, &mut held, 2000));
    let mut cache = MbufCache::new(&pool);
    for m in held.drain(..) {
        cache.free(m);
    }
    assert!(cache.cached_buffers() <= 512);
    assert_eq!(
        pool.available_buffers() as usize,
        2047 - cache.cached_buffers()
    );
    assert!(cache.reserve(64));
    drop(cache);
    assert_eq!(pool.available_buffers(), 2047);
}

#[test]
fn a_buffer_of_another_pool_goes_home() {
    let (ours, theirs) = (pool(127), pool(127));
    let memory = pattern();
    let mut trackers = TrackerPool::new(1);
    let tracker = trackers.alloc(as_ext(&memory)).unwrap();
    let mut cache = MbufCache::new(&ours);
    for i in 0..100 {
        let mut m = Mbuf::alloc(&theirs).unwrap();
        if i % 3 == 0 {
            assert!(tracker.attach(&mut m, 5, 100));
        }
        cache.free(m);
    }
    assert_eq!(tracker.outstanding_mbufs(), 0);
    cache.return_surplus();
    assert_eq!(theirs.available_buffers(), 127);
    // The detached buffers have their own room again.
    let mut all = Vec::new();
    assert!(Mbuf::alloc_bulk(&theirs, &mut all, 127));
    for m in &mut all {
        assert!(!m.is_external());
        m.append(2048).unwrap().fill(7);
    }
}

#[test]
fn splitting_a_chain_yields_its_segments_as_packets() {
    let pool = pool(63);
    let mut cache = MbufCache::new(&pool);
    let mut chain = filled(&mut cache, b"one");
    for part in [b"two" as &[u8], b"three", b"four"] {
        assert!(chain.append_chain(filled(&mut cache, part)).is_ok());
    }
    let mut split = chain.split_chain();
    assert_eq!(split.size_hint(), (4, Some(4)));
    let (a, b) = (split.next().unwrap(), split.next().unwrap());
    assert_eq!((a.data(), a.pkt_len(), a.nb_segs()), (&b"one"[..], 3, 1));
    assert_eq!((b.data(), b.pkt_len(), b.nb_segs()), (&b"two"[..], 3, 1));
    drop((split, a, b, cache));
    assert_eq!(pool.available_buffers(), 63);
}

/// Model test: a chain holds the same bytes as a Vec that went through the same operations.
#[test]
fn a_chain_behaves_like_the_bytes_it_holds() {
    let pool = pool(1023);
    let memory = pattern();
    let mut trackers = TrackerPool::new(1);
    let tracker = trackers.alloc(as_ext(&memory)).unwrap();
    let mut cache = MbufCache::new(&pool);
    let mut seed = 0x2545_f491_4f6c_dd1du64;
    let mut random = move |n: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed % n as u64) as usize
    };
    for _ in 0..300 {
        let mut chain = filled(&mut cache, b"start");
        let mut model = b"start".to_vec();
        for _ in 0..20 {
            match random(7) {
                0 => {
                    let n = random(100) as u16;
                    let (ok, at) = (random(2) == 0, random(1000) as u64);
                    let mut m = cache.alloc().unwrap();
                    if ok {
                        assert!(tracker.attach(&mut m, at, n));
                        model.extend((0..u64::from(n)).map(|i| ((at + i) % 251) as u8));
                    } else {
                        assert!(m.append_slice(&vec![9; n.into()]));
                        model.extend(std::iter::repeat_n(9, n.into()));
                    }
                    assert!(chain.append_chain(m).is_ok());
                }
                1 => {
                    let n = random(40) as u32;
                    let fits = n as usize <= model.len();
                    assert_eq!(chain.advance(n), fits);
                    if fits {
                        model.drain(..n as usize);
                    }
                }
                2 => {
                    let len = random(400);
                    chain.truncate(len as u32);
                    model.truncate(len);
                }
                3 => {
                    if let Some(room) = chain.append(5) {
                        room.copy_from_slice(b"tail!");
                        model.extend(b"tail!");
                    }
                }
                4 => {
                    let (at, mut out) = (random(50), vec![0; random(300)]);
                    let n = chain.copy_out(at, &mut out);
                    let expected: Vec<u8> =
                        model.iter().skip(at).take(out.len()).copied().collect();
                    assert_eq!(&out[..n], &expected[..]);
                }
                5 => {
                    let flat = chain.linearize(&mut cache);
                    match flat {
                        Some(flat) => {
                            assert_eq!(flat.nb_segs(), 1);
                            assert_eq!(flat.data(), model);
                            cache.free(flat);
                        }
                        None => assert!(model.len() > 2048),
                    }
                }
                _ => {
                    let (first, rest) = chain.split_first();
                    let cut = first.data().len();
                    assert_eq!(first.data(), &model[..cut]);
                    chain = match rest {
                        Some(rest) => {
                            model.drain(..cut);
                            cache.free(first);
                            rest
                        }
                        None => first,
                    };
                }
            }
            assert_eq!(chain.pkt_len() as usize, model.len());
            assert_eq!(bytes(&chain), model);
            assert_eq!(usize::from(chain.nb_segs()), chain.segments().count());
        }
        if random(2) == 0 {
            cache.free(chain);
        } else {
            drop(chain);
        }
    }
    assert_eq!(tracker.outstanding_mbufs(), 0);
    drop(cache);
    assert_eq!(pool.available_buffers(), 1023);
}

#[test]
fn the_builder_appends_to_the_last_segment_only_when_it_is_writable() {
    let pool = pool(15);
    let memory = pattern();
    let mut trackers = TrackerPool::new(1);
    let tracker = trackers.alloc(as_ext(&memory)).unwrap();
    let mut cache = MbufCache::new(&pool);
    let mut chain = ChainBuilder::new(filled(&mut cache, b"header"));
    let mut payload = cache.alloc().unwrap();
    assert!(tracker.attach(&mut payload, 0, 10));
    chain.push(payload).unwrap();
    assert!(
        !chain.append_slice(b"crc"),
        "registered memory is not written to"
    );
    chain.push(cache.alloc().unwrap()).unwrap();
    assert!(chain.append_slice(b"crc"));
    chain.head_data_mut()[0] = b'H';
    let chain = chain.finish();
    assert_eq!(chain.pkt_len(), 19);
    assert_eq!(
        bytes(&chain),
        b"Header\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09crc"
    );
}

#[test]
fn clones_share_bytes_and_neither_side_may_write() {
    let pool = pool(15);
    let mut cache = MbufCache::new(&pool);
    let mut original = filled(&mut cache, b"shared");
    let clone = original.clone_ref(&pool).unwrap();
    assert_eq!(clone.data(), b"shared");
    assert!(!original.is_writable() && !clone.is_writable());
    assert!(original.data_mut().is_empty());
    assert!(original.append(1).is_none() && original.prepend(1).is_none());
    cache.free(clone);
    assert!(original.is_writable());
    let clone = original.clone_ref(&pool).unwrap();
    cache.free(original);
    assert_eq!(clone.data(), b"shared", "the clone keeps the bytes");
    drop((clone, cache));
    assert_eq!(pool.available_buffers(), 15);
}

#[test]
fn offload_requests_read_back_as_they_were_written() {
    let pool = pool(7);
    let mut m = Mbuf::alloc(&pool).unwrap();
    assert_eq!(m.tx_offload(), None);
    let tso = TxOffload {
        l2_len: 18,
        l3_len: 40,
        l4_len: 60,
        ipv6: true,
        ip_checksum: false,
        tcp_checksum: true,
        tso_segsz: 8948,
    };
    m.set_tx_offload(tso);
    assert_eq!(m.tx_offload(), Some(tso));
    m.clear_offload();
    assert_eq!(m.tx_offload(), None);
    assert_eq!(m.rx_l4_checksum(), ChecksumStatus::Unknown);
    assert_eq!(m.rx_ip_checksum(), ChecksumStatus::Unknown);
    assert_eq!((m.rss_hash(), m.rx_vlan()), (None, None));
}

#[test]
fn buffers_cross_threads() {
    let pool = pool(255);
    let mut held = Vec::new();
    assert!(Mbuf::alloc_bulk(&pool, &mut held, 200));
    let peer = pool.clone();
    std::thread::spawn(move || {
        let registered = eal().register_thread().unwrap();
        assert!(eal().register_thread().is_err(), "once a thread");
        let mut cache = MbufCache::new(&peer);
        for m in held {
            cache.free(m);
        }
        drop((cache, registered));
        assert!(eal().register_thread().is_ok());
    })
    .join()
    .unwrap();
    assert_eq!(pool.available_buffers(), 255);
}

#[test]
fn jumbo_frames_fit_one_buffer() {
    let pool =
        dpdk::Mempool::new(eal(), &common::unique("jumbo"), 31, 0, 9000 + 128, None).unwrap();
    let mut m = Mbuf::alloc(&pool).unwrap();
    assert!(m.append(9022).is_some());
    assert_eq!(pool.data_room(), 9128);
}
