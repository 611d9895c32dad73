//! Actions of a hostile client on memory keys, driven by the octets of a fuzzer. Used by the test
//! suite and by the fuzz target `keys` in `shm-api/fuzz`.

#[path = "../../../tests/common/octet_input.rs"]
mod octet_input;

use octet_input::Input;
use siw_memory::*;
use siw_shm::local_wqe::MAX_FAST_PAGES;
use siw_shm::*;
use std::sync::Arc;

const PD: u32 = 3;
const BASE: u64 = 0x10_0000;
const PAGES: u64 = 8;

/// Model of a window or a fast registration.
#[derive(Clone)]
struct Bound {
    key: u32,
    qp: Option<u32>,
    base: u64,
    len: u64,
    access: Access,
    /// Offset in the region of each byte.
    place: Vec<u64>,
}

impl Bound {
    fn allows(&self, addr: u64, len: u32, need: Access, qp: u32) -> Option<u64> {
        let end = addr.checked_add(u64::from(len))?;
        let fits = addr >= self.base && end <= self.base + self.len;
        let stream = self.qp.is_none_or(|bound| bound == qp);
        (fits && stream && self.access.contains(need))
            .then(|| self.place[(addr - self.base) as usize])
    }
}

/// BIND_MW, REG_MR, LOCAL_INV and SEND_WITH_INV with arguments and page lists of all kinds: each
/// access is allowed exactly when the last successful operation allows it, and reaches the memory
/// that the operation selected.
pub fn change_keys(data: &[u8]) {
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
    let mut keys = homes.map(|key| key.0);
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
                let bind = BindMw {
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
                let source = if bind.lkey == mr.0 {
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
                if reader.bind_window(&bind, pd, qp).is_ok() {
                    assert_eq!(pd, PD);
                    if let (1, Some(known)) = (which, &model[1]) {
                        assert!(
                            bind.length == 0 && known.qp == Some(qp),
                            "bound is not free"
                        );
                    }
                    keys[which] = new;
                    model[which] = (bind.length > 0).then(|| {
                        let source = source.expect("a region that works");
                        let writes = bind.access.allows_remote_changes();
                        assert!(source.access.contains(Access::MW_BIND));
                        assert!(!writes || source.access.contains(Access::LOCAL_WRITE));
                        let from = (bind.addr - source.base) as usize;
                        let zero = bind.access.contains(Access::ZERO_BASED);
                        Bound {
                            key: new,
                            qp: (which == 1).then_some(qp),
                            base: if zero { 0 } else { bind.addr },
                            len: bind.length,
                            access: bind.access,
                            place: source.place[from..from + bind.length as usize].to_vec(),
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
                let octets: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
                list.write(64, &octets).expect("in range");
                let registration = FastReg {
                    key: new,
                    iova: input.odd(),
                    length: u32::from(input.u16()) % 20_000,
                    first_offset: u32::from(input.u16()) % 5000,
                    page_shift: shift,
                    access: Access(u32::from(input.u8()) & 63),
                };
                if reader.register_pages(&registration, pd).is_ok() {
                    assert!(pd == PD && model[2].is_none() && shift >= 12);
                    let size = 1u64 << shift;
                    let at = |i: u64| {
                        let position = i + u64::from(registration.first_offset);
                        pages[(position / size) as usize] + position % size
                    };
                    let place: Vec<u64> = (0..u64::from(registration.length)).map(at).collect();
                    assert!(place.iter().all(|page| *page < PAGES << 12));
                    let zero = registration.access.contains(Access::ZERO_BASED);
                    keys[2] = new;
                    model[2] = Some(Bound {
                        key: new,
                        qp: None,
                        base: if zero { 0 } else { registration.iova },
                        len: registration.length.into(),
                        access: registration.access,
                        place,
                    });
                }
                // The list was copied: later writes to it have no effect.
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
                        .find(|known| known.as_ref().is_some_and(|known| known.key == key));
                    match hit {
                        Some(known) => *known = None,
                        None => {
                            assert!(key == mr.0 && mr_valid);
                            mr_valid = false;
                        }
                    }
                }
            }
            _ => {
                let known = model[which].as_ref();
                let addr = match known {
                    Some(known) if input.u8() % 4 > 0 => known
                        .base
                        .wrapping_add(u64::from(input.u16()) % (known.len + 2))
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
                let want = known.and_then(|known| known.allows(addr, len, need, qp));
                assert_eq!(got.is_ok(), want.is_some(), "{which} {got:?}");
                if let (Ok((mr, off)), Some(at)) = (got, want) {
                    let (_, first, n) = mr.piece_at(off, len as usize).expect("allowed");
                    assert_eq!(first as u64, at);
                    assert!(n > 0 && n <= len as usize);
                    let octets: Vec<u8> = (0..len).map(|i| i as u8 ^ 0x5a).collect();
                    mr.write_at(off, &octets).expect("allowed");
                    let mut back = vec![0; octets.len()];
                    mr.read_at(off, &mut back).expect("allowed");
                    let known = known.expect("allowed");
                    let from = (addr - known.base) as usize;
                    let places = &known.place[from..from + len as usize];
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
            .map(|key| table.with_entry(*key, RegisteredMemory::count_windows))
            .sum();
        assert_eq!(Some(bound), counted, "each bound window is counted once");
    }
}
