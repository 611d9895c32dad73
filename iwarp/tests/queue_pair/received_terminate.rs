//! Effects of a received Terminate, and the layout of the message in both bit orders.
use crate::common::*;
use siw_iwarp::rdmap::ReadRequestHeader;
use siw_iwarp::*;
use siw_memory::Stag;
use siw_shm::wqe::SendData;
use siw_shm::{Opcode, WcStatus};

const VA: u64 = 0x10_0000;
const LEN: usize = 4096;

fn term(payload: &[u8]) -> Vec<u8> {
    untagged([0x41, 0x47], 0, 2, 1, 0, payload)
}

/// An initiator with an unacknowledged WRITE, SEND, READ and WRITE; also returns their FPDUs.
fn busy() -> (End, Vec<Vec<u8>>) {
    let mut initiator = End::new(negotiated(true));
    let (key, _) = initiator.env.mr(VA, LEN, REMOTE);
    let sges = [sge(VA, 16, key)];
    initiator
        .env
        .post(&remote(Opcode::Write, 1, &sges, 0x100, Stag(0x11)));
    initiator
        .env
        .post(&wr(Opcode::Send, 2, SendData::Sges(&sges)));
    initiator
        .env
        .post(&remote(Opcode::Read, 3, &sges, 0x300, Stag(0x33)));
    initiator
        .env
        .post(&remote(Opcode::Write, 4, &sges, 0x400, Stag(0x44)));
    initiator.env.post_recv(9, &[]);
    let fpdu = std::iter::from_fn(|| initiator.pull()).collect();
    (initiator, fpdu)
}

#[test]
fn terminate_fails_the_work_request_that_it_quotes() {
    for (code, at, read, status) in [
        (TerminateCode::DDP_STAG, 0, false, WcStatus::REM_ACCESS_ERR),
        (
            TerminateCode::DDP_NO_BUFFER,
            1,
            false,
            WcStatus::RNR_RETRY_EXC_ERR,
        ),
        (
            TerminateCode::DDP_TOO_LONG,
            1,
            false,
            WcStatus::REM_INV_REQ_ERR,
        ),
        (
            TerminateCode::RDMAP_ACCESS,
            2,
            true,
            WcStatus::REM_ACCESS_ERR,
        ),
        (TerminateCode::RDMAP_OPCODE, 2, false, WcStatus::REM_OP_ERR),
        (
            TerminateCode::RDMAP_ACCESS,
            3,
            false,
            WcStatus::REM_ACCESS_ERR,
        ),
    ] {
        let (mut initiator, frames) = busy();
        let ulpdu_octets = ulpdu(&frames[at]);
        let by = rdmap::terminate::OffendingSegment {
            ulpdu_len: ulpdu_octets.len() as u16,
            hdr: hdr18(ulpdu_octets),
            read: read
                .then(|| ReadRequestHeader::parse(ulpdu_octets[18..46].try_into().expect("28"))),
        };
        let payload = rdmap::terminate::TerminatePayload::new(code, Some(&by));
        initiator.give(&term(payload.as_bytes()));
        assert_eq!(initiator.qp.state(), RdmapState::Terminate);
        assert_eq!(initiator.qp.received_terminate(), Some(code));
        assert!(initiator.pull().is_none(), "no Terminate in return");
        assert_eq!(initiator.qp.requested_close(), Some(CloseKind::Graceful));
        initiator.ack_all();
        initiator
            .qp
            .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
        let mut want = Vec::new();
        for i in 0..4 {
            want.push((
                i as u64 + 1,
                match i {
                    i if i == at => status,
                    // The Read before the last Write was never answered.
                    i if i < at && i != 2 => WcStatus::SUCCESS,
                    _ => WcStatus::WR_FLUSH_ERR,
                },
            ));
        }
        assert_eq!(initiator.env.statuses(), want, "{code}");
        assert_eq!(initiator.env.recv_statuses(), [(9, WcStatus::WR_FLUSH_ERR)]);
        assert_eq!(initiator.qp.state(), RdmapState::Error);
    }
}

#[test]
fn siw_quotes_the_length_of_a_refused_read_for_its_msn() {
    let (mut initiator, frames) = busy();
    // RDMAP, remote protection, STag; M, D and R; no segment length; the header of the request.
    let mut payload = vec![0x10, 0, 0x07, 0, 0, 0];
    payload.extend(&ulpdu(&frames[2])[..46]);
    payload[16..20].copy_from_slice(&16u32.to_be_bytes());
    initiator.give(&term(&payload));
    assert_eq!(
        initiator.qp.received_terminate(),
        Some(TerminateCode::RDMAP_STAG)
    );
    initiator.ack_all();
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
    let statuses: Vec<WcStatus> = initiator.env.statuses().iter().map(|sges| sges.1).collect();
    let want = [
        WcStatus::SUCCESS,
        WcStatus::SUCCESS,
        WcStatus::REM_ACCESS_ERR,
        WcStatus::WR_FLUSH_ERR,
    ];
    assert_eq!(statuses, want);
}

#[test]
fn siw_sets_the_read_header_bit_without_a_read_header() {
    let (mut initiator, frames) = busy();
    let mut payload = vec![0x10, 9, 0x07, 0, 0, 0];
    payload.extend(&ulpdu(&frames[1])[..18]);
    initiator.give(&term(&payload));
    let code = initiator.qp.received_terminate().expect("sound");
    assert_eq!(code, TerminateCode::RDMAP_CANNOT_INVALIDATE_PROT);
}

#[test]
fn terminate_without_headers_fails_the_oldest_request() {
    for payload in [[0x20, 2, 0, 0], [0x02, 2, 0, 0], [0x23, 2, 0, 0]] {
        let (mut initiator, _) = busy();
        initiator.give(&term(&payload));
        assert_eq!(
            initiator.qp.received_terminate(),
            Some(TerminateCode::MPA_CRC)
        );
        assert_eq!(initiator.env.statuses(), [(1, WcStatus::GENERAL_ERR)]);
        initiator
            .qp
            .on_tcp_closed(&mut initiator.env, CloseReason::Reset);
        assert_eq!(initiator.env.statuses().len(), 4);
    }
}

/// TCP has acknowledged the first Write, whose payload the port still references.
#[test]
fn terminate_without_headers_passes_over_a_finished_request() {
    let mut initiator = End::new(negotiated(true));
    initiator.send_by_reference();
    initiator.env.held = true;
    let (key, _) = initiator.env.mr(VA, LEN, REMOTE);
    let sges = [sge(VA, 16, key)];
    for number in [1, 2] {
        let write = remote(Opcode::Write, number, &sges, 0x100, Stag(0x11));
        initiator.env.post(&write);
    }
    initiator.pull().expect("the first Write");
    initiator.ack_all();
    initiator.pull().expect("the second Write");
    initiator.give(&term(&[0x20, 2, 0, 0]));
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
    let want = [(1, WcStatus::SUCCESS), (2, WcStatus::GENERAL_ERR)];
    assert_eq!(initiator.env.statuses(), want);
}

#[test]
fn c78_malformed_terminate_is_a_local_error() {
    for fpdu in [
        term(&[]),
        term(&[0x11, 0]),
        term(&[0x11, 0, 0xc0, 0, 0, 30]),
        untagged([0x41, 0x47], 0, 2, 2, 0, &[0x11, 0, 0, 0]),
    ] {
        let (mut initiator, _) = busy();
        initiator.give(&fpdu);
        assert_eq!(initiator.qp.state(), RdmapState::Terminate);
        assert_eq!(initiator.qp.received_terminate(), None);
        assert!(initiator.pull().is_none());
        assert_eq!(initiator.env.events, [QpEvent::QpFatal]);
        initiator
            .qp
            .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
        assert_eq!(initiator.env.statuses().len(), 4);
    }
}

#[test]
fn both_bit_orders_are_distinguished_for_every_code() {
    let quoted = rdmap::terminate::OffendingSegment {
        ulpdu_len: 15,
        hdr: hdr18(ulpdu(&write(1, 2, &[3]))),
        read: None,
    };
    for (layer, error_type, codes) in [
        (0u8, 1u8, &[0u8, 1, 2, 3, 4, 9, 0xff][..]),
        (0, 2, &[5, 6, 7, 8, 9, 0xff]),
        (1, 1, &[0, 1, 2, 3, 4]),
        (1, 2, &[1, 2, 3, 4, 5, 6]),
        (2, 0, &[1, 2, 3, 4, 5, 6, 7]),
        (0, 0, &[0]),
    ] {
        for &code in codes {
            let code = TerminateCode {
                layer,
                error_type,
                code,
            };
            let payload = rdmap::terminate::TerminatePayload::new(code, Some(&quoted));
            let mut bytes = payload.as_bytes().to_vec();
            let received = rdmap::terminate::ReceivedTerminate::parse(&bytes).expect("sound");
            assert_eq!((received.code, received.is_siw_order), (code, false));
            bytes[0] = bytes[0].rotate_left(4);
            let received = rdmap::terminate::ReceivedTerminate::parse(&bytes).expect("sound");
            let same = layer == error_type;
            // 1/2 and 2/1: only one of them is registered.
            assert_eq!(
                (received.code, received.is_siw_order),
                (code, !same),
                "{code}"
            );
            // siw's control bits are at the other end, which identifies even 1/1.
            let payload = payload.in_bit_order(rdmap::terminate::TerminateBitOrder::Siw);
            let received =
                rdmap::terminate::ReceivedTerminate::parse(payload.as_bytes()).expect("sound");
            let quotes = payload.as_bytes().len() > 4;
            assert_eq!(
                (received.code, received.is_siw_order),
                (code, quotes || !same),
                "{code}"
            );
            assert_eq!(received.ddp, quotes.then_some(quoted.hdr));
        }
    }
}

/// Conformance 81: RFC 5040 figure 10, which headers a Terminate quotes, for each layer and type.
#[test]
fn c81_header_control_bits_follow_figure_10() {
    let by = rdmap::terminate::OffendingSegment {
        ulpdu_len: 46,
        hdr: hdr18(&[0x41; 18]),
        read: Some(ReadRequestHeader::default()),
    };
    for (layer, error_type, hct, len) in [
        (0, 0, 0x00, 4),
        (0, 1, 0xe0, 4 + 2 + 18 + 28),
        (0, 2, 0xe0, 4 + 2 + 18 + 28),
        (1, 0, 0x00, 4),
        (1, 1, 0xc0, 4 + 2 + 18),
        (1, 2, 0xc0, 4 + 2 + 18),
        (2, 0, 0x00, 4),
    ] {
        let code = TerminateCode {
            layer,
            error_type,
            code: 1,
        };
        let payload = rdmap::terminate::TerminatePayload::new(code, Some(&by));
        let b = payload.as_bytes();
        assert_eq!(
            (b[0], b[2], b[3], b.len()),
            (layer << 4 | error_type, hct, 0, len)
        );
        if hct & 0x80 != 0 {
            assert_eq!(b[4..6], [0, 46], "the length of the ULPDU");
        }
        let alone = rdmap::terminate::TerminatePayload::new(code, None);
        assert_eq!(alone.as_bytes()[2], 0, "nothing to quote");
    }
}

#[test]
fn user_terminate_leaves_and_closes() {
    let (mut initiator, _) = busy();
    initiator
        .qp
        .send_terminate(TerminateCode::LOCAL_CATASTROPHIC);
    initiator.expect_terminate("0/0/00");
    initiator.qp.send_terminate(TerminateCode::MPA_CRC);
    assert!(initiator.pull().is_none());
}
