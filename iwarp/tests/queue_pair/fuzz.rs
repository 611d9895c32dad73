//! The fuzz targets of `iwarp/fuzz` on a fixed number of random inputs.
use crate::common::fuzz;
use proptest::prelude::*;

fn octets(max: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..max)
}

/// Valid control octets and lengths are more frequent than in random input.
fn ulpdus() -> impl Strategy<Value = Vec<u8>> {
    let one = (
        prop_oneof![18u8..24, Just(26), Just(30), Just(46), Just(70), 0u8..90],
        any::<u8>(),
        prop_oneof![
            Just(0x41u8),
            Just(0x01),
            Just(0xc1),
            Just(0x81),
            any::<u8>()
        ],
        0x40u8..0x4d,
        octets(90),
    );
    let all = prop::collection::vec(one, 0..10);
    (any::<u8>(), all).prop_map(|(how, all)| {
        let mut out = vec![how];
        for (n, fix, ddp, rdmap, mut rest) in all {
            rest.resize(usize::from(n), 0);
            if let [a, b, ..] = &mut rest[..] {
                (*a, *b) = (ddp, rdmap);
            }
            out.extend([n, fix | 1]);
            out.extend(rest);
        }
        out
    })
}

/// Frames with a correct key, flags and revision, and a correct or nearly correct length.
fn frames() -> impl Strategy<Value = Vec<u8>> {
    let head = (any::<bool>(), any::<u8>(), 0u8..4, 0u16..20, any::<u8>());
    (head, octets(40)).prop_map(|((reply, flags, rev, n, how), data)| {
        let mut f = vec![how];
        f.extend(if reply {
            b"MPA ID Rep Frame"
        } else {
            b"MPA ID Req Frame"
        });
        f.extend([flags, rev]);
        f.extend(n.to_be_bytes());
        f.extend(data);
        f
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_mpa_frame_breaks_the_machines(a in octets(64), b in frames()) {
        fuzz::mpa_frames(&a);
        fuzz::mpa_frames(&b);
    }

    #[test]
    fn no_stream_breaks_a_queue_pair(a in octets(2000)) {
        fuzz::fpdu_stream(&a);
    }

    #[test]
    fn no_header_breaks_a_queue_pair(a in ulpdus()) {
        fuzz::headers(&a);
    }
}
