//! Streams with markers: positions and pointers at every alignment, splits, damage (RFC 5044 section
//! 4.3). What the octets must be is worked out here from the grid alone.
mod common;
use common::*;
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

/// Takes the markers out of a stream from its start, FPDU by FPDU, and checks each: a second
/// implementation, that walks octet by octet.
fn strip(stream: &[u8]) -> Vec<Vec<u8>> {
    let mut out = Vec::new();
    let (mut fpdu, mut covered, mut start): (Vec<u8>, Vec<u8>, Option<usize>) =
        (Vec::new(), Vec::new(), None);
    let mut at = 0;
    while at < stream.len() {
        if at % 512 == 0 {
            let m = &stream[at..at + 4];
            let back = start.map_or(0, |s| at - s) as u16;
            assert_eq!(m[..2], [0, 0]);
            assert_eq!(m[2..], back.to_be_bytes(), "pointer at {at}");
            covered.extend(m);
            at += 4;
            continue;
        }
        start.get_or_insert(at);
        fpdu.push(stream[at]);
        covered.push(stream[at]);
        at += 1;
        if fpdu.len() >= 2 {
            let n = u16::from_be_bytes([fpdu[0], fpdu[1]]);
            if fpdu.len() == mpa::fpdu::wire_len(n) {
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
/// every alignment; retransmissions are identical (checked in the random test, too).
#[test]
fn c17_markers_stand_on_the_grid_and_point_at_their_fpdu() {
    let (mut a, mut b) = (marked(true), marked(false));
    let (ka, ma) = a.env.mr(VA, 8192, REMOTE);
    let (kb, mb) = b.env.mr(VA, 8192, REMOTE);
    let mut stream = Vec::new();
    let mut sent = 0;
    for len in (0..60).chain(440..600).chain([1448, 3000, 4096, 8192]) {
        let data = pattern(len, len as u8);
        ma.write(0, &data).expect("in range");
        a.env
            .post(&remote(Opcode::Write, 1, &[sge(VA, len, ka)], VA, kb));
        while let Some(f) = a.pull() {
            b.give(&f);
            stream.extend(f);
            sent += 1;
        }
        a.ack_all();
        assert_eq!(contents(&mb, len), data, "{len}");
    }
    assert_eq!(b.qp.state(), RdmapState::Rts);
    assert_eq!(strip(&stream).len(), sent);
}

/// Conformance 34, 35 with markers: arrivals of any size.
#[test]
fn c34_marked_fpdus_are_taken_from_any_split_of_the_stream() {
    for cut in [1, 2, 3, 5, 509, 512, 515, 4000, 100_000] {
        let (mut a, mut b) = (marked(true), marked(false));
        let (ka, ma) = a.env.mr(VA, 20_000, REMOTE);
        let (kb, mb) = b.env.mr(VA, 20_000, REMOTE);
        ma.write(0, &pattern(20_000, 1)).expect("in range");
        b.env.post_recv(9, &[sge(VA + 10_000, 10_000, kb)]);
        let (x, y) = ([sge(VA, 10_000, ka)], [sge(VA + 10_000, 9_999, ka)]);
        a.env.post(&remote(Opcode::Write, 1, &x, VA, kb));
        a.env.post(&wr(Opcode::Send, 2, SendData::Sges(&y)));
        let stream = a.pull_all();
        let mut bytes = 0;
        for c in stream.chunks(cut) {
            bytes += b.give(c).bytes;
        }
        assert_eq!(bytes, stream.len(), "every octet is accounted for");
        assert!(contents(&mb, 19_999) == pattern(20_000, 1)[..19_999]);
        assert_eq!(b.env.recv_statuses().len(), 1);
    }
}

/// Payload of gather lists begins and ends at any octet, and a builder may have room for a part of it
/// only, as buffers of a pool do for the FPDUs of large segments.
#[test]
fn an_fpdu_is_the_same_in_whatever_pieces_it_is_gathered_and_stored() {
    for first in [1, 3, 64, 255, 500, 700] {
        let whole = [sge(VA, 1400, Stag(0))];
        let cut = [
            sge(VA, first, Stag(0)),
            sge(VA + first as u64, 1400 - first, Stag(0)),
        ];
        let mut built = Vec::new();
        for (sges, piece) in [(&whole[..], 0), (&cut[..], 0), (&cut, 5), (&whole, 300)] {
            let mut a = marked(true);
            let (k, m) = a.env.mr(VA, 4096, REMOTE);
            m.write(0, &pattern(4096, 5)).expect("in range");
            let sges: Vec<_> = sges.iter().map(|s| Sge { lkey: k.0, ..*s }).collect();
            a.env.post(&remote(Opcode::Write, 1, &sges, VA, Stag(77)));
            let rec =
                a.qp.next_record(&mut a.env, 1 << 20)
                    .expect("an FPDU")
                    .record;
            let mut f = Frame {
                piece,
                ..Frame::default()
            };
            a.qp.build_fpdu(&a.env.keys, &rec, &mut f).expect("built");
            built.push(f.bytes);
        }
        assert_eq!(strip(&built[0]).len(), 1);
        assert!(built.iter().all(|b| *b == built[0]), "{first}");
    }
}

/// A Terminate and a Read Response have markers as everything else.
#[test]
fn all_kinds_of_fpdu_carry_markers() {
    let (mut a, mut b) = (marked(true), marked(false));
    let (ka, _) = a.env.mr(VA, 4096, REMOTE);
    let (kb, mb) = b.env.mr(VA, 4096, REMOTE);
    mb.write(0, &pattern(4096, 3)).expect("in range");
    a.env
        .post(&remote(Opcode::Read, 1, &[sge(VA, 4096, ka)], VA, kb));
    b.give(&a.pull_all());
    a.ack_all();
    let mut stream = b.pull_all();
    b.give(&{
        a.env.post(&remote(
            Opcode::Write,
            2,
            &[sge(VA, 8, ka)],
            0,
            Stag(0x4200),
        ));
        a.pull_all()
    });
    stream.extend(b.pull_all());
    let frames = strip(&stream);
    assert_eq!(frames.last().expect("a Terminate")[3], 0x47);
    a.give(&stream);
    assert_eq!(a.env.statuses()[0].1, siw_shm::WcStatus::SUCCESS);
    assert_eq!(
        a.qp.received_terminate().expect("told").to_string(),
        "1/1/00"
    );
}

/// One Write of 1000 octets: markers at 0 and 512.
fn two_markers() -> (End, Vec<u8>, std::sync::Arc<siw_shm::SharedMemory>) {
    let b = marked(false);
    let (kb, mb) = b.env.mr(VA, 4096, REMOTE);
    let mut plain = vec![0xc1, 0x40];
    plain.extend(kb.0.to_be_bytes());
    plain.extend(VA.to_be_bytes());
    plain.extend([5; 1000]);
    let f = mpa::fpdu::encode_fpdu_at(&[&plain], true, mpa::marker::MarkerPosition::START);
    (b, f.into_vec(), mb)
}

fn fix_crc(f: &mut [u8]) {
    let n = f.len() - 4;
    let crc = crc32c::crc32c(&f[..n]);
    f[n..].copy_from_slice(&crc.to_le_bytes());
}

/// Conformance 31: RFC 5044 section 4.3, error code 3 of section 8.
#[test]
fn c31_a_marker_that_points_elsewhere_ends_the_stream_with_2_0_03() {
    for (at, wrong) in [(0, 4u16), (512, 504), (512, 512), (512, 0)] {
        let (mut b, mut f, mem) = two_markers();
        assert_eq!(f[512..516], [0, 0, 0x01, 0xfc], "508 octets back");
        f[at + 2..at + 4].copy_from_slice(&wrong.to_be_bytes());
        fix_crc(&mut f);
        b.give(&f);
        let t = strip(&b.pull().expect("a Terminate leaves")).remove(0);
        assert_eq!(parse_terminate_ulpdu(&t).to_string(), "2/0/03");
        assert_eq!(contents(&mem, 8), [0; 8], "nothing is placed");
    }
}

fn parse_terminate_ulpdu(f: &[u8]) -> TerminateCode {
    rdmap::terminate::ReceivedTerminate::parse(&f[2 + 18..f.len() - 4])
        .expect("well formed")
        .code
}

/// Conformance 32, 33.
#[test]
fn c32_c33_reserved_bits_and_the_low_bits_of_the_pointer_do_not_matter() {
    let (mut b, mut f, mem) = two_markers();
    f[0..2].copy_from_slice(&[0xff, 0xff]);
    f[3] |= 3;
    f[512..514].copy_from_slice(&[0xa5, 0x5a]);
    f[515] |= 1;
    fix_crc(&mut f);
    b.give(&f);
    assert_eq!(b.qp.state(), RdmapState::Rts);
    assert_eq!(contents(&mem, 1000), [5; 1000]);
}

/// Conformance 27 with markers: damage anywhere, markers included.
#[test]
fn c27_every_damaged_octet_of_a_marked_fpdu_breaks_the_crc() {
    let len = two_markers().1.len();
    for i in (0..len).filter(|i| !(4..6).contains(i)) {
        let (mut b, mut f, mem) = two_markers();
        f[i] ^= 0x10;
        b.give(&f);
        assert_eq!(
            b.qp.found_error(),
            Some(TerminateCode::MPA_CRC),
            "octet {i}"
        );
        assert_eq!(contents(&mem, 8), [0; 8]);
    }
}

/// A Terminate that an initiator sends before there is a queue pair obeys the reply's M flag.
#[test]
fn a_standalone_terminate_starts_with_a_marker_when_the_peer_wants_them() {
    let f = rdmap::terminate::encode_standalone_fpdu(
        TerminateCode::MPA_NO_RTR,
        TerminateBitOrder::Rfc,
        true,
        true,
    );
    assert_eq!(strip(&f).len(), 1);
    assert_eq!(f[..4], [0; 4]);
}
