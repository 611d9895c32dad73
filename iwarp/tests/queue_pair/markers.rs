//! Streams with markers: positions and pointers at every alignment, splits, damage (RFC 5044 section
//! 4.3). The expected octets are derived here from the marker grid alone.
use crate::common::*;
use siw_iwarp::*;
use siw_memory::Stag;
use siw_shm::wqe::SendData;
use siw_shm::{Opcode, Sge};

const VA: u64 = 0x10_0000;

fn marked(initiator: bool) -> End {
    End::new(NegotiatedParameters {
        markers_in: true,
        markers_out: true,
        ..negotiated(initiator)
    })
}

/// Removes the markers from a stream, FPDU by FPDU from its start, and checks each: a second
/// implementation, which works octet by octet.
fn strip(stream: &[u8]) -> Vec<Vec<u8>> {
    let mut out = Vec::new();
    let (mut fpdu, mut covered, mut start): (Vec<u8>, Vec<u8>, Option<usize>) =
        (Vec::new(), Vec::new(), None);
    let mut at = 0;
    while at < stream.len() {
        if at % 512 == 0 {
            let mem = &stream[at..at + 4];
            let back = start.map_or(0, |s| at - s) as u16;
            assert_eq!(mem[..2], [0, 0]);
            assert_eq!(mem[2..], back.to_be_bytes(), "pointer at {at}");
            covered.extend(mem);
            at += 4;
            continue;
        }
        start.get_or_insert(at);
        fpdu.push(stream[at]);
        covered.push(stream[at]);
        at += 1;
        if fpdu.len() >= 2 {
            let len = u16::from_be_bytes([fpdu[0], fpdu[1]]);
            if fpdu.len() == mpa::fpdu::wire_len(len) {
                let crc = crc32c::crc32c(&covered[..covered.len() - 4]).to_le_bytes();
                assert_eq!(fpdu[fpdu.len() - 4..], crc, "CRC covers the markers");
                out.push(std::mem::take(&mut fpdu));
                covered.clear();
                start = None;
            }
        }
    }
    assert!(fpdu.is_empty());
    out
}

/// Conformance 17, 31: Writes of every length around an interval, so that FPDUs start and end at
/// every alignment; retransmissions are identical (also checked in the random test).
#[test]
fn c17_markers_stand_on_the_grid_and_point_at_their_fpdu() {
    let (mut initiator, mut responder) = (marked(true), marked(false));
    let (initiator_key, initiator_mem) = initiator.env.mr(VA, 8192, REMOTE);
    let (responder_key, responder_mem) = responder.env.mr(VA, 8192, REMOTE);
    let mut stream = Vec::new();
    let mut sent = 0;
    for len in (0..60).chain(440..600).chain([1448, 3000, 4096, 8192]) {
        let data = pattern(len, len as u8);
        initiator_mem.write(0, &data).expect("in range");
        initiator.env.post(&remote(
            Opcode::Write,
            1,
            &[sge(VA, len, initiator_key)],
            VA,
            responder_key,
        ));
        while let Some(fpdu) = initiator.pull() {
            responder.give(&fpdu);
            stream.extend(fpdu);
            sent += 1;
        }
        initiator.ack_all();
        assert_eq!(contents(&responder_mem, len), data, "{len}");
    }
    assert_eq!(responder.qp.state(), RdmapState::Rts);
    assert_eq!(strip(&stream).len(), sent);
}

/// Conformance 34, 35 with markers: segments of any size.
#[test]
fn c34_marked_fpdus_are_taken_from_any_split_of_the_stream() {
    for cut in [1, 2, 3, 5, 509, 512, 515, 4000, 100_000] {
        let (mut initiator, mut responder) = (marked(true), marked(false));
        let (initiator_key, initiator_mem) = initiator.env.mr(VA, 20_000, REMOTE);
        let (responder_key, responder_mem) = responder.env.mr(VA, 20_000, REMOTE);
        initiator_mem
            .write(0, &pattern(20_000, 1))
            .expect("in range");
        responder
            .env
            .post_recv(9, &[sge(VA + 10_000, 10_000, responder_key)]);
        let (write_sges, send_sges) = (
            [sge(VA, 10_000, initiator_key)],
            [sge(VA + 10_000, 9_999, initiator_key)],
        );
        initiator
            .env
            .post(&remote(Opcode::Write, 1, &write_sges, VA, responder_key));
        initiator
            .env
            .post(&wr(Opcode::Send, 2, SendData::Sges(&send_sges)));
        let stream = initiator.pull_all();
        let mut bytes = 0;
        for part in stream.chunks(cut) {
            bytes += responder.give(part).bytes;
        }
        assert_eq!(bytes, stream.len(), "every octet is accounted for");
        assert!(contents(&responder_mem, 19_999) == pattern(20_000, 1)[..19_999]);
        assert_eq!(responder.env.recv_statuses().len(), 1);
    }
}

/// Payload of gather lists begins and ends at any octet, and a builder may have room for only a part
/// of it, as buffers of a pool do for the FPDUs of large segments.
#[test]
fn fpdu_is_the_same_from_any_pieces() {
    for first in [1, 3, 64, 255, 500, 700] {
        let whole = [sge(VA, 1400, Stag(0))];
        let cut = [
            sge(VA, first, Stag(0)),
            sge(VA + first as u64, 1400 - first, Stag(0)),
        ];
        let mut built = Vec::new();
        for (sges, piece) in [(&whole[..], 0), (&cut[..], 0), (&cut, 5), (&whole, 300)] {
            let mut initiator = marked(true);
            let (key, mem) = initiator.env.mr(VA, 4096, REMOTE);
            mem.write(0, &pattern(4096, 5)).expect("in range");
            let sges: Vec<_> = sges.iter().map(|s| Sge { lkey: key.0, ..*s }).collect();
            initiator
                .env
                .post(&remote(Opcode::Write, 1, &sges, VA, Stag(77)));
            let record = initiator
                .qp
                .next_record(&mut initiator.env, 1 << 20)
                .expect("an FPDU")
                .record;
            let mut fpdu = Frame {
                piece,
                ..Frame::default()
            };
            initiator.build_fpdu(&record, &mut fpdu).expect("built");
            built.push(fpdu.bytes);
        }
        assert_eq!(strip(&built[0]).len(), 1);
        assert!(
            built.iter().all(|responder| *responder == built[0]),
            "{first}"
        );
    }
}

/// A Terminate and a Read Response have markers like all other FPDUs.
#[test]
fn all_kinds_of_fpdu_carry_markers() {
    let (mut initiator, mut responder) = (marked(true), marked(false));
    let (initiator_key, _) = initiator.env.mr(VA, 4096, REMOTE);
    let (responder_key, responder_mem) = responder.env.mr(VA, 4096, REMOTE);
    responder_mem.write(0, &pattern(4096, 3)).expect("in range");
    initiator.env.post(&remote(
        Opcode::Read,
        1,
        &[sge(VA, 4096, initiator_key)],
        VA,
        responder_key,
    ));
    responder.give(&initiator.pull_all());
    initiator.ack_all();
    let mut stream = responder.pull_all();
    responder.give(&{
        initiator.env.post(&remote(
            Opcode::Write,
            2,
            &[sge(VA, 8, initiator_key)],
            0,
            Stag(0x4200),
        ));
        initiator.pull_all()
    });
    stream.extend(responder.pull_all());
    let frames = strip(&stream);
    assert_eq!(frames.last().expect("a Terminate")[3], 0x47);
    initiator.give(&stream);
    assert_eq!(initiator.env.statuses()[0].1, siw_shm::WcStatus::SUCCESS);
    assert_eq!(
        initiator
            .qp
            .received_terminate()
            .expect("received")
            .to_string(),
        "1/1/00"
    );
}

/// One Write of 1000 octets: markers at 0 and 512.
fn two_markers() -> (End, Vec<u8>, std::sync::Arc<siw_shm::SharedMemory>) {
    let responder = marked(false);
    let (responder_key, responder_mem) = responder.env.mr(VA, 4096, REMOTE);
    let mut plain = vec![0xc1, 0x40];
    plain.extend(responder_key.0.to_be_bytes());
    plain.extend(VA.to_be_bytes());
    plain.extend([5; 1000]);
    let fpdu = mpa::fpdu::encode_fpdu_at(&[&plain], true, mpa::marker::MarkerPosition::START);
    (responder, fpdu.into_vec(), responder_mem)
}

fn fix_crc(fpdu: &mut [u8]) {
    let len = fpdu.len() - 4;
    let crc = crc32c::crc32c(&fpdu[..len]);
    fpdu[len..].copy_from_slice(&crc.to_le_bytes());
}

/// Conformance 31: RFC 5044 section 4.3, error code 3 of section 8.
#[test]
fn c31_marker_that_points_elsewhere_is_2_0_03() {
    for (at, wrong) in [(0, 4u16), (512, 504), (512, 512), (512, 0)] {
        let (mut responder, mut fpdu, mem) = two_markers();
        assert_eq!(fpdu[512..516], [0, 0, 0x01, 0xfc], "508 octets back");
        fpdu[at + 2..at + 4].copy_from_slice(&wrong.to_be_bytes());
        fix_crc(&mut fpdu);
        responder.give(&fpdu);
        let terminate = strip(&responder.pull().expect("a Terminate leaves")).remove(0);
        assert_eq!(parse_terminate_ulpdu(&terminate).to_string(), "2/0/03");
        assert_eq!(contents(&mem, 8), [0; 8], "nothing is placed");
    }
}

fn parse_terminate_ulpdu(fpdu: &[u8]) -> TerminateCode {
    rdmap::terminate::ReceivedTerminate::parse(&fpdu[2 + 18..fpdu.len() - 4])
        .expect("well formed")
        .code
}

/// Conformance 32, 33.
#[test]
fn c32_c33_reserved_and_low_pointer_bits_are_ignored() {
    let (mut responder, mut fpdu, mem) = two_markers();
    fpdu[0..2].copy_from_slice(&[0xff, 0xff]);
    fpdu[3] |= 3;
    fpdu[512..514].copy_from_slice(&[0xa5, 0x5a]);
    fpdu[515] |= 1;
    fix_crc(&mut fpdu);
    responder.give(&fpdu);
    assert_eq!(responder.qp.state(), RdmapState::Rts);
    assert_eq!(contents(&mem, 1000), [5; 1000]);
}

/// Conformance 27 with markers: damage at any octet, including markers.
#[test]
fn c27_every_damaged_octet_of_a_marked_fpdu_breaks_the_crc() {
    let len = two_markers().1.len();
    for i in (0..len).filter(|i| !(4..6).contains(i)) {
        let (mut responder, mut fpdu, mem) = two_markers();
        fpdu[i] ^= 0x10;
        responder.give(&fpdu);
        assert_eq!(
            responder.qp.found_error(),
            Some(TerminateCode::MPA_CRC),
            "octet {i}"
        );
        assert_eq!(contents(&mem, 8), [0; 8]);
    }
}

/// A Terminate that an initiator sends before a queue pair exists obeys the reply's M flag.
#[test]
fn standalone_terminate_has_a_marker_in_front() {
    let fpdu = rdmap::terminate::encode_standalone_fpdu(
        TerminateCode::MPA_NO_RTR,
        TerminateBitOrder::Rfc,
        true,
        true,
    );
    assert_eq!(strip(&fpdu).len(), 1);
    assert_eq!(fpdu[..4], [0; 4]);
}
