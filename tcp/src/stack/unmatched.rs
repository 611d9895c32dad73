//! Segments that match no connection (RFC 9293 sections 3.10.7.1 and 3.10.7.2): SYNs for listeners, and
//! segments of unknown peers, which are answered by RST.

use crate::base::buffer::RecvBuf;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::stack::Stack;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::flow_key::FlowKey;
use crate::wire::segment::{self, Segment};

impl<B: RecvBuf, R> Stack<B, R> {
    /// Returns the listener for the key's local address and port; one on the address itself takes
    /// precedence over one on all addresses.
    pub(crate) fn find_listener(&self, key: &FlowKey) -> Option<u32> {
        let local = key.local();
        let ports = &self.shared.ports;
        let one = ports.get(&(local.port(), Some(local.ip())));
        one.or_else(|| ports.get(&(local.port(), None))).copied()
    }

    /// Processes a SYN that is acceptable for a new connection in place of one in TIME-WAIT. The old one is
    /// closed only if the new one can be opened, which needs a listener with room; otherwise it stays, since
    /// the peer may still retransmit its FIN (RFC 9293 section 3.6.1).
    #[cold]
    pub(super) fn on_syn_in_time_wait(
        &mut self,
        now: Instant,
        index: u32,
        key: &FlowKey,
        seg: &Segment,
        payload: u32,
        src_mac: [u8; 6],
    ) {
        let listener = self
            .find_listener(key)
            .filter(|_| self.is_plausible_peer(key, src_mac) && seg.flags & segment::FIN == 0);
        let Some(entry) = listener.and_then(|id| self.shared.listeners.get(&id)) else {
            let conn = &mut self.connections[index as usize];
            self.shared
                .context_of(conn.id(index))
                .on_unexpected_syn(&mut conn.tcb);
            return;
        };
        // No cookie: its sequence number is not above those of the old connection.
        let room = entry.pending < entry.backlog && !self.shared.neighbours.crowded();
        if !room || !self.make_slot(index) {
            self.shared.stats.listen_overflows += u64::from(!room);
            self.shared.stats.listen_drops += 1;
            return;
        }
        self.shared.stats.time_wait_recycled += 1;
        let conn = &mut self.connections[index as usize];
        let previous = Some(conn.tcb.snd_nxt);
        conn.enter_closed(&mut self.shared.context_of(conn.id(index)));
        self.free_if_done(index);
        self.on_unmatched_segment(now, key, seg, payload, src_mac, previous);
    }

    /// Returns whether a segment that matches no connection has a source address that a peer can have and
    /// that is not ours (LAND attack).
    pub(crate) fn is_plausible_peer(&self, key: &FlowKey, src_mac: [u8; 6]) -> bool {
        let remote = key.remote();
        self.shared.can_be_peer(remote.ip(), src_mac) && remote.port() != 0
    }

    /// Processes a segment that matches no connection (RFC 9293 sections 3.10.7.1 and 3.10.7.2).
    /// `previous`: SND.NXT of the connection that a SYN replaces.
    #[cold]
    pub(super) fn on_unmatched_segment(
        &mut self,
        now: Instant,
        key: &FlowKey,
        seg: &Segment,
        payload: u32,
        src_mac: [u8; 6],
        previous: Option<SeqNr>,
    ) {
        let own = self.shared.is_own_address(key.local().ip());
        if !own || !self.is_plausible_peer(key, src_mac) {
            self.shared.stats.not_for_us += u64::from(!own);
            self.shared.stats.martians += u64::from(own);
            return;
        }
        self.shared.stats.no_connection += u64::from(seg.flags & segment::SYN == 0);
        if seg.flags & segment::RST != 0 {
            return;
        }
        let listener = self.find_listener(key);
        if listener.is_some() && seg.flags & (segment::SYN | segment::ACK) == 0 {
            // LISTEN ignores segments with neither SYN nor ACK (section 3.10.7.2, fourth).
            return;
        }
        if listener.is_some()
            && seg.flags & (segment::SYN | segment::ACK | segment::FIN)
                == segment::SYN | segment::FIN
        {
            // SYN with FIN opens and closes at once; no legitimate peer sends it.
            self.shared.stats.martians += 1;
            return;
        }
        let listener =
            listener.filter(|_| seg.flags & (segment::SYN | segment::ACK) == segment::SYN);
        let Some(listener) = listener else {
            self.shared.stats.no_ports += u64::from(seg.flags & segment::SYN != 0);
            return self.reset_unmatched_segment(now, key, seg, payload, src_mac);
        };
        let Some(entry) = self.shared.listeners.get_mut(&listener) else {
            return;
        };
        // A cookie needs neither a slot nor a neighbour entry: it is sent to the source MAC address of the
        // SYN.
        let pressed = entry.pending >= entry.backlog || self.shared.neighbours.crowded();
        if pressed && entry.ready < entry.backlog && self.shared.config.syn_cookies {
            return self.send_cookie(now, key, seg, listener, src_mac);
        }
        if entry.pending >= entry.backlog {
            self.shared.stats.listen_overflows += 1;
            self.shared.stats.listen_drops += 1;
            return;
        }
        let user = entry.user;
        let Some(index) = self.allocate_slot(*key) else {
            self.shared.stats.listen_drops += 1;
            return;
        };
        if let Some(entry) = self.shared.listeners.get_mut(&listener) {
            entry.pending += 1;
        }
        let conn = &mut self.connections[index as usize];
        conn.listener = listener;
        conn.tcb.user = user;
        conn.tcb.state = TcpState::SynReceived;
        conn.tcb.flags |=
            ConnectionFlags::PASSIVE | ConnectionFlags::IN_BACKLOG | ConnectionFlags::RELEASED;
        conn.apply_peer_syn(&mut self.shared.context_of(conn.id(index)), seg);
        self.start_handshake(index, previous);
    }

    pub(super) fn reset_unmatched_segment(
        &mut self,
        now: Instant,
        key: &FlowKey,
        seg: &Segment,
        payload: u32,
        src_mac: [u8; 6],
    ) {
        if seg.flags & segment::RST != 0 {
            return;
        }
        if self.shared.resets.try_take(now) {
            self.shared.control_queue.push_reset(
                src_mac,
                key,
                seg,
                payload,
                &mut self.shared.stats,
            );
        } else {
            self.shared.stats.resets_skipped += 1;
        }
    }
}
