//! What a hostile client can do to shared memory, from the octets of a fuzzer: shared by the
//! suite and by the fuzz targets in `shm-api/fuzz`. The consumers are those of the daemon.

use siw_memory::*;
use siw_shm::completion_queue::CqGeometry;
use siw_shm::local_wqe::MAX_FAST_PAGES;
use siw_shm::work_queue::{QpGeometry, ring_len};
use siw_shm::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Takes values off the front of the input; zeroes after its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn u8(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }
    fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8(), self.u8()])
    }
    fn u32(&mut self) -> u32 {
        u32::from(self.u16()) | u32::from(self.u16()) << 16
    }
    /// Small, near the ends of its type, or anything.
    fn odd(&mut self) -> u64 {
        let v = u64::from(self.u16());
        match self.u8() % 4 {
            0 => v,
            1 => v << 12,
            2 => u64::MAX - v,
            _ => v << 48 | u64::from(self.u32()),
        }
    }
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Everything that lies in one region: send queue, receive queue, doorbell ring, completion queue.
/// The client writes words wherever it likes while the worker takes and completes.
pub fn rings(data: &[u8]) {
    const BELLS: u32 = 8;
    let mut input = Input(data);
    let qp = QpGeometry::new(4, 4, 5, 5, 64).expect("small");
    let cq = CqGeometry::new(4, 1).expect("small");
    let (bell_at, cq_at) = (qp.len, qp.len + doorbell::ring_len(BELLS));
    let len = cq_at + cq.len;
    let region = Arc::new(SharedMemory::new_anonymous(len + 4096).expect("memory"));
    let sq = SqConsumer::new(region.clone(), 0, qp.sq_slots);
    let mut sq = sq.expect("in range");
    let rq = RqConsumer::new(region.clone(), qp.rq_offset, qp.rq_slots);
    let mut rq = rq.expect("in range");
    let mut bell = DoorbellConsumer::new(region.clone(), bell_at, BELLS).expect("in range");
    let mut producer = CqProducer::new(region.clone(), cq_at, cq, 0).expect("in range");
    assert_eq!(qp.rq_offset, ring_len(qp.sq_slots));
    let (mut send, mut recv) = (SendWqe::new(), RecvWqe::new());
    let (mut sq_dead, mut rq_dead) = (false, false);
    while !input.is_empty() {
        match input.u8() % 8 {
            0..=2 => {
                let at = usize::from(input.u16()) * 4 % len;
                let word = region.atomic_u32(at).expect("in range");
                word.store(input.odd() as u32, Ordering::Relaxed);
            }
            // A header slot that is nearly right, and the index behind it.
            3 => {
                let (base, slots) = if input.u8() & 1 == 0 {
                    (0, qp.sq_slots)
                } else {
                    (qp.rq_offset, qp.rq_slots)
                };
                let slot = u32::from(input.u8()) % slots;
                let at = base + work_queue::HEADER + slot as usize * wqe::SLOT_LEN;
                let head = [
                    input.u8() % 14,
                    input.u8() % 16,
                    input.u8() % 18,
                    input.u8() % 6,
                ];
                let opcode = if base == 0 { head[0] } else { wqe::OPCODE_RECV };
                region
                    .write(at, &[opcode, head[1], head[2], head[3]])
                    .expect("in range");
                let tail = region.atomic_u32(base).expect("in range");
                tail.fetch_add(u32::from(input.u8() % 3), Ordering::Relaxed);
            }
            4 if !sq_dead => match sq.pop(&mut send) {
                Ok(Some(())) => {
                    assert!(send.sges().len() <= wqe::MAX_SGE);
                    assert!(
                        send.inline_data()
                            .is_none_or(|d| d.len() <= wqe::MAX_INLINE)
                    );
                    let _ = format!("{send:?}");
                    sq.release_popped();
                    sq.complete_requests(1);
                }
                Ok(None) => {}
                Err(_) => sq_dead = true,
            },
            5 if !rq_dead => match rq.pop(&mut recv) {
                Ok(Some(())) => {
                    assert!(recv.sges().len() <= wqe::MAX_SGE);
                    rq.release_popped();
                    rq.complete_requests(1);
                }
                Ok(None) => {}
                Err(_) => rq_dead = true,
            },
            6 => {
                for _ in 0..BELLS {
                    if bell.pop().is_none() {
                        break;
                    }
                }
                sq.clear_pending();
            }
            _ => {
                // Full, as the client says, is an error of this queue.
                let _ = producer.push(&Wc::default());
                let _ = producer.take_event();
            }
        }
    }
    // What lies behind was never touched.
    let mut tail = [1; 4096];
    region.read(len, &mut tail).expect("in range");
    assert_eq!(tail, [0; 4096]);
}

const PD: u32 = 3;
const BASE: u64 = 0x10_0000;
const PAGES: u64 = 8;

/// What the model knows of a window or a fast registration.
#[derive(Clone)]
struct Bound {
    key: u32,
    qp: Option<u32>,
    base: u64,
    len: u64,
    access: Access,
    /// Of each byte: offset in the region.
    place: Vec<u64>,
}

impl Bound {
    fn allows(&self, addr: u64, len: u32, need: Access, qp: u32) -> Option<u64> {
        let end = addr.checked_add(u64::from(len))?;
        let fits = addr >= self.base && end <= self.base + self.len;
        let stream = self.qp.is_none_or(|q| q == qp);
        (fits && stream && self.access.contains(need))
            .then(|| self.place[(addr - self.base) as usize])
    }
}

/// BIND_MW, REG_MR, LOCAL_INV and SEND_WITH_INV with arguments and page lists of all kinds: each
/// access is allowed exactly when the last successful one of them allows it, and goes where it
/// said.
pub fn keys(data: &[u8]) {
    let mut input = Input(data);
    let table = KeyTable::new(8, 1);
    let reader = table.register_reader().expect("the first");
    let region = Arc::new(SharedMemory::new_anonymous((PAGES as usize) << 12).expect("memory"));
    let list = Arc::new(SharedMemory::new_anonymous(4096).expect("memory"));
    let all = Access(31);
    let mr =
        RegisteredMemory::new(region.clone(), 100, 5000, BASE, PD, None, all).expect("in range");
    let mr = table.insert(mr).expect("room");
    let fast =
        RegisteredMemory::new_fast(region.clone(), 4, list.clone(), 64, PD).expect("in range");
    let one = table
        .insert(RegisteredMemory::new_window(PD, WindowType::One))
        .expect("room");
    let two = table
        .insert(RegisteredMemory::new_window(PD, WindowType::Two))
        .expect("room");
    let fast = table.insert(fast).expect("room");
    let homes = [one, two, fast];
    let mut keys = homes.map(|k| k.0);
    let mut model: [Option<Bound>; 3] = [None, None, None];
    let mut mr_valid = true;
    assert_eq!(MAX_FAST_PAGES, 512);
    while !input.is_empty() {
        let which = usize::from(input.u8()) % 3;
        let qp = u32::from(input.u8() % 2) + 1;
        let pd = PD + u32::from(input.u8() == 0);
        let new = keys[which] & !0xff | u32::from(input.u8());
        match input.u8() % 5 {
            0 | 1 if which < 2 => {
                let b = BindMw {
                    rkey: keys[which],
                    new_rkey: new,
                    lkey: if input.u8() % 8 == 0 { keys[2] } else { mr.0 },
                    addr: if input.u8() % 4 == 0 {
                        input.odd()
                    } else {
                        BASE + u64::from(input.u16() % 6000)
                    },
                    length: if input.u8() % 4 == 0 {
                        input.odd()
                    } else {
                        u64::from(input.u16() % 6000)
                    },
                    access: Access(u32::from(input.u8()) & 47),
                };
                let source = if b.lkey == mr.0 {
                    mr_valid.then(|| Bound {
                        key: mr.0,
                        qp: None,
                        base: BASE,
                        len: 5000,
                        access: all,
                        place: (100..5100).collect(),
                    })
                } else {
                    model[2].clone()
                };
                if reader.bind_window(&b, pd, qp).is_ok() {
                    assert_eq!(pd, PD);
                    if let (1, Some(m)) = (which, &model[1]) {
                        assert!(b.length == 0 && m.qp == Some(qp), "bound is not free");
                    }
                    keys[which] = new;
                    model[which] = (b.length > 0).then(|| {
                        let s = source.expect("a region that works");
                        let writes = b.access.allows_remote_changes();
                        assert!(s.access.contains(Access::MW_BIND));
                        assert!(!writes || s.access.contains(Access::LOCAL_WRITE));
                        let from = (b.addr - s.base) as usize;
                        let zero = b.access.contains(Access::ZERO_BASED);
                        Bound {
                            key: new,
                            qp: (which == 1).then_some(qp),
                            base: if zero { 0 } else { b.addr },
                            len: b.length,
                            access: b.access,
                            place: s.place[from..from + b.length as usize].to_vec(),
                        }
                    });
                }
            }
            0 | 1 => {
                let shift = 11 + input.u8() % 3;
                let pages: Vec<u64> = (0..4)
                    .map(|_| match input.u8() % 8 {
                        0 => input.odd(),
                        n => u64::from(n) << 12,
                    })
                    .collect();
                let octets: Vec<u8> = pages.iter().flat_map(|p| p.to_le_bytes()).collect();
                list.write(64, &octets).expect("in range");
                let r = FastReg {
                    key: new,
                    iova: input.odd(),
                    length: u32::from(input.u16()) % 20_000,
                    first_offset: u32::from(input.u16()) % 5000,
                    page_shift: shift,
                    access: Access(u32::from(input.u8()) & 63),
                };
                if reader.register_pages(&r, pd).is_ok() {
                    assert!(pd == PD && model[2].is_none() && shift >= 12);
                    let size = 1u64 << shift;
                    let at = |i: u64| {
                        let o = i + u64::from(r.first_offset);
                        pages[(o / size) as usize] + o % size
                    };
                    let place: Vec<u64> = (0..u64::from(r.length)).map(at).collect();
                    assert!(place.iter().all(|p| *p < PAGES << 12));
                    let zero = r.access.contains(Access::ZERO_BASED);
                    keys[2] = new;
                    model[2] = Some(Bound {
                        key: new,
                        qp: None,
                        base: if zero { 0 } else { r.iova },
                        len: r.length.into(),
                        access: r.access,
                        place,
                    });
                }
                // It was copied: what is written later changes nothing.
                list.write(64, &[0xff; 32]).expect("in range");
            }
            2 => {
                let key = match input.u8() % 16 {
                    0 => mr.0,
                    1 => input.u32(),
                    _ => keys[which],
                };
                let remote = input.u8() & 1 == 1;
                let done = if remote {
                    reader.invalidate_remote(Stag(key), pd, qp)
                } else {
                    reader.invalidate_key(Stag(key), pd, qp)
                };
                if done.is_ok() {
                    assert_eq!(pd, PD);
                    assert_ne!(key, keys[0], "a window of type 1");
                    let hit = model
                        .iter_mut()
                        .find(|m| m.as_ref().is_some_and(|m| m.key == key));
                    match hit {
                        Some(m) => *m = None,
                        None => {
                            assert!(key == mr.0 && mr_valid);
                            mr_valid = false;
                        }
                    }
                }
            }
            _ => {
                let m = model[which].as_ref();
                let addr = match m {
                    Some(m) if input.u8() % 4 > 0 => m
                        .base
                        .wrapping_add(u64::from(input.u16()) % (m.len + 2))
                        .wrapping_sub(1),
                    _ => input.odd(),
                };
                let len = u32::from(input.u8()) + 1;
                let need = [
                    Access::REMOTE_READ,
                    Access::REMOTE_WRITE,
                    Access::REMOTE_ATOMIC,
                    Access::LOCAL_WRITE,
                ][usize::from(input.u8()) % 4];
                let got = reader.check_access(Stag(keys[which]), addr, len, need, PD, qp);
                let want = m.and_then(|m| m.allows(addr, len, need, qp));
                assert_eq!(got.is_ok(), want.is_some(), "{which} {got:?}");
                if let (Ok((mr, off)), Some(at)) = (got, want) {
                    let (_, first, n) = mr.piece_at(off, len as usize).expect("allowed");
                    assert_eq!(first as u64, at);
                    assert!(n > 0 && n <= len as usize);
                    let octets: Vec<u8> = (0..len).map(|i| i as u8 ^ 0x5a).collect();
                    mr.write_at(off, &octets).expect("allowed");
                    let mut back = vec![0; octets.len()];
                    mr.read_at(off, &mut back).expect("allowed");
                    let m = m.expect("allowed");
                    let from = (addr - m.base) as usize;
                    let places = &m.place[from..from + len as usize];
                    let mut distinct = places.to_vec();
                    distinct.sort_unstable();
                    distinct.dedup();
                    if distinct.len() == places.len() {
                        assert_eq!(back, octets);
                    }
                    let sum = mr.crc32c_append_at(off, back.len(), 0).expect("allowed");
                    assert_eq!(sum, crc::crc32c_append(0, &back));
                }
            }
        }
        let bound = model[..2].iter().flatten().count() as u32;
        let counted = [mr, fast]
            .iter()
            .map(|k| table.with_entry(*k, RegisteredMemory::count_windows))
            .sum();
        assert_eq!(Some(bound), counted, "each bound window is counted once");
    }
}
