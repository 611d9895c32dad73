//! From a burst of frames to connections: classification, lookup, and segments for none of them
//! (listeners, strangers).

use crate::conn::flag;
use crate::flow_table::FlowKey;
use crate::inbound::{self, Inbound, Link};
use crate::input::Verdict;
use crate::segment::{self, Segment};
use crate::stack::{FrameInfo, RxChecksum, Stack, State};
use crate::{Instant, RecvBuf};

impl<B: RecvBuf, R> Stack<B, R> {
    /// Takes a whole burst of received frames. ARP, NDP, ICMP are answered inside; the answers
    /// leave with the next `poll`.
    pub fn receive(&mut self, now: Instant, frames: impl Iterator<Item = (B, FrameInfo)>) {
        let link = Link {
            mac: self.sh.config.mac,
            vlan: self.sh.config.vlan,
        };
        // A burst is mostly of one flow: the last connection is tried before hashing.
        let mut last = u32::MAX;
        let mut seg = Segment::default();
        for (mut b, info) in frames {
            self.sh.stats.frames_in += 1;
            let mut src_mac = [0; 6];
            match inbound::classify(
                &link,
                &mut b,
                info.checksum,
                &mut src_mac,
                &mut self.sh.stats,
            ) {
                Some(Inbound::Tcp { key, ce }) => {
                    if !seg.parse(b.chunk()) {
                        self.sh.stats.in_errs += 1;
                        continue;
                    }
                    seg.ce = ce;
                    self.sh.stats.in_segs += 1;
                    b.advance(usize::from(seg.header_len));
                    self.tcp(now, &key, &seg, b, src_mac, &mut last);
                }
                Some(other) => self.other(now, other, b, src_mac),
                None => {}
            }
        }
    }

    /// Takes a copy of a frame that another worker received and answers: what every worker of
    /// a device has to know (neighbours, ICMP errors), see [`crate::Destination::Everyone`].
    pub fn overhear(&mut self, now: Instant, mut frame: B, checksum: RxChecksum) {
        let link = Link {
            mac: self.sh.config.mac,
            vlan: self.sh.config.vlan,
        };
        let mut src_mac = [0; 6];
        let what = inbound::classify(
            &link,
            &mut frame,
            checksum,
            &mut src_mac,
            &mut self.sh.stats,
        );
        if let Some(what) = what {
            self.sh.control.silent = true;
            self.other(now, what, frame, src_mac);
            self.sh.control.silent = false;
        }
    }

    #[inline]
    fn tcp(
        &mut self,
        now: Instant,
        key: &FlowKey,
        seg: &Segment,
        b: B,
        src_mac: [u8; 6],
        last: &mut u32,
    ) {
        let known = self
            .conns
            .get(*last as usize)
            .is_some_and(|c| c.template.carries(key) && c.hot.has(flag::HASHED));
        if !known {
            let hash = key.hash::<1, 3>(self.sh.hash_key);
            match self
                .sh
                .table
                .find(hash, |i| self.conns[i as usize].template.carries(key))
            {
                Some(i) => *last = i,
                None if seg.flags & (segment::SYN | segment::RST | segment::ACK)
                    == segment::ACK
                    && let Some(opened) = self.cookie_returned(now, key, seg, src_mac) =>
                {
                    let Some(i) = opened else { return };
                    *last = i;
                }
                None => return self.stranger(now, key, seg, b.remaining() as u32, src_mac),
            }
        }
        let index = *last;
        let c = &mut self.conns[index as usize];
        if let Err(b) = self.sh.predicted(index, c, seg, b, now) {
            let payload = b.remaining() as u32;
            match self.sh.segment(index, c, seg, b, now) {
                Verdict::Done => self.reap(index),
                Verdict::Reset => {
                    self.reap(index);
                    self.refuse(now, key, seg, payload, src_mac);
                }
                Verdict::Reopen => {
                    self.sh.stats.time_wait_recycled += 1;
                    self.sh.closed(index, c);
                    self.reap(index);
                    self.stranger(now, key, seg, payload, src_mac);
                }
            }
        }
    }

    /// Who listens there: on the address first, then on all.
    pub(crate) fn listener_of(&self, key: &FlowKey) -> Option<u32> {
        let local = key.local();
        let ports = &self.sh.ports;
        let one = ports.get(&(local.port(), Some(local.ip())));
        one.or_else(|| ports.get(&(local.port(), None))).copied()
    }

    /// A stranger's segment that can be meant: from an address that a peer can have and that is
    /// not ours (LAND), and no SYN with FIN.
    pub(crate) fn sound(&self, key: &FlowKey, seg: &Segment, src_mac: [u8; 6]) -> bool {
        let remote = key.remote();
        inbound::peer_address(remote.ip())
            && remote.port() != 0
            && !(self.sh.own(remote.ip()) && src_mac != self.sh.config.mac)
            && seg.flags & (segment::SYN | segment::FIN) != segment::SYN | segment::FIN
    }

    /// A segment for no connection (RFC 9293 section 3.10.7.1 and .2).
    #[cold]
    fn stranger(
        &mut self,
        now: Instant,
        key: &FlowKey,
        seg: &Segment,
        payload: u32,
        src_mac: [u8; 6],
    ) {
        let own = self.sh.own(key.local().ip());
        if !own || !self.sound(key, seg, src_mac) {
            self.sh.stats.not_for_us += u64::from(!own);
            self.sh.stats.martians += u64::from(own);
            return;
        }
        if seg.flags & segment::RST != 0 {
            return;
        }
        let listener = self
            .listener_of(key)
            .filter(|_| seg.flags & (segment::SYN | segment::ACK) == segment::SYN);
        let Some(listener) = listener else {
            self.sh.stats.no_ports += u64::from(seg.flags & segment::SYN != 0);
            return self.refuse(now, key, seg, payload, src_mac);
        };
        let Some(l) = self.sh.listeners.get_mut(&listener) else {
            return;
        };
        if l.pending >= l.backlog && l.ready < l.backlog && self.sh.config.syn_cookies {
            return self.send_cookie(now, key, seg, listener, src_mac);
        }
        if l.pending >= l.backlog {
            self.sh.stats.listen_overflows += 1;
            self.sh.stats.listen_drops += 1;
            return;
        }
        let user = l.user;
        let Some(index) = self.alloc(*key) else {
            self.sh.stats.listen_drops += 1;
            return;
        };
        if let Some(l) = self.sh.listeners.get_mut(&listener) {
            l.pending += 1;
        }
        let c = &mut self.conns[index as usize];
        c.listener = listener;
        c.hot.user = user;
        c.hot.state = State::SynReceived;
        c.hot.flags |= flag::PASSIVE | flag::BACKLOG | flag::RELEASED;
        c.negotiate(seg, &self.sh.config, self.sh.recv_wscale);
        self.open(index, now);
    }

    fn refuse(
        &mut self,
        now: Instant,
        key: &FlowKey,
        seg: &Segment,
        payload: u32,
        src_mac: [u8; 6],
    ) {
        if seg.flags & segment::RST == 0 && self.sh.resets.take(now) {
            self.sh
                .control
                .reset(src_mac, key, seg, payload, &mut self.sh.stats);
        }
    }
}
