//! Tests of a single connection, with only its context.

use core::time::Duration;

use siw_net::{FlowKey, Instant, VecBuf};

use crate::base::events::Events;
use crate::base::state::TcpState;
use crate::base::time::to_long_ticks;
use crate::config::StackConfig;
use crate::connection::Connection;
use crate::connection::context::SharedState;
use crate::path_mtu::RAISE_TICKS;
use crate::tcb::timer::Timer;
use crate::wire::segment::{ACK, RST, SYN, Segment};

const START: Instant = Instant(1_000_000_000);

/// Returns a connection in SYN-SENT and its shared state.
fn opening() -> (SharedState, Connection<VecBuf, u8>) {
    let address = "10.0.0.1/24".parse().unwrap();
    let config = StackConfig::new([2, 0, 0, 0, 0, 1], vec![address]);
    let mut shared = SharedState::new(config, START).unwrap();
    let (local, remote) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
    let key = FlowKey::new(local, 1000, remote, 80).unwrap();
    let mut conn = Connection::new(&shared, &key, 7);
    conn.start_handshake(&mut shared.context_of(conn.id(0)), None);
    (shared, conn)
}

fn answer(conn: &Connection<VecBuf, u8>, flags: u8) -> Segment {
    Segment {
        seq: crate::SeqNr(5000),
        ack: conn.sender.snd.nxt,
        flags,
        window: 1000,
        mss: Some(1460),
        ..Segment::default()
    }
}

#[test]
fn a_syn_ack_establishes_the_connection() {
    let (mut shared, mut conn) = opening();
    assert_eq!(conn.tcb.state, TcpState::SynSent);
    let segment = answer(&conn, SYN | ACK);
    conn.process_segment(
        &mut shared.context_of(conn.id(0)),
        &segment,
        VecBuf::default(),
    );
    assert_eq!(conn.tcb.state, TcpState::Established);
    assert_eq!(conn.tcb.timer(), None, "nothing is in flight");
    assert_ne!(conn.tcb.events & Events::CONNECTED.0, 0);
    assert_eq!(shared.event_list, [0]);
}

#[test]
fn a_reset_in_answer_to_a_syn_refuses() {
    let (mut shared, mut conn) = opening();
    let segment = answer(&conn, RST | ACK);
    conn.process_segment(
        &mut shared.context_of(conn.id(0)),
        &segment,
        VecBuf::default(),
    );
    assert_eq!(conn.tcb.state, TcpState::Closed);
    assert_ne!(conn.tcb.events & Events::REFUSED.0, 0);
}

#[test]
fn the_retransmission_timer_of_a_syn_is_doubled() {
    let (mut shared, mut conn) = opening();
    assert_eq!(conn.tcb.timer(), Some(Timer::Retransmission));
    let first = conn.tcb.timer_at().unwrap();
    shared.now = Instant(first);
    let ended = conn.on_timer(&mut shared.context_of(conn.id(0)));
    assert!(!ended && conn.tcb.is_timer(Timer::Retransmission));
    let waits = Instant(conn.tcb.timer_at().unwrap()).duration_since(Instant(first));
    assert_eq!(waits, 2 * Instant(first).duration_since(START));
    assert!(waits > Duration::ZERO);
}

/// The clock of ticks wraps after 52 days; a connection may be silent for longer.
#[test]
fn a_narrow_path_is_tried_again_with_the_agreed_size_after_ten_minutes() {
    let (mut shared, mut conn) = opening();
    let segment = answer(&conn, SYN | ACK);
    conn.process_segment(
        &mut shared.context_of(conn.id(0)),
        &segment,
        VecBuf::default(),
    );
    let agreed = conn.sender.emss_agreed;
    for silence in [1, 20 * 86_400, 40 * 86_400] {
        let at = (to_long_ticks(shared.now.0) + RAISE_TICKS) << 20;
        let cx = &mut shared.context_of(conn.id(0));
        conn.narrow_path(cx, agreed - 100);
        while shared.now.0 < at {
            // Other timers may fire first.
            shared.now = Instant(conn.tcb.wheel_at.min(at));
            assert_eq!(conn.tcb.emss, agreed - 100);
            conn.on_timer(&mut shared.context_of(conn.id(0)));
        }
        assert_eq!(conn.tcb.emss, agreed, "after the time");
        shared.now = shared.now + Duration::from_secs(silence);
        conn.on_timer(&mut shared.context_of(conn.id(0)));
        assert_eq!(conn.tcb.emss, agreed, "and whenever later");
    }
}
