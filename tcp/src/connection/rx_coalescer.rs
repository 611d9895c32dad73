//! Trains: the segments of one connection that follow each other in a burst, with nothing in them
//! but the next bytes. Each is checked as header prediction checks it, against what the
//! connection expects; the connection itself learns of all of them at once, as of one long segment
//! that a port put together. Called by `stack::receive`.

use crate::base::buffer::RecvBuf;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::connection::Connection;
use crate::connection::context::{ConnectionContext, SharedState};
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::timer::Timer;
use crate::wire::bytes::{read_u16, read_u32, read_u64};
use crate::wire::checksum::OnesComplementSum;
use crate::wire::segment::{ACK, CWR, ECE, FIN, PSH, RST, SYN, TS_ALIGNED};

/// Stands for no connection.
const NONE: u32 = u32::MAX;
/// A TCP header with timestamps and nothing else.
const TCP: usize = 32;

/// What the next segment of a train looks like, and what it brought so far.
pub(crate) struct Train {
    pub index: u32,
    v6: bool,
    vlan: Option<u16>,
    /// Our MAC, right-aligned.
    mac: u64,
    /// The peer's address, then ours; IPv4 fills the first word.
    addresses: [u64; 4],
    /// The peer's port above ours.
    ports: u32,
    next: SeqNr,
    ack: SeqNr,
    window: u16,
    ts_recent: u32,
    emss: u32,
    /// Payload bytes and buffers that still fit.
    space: u32,
    room: u32,
    /// Segments, and how many the ACK policy takes them for.
    segs: u32,
    counted: u32,
    bytes: u32,
    push: bool,
}

/// A segment that belongs to the train.
pub(crate) struct Wagon {
    pub headers: usize,
    pub len: u32,
    push: bool,
}

impl Train {
    pub(crate) fn new(mac: [u8; 6], vlan: Option<u16>) -> Self {
        let [a, b, c, d, e, f] = mac;
        Train {
            index: NONE,
            v6: false,
            vlan,
            mac: u64::from_be_bytes([0, 0, a, b, c, d, e, f]),
            addresses: [0; 4],
            ports: 0,
            next: SeqNr(0),
            ack: SeqNr(0),
            window: 0,
            ts_recent: 0,
            emss: 0,
            space: 0,
            room: 0,
            segs: 0,
            counted: 0,
            bytes: 0,
            push: false,
        }
    }

    /// A segment of this connection was taken: more may follow.
    #[inline]
    pub(crate) fn begin<B: RecvBuf, R>(
        &mut self,
        sh: &SharedState,
        index: u32,
        c: &Connection<B, R>,
    ) {
        const NEVER: ConnectionFlags = ConnectionFlags::RECOVERING
            .union(ConnectionFlags::RELEASED)
            .union(ConnectionFlags::FIN_SEEN)
            .union(ConnectionFlags::LAST_WAS_MARKED)
            .union(ConnectionFlags::TIMESTAMPS);
        let h = &c.tcb;
        let window = h.snd_wnd >> h.scales.send();
        if h.state != TcpState::Established
            || h.is_timer(Timer::Persist)
            || h.flags & NEVER != ConnectionFlags::TIMESTAMPS
            || c.ooo.is_some()
            || window > 0xffff
            || window << h.scales.send() != h.snd_wnd
        {
            return;
        }
        let own = c.rx.counted as usize;
        let room = sh.config.max_recv_buffers.saturating_sub(own);
        let all = sh.config.max_held_buffers.saturating_sub(sh.held);
        self.index = index;
        self.v6 = c.template.is_v6();
        (self.addresses, self.ports) = c.template.key().in_peer_headers();
        self.next = h.rcv_nxt;
        self.ack = h.snd_una;
        self.window = window as u16;
        self.ts_recent = h.ts_recent;
        self.emss = u32::from(h.emss);
        self.space = h.rcv_adv.distance_from(h.rcv_nxt).max(0) as u32;
        self.room = u32::try_from(room.min(all)).unwrap_or(u32::MAX);
        (self.segs, self.counted, self.bytes) = (0, 0, 0);
        self.push = false;
    }

    /// The frame is the next segment; its checksums were not looked at.
    #[inline]
    pub(crate) fn next<B: RecvBuf>(&self, b: &B) -> Option<Wagon> {
        if self.index == NONE {
            return None;
        }
        let h = b.chunk();
        match (self.vlan, self.v6) {
            (None, false) => self.check::<14, 20>(h, b.remaining()),
            (None, true) => self.check::<14, 40>(h, b.remaining()),
            (Some(_), false) => self.check::<18, 20>(h, b.remaining()),
            (Some(_), true) => self.check::<18, 40>(h, b.remaining()),
        }
    }

    #[inline(always)]
    fn check<const L2: usize, const L3: usize>(&self, h: &[u8], frame: usize) -> Option<Wagon> {
        let headers = L2 + L3 + TCP;
        let h = h.get(..headers)?;
        let mut good = read_u64(h, 0) >> 16 == self.mac;
        if L2 == 18 {
            good &= read_u16(h, 12) == 0x8100 && Some(read_u16(h, 14) & 0xfff) == self.vlan;
        }
        let len = if L3 == 20 {
            // No options, no fragment, TCP; not marked.
            good &= read_u32(h, L2 - 2) >> 8 == 0x080045 && h[L2 + 1] & 3 != 3;
            good &= read_u32(h, L2 + 6) & 0x3fff_00ff == 6;
            good &= read_u64(h, L2 + 12) == self.addresses[0];
            usize::from(read_u16(h, L2 + 2)).wrapping_sub(L3 + TCP)
        } else {
            good &=
                read_u32(h, L2 - 2) >> 12 == 0x86dd6 && h[L2 + 1] >> 4 & 3 != 3 && h[L2 + 6] == 6;
            for (i, a) in self.addresses.iter().enumerate() {
                good &= read_u64(h, L2 + 8 + 8 * i) == *a;
            }
            usize::from(read_u16(h, L2 + 4)).wrapping_sub(TCP)
        };
        let t = &h[L2 + L3..];
        let flags = t[13];
        let ts = read_u32(t, 24);
        good &= read_u32(t, 0) == self.ports
            && read_u32(t, 4) == self.next.0
            && read_u32(t, 8) == self.ack.0
            && t[12] == (TCP as u8 / 4) << 4
            && flags & (FIN | SYN | RST | ACK | ECE | CWR) == ACK
            && read_u16(t, 14) == self.window
            && read_u32(t, 20) == TS_ALIGNED
            && (ts.wrapping_sub(self.ts_recent) as i32) >= 0;
        // A length below that of the headers wrapped.
        if !good || len == 0 || len > self.space as usize || headers + len > frame || self.room == 0
        {
            return None;
        }
        Some(Wagon {
            headers,
            len: len as u32,
            push: flags & PSH != 0,
        })
    }

    /// The checksums of the frame are right, for ports that do not look.
    pub(crate) fn verified<B: RecvBuf>(&self, w: &Wagon, b: &B) -> bool {
        let h = b.chunk();
        let (l2, l4) = (if self.vlan.is_some() { 18 } else { 14 }, w.headers - TCP);
        let mut ip = OnesComplementSum::new();
        ip.add(&h[l2..l4]);
        if !self.v6 && ip.value() != 0xffff {
            return false;
        }
        let end = w.headers + w.len as usize;
        let mut s = OnesComplementSum::new();
        let addresses = if self.v6 { 32 } else { 8 };
        s.add(&h[l4 - addresses..l4]);
        s.add_word(6);
        s.add_word((end - l4) as u16);
        let mut at = 0;
        for c in b.chunks() {
            let (from, to) = (l4.saturating_sub(at), (end - at).min(c.len()));
            s.add(&c[from.min(to)..to]);
            at += to;
        }
        s.value() == 0xffff
    }

    #[inline]
    pub(crate) fn take(&mut self, w: &Wagon) {
        self.next += w.len;
        self.space -= w.len;
        self.room -= 1;
        self.segs += 1;
        self.counted += 1 + u32::from(w.len > self.emss);
        self.bytes += w.len;
        self.push |= w.push;
    }
}

impl<B: RecvBuf, R> Connection<B, R> {
    /// What else has to be done for the segments of a train, whose payload is in the receive queue.
    #[inline]
    pub(crate) fn train_ended(&mut self, cx: &mut ConnectionContext<'_>, t: &mut Train) {
        t.index = NONE;
        if t.segs == 0 {
            return;
        }
        cx.shared.stats.in_segs += u64::from(t.segs);
        cx.shared.stats.hp_hits += u64::from(t.segs);
        let h = &mut self.tcb;
        h.last_rx = cx.now.0;
        h.probes = 0;
        // TS.Recent stays: only the segment that begins where the last ACK ended sets it
        // (RFC 7323 section 4.3), which was the one before the train if any.
        h.snd_wl1 = t.next - 1;
        h.snd_wl2 = t.ack;
        self.arrived(cx, (t.segs, t.counted, t.bytes), t.push);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::buffer::VecBuf;
    use crate::wire::flow_key::FlowKey;
    use crate::wire::template::{HEADER_MAX, SegmentFields, Template};

    #[test]
    fn the_next_segment_is_known_and_no_spoilt_one_passes_for_it() {
        for (local, remote) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            for vlan in [None, Some(7)] {
                let key = |a: &str, p, b: &str, q| {
                    FlowKey::new(a.parse().unwrap(), p, b.parse().unwrap(), q).unwrap()
                };
                let mut train = Train::new([2, 0, 0, 0, 0, 1], vlan);
                let flow = key(local, 80, remote, 4000);
                (train.addresses, train.ports) = flow.in_peer_headers();
                train.v6 = flow.is_v6();
                (train.index, train.space, train.room, train.emss) = (0, 5000, 9, 1000);
                (train.next, train.ack, train.window, train.ts_recent) =
                    (SeqNr(u32::MAX - 3), SeqNr(9), 77, 100);
                let fields = SegmentFields {
                    seq: train.next,
                    ack: train.ack,
                    flags: ACK,
                    window: train.window,
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
                let w = train.next(&good).expect("it is the next");
                assert_eq!((w.headers, w.len, w.push), (n, 10, false));
                assert!(train.verified(&w, &good));
                for bit in 0..frame.len() * 8 {
                    let mut f = frame.clone();
                    f[bit / 8] ^= 1 << (bit % 8);
                    let f = VecBuf::from(f);
                    let Some(w) = train.next(&f) else { continue };
                    // Where it came from, the tag's priority, what IPv6 leaves to routers.
                    let unread = (6..12).contains(&(bit / 8))
                        || (vlan.is_some() && bit / 8 == 14 && bit % 8 >= 4)
                        || (train.v6 && (n - 72..n - 68).contains(&(bit / 8)))
                        || (train.v6 && bit / 8 == n - 72 + 7);
                    assert!(unread || !train.verified(&w, &f), "bit {bit} of {n}");
                }
                train.take(&w);
                assert!(train.next(&good).is_none(), "it came already");
                (train.next, train.space) = (SeqNr(u32::MAX - 3), 9);
                assert!(train.next(&good).is_none(), "no window");
            }
        }
    }
}
