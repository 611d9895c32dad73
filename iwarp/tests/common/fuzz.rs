//! Bodies of the fuzz targets in `iwarp/fuzz`; `tests/fuzz.rs` runs them on random input, too.
//!
//! None of them may panic in the crate, whatever the octets; what must hold besides is asserted.

use super::*;
use siw_iwarp::mpa::{InitiatorStep, MpaFrame, MpaInitiator, MpaResponder, ResponderStep};

const VA: u64 = 0x10_0000;
const LEN: usize = 256;
const GUARD: usize = 64;

/// MPA frames: the first octet says in which fragments they arrive.
pub fn mpa_frames(data: &[u8]) {
    let Some((&how, data)) = data.split_first() else {
        return;
    };
    let cut = usize::from(how >> 2) + 1;
    let cfg = MpaConfig {
        markers: [MarkerPolicy::Never, MarkerPolicy::Request][usize::from(how & 1)],
        revision: 1 + (how >> 1 & 1),
        ..MpaConfig::default()
    };
    let mut whole = ByteStream::from(data);
    if let Ok(Some(f)) = MpaFrame::read_from(&mut whole, 512) {
        let again = f.encode().expect("it came from a frame");
        let mut again = ByteStream::from(&again[..]);
        assert_eq!(MpaFrame::read_from(&mut again, 512), Ok(Some(f)));
    }
    let (mut s, mut r) = (ByteStream::new(), MpaResponder::new(&cfg));
    let mut asked = 0;
    for c in data.chunks(cut) {
        s.push(c);
        match r.on_stream(&mut s) {
            ResponderStep::Request(_) => {
                asked += 1;
                if let Ok((reply, n)) = r.accept(4, 4, b"x") {
                    assert!(n.ird >= 1 && reply.len() <= 20 + 512);
                }
                let _ = r.reject(b"");
            }
            ResponderStep::NeedMore => {}
            ResponderStep::Failed { .. } => break,
        }
    }
    assert!(asked <= 1);
    let (mut s, mut i) = (
        ByteStream::new(),
        MpaInitiator::new(&cfg, 4, 4, b"").expect("fits"),
    );
    for c in data.chunks(cut) {
        s.push(c);
        if !matches!(i.on_stream(&mut s), InitiatorStep::NeedMore) {
            break;
        }
    }
}

/// A queue pair with something in every queue, and memory between guards.
fn loaded(markers: bool, crc: bool) -> (End, Stag, std::sync::Arc<SharedMemory>) {
    let mut e = End::new(NegotiatedParameters {
        crc,
        markers_in: markers,
        markers_out: markers,
        ..negotiated(true)
    });
    let region = std::sync::Arc::new(SharedMemory::new_anonymous(4096).expect("memory"));
    region.write(0, &[0xee; 4096]).expect("in range");
    let mr = RegisteredMemory::new(
        region.clone(),
        GUARD as u64,
        LEN as u64,
        VA,
        PD,
        None,
        Access(15),
    );
    let key = e.env.table.insert(mr.expect("in range")).expect("room");
    let s = [sge(VA, 8, key), sge(VA + 8, 8, key)];
    e.env.post(&remote(Opcode::Read, 1, &s, 0, Stag(9)));
    e.env.post(&SendWr::fetch_add(2, s[0], 0, 9, 1));
    e.env
        .post(&SendWr::send_with_imm(3, SendData::Inline(b"x"), 1));
    e.env
        .post(&SendWr::write_with_imm(4, SendData::Sges(&s), 0, 9, 1));
    for i in 0..3 {
        e.env.post_recv(i, &[sge(VA, 40, key)]);
    }
    e.pull_all();
    (e, key, region)
}

/// What holds for any input: one Terminate at most, every work request completes once, in order, and
/// nothing is written outside of the region.
fn settle(mut e: End, region: &SharedMemory) {
    let mut terminates = 0;
    while let Some(OutgoingFpdu { record: r, .. }) = e.qp.next_record(&mut e.env, usize::MAX) {
        terminates += usize::from(r.kind == FpduKind::Terminate);
        let mut f = Frame::default();
        if e.qp.build_fpdu(&e.env.keys, &r, &mut f).is_ok() {
            assert_eq!(f.bytes.len(), r.wire_len());
        }
        e.unacked.push_back(r);
    }
    e.ack_all();
    assert!(terminates <= 1);
    e.qp.on_tcp_closed(&mut e.env, CloseReason::Reset);
    e.qp.modify_to_error(&mut e.env);
    let sent: Vec<u64> = e.env.sent.iter().flatten().map(|c| c.wr_id).collect();
    assert_eq!(sent, [1, 2, 3, 4]);
    let mut received: Vec<u64> = e.env.received.iter().map(|c| c.wr_id).collect();
    received.sort_unstable();
    assert_eq!(received, [0, 1, 2]);
    let all = contents(region, 4096);
    assert!(all[..GUARD].iter().all(|&b| b == 0xee), "before the region");
    assert!(
        all[GUARD + LEN..].iter().all(|&b| b == 0xee),
        "behind the region"
    );
}

/// Raw octets as a stream: the first octet says markers, CRC, and the size of arrivals.
pub fn fpdu_stream(data: &[u8]) {
    let Some((&how, data)) = data.split_first() else {
        return;
    };
    let (mut e, _, region) = loaded(how & 1 != 0, how & 2 != 0);
    let mut used = 0;
    for c in data.chunks(usize::from(how >> 2) * 16 + 1) {
        let p = e.give(c);
        used += p.bytes;
        assert!(e.qp.state() == RdmapState::Rts || e.rx.available() == 0);
    }
    assert!(used <= data.len() && used + e.rx.available() == data.len());
    settle(e, &region);
}

/// ULPDUs in sound FPDUs. Each starts with two octets: its length, and what is put right in it so
/// that it gets past the first checks.
pub fn headers(data: &[u8]) {
    let Some((&how, mut data)) = data.split_first() else {
        return;
    };
    let (mut e, key, region) = loaded(how & 1 != 0, true);
    let mut marker_position = mpa::marker::MarkerPosition::stream_start(how & 1 != 0);
    let mut msn = [1u32; 4];
    while let [n, fix, rest @ ..] = data {
        let n = usize::from(*n).min(rest.len());
        let (u, rest) = rest.split_at(n);
        data = rest;
        let mut u = u.to_vec();
        repair(&mut u, *fix, key, &mut msn);
        let f = mpa::fpdu::encode_fpdu_at(&[&u], true, marker_position);
        marker_position = marker_position.advanced_by(f.len());
        e.give(&f);
    }
    settle(e, &region);
}

fn repair(u: &mut [u8], fix: u8, key: Stag, msn: &mut [u32; 4]) {
    if u.len() < 18 {
        return;
    }
    if fix & 1 != 0 {
        u[0] = u[0] & 0xc0 | 1;
        u[1] = 0x40 | u[1] & 0x0f;
    }
    let key = key.0.to_be_bytes();
    if u[0] & T_BIT != 0 {
        if fix & 2 != 0 {
            u[2..6].copy_from_slice(&key);
            let to = VA + u64::from(u[13]);
            u[6..14].copy_from_slice(&to.to_be_bytes());
        }
        return;
    }
    let qn = match u[1] & 0x0f {
        1 | 10 => 1,
        7 => 2,
        11 => 3,
        _ => 0,
    };
    if fix & 2 != 0 {
        u[6..10].copy_from_slice(&(qn as u32).to_be_bytes());
    }
    if fix & 4 != 0 {
        u[10..14].copy_from_slice(&msn[qn].to_be_bytes());
        msn[qn] = msn[qn].wrapping_add(u32::from(u[0] & 0x40 != 0));
        u[14..18].fill(0);
    }
    if fix & 8 != 0 {
        // The source of a Read Request, the word of an Atomic Request.
        let at = if qn == 1 && u[1] & 0x0f == 1 { 34 } else { 26 };
        if let Some(s) = u.get_mut(at..at + 12) {
            s[..4].copy_from_slice(&key);
            let to = VA + u64::from(s[11]);
            s[4..].copy_from_slice(&to.to_be_bytes());
        }
    }
}
