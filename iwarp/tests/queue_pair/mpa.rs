//! Connection set-up: two state machines against each other, and against raw frames of peers.
use crate::common::parse_terminate;
use siw_iwarp::mpa::*;
use siw_iwarp::{ByteStream, RxStream};

fn cfg() -> MpaConfig {
    MpaConfig {
        max_ird: 16,
        max_ord: 16,
        ..MpaConfig::default()
    }
}

fn stream(b: &[u8]) -> ByteStream {
    ByteStream::from(b)
}

/// A frame built by hand: key, flags, revision, data.
fn frame(key: &[u8; 16], flags: u8, revision: u8, data: &[u8]) -> Vec<u8> {
    let mut f = key.to_vec();
    f.extend([flags, revision]);
    f.extend((data.len() as u16).to_be_bytes());
    f.extend(data);
    f
}

const REQ: &[u8; 16] = b"MPA ID Req Frame";
const REP: &[u8; 16] = b"MPA ID Rep Frame";

fn enhanced(a: bool, b: bool, ird: u16, c: bool, d: bool, ord: u16) -> [u8; 4] {
    let i = ird | u16::from(a) << 15 | u16::from(b) << 14;
    let o = ord | u16::from(c) << 15 | u16::from(d) << 14;
    [i.to_be_bytes(), o.to_be_bytes()]
        .concat()
        .try_into()
        .expect("4")
}

/// Connects two configured sides; also returns the reply's octets.
fn connect(
    ci: &MpaConfig,
    cr: &MpaConfig,
    depths: [u16; 4],
) -> (InitiatorStep, Vec<u8>, NegotiatedParameters) {
    let mut i = MpaInitiator::new(ci, depths[0], depths[1], b"ping").expect("valid");
    let mut r = MpaResponder::new(cr);
    let ResponderStep::Request(q) = r.on_stream(&mut stream(&i.request_frame())) else {
        panic!("a request")
    };
    assert_eq!(q.private_data, b"ping");
    let (reply, n) = r.accept(depths[2], depths[3], b"pong").expect("accepts");
    let step = i.on_stream(&mut stream(&reply));
    (step, reply.into_vec(), n)
}

fn accepted(step: InitiatorStep) -> (NegotiatedParameters, Vec<u8>) {
    match step {
        InitiatorStep::Accepted {
            negotiated,
            private_data,
        } => (negotiated, private_data),
        s => panic!("{s:?}"),
    }
}

/// Conformance 18, and both ends agree.
#[test]
fn c18_crc_is_on_when_either_side_asks() {
    use MpaCrcPolicy::*;
    for (a, b, on) in [
        (IfAsked, IfAsked, false),
        (IfAsked, Asked, true),
        (Asked, IfAsked, true),
        (Asked, Asked, true),
        (IfAsked, Required, true),
        (Required, IfAsked, true),
    ] {
        for revision in [1, 2] {
            let c = |crc| MpaConfig {
                crc,
                revision,
                ..cfg()
            };
            let (step, _, n) = connect(&c(a), &MpaConfig { crc: b, ..cfg() }, [1; 4]);
            let (m, _) = accepted(step);
            assert_eq!((m.crc, n.crc), (on, on));
        }
    }
}

/// Conformance 4, 5, 6.
#[test]
fn c4_c5_c6_revision_and_s_bit_are_answered_in_kind() {
    for revision in [1, 2] {
        let (step, reply, n) = connect(&MpaConfig { revision, ..cfg() }, &cfg(), [4; 4]);
        let (m, pd) = accepted(step);
        assert_eq!(pd, b"pong");
        assert_eq!(
            (reply[17], reply[16] & 0x10 != 0),
            (revision, revision == 2)
        );
        assert_eq!((m.revision, n.revision), (revision, revision));
        assert!(m.initiator && !n.initiator);
    }
    // Revision 2 without S has no enhanced data.
    for (revision, want) in [(1, 1), (2, 2)] {
        let mut r = MpaResponder::new(&cfg());
        let ResponderStep::Request(q) = r.on_stream(&mut stream(&frame(REQ, 0, revision, b"x")))
        else {
            panic!("a request")
        };
        assert_eq!((q.peer_ird, q.peer_ord), (None, None));
        let (reply, n) = r.accept(3, 5, b"").expect("accepts");
        assert_eq!((reply[16] & 0x10, reply[17]), (0, want));
        // Nothing is negotiated: the peer may have as many Reads outstanding as the device can hold.
        assert_eq!((n.ird, n.ord, n.rtr), (16, 5, None));
    }
}

/// Conformance 3.
#[test]
fn c3_unsupported_revisions_fail() {
    let fails = |cfg: &MpaConfig, f: &[u8], e| {
        let s = MpaResponder::new(cfg).on_stream(&mut stream(f));
        assert_eq!(
            s,
            ResponderStep::Failed {
                error: e,
                send: None
            }
        );
    };
    fails(&cfg(), &frame(REQ, 0, 3, b""), MpaError::BadRevision(3));
    // Revision 0 belongs to version 0 of RDMAP and DDP (RFC 5044 appendix C).
    fails(&cfg(), &frame(REQ, 0, 0, b""), MpaError::BadRevision(0));
    let one = MpaConfig {
        revision: 1,
        ..cfg()
    };
    fails(
        &one,
        &frame(REQ, 0x10, 2, &[0; 4]),
        MpaError::BadRevision(2),
    );
    let mut i = MpaInitiator::new(&one, 1, 1, b"").expect("valid");
    let s = i.on_stream(&mut stream(&frame(REP, 0, 2, b"")));
    assert_eq!(
        s,
        InitiatorStep::Failed {
            error: MpaError::BadRevision(2),
            send: None
        }
    );
    assert!(
        MpaInitiator::new(
            &MpaConfig {
                revision: 3,
                ..cfg()
            },
            1,
            1,
            b""
        )
        .is_err()
    );
}

/// Conformance 1, 2, 9, 10.
#[test]
fn c1_c2_c8_c9_c10_wrong_openings_fail() {
    let bad = |f: &[u8]| match MpaResponder::new(&cfg()).on_stream(&mut stream(f)) {
        ResponderStep::Failed { error, send: None } => error,
        s => panic!("{s:?}"),
    };
    assert_eq!(bad(b"GET / HTTP/1.1\r\n"), MpaError::BadKey);
    assert_eq!(bad(&frame(REP, 0, 1, b"")), MpaError::UnexpectedReply);
    assert_eq!(
        bad(&frame(REQ, 0x10, 2, &[0; 3])),
        MpaError::EnhancedTooShort
    );
    assert_eq!(
        bad(&frame(REQ, 0, 1, &[0; 513])),
        MpaError::PrivateDataTooLong(513)
    );
    let mut f = frame(REQ, 0, 1, b"");
    f.push(0);
    assert_eq!(bad(&f), MpaError::TrailingBytes);

    let badi = |f: &[u8]| {
        let mut i = MpaInitiator::new(&cfg(), 1, 1, b"").expect("valid");
        match i.on_stream(&mut stream(f)) {
            InitiatorStep::Failed { error, send: None } => error,
            s => panic!("{s:?}"),
        }
    };
    let e = enhanced(true, false, 4, true, false, 4);
    assert_eq!(badi(b"HTTP/1.1 400 Bad"), MpaError::BadKey);
    assert_eq!(badi(&frame(REQ, 0x10, 2, &e)), MpaError::BothInitiators);
    assert_eq!(badi(&frame(REP, 0x00, 2, b"")), MpaError::EnhancedMismatch);
    assert_eq!(badi(&frame(REP, 0x00, 1, b"")), MpaError::EnhancedMismatch);
    let mut f = frame(REP, 0x10, 2, &e);
    f.push(0);
    assert_eq!(badi(&f), MpaError::TrailingBytes);
}

#[test]
fn bytes_before_the_answer_fail_a_responder_that_still_decides() {
    let mut r = MpaResponder::new(&cfg());
    assert_eq!(r.reject(b""), Err(MpaError::WrongState));
    assert!(r.accept(1, 1, b"").is_err());
    let mut s = stream(&frame(REQ, 0, 1, b""));
    assert!(matches!(r.on_stream(&mut s), ResponderStep::Request(_)));
    assert_eq!(r.on_stream(&mut s), ResponderStep::NeedMore);
    s.push(&[1]);
    assert!(matches!(
        r.on_stream(&mut s),
        ResponderStep::Failed {
            error: MpaError::TrailingBytes,
            ..
        }
    ));
}

/// Conformance 11.
#[test]
fn c11_both_machines_take_one_byte_fragments() {
    let mut i = MpaInitiator::new(&cfg(), 4, 4, &[7; 100]).expect("valid");
    let mut r = MpaResponder::new(&cfg());
    let mut s = ByteStream::new();
    let req = i.request_frame();
    for (n, b) in req.iter().enumerate() {
        s.push(&[*b]);
        let step = r.on_stream(&mut s);
        assert_eq!(
            matches!(step, ResponderStep::Request(_)),
            n + 1 == req.len()
        );
    }
    let (reply, _) = r.accept(4, 4, &[8; 100]).expect("accepts");
    for (n, b) in reply.iter().enumerate() {
        s.push(&[*b]);
        let step = i.on_stream(&mut s);
        assert_eq!(
            matches!(step, InitiatorStep::Accepted { .. }),
            n + 1 == reply.len()
        );
    }
    assert_eq!(s.available(), 0);
}

/// Conformance 7.
#[test]
fn c7_private_data_fills_the_frame_to_its_limit() {
    for (revision, max) in [(1, 512), (2, 508)] {
        let c = MpaConfig { revision, ..cfg() };
        for n in [0, 1, 248, 252, max] {
            let pd = vec![3; n];
            let mut i = MpaInitiator::new(&c, 1, 1, &pd).expect("fits");
            let mut r = MpaResponder::new(&cfg());
            let ResponderStep::Request(q) = r.on_stream(&mut stream(&i.request_frame())) else {
                panic!("a request")
            };
            assert_eq!(q.private_data, pd);
            let (reply, _) = r.accept(1, 1, &pd).expect("fits");
            assert_eq!(accepted(i.on_stream(&mut stream(&reply))).1, pd);
            let reject = r.reject(&pd).expect("fits");
            assert_eq!(
                i.on_stream(&mut stream(&reject)),
                InitiatorStep::Rejected { private_data: pd }
            );
        }
        assert_eq!(
            MpaInitiator::new(&c, 1, 1, &vec![0; max + 1]).err(),
            Some(MpaError::OwnPrivateDataTooLong(max + 1))
        );
    }
}

/// Conformance 14, 15, 16.
#[test]
fn c14_c15_c16_r_bit_counts_in_replies_only() {
    let mut r = MpaResponder::new(&cfg());
    let s = r.on_stream(&mut stream(&frame(REQ, 0x2f, 1, b"hi")));
    assert!(matches!(s, ResponderStep::Request(q) if q.private_data == b"hi"));
    let mut i = MpaInitiator::new(&cfg(), 1, 1, b"").expect("valid");
    // A siw reject, with and without enhanced data, at either revision.
    for f in [
        frame(REP, 0x30, 2, &[&[0; 4], &b"no"[..]].concat()),
        frame(REP, 0x20, 2, b"no"),
        frame(REP, 0x20, 1, b"no"),
    ] {
        assert_eq!(
            i.on_stream(&mut stream(&f)),
            InitiatorStep::Rejected {
                private_data: b"no".to_vec()
            }
        );
    }
}

/// RFC 5044 section 7.1.1: a device that cannot send markers may not accept a peer that needs them.
#[test]
fn request_for_markers_is_rejected_when_they_are_off() {
    let never = MpaConfig {
        markers: MarkerPolicy::Never,
        ..cfg()
    };
    let s = MpaResponder::new(&never).on_stream(&mut stream(&frame(REQ, 0x80, 1, b"")));
    let ResponderStep::Failed {
        error: MpaError::MarkersUnsupported,
        send: Some(reply),
    } = s
    else {
        panic!("{s:?}")
    };
    assert_eq!(reply[..16], REP[..]);
    assert_eq!(reply[16] & 0x20, 0x20);
    let mut i = MpaInitiator::new(&never, 4, 4, b"").expect("valid");
    let reply = frame(REP, 0xd0, 2, &enhanced(false, false, 4, false, false, 4));
    let InitiatorStep::Failed { error, send } = i.on_stream(&mut stream(&reply)) else {
        panic!("taken")
    };
    assert_eq!(error, MpaError::MarkersUnsupported);
    // Conformance 26, with the marker that the peer expects.
    let term = send.expect("a Terminate");
    assert_eq!(
        (&term[..4], &term[24..28]),
        (&[0; 4][..], &[0x20, 5, 0, 0][..])
    );
}

/// Conformance 18, 26: a reply without C is accepted under `Asked`, and refused under `Required`.
#[test]
fn c26_reply_without_the_required_crc_is_2_0_05() {
    let reply = frame(REP, 0x10, 2, &enhanced(false, false, 4, false, false, 4));
    let answer = |crc| {
        let mut i = MpaInitiator::new(&MpaConfig { crc, ..cfg() }, 4, 4, b"").expect("valid");
        i.on_stream(&mut stream(&reply))
    };
    let (n, _) = accepted(answer(MpaCrcPolicy::Asked));
    assert!(n.crc);
    match answer(MpaCrcPolicy::Required) {
        InitiatorStep::Failed {
            error: MpaError::CrcRefused,
            send: Some(term),
        } => assert_eq!(term[20..24], [0x20, 5, 0, 0]),
        s => panic!("{s:?}"),
    }
}

/// Conformance 17: M in a frame controls the direction toward the frame's sender.
#[test]
fn c17_each_side_sends_markers_when_the_other_asked_for_them() {
    use MarkerPolicy::*;
    for (ci, cr) in [
        (Accept, Accept),
        (Accept, Request),
        (Request, Accept),
        (Request, Request),
    ] {
        let with = |markers| MpaConfig { markers, ..cfg() };
        let (step, reply, r) = connect(&with(ci), &with(cr), [4; 4]);
        let (i, _) = accepted(step);
        assert_eq!(reply[16] & 0x80 != 0, cr == Request, "M of the reply");
        assert_eq!(
            (r.markers_in, r.markers_out),
            (cr == Request, ci == Request)
        );
        assert_eq!(
            (i.markers_in, i.markers_out),
            (ci == Request, cr == Request)
        );
    }
    let i = MpaInitiator::new(&cfg(), 4, 4, b"").expect("valid");
    assert_eq!(i.request_frame()[16] & 0x80, 0, "not asked for by default");
}

/// Conformance 20, 21, 22: every combination of offered and supported kinds.
#[test]
fn c20_c21_c22_rtr_is_one_kind_that_both_sides_know() {
    let sets: Vec<RtrKinds> = (0..8)
        .map(|i| RtrKinds {
            send: i & 1 != 0,
            write: i & 2 != 0,
            read: i & 4 != 0,
        })
        .collect();
    for &offer in &sets {
        for &know in &sets {
            let ci = MpaConfig {
                rtr_kinds: offer,
                ..cfg()
            };
            let cr = MpaConfig {
                rtr_kinds: know,
                ..cfg()
            };
            let mut i = MpaInitiator::new(&ci, 4, 4, b"").expect("valid");
            let mut r = MpaResponder::new(&cr);
            let step = r.on_stream(&mut stream(&i.request_frame()));
            if offer.is_empty() {
                assert!(
                    matches!(step, ResponderStep::Request(_)),
                    "A=0: nothing to agree on"
                );
                let (reply, n) = r.accept(4, 4, b"").expect("accepts");
                assert_eq!((reply[20] & 0xc0, reply[22] & 0xc0), (0, 0));
                assert_eq!(n.rtr, None);
                assert_eq!(accepted(i.on_stream(&mut stream(&reply))).0.rtr, None);
            } else if offer.intersection(know).is_empty() {
                let ResponderStep::Failed {
                    error: MpaError::NoRtr,
                    send: Some(reply),
                } = step
                else {
                    panic!("{step:?}")
                };
                // It names one kind that the responder supports.
                assert_eq!(reply[16] & 0x20, 0x20, "R");
                let named = RtrKinds {
                    send: reply[20] & 0x40 != 0,
                    write: reply[22] & 0x80 != 0,
                    read: reply[22] & 0x40 != 0,
                };
                let kind = know.choose().map_or(RtrKinds::NONE, RtrKinds::from_kind);
                assert_eq!(named, kind);
                assert_eq!(
                    reply[20] & 0x80 != 0,
                    !know.is_empty(),
                    "A with a kind alone"
                );
            } else {
                assert!(matches!(step, ResponderStep::Request(_)));
                let (reply, n) = r.accept(4, 4, b"").expect("accepts");
                let bits = (reply[20] & 0x40).count_ones() + (reply[22] & 0xc0).count_ones();
                assert_eq!(bits, 1, "exactly one kind is returned");
                assert_eq!(reply[20] & 0x80, 0x80, "A echoed");
                let m = accepted(i.on_stream(&mut stream(&reply))).0;
                assert_eq!(m.rtr, n.rtr);
                assert!(offer.intersection(know).contains(m.rtr.expect("agreed")));
            }
        }
    }
}

#[test]
fn immediate_with_send_is_agreed_on_by_both_or_by_nobody() {
    let with = |immediate_with_send| MpaConfig {
        immediate_with_send,
        ..cfg()
    };
    for (ours, theirs) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut i = MpaInitiator::new(&with(ours), 4, 4, b"").expect("valid");
        let mut r = MpaResponder::new(&with(theirs));
        let request = i.request_frame();
        assert_eq!(request[16] & 0x0f, if ours { 8 } else { 0 });
        assert!(matches!(
            r.on_stream(&mut stream(&request)),
            ResponderStep::Request(_)
        ));
        let (reply, n) = r.accept(4, 4, b"").expect("accepts");
        let both = ours && theirs;
        assert_eq!(reply[16] & 0x0f, if both { 4 } else { 0 });
        let m = accepted(i.on_stream(&mut stream(&reply))).0;
        assert_eq!((m.joins_immediate, n.joins_immediate), (both, both));
    }
    // A peer that echoes the reserved bits of the request does not agree to anything.
    let mut i = MpaInitiator::new(&cfg(), 4, 4, b"").expect("valid");
    let e = enhanced(true, false, 4, true, false, 4);
    let echoed = frame(REP, 0x50 | i.request_frame()[16] & 0x0f, 2, &e);
    let m = accepted(i.on_stream(&mut stream(&echoed))).0;
    assert!(!m.joins_immediate);
}

/// Conformance 20: siw requests with A=0, and stray options are ignored.
#[test]
fn c20_without_a_the_options_do_not_count() {
    let mut r = MpaResponder::new(&cfg());
    let e = enhanced(false, true, 8, true, true, 8);
    assert!(matches!(
        r.on_stream(&mut stream(&frame(REQ, 0x10, 2, &e))),
        ResponderStep::Request(_)
    ));
    let (reply, n) = r.accept(8, 8, b"").expect("accepts");
    assert_eq!(n.rtr, None);
    assert_eq!(reply[20..24], enhanced(false, false, 8, false, false, 8));
}

/// Conformance 22: the Terminate FPDU is sent without a queue pair.
#[test]
fn c22_reply_with_an_unknown_rtr_is_2_0_07() {
    let mut i = MpaInitiator::new(&cfg(), 4, 4, b"").expect("valid");
    for e in [
        enhanced(true, true, 4, false, false, 4),
        enhanced(true, false, 4, false, false, 4),
    ] {
        let InitiatorStep::Failed {
            error: MpaError::NoRtr,
            send: Some(f),
        } = i.on_stream(&mut stream(&frame(REP, 0x50, 2, &e)))
        else {
            panic!("fails")
        };
        assert_eq!(parse_terminate(&f).code.to_string(), "2/0/07");
    }
}

/// Conformance 23: a responder's ORD above our IRD raises the IRD up to the device's limit.
#[test]
fn c23_responder_that_reads_deeper_than_the_device_is_2_0_06() {
    let reply = |ird, ord| frame(REP, 0x50, 2, &enhanced(true, false, ird, true, false, ord));
    let mut i = MpaInitiator::new(&cfg(), 4, 8, b"").expect("valid");
    let (n, _) = accepted(i.on_stream(&mut stream(&reply(3, 16))));
    assert_eq!((n.ird, n.ord), (16, 3));
    // Linux siw rounds its ORD up to a power of two, so a power of two is announced.
    let i3 = MpaInitiator::new(&cfg(), 3, 0, b"").expect("valid");
    assert_eq!(i3.request_frame()[20..22], [0x80, 4]);
    let InitiatorStep::Failed {
        error,
        send: Some(f),
    } = i.on_stream(&mut stream(&reply(3, 17)))
    else {
        panic!("fails")
    };
    assert_eq!(
        error,
        MpaError::InsufficientIrd {
            peer_ord: 17,
            ird: 16
        }
    );
    assert_eq!(parse_terminate(&f).code.to_string(), "2/0/06");
}

/// Conformance 24, 25, RFC 6581 section 9.1: each side's ORD fits the other's IRD.
#[test]
fn c25_depths_fit_each_other() {
    for ii in [0, 1, 4, 16] {
        for io in [0, 1, 4, 16] {
            for ri in [0, 1, 4, 16] {
                for ro in [0, 1, 4, 16] {
                    let (step, _, r) = connect(&cfg(), &cfg(), [ii, io, ri, ro]);
                    let (i, _) = accepted(step);
                    assert!(i.ord <= r.ird && r.ord <= i.ird, "{i:?} {r:?}");
                    assert!(i.ord <= io && r.ord <= ro && r.ord <= ii && r.ird >= 1);
                }
            }
        }
    }
    // 0x3FFF in the request, 0x3FFF in the reply; our own values stay.
    let mut r = MpaResponder::new(&cfg());
    let e = enhanced(true, false, 0x3fff, false, true, 0x3fff);
    let ResponderStep::Request(q) = r.on_stream(&mut stream(&frame(REQ, 0x10, 2, &e))) else {
        panic!("a request")
    };
    assert_eq!((q.peer_ird, q.peer_ord), (None, None));
    let (reply, n) = r.accept(2, 3, b"").expect("accepts");
    assert_eq!(
        reply[20..24],
        enhanced(true, false, 0x3fff, false, true, 0x3fff)
    );
    assert_eq!((n.ird, n.ord), (2, 3));
    let mut i = MpaInitiator::new(&cfg(), 2, 3, b"").expect("valid");
    let e = enhanced(true, false, 0x3fff, true, false, 0x3fff);
    let (n, _) = accepted(i.on_stream(&mut stream(&frame(REP, 0x50, 2, &e))));
    assert_eq!((n.ird, n.ord), (2, 3));
}

/// A Read as RTR message with ORD 0 still gets IRD at the responder.
#[test]
fn c24_rtr_read_reserves_ird() {
    let mut r = MpaResponder::new(&cfg());
    let e = enhanced(true, false, 0, false, true, 0);
    assert!(matches!(
        r.on_stream(&mut stream(&frame(REQ, 0x10, 2, &e))),
        ResponderStep::Request(_)
    ));
    let (reply, n) = r.accept(0, 0, b"").expect("accepts");
    assert_eq!(n.ird, 1);
    assert_eq!(reply[20..24], enhanced(true, false, 1, false, true, 0));
}

#[test]
fn fallback_is_revision_1_and_only_once() {
    let i = MpaInitiator::new(&cfg(), 1, 1, b"x").expect("valid");
    let one = i.fallback_config().expect("offered");
    let i = MpaInitiator::new(&one, 1, 1, b"x").expect("valid");
    assert_eq!(i.request_frame()[16..20], [0x40, 1, 0, 1]);
    assert!(i.fallback_config().is_none());
    let c = MpaConfig {
        fallback_to_rev1: false,
        ..cfg()
    };
    assert!(
        MpaInitiator::new(&c, 1, 1, b"")
            .expect("valid")
            .fallback_config()
            .is_none()
    );
}

/// The request that Linux siw sends (seen on the wire), and the reply that it expects.
#[test]
fn request_of_linux_siw_is_answered_as_siw_wants_it() {
    let e = enhanced(false, false, 128, false, false, 1);
    let mut r = MpaResponder::new(&MpaConfig::default());
    let f = frame(REQ, 0x10, 2, &[&e[..], b"abc"].concat());
    let ResponderStep::Request(q) = r.on_stream(&mut stream(&f)) else {
        panic!("a request")
    };
    assert_eq!(q.private_data, b"abc");
    assert_eq!((q.peer_ird, q.peer_ord), (Some(128), Some(1)));
    let (reply, _) = r.accept(4, 4, b"").expect("accepts");
    assert_eq!((reply[16], reply[17]), (0x50, 2), "S, C, no M, no R");
    assert_eq!(reply[20..24], enhanced(false, false, 4, false, false, 4));
}

mod random {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// No input makes a state machine panic.
        #[test]
        fn machines_survive_anything(bytes in prop::collection::vec(any::<u8>(), 0..600), flags: u8, revision in 0u8..4) {
            let mut i = MpaInitiator::new(&cfg(), 4, 4, b"").expect("valid");
            i.on_stream(&mut stream(&bytes));
            i.on_stream(&mut stream(&frame(REP, flags, revision, &bytes)));
            let mut r = MpaResponder::new(&cfg());
            r.on_stream(&mut stream(&bytes));
            let mut r = MpaResponder::new(&cfg());
            if let ResponderStep::Request(_) = r.on_stream(&mut stream(&frame(REQ, flags, revision, &bytes))) {
                r.accept(9, 9, b"x").expect("fits");
                r.reject(b"x").expect("fits");
            }
        }
    }
}

/// The settings for Windows peers.
fn windows() -> MpaConfig {
    MpaConfig {
        revision: 1,
        markers: MarkerPolicy::Never,
        rtr_kinds: RtrKinds::from_kind(RtrKind::Read),
        depths_in_private_data: true,
        ..cfg()
    }
}

/// [MS-SMBD] section 6.1.
#[test]
fn depths_of_windows_are_exchanged_in_the_private_data_of_revision_1() {
    // IRD, ORD of the initiator, then of the responder.
    for (depths, ird, ord) in [
        ([8, 4, 16, 16], [8, 16], [4, 8]),
        ([8, 16, 2, 1], [8, 16], [16, 1]),
        // Depths of zero are announced as one, so that the peer may start with a Read.
        ([0, 0, 0, 0], [1, 1], [0, 0]),
    ] {
        let (step, reply, responder) = connect(&windows(), &windows(), depths);
        let (initiator, private_data) = accepted(step);
        assert_eq!(private_data, b"pong");
        assert_eq!([initiator.ird, responder.ird], ird, "{depths:?}");
        assert_eq!([initiator.ord, responder.ord], ord, "{depths:?}");
        assert_eq!(initiator.rtr, Some(RtrKind::Read));
        assert_eq!((reply[16] & 0x30, reply[17]), (0, 1));
        let mut told = u32::from(ird[1]).to_be_bytes().to_vec();
        told.extend(u32::from(ord[1].max(1)).to_be_bytes());
        assert_eq!(&reply[20..28], told);
    }
}

#[test]
fn depths_of_windows_that_are_missing_or_zero_are_refused() {
    let full = [0, 0, 0, 1, 0, 0, 0, 1];
    for data in [&full[..7], &[0; 8], &[0, 0, 0, 1, 0, 0, 0, 0], b""] {
        let request = frame(REQ, 0x40, 1, data);
        match MpaResponder::new(&windows()).on_stream(&mut stream(&request)) {
            ResponderStep::Failed {
                error: MpaError::DepthsMissing,
                send: Some(reply),
            } => assert_eq!(reply[16..20], [0x60, 1, 0, 0], "a rejecting reply"),
            step => panic!("{data:?}: {step:?}"),
        }
        let mut initiator = MpaInitiator::new(&windows(), 1, 1, b"").expect("valid");
        let step = initiator.on_stream(&mut stream(&frame(REP, 0x40, 1, data)));
        let expected = InitiatorStep::Failed {
            error: MpaError::DepthsMissing,
            send: None,
        };
        assert_eq!(step, expected, "{data:?}");
    }
    // A refusal has no depths.
    let mut initiator = MpaInitiator::new(&windows(), 1, 1, b"").expect("valid");
    let step = initiator.on_stream(&mut stream(&frame(REP, 0x60, 1, b"no")));
    let private_data = b"no".to_vec();
    assert_eq!(step, InitiatorStep::Rejected { private_data });
}

#[test]
fn depths_of_windows_leave_504_octets_of_private_data() {
    assert!(MpaInitiator::new(&windows(), 1, 1, &[0; 504]).is_ok());
    assert!(MpaInitiator::new(&windows(), 1, 1, &[0; 505]).is_err());
    // A peer may announce more than siwd grants.
    let mut responder = MpaResponder::new(&windows());
    let request = frame(REQ, 0x40, 1, &[0, 1, 0, 0, 0xff, 0, 0, 0, 7]);
    match responder.on_stream(&mut stream(&request)) {
        ResponderStep::Request(request) => {
            assert_eq!(
                (request.peer_ird, request.peer_ord),
                (Some(0x3ffe), Some(0x3ffe))
            );
            assert_eq!(request.private_data, [7]);
        }
        step => panic!("{step:?}"),
    }
    let (_, negotiated) = responder.accept(4, 4, b"").expect("accepts");
    assert_eq!((negotiated.ird, negotiated.ord), (16, 4));
}
