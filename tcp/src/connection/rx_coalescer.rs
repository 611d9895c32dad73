//! Receive coalescing: consecutive segments of one connection in a burst that carry nothing but the
//! next bytes. Each is checked as by header prediction, against the state that the connection
//! expects; the connection then processes all of them at once, like one long segment that a port
//! coalesced. This makes a burst of one flow fast: one comparison of header fields per segment, and
//! one update of the connection per run. Called by `stack::receive`.

use crate::base::buffer::RecvBuf;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::connection::Connection;
use crate::connection::context::{SharedState, TcpContext};
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::timer::Timer;
use crate::wire::bytes::{read_u16, read_u32, read_u64};
use crate::wire::checksum::OnesComplementSum;
use crate::wire::segment::{ACK, CWR, ECE, FIN, PSH, RST, SYN, TS_ALIGNED};

/// The index that means "no connection".
const NONE: u32 = u32::MAX;
/// Length of a TCP header with timestamps as its only option.
const TCP: usize = 32;

/// The expected header fields of the next segment, and the totals of the segments accepted so far.
pub(crate) struct RxCoalescer {
    pub index: u32,
    v6: bool,
    vlan: Option<u16>,
    /// Our MAC address, right-aligned.
    mac: u64,
    /// The peer's address, then ours; IPv4 fills the first word.
    addresses: [u64; 4],
    /// The peer's port in the high half, ours in the low half.
    ports: u32,
    match_next: SeqNr,
    ack: SeqNr,
    window: u16,
    ts_recent: u32,
    emss: u32,
    /// Payload bytes and buffers that the connection can still accept.
    space: u32,
    room: u32,
    /// Number of segments accepted, and the number that they count as for the ACK policy.
    segs: u32,
    counted: u32,
    buffers: u32,
    bytes: u32,
    push: bool,
}

/// A segment that continues the run.
pub(crate) struct CoalescedSegment {
    pub headers: usize,
    pub len: u32,
    /// Number of pool buffers that the frame occupies.
    buffers: u32,
    push: bool,
}

impl RxCoalescer {
    pub(crate) fn new(mac: [u8; 6], vlan: Option<u16>) -> Self {
        let mut padded_mac = [0; 8];
        padded_mac[2..].copy_from_slice(&mac);
        RxCoalescer {
            index: NONE,
            v6: false,
            vlan,
            mac: u64::from_be_bytes(padded_mac),
            addresses: [0; 4],
            ports: 0,
            match_next: SeqNr(0),
            ack: SeqNr(0),
            window: 0,
            ts_recent: 0,
            emss: 0,
            space: 0,
            room: 0,
            segs: 0,
            buffers: 0,
            counted: 0,
            bytes: 0,
            push: false,
        }
    }

    /// Prepares to match the segments that follow one of this connection, which was processed.
    #[inline]
    pub(crate) fn start_after<B: RecvBuf, R>(
        &mut self,
        sh: &SharedState,
        index: u32,
        conn: &Connection<B, R>,
    ) {
        const NEVER: ConnectionFlags = ConnectionFlags::RECOVERING
            .union(ConnectionFlags::RELEASED)
            .union(ConnectionFlags::FIN_SEEN)
            .union(ConnectionFlags::LAST_WAS_MARKED)
            .union(ConnectionFlags::TIMESTAMPS);
        let tcb = &conn.tcb;
        let window = tcb.snd_wnd >> tcb.scales.send();
        if tcb.state != TcpState::Established
            || tcb.is_timer(Timer::Persist)
            || tcb.flags & NEVER != ConnectionFlags::TIMESTAMPS
            || conn.out_of_order.is_some()
            || window > 0xffff
            || window << tcb.scales.send() != tcb.snd_wnd
        {
            return;
        }
        let own = conn.counted_buffers as usize;
        // Beyond a quarter, segments share buffers.
        let room = (sh.config.max_recv_buffers / 4).saturating_sub(own);
        let all = sh.config.max_held_buffers.saturating_sub(sh.held_buffers);
        self.index = index;
        self.v6 = conn.template.is_v6();
        (self.addresses, self.ports) = conn.template.key().in_peer_headers();
        self.match_next = tcb.rcv_nxt;
        self.ack = tcb.snd_una;
        self.window = window as u16;
        self.ts_recent = tcb.ts_recent;
        self.emss = u32::from(tcb.emss);
        self.space = tcb.rcv_adv.distance_from(tcb.rcv_nxt).max(0) as u32;
        self.room = u32::try_from(room.min(all)).unwrap_or(u32::MAX);
        (self.segs, self.counted, self.buffers, self.bytes) = (0, 0, 0, 0);
        self.push = false;
    }

    /// Matches the frame against the next segment, without its checksums. `None`: no match.
    #[inline]
    pub(crate) fn match_next<B: RecvBuf>(&self, buffer: &B) -> Option<CoalescedSegment> {
        if self.index == NONE {
            return None;
        }
        let (bytes, buffers) = (buffer.chunk(), buffer.buffer_count() as u32);
        if buffers > self.room {
            return None;
        }
        let size = (buffer.remaining(), buffers);
        match (self.vlan, self.v6) {
            (None, false) => self.match_headers::<14, 20>(bytes, size),
            (None, true) => self.match_headers::<14, 40>(bytes, size),
            (Some(_), false) => self.match_headers::<18, 20>(bytes, size),
            (Some(_), true) => self.match_headers::<18, 40>(bytes, size),
        }
    }

    #[inline(always)]
    fn match_headers<const L2: usize, const L3: usize>(
        &self,
        bytes: &[u8],
        (frame, buffers): (usize, u32),
    ) -> Option<CoalescedSegment> {
        let headers = L2 + L3 + TCP;
        let bytes = bytes.get(..headers)?;
        let mut good = read_u64(bytes, 0) >> 16 == self.mac;
        if L2 == 18 {
            good &= read_u16(bytes, 12) == 0x8100 && Some(read_u16(bytes, 14) & 0xfff) == self.vlan;
        }
        let len = if L3 == 20 {
            // No options, not a fragment, TCP; no CE mark.
            good &= read_u32(bytes, L2 - 2) >> 8 == 0x080045 && bytes[L2 + 1] & 3 != 3;
            good &= read_u32(bytes, L2 + 6) & 0x3fff_00ff == 6;
            good &= read_u64(bytes, L2 + 12) == self.addresses[0];
            usize::from(read_u16(bytes, L2 + 2)).wrapping_sub(L3 + TCP)
        } else {
            good &= read_u32(bytes, L2 - 2) >> 12 == 0x86dd6
                && bytes[L2 + 1] >> 4 & 3 != 3
                && bytes[L2 + 6] == 6;
            for (i, a) in self.addresses.iter().enumerate() {
                good &= read_u64(bytes, L2 + 8 + 8 * i) == *a;
            }
            usize::from(read_u16(bytes, L2 + 4)).wrapping_sub(TCP)
        };
        let tcp = &bytes[L2 + L3..];
        let flags = tcp[13];
        let ts = read_u32(tcp, 24);
        good &= read_u32(tcp, 0) == self.ports
            && read_u32(tcp, 4) == self.match_next.0
            && read_u32(tcp, 8) == self.ack.0
            && tcp[12] == (TCP as u8 / 4) << 4
            && flags & (FIN | SYN | RST | ACK | ECE | CWR) == ACK
            && read_u16(tcp, 14) == self.window
            && read_u32(tcp, 20) == TS_ALIGNED
            && (ts.wrapping_sub(self.ts_recent) as i32) >= 0;
        // A length below that of the headers wraps around.
        if !good || len == 0 || len > self.space as usize || headers + len > frame {
            return None;
        }
        Some(CoalescedSegment {
            headers,
            len: len as u32,
            buffers,
            push: flags & PSH != 0,
        })
    }

    /// Returns whether the checksums of the frame are correct, for ports that do not verify them.
    pub(crate) fn is_checksum_valid<B: RecvBuf>(
        &self,
        segment: &CoalescedSegment,
        buffer: &B,
    ) -> bool {
        let bytes = buffer.chunk();
        let (l2, l4) = (
            if self.vlan.is_some() { 18 } else { 14 },
            segment.headers - TCP,
        );
        let mut ip = OnesComplementSum::new();
        ip.add(&bytes[l2..l4]);
        if !self.v6 && ip.value() != 0xffff {
            return false;
        }
        let end = segment.headers + segment.len as usize;
        let mut sum = OnesComplementSum::new();
        let addresses = if self.v6 { 32 } else { 8 };
        sum.add(&bytes[l4 - addresses..l4]);
        sum.add_word(6);
        sum.add_word((end - l4) as u16);
        let mut at = 0;
        for chunk in buffer.chunks() {
            let (from, to) = (l4.saturating_sub(at), (end - at).min(chunk.len()));
            sum.add(&chunk[from.min(to)..to]);
            at += to;
        }
        sum.value() == 0xffff
    }

    #[inline]
    pub(crate) fn add_segment(&mut self, segment: &CoalescedSegment) {
        self.match_next += segment.len;
        self.space -= segment.len;
        self.room -= segment.buffers;
        self.segs += 1;
        self.buffers += segment.buffers;
        self.counted += 1 + u32::from(segment.len > self.emss);
        self.bytes += segment.len;
        self.push |= segment.push;
    }
}

impl<B: RecvBuf, R> Connection<B, R> {
    /// Updates the connection for all segments of the run, whose payload is already in the receive
    /// queue.
    #[inline]
    pub(crate) fn on_coalesced_segments(
        &mut self,
        cx: &mut TcpContext<'_>,
        coalescer: &mut RxCoalescer,
    ) {
        coalescer.index = NONE;
        if coalescer.segs == 0 {
            return;
        }
        cx.shared.stats.in_segs += u64::from(coalescer.segs);
        cx.shared.stats.hp_hits += u64::from(coalescer.segs);
        let tcb = &mut self.tcb;
        tcb.last_rx = cx.now.0;
        tcb.probes = 0;
        // TS.Recent stays: only the segment that begins where the last ACK ended updates it (RFC
        // 7323 section 4.3), and that can only be the one before this run.
        tcb.snd_wl1 = coalescer.match_next - 1;
        tcb.snd_wl2 = coalescer.ack;
        self.on_delivered(
            cx,
            (coalescer.buffers, coalescer.counted, coalescer.bytes),
            coalescer.push,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::buffer::VecBuf;
    use crate::wire::flow_key::FlowKey;
    use crate::wire::template::{HEADER_MAX, SegmentFields, Template};

    #[test]
    fn the_next_segment_is_matched_and_no_damaged_one() {
        for (local, remote) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            for vlan in [None, Some(7)] {
                let key = |from: &str, from_port, to: &str, to_port| {
                    let (from, to) = (from.parse().unwrap(), to.parse().unwrap());
                    FlowKey::new(from, from_port, to, to_port).unwrap()
                };
                let mut coalescer = RxCoalescer::new([2, 0, 0, 0, 0, 1], vlan);
                let flow = key(local, 80, remote, 4000);
                (coalescer.addresses, coalescer.ports) = flow.in_peer_headers();
                coalescer.v6 = flow.is_v6();
                (
                    coalescer.index,
                    coalescer.space,
                    coalescer.room,
                    coalescer.emss,
                ) = (0, 5000, 9, 1000);
                (
                    coalescer.match_next,
                    coalescer.ack,
                    coalescer.window,
                    coalescer.ts_recent,
                ) = (SeqNr(u32::MAX - 3), SeqNr(9), 77, 100);
                let fields = SegmentFields {
                    seq: coalescer.match_next,
                    ack: coalescer.ack,
                    flags: ACK,
                    window: coalescer.window,
                    ts: Some((101, 5)),
                    options: &[],
                    payload: 10,
                    ect: true,
                    tso: false,
                };
                let t = Template::new(
                    [4; 6],
                    [2, 0, 0, 0, 0, 1],
                    vlan,
                    &key(remote, 4000, local, 80),
                );
                let (n, meta) = t.meta(&fields);
                let mut out = [0; HEADER_MAX];
                t.build(&mut out[..n], &fields);
                let mut frame = out[..n].to_vec();
                let payload = *b"0123456789";
                let mut sum = OnesComplementSum::new();
                sum.add(&payload);
                let at = crate::wire::checksum::tcp_checksum_offset(&meta);
                let done = crate::wire::checksum::complete_tcp_checksum(&frame, &meta, sum);
                frame[at..at + 2].copy_from_slice(&done);
                frame.extend(payload);
                let good = VecBuf::from(frame.clone());
                let segment = coalescer.match_next(&good).expect("it is the next");
                assert_eq!((segment.headers, segment.len, segment.push), (n, 10, false));
                assert!(coalescer.is_checksum_valid(&segment, &good));
                for bit in 0..frame.len() * 8 {
                    let mut f = frame.clone();
                    f[bit / 8] ^= 1 << (bit % 8);
                    let f = VecBuf::from(f);
                    let Some(segment) = coalescer.match_next(&f) else {
                        continue;
                    };
                    // Bits that are not compared: the source MAC, the priority of the tag, IPv6
                    // fields for routers.
                    let unread = (6..12).contains(&(bit / 8))
                        || (vlan.is_some() && bit / 8 == 14 && bit % 8 >= 4)
                        || (coalescer.v6 && (n - 72..n - 68).contains(&(bit / 8)))
                        || (coalescer.v6 && bit / 8 == n - 72 + 7);
                    assert!(
                        unread || !coalescer.is_checksum_valid(&segment, &f),
                        "bit {bit} of {n}"
                    );
                }
                coalescer.add_segment(&segment);
                assert!(coalescer.match_next(&good).is_none(), "it came already");
                (coalescer.match_next, coalescer.space) = (SeqNr(u32::MAX - 3), 9);
                assert!(coalescer.match_next(&good).is_none(), "no window");
            }
        }
    }
}
