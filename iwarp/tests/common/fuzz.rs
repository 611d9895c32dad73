//! Bodies of the fuzz targets in `iwarp/fuzz`; `tests/queue_pair/fuzz.rs` also runs them on random input.
//!
//! The crate must not panic on any input; further invariants are asserted.

use super::*;
use siw_iwarp::mpa::{InitiatorStep, MpaFrame, MpaInitiator, MpaResponder, ResponderStep};

const VA: u64 = 0x10_0000;
const LEN: usize = 256;
const GUARD: usize = 64;

/// MPA frames: the first octet selects the fragmentation.
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
    if let Ok(Some(frame)) = MpaFrame::read_from(&mut whole, 512) {
        let again = frame.encode().expect("it came from a frame");
        let mut again = ByteStream::from(&again[..]);
        assert_eq!(MpaFrame::read_from(&mut again, 512), Ok(Some(frame)));
    }
    let (mut stream, mut responder) = (ByteStream::new(), MpaResponder::new(&cfg));
    let mut asked = 0;
    for part in data.chunks(cut) {
        stream.push(part);
        match responder.on_stream(&mut stream) {
            ResponderStep::Request(_) => {
                asked += 1;
                if let Ok((reply, len)) = responder.accept(4, 4, b"x") {
                    assert!(len.ird >= 1 && reply.len() <= 20 + 512);
                }
                let _ = responder.reject(b"");
            }
            ResponderStep::NeedMore => {}
            ResponderStep::Failed { .. } => break,
        }
    }
    assert!(asked <= 1);
    let (mut stream, mut initiator) = (
        ByteStream::new(),
        MpaInitiator::new(&cfg, 4, 4, b"").expect("fits"),
    );
    for part in data.chunks(cut) {
        stream.push(part);
        if !matches!(initiator.on_stream(&mut stream), InitiatorStep::NeedMore) {
            break;
        }
    }
}

/// A queue pair with entries in every queue, and memory between guards.
fn loaded(markers: bool, crc: bool) -> (End, Stag, std::sync::Arc<SharedMemory>) {
    let mut end = End::new(NegotiatedParameters {
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
    let key = end.env.table.insert(mr.expect("in range")).expect("room");
    let stream = [sge(VA, 8, key), sge(VA + 8, 8, key)];
    end.env.post(&remote(Opcode::Read, 1, &stream, 0, Stag(9)));
    end.env.post(&SendWr::fetch_add(2, stream[0], 0, 9, 1));
    end.env
        .post(&SendWr::send_with_imm(3, SendData::Inline(b"x"), 1));
    end.env
        .post(&SendWr::write_with_imm(4, SendData::Sges(&stream), 0, 9, 1));
    for initiator in 0..3 {
        end.env.post_recv(initiator, &[sge(VA, 40, key)]);
    }
    end.pull_all();
    (end, key, region)
}

/// Invariants for any input: at most one Terminate, every work request completes once and in order,
/// and nothing is written outside the region.
fn settle(mut end: End, region: &SharedMemory) {
    let mut terminates = 0;
    while let Some(OutgoingFpdu {
        record: responder, ..
    }) = end.qp.next_record(&mut end.env, usize::MAX)
    {
        terminates += usize::from(responder.kind == FpduKind::Terminate);
        let mut frame = Frame::default();
        if end.build_fpdu(&responder, &mut frame).is_ok() {
            assert_eq!(frame.bytes.len(), responder.wire_len());
        }
        end.unacked.push_back(responder);
    }
    end.ack_all();
    assert!(terminates <= 1);
    end.qp.on_tcp_closed(&mut end.env, CloseReason::Reset);
    end.qp.modify_to_error(&mut end.env);
    let sent: Vec<u64> = end
        .env
        .sent
        .iter()
        .flatten()
        .map(|part| part.wr_id)
        .collect();
    assert_eq!(sent, [1, 2, 3, 4]);
    let mut received: Vec<u64> = end.env.received.iter().map(|part| part.wr_id).collect();
    received.sort_unstable();
    assert_eq!(received, [0, 1, 2]);
    let all = contents(region, 4096);
    assert!(all[..GUARD].iter().all(|&b| b == 0xee), "before the region");
    assert!(
        all[GUARD + LEN..].iter().all(|&b| b == 0xee),
        "behind the region"
    );
}

/// Raw octets as a stream: the first octet selects markers, CRC, and the size of arrivals.
pub fn fpdu_stream(data: &[u8]) {
    let Some((&how, data)) = data.split_first() else {
        return;
    };
    let (mut end, _, region) = loaded(how & 1 != 0, how & 2 != 0);
    let mut used = 0;
    for part in data.chunks(usize::from(how >> 2) * 16 + 1) {
        let progress = end.give(part);
        used += progress.bytes;
        assert!(end.qp.state() == RdmapState::Rts || end.rx.available() == 0);
    }
    assert!(used <= data.len() && used + end.rx.available() == data.len());
    settle(end, &region);
}

/// ULPDUs in valid FPDUs. Each starts with two octets: its length, and the fields to correct so that
/// it passes the first checks.
pub fn headers(data: &[u8]) {
    let Some((&how, mut data)) = data.split_first() else {
        return;
    };
    let (mut end, key, region) = loaded(how & 1 != 0, true);
    let mut marker_position = mpa::marker::MarkerPosition::stream_start(how & 1 != 0);
    let mut msn = [1u32; 4];
    while let [len, fix, rest @ ..] = data {
        let len = usize::from(*len).min(rest.len());
        let (ulpdu_octets, rest) = rest.split_at(len);
        data = rest;
        let mut ulpdu_octets = ulpdu_octets.to_vec();
        repair(&mut ulpdu_octets, *fix, key, &mut msn);
        let frame = mpa::fpdu::encode_fpdu_at(&[&ulpdu_octets], true, marker_position);
        marker_position = marker_position.advanced_by(frame.len());
        end.give(&frame);
    }
    settle(end, &region);
}

fn repair(ulpdu_octets: &mut [u8], fix: u8, key: Stag, msn: &mut [u32; 4]) {
    if ulpdu_octets.len() < 18 {
        return;
    }
    if fix & 1 != 0 {
        ulpdu_octets[0] = ulpdu_octets[0] & 0xc0 | 1;
        ulpdu_octets[1] = 0x40 | ulpdu_octets[1] & 0x0f;
    }
    let key = key.0.to_be_bytes();
    if ulpdu_octets[0] & T_BIT != 0 {
        if fix & 2 != 0 {
            ulpdu_octets[2..6].copy_from_slice(&key);
            let to = VA + u64::from(ulpdu_octets[13]);
            ulpdu_octets[6..14].copy_from_slice(&to.to_be_bytes());
        }
        return;
    }
    let qn = match ulpdu_octets[1] & 0x0f {
        1 | 10 => 1,
        7 => 2,
        11 => 3,
        _ => 0,
    };
    if fix & 2 != 0 {
        ulpdu_octets[6..10].copy_from_slice(&(qn as u32).to_be_bytes());
    }
    if fix & 4 != 0 {
        ulpdu_octets[10..14].copy_from_slice(&msn[qn].to_be_bytes());
        msn[qn] = msn[qn].wrapping_add(u32::from(ulpdu_octets[0] & 0x40 != 0));
        ulpdu_octets[14..18].fill(0);
    }
    if fix & 8 != 0 {
        // The source of a Read Request, the word of an Atomic Request.
        let at = if qn == 1 && ulpdu_octets[1] & 0x0f == 1 {
            34
        } else {
            26
        };
        if let Some(stream) = ulpdu_octets.get_mut(at..at + 12) {
            stream[..4].copy_from_slice(&key);
            let to = VA + u64::from(stream[11]);
            stream[4..].copy_from_slice(&to.to_be_bytes());
        }
    }
}
