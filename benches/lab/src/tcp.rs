//! Scripted TCP: each segment leaves when and as the case wants it. Received data is acknowledged and
//! put in order; sent data is repeated until acknowledged, because a busy machine loses frames.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use etherparse::{EtherType, Ethernet2Header, IpNumber, Ipv4Header, TcpHeader, TcpOptionElement};

use crate::impair::{Counts, Direction, Profile};
use crate::link::{Dress, Impaired, Mac, Received, StartUp, Station};

/// Time after which an unacknowledged segment is sent again.
const RETRANSMIT: Duration = Duration::from_millis(400);

/// The same on an impaired path, beside two round trips: losses are the rule there.
const IMPAIRED_RETRANSMIT: Duration = Duration::from_millis(100);

/// Longest wait for the start-up of another stream. Linux siw closes a connection without a Request after
/// five seconds.
const START_UP_WAIT: Duration = Duration::from_secs(3);

/// Place of the checksum in a segment.
const CHECKSUM: usize = 16;

/// Window announced to the peer, unless a case chooses another.
const WINDOW: u16 = 65_535;

/// A line of the ladder.
#[derive(Debug, Clone)]
pub struct Line {
    pub at: Instant,
    pub from_lab: bool,
    pub text: String,
    /// The Ethernet frame; `None` for a decoded message.
    pub frame: Option<Vec<u8>>,
}

/// Fields of a connection's SYN that a case can choose.
#[derive(Debug, Clone, Default)]
pub struct SynOptions {
    pub isn: Option<u32>,
    /// `None`: that of an MTU of 1500; zero: no option.
    pub mss: Option<u16>,
    /// Payload of the third segment of the handshake.
    pub with_ack: Vec<u8>,
    /// Window announced from the SYN on, before scaling.
    pub window: Option<u16>,
    /// Window Scale option (RFC 7323 section 2).
    pub scale: Option<u8>,
    /// SACK Permitted option (RFC 2018 section 2).
    pub has_sack: bool,
    /// Timestamps option (RFC 7323 section 3).
    pub has_timestamps: bool,
    /// Local port; `None`: one that no connection had.
    pub port: Option<u16>,
    /// Impairments of the path, from the SYN on, and their seed.
    pub path: Option<(Profile, u64)>,
}

/// Modifications of a single segment.
#[derive(Debug, Clone, Copy, Default)]
pub struct SegmentOptions {
    pub no_push: bool,
    /// The segment has a FIN, too.
    pub fin: bool,
    pub bad_checksum: bool,
    /// URG with a pointer to the first octet.
    pub urgent: bool,
    /// In two IP fragments, the second one first.
    pub fragments: bool,
    /// Added to the sequence number; such a segment is sent once.
    pub offset: i64,
    /// Sent once, without taking sequence numbers.
    pub is_once: bool,
    /// The timestamp is older than that of any segment before.
    pub is_old: bool,
    pub dress: Dress,
    /// Added to the acknowledgment number; such a segment is sent once.
    pub ack_offset: i64,
}

/// A segment with data of the peer.
#[derive(Debug, Clone, Copy)]
pub struct SeenSegment {
    pub seq: u32,
    pub length: u32,
    /// Octets of it were sent before.
    pub is_repeated: bool,
}

/// Segments that get lost on their way to the lab.
#[derive(Debug, Default)]
struct Loss {
    /// Segments with data that are still to be counted before each loss; one is the next.
    which: Vec<u32>,
    /// Largest IP packet that arrives; `None`: any.
    largest: Option<usize>,
}

#[derive(Debug, Clone)]
struct Unacked {
    seq: u32,
    fin: bool,
    payload: Vec<u8>,
    sent: Instant,
}

/// End of the peer's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    Fin,
    Reset,
}

/// A peer that did not answer a SYN, not even with a RST.
#[derive(Debug, thiserror::Error)]
#[error("{0} does not answer a SYN")]
pub struct NoAnswer(SocketAddr);

pub struct Tcp {
    station: Arc<Station>,
    peer: SocketAddr,
    peer_mac: Mac,
    pub port: u16,
    inbox: Receiver<Received>,
    pub snd_nxt: u32,
    pub snd_una: u32,
    pub rcv_nxt: u32,
    /// Announced window; octets beyond it are dropped.
    pub window: u16,
    /// MSS option of the peer's SYN.
    pub peer_mss: Option<u16>,
    /// Shift of the announced window, if both sides scale.
    scale: u8,
    /// Whether both sides send timestamps.
    has_timestamps: bool,
    /// Last timestamp of the peer.
    peer_timestamp: u32,
    begin: Instant,
    /// First SACK block of the peer's last segment.
    pub sack: Option<(u32, u32)>,
    /// Last acknowledgment number that the peer got.
    acked: u32,
    /// Highest sequence number of the peer, lost segments included.
    highest: Option<u32>,
    /// Most octets of the peer beyond what was acknowledged, since the last look.
    pub beyond: u32,
    /// Segments with data since the last look.
    pub seen: Vec<SeenSegment>,
    loss: Loss,
    /// IP packet of the peer's last segment with data.
    last_packet: Vec<u8>,
    out_of_order: BTreeMap<u32, (Vec<u8>, bool)>,
    /// Received in order and not taken yet.
    pub data: Vec<u8>,
    pub ending: Option<Ending>,
    unacked: Vec<Unacked>,
    /// Acknowledgements without data since the counter was reset.
    pub pure_acks: u32,
    /// Segments with data that were received.
    pub data_segments: u32,
    pub closed: bool,
    /// Acknowledged up to here only, whatever arrives.
    held_ack: Option<u32>,
    pub ladder: Vec<Line>,
    /// Impairments of the path.
    path: Option<Impaired>,
    /// Time after which an unacknowledged segment is sent again.
    retransmit: Duration,
}

/// Payload of a segment in an MTU of 1500.
fn largest_segment(peer: SocketAddr) -> u16 {
    if peer.is_ipv4() { 1460 } else { 1440 }
}

fn later(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

/// Octets of a segment up to `end` beyond what is acknowledged; none if it is sent again although it has been
/// acknowledged as a whole.
fn octets_beyond(end: u32, acked: u32) -> u32 {
    if later(end, acked) {
        end.wrapping_sub(acked)
    } else {
        0
    }
}

fn flags(header: &TcpHeader) -> String {
    let set = [
        (header.syn, "SYN"),
        (header.fin, "FIN"),
        (header.rst, "RST"),
        (header.psh, "PSH"),
        (header.ack, "ACK"),
        (header.urg, "URG"),
    ];
    let set: Vec<_> = set.iter().filter(|f| f.0).map(|f| f.1).collect();
    set.join(" ")
}

impl Tcp {
    /// Connects to a listening peer.
    pub fn connect(
        station: &Arc<Station>,
        peer: SocketAddr,
        peer_mac: Mac,
        isn: u32,
        options: &SynOptions,
        patience: Duration,
    ) -> Result<Tcp> {
        let port = options.port.unwrap_or_else(|| station.port());
        let (to, inbox) = channel();
        station.attach(port, peer, to);
        let isn = options.isn.unwrap_or(isn);
        let mut tcp = Tcp::new(station, peer, peer_mac, port, inbox, isn);
        tcp.window = options.window.unwrap_or(WINDOW);
        if let Some((profile, seed)) = &options.path {
            tcp.impair(profile, *seed);
        }
        let deadline = Instant::now() + patience;
        let mss = options.mss.unwrap_or(largest_segment(peer));
        loop {
            if Instant::now() >= deadline {
                return Err(NoAnswer(peer).into());
            }
            tcp.send_syn(mss, options, false);
            let again = (Instant::now() + tcp.retransmit).min(deadline);
            while let Some(received) = tcp.receive(again) {
                let header = &received.header;
                if header.rst {
                    bail!("{peer} refuses the connection with a RST");
                }
                if header.syn && header.ack && header.acknowledgment_number == isn.wrapping_add(1) {
                    tcp.on_syn(&received, options);
                    tcp.snd_nxt = isn.wrapping_add(1);
                    tcp.snd_una = tcp.snd_nxt;
                    if options.with_ack.is_empty() {
                        tcp.send_ack();
                    } else {
                        tcp.send(&options.with_ack, SegmentOptions::default());
                    }
                    return Ok(tcp);
                }
            }
        }
    }

    /// Answers the SYN of a peer and waits for the end of the handshake.
    pub fn accept(
        station: &Arc<Station>,
        syn: &Received,
        isn: u32,
        options: &SynOptions,
        patience: Duration,
    ) -> Result<Tcp> {
        let port = syn.header.destination_port;
        let (to, inbox) = channel();
        station.attach(port, syn.from, to);
        let isn = options.isn.unwrap_or(isn);
        let mut tcp = Tcp::new(station, syn.from, syn.from_mac, port, inbox, isn);
        tcp.window = options.window.unwrap_or(WINDOW);
        tcp.log(false, &syn.frame, &syn.header, syn.payload.len());
        tcp.on_syn(syn, options);
        let mss = options.mss.unwrap_or(largest_segment(syn.from));
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            tcp.snd_nxt = isn;
            tcp.send_syn(mss, options, true);
            tcp.snd_nxt = isn.wrapping_add(1);
            let again = (Instant::now() + RETRANSMIT).min(deadline);
            while let Some(received) = tcp.receive(again) {
                if received.header.rst {
                    bail!("{} resets its own SYN", syn.from);
                }
                if received.header.ack && received.header.acknowledgment_number == tcp.snd_nxt {
                    tcp.snd_una = tcp.snd_nxt;
                    tcp.on_segment(received);
                    return Ok(tcp);
                }
            }
        }
        bail!("{} does not end its handshake", syn.from)
    }

    fn new(
        station: &Arc<Station>,
        peer: SocketAddr,
        peer_mac: Mac,
        port: u16,
        inbox: Receiver<Received>,
        isn: u32,
    ) -> Tcp {
        Tcp {
            station: station.clone(),
            peer,
            peer_mac,
            port,
            inbox,
            snd_nxt: isn,
            snd_una: isn,
            rcv_nxt: 0,
            window: WINDOW,
            peer_mss: None,
            scale: 0,
            has_timestamps: false,
            peer_timestamp: 0,
            begin: Instant::now(),
            sack: None,
            acked: 0,
            highest: None,
            beyond: 0,
            seen: Vec::new(),
            loss: Loss::default(),
            last_packet: Vec::new(),
            out_of_order: BTreeMap::new(),
            data: Vec::new(),
            ending: None,
            unacked: Vec::new(),
            pure_acks: 0,
            data_segments: 0,
            closed: false,
            held_ack: None,
            ladder: Vec::new(),
            path: None,
            retransmit: RETRANSMIT,
        }
    }

    /// Impairs the path from here on; an impairment before it ends.
    pub fn impair(&mut self, profile: &Profile, seed: u64) {
        let Direction {
            delay_ms,
            jitter_ms,
            late_ms,
            ..
        } = profile.left;
        let back = profile.right.delay_ms + profile.right.jitter_ms;
        let round = Duration::from_secs_f64((delay_ms + jitter_ms + late_ms + back) / 1000.0);
        self.retransmit = IMPAIRED_RETRANSMIT + 2 * round;
        self.path = Some(self.station.impair(self.port, profile, seed));
    }

    /// Segments that took the impaired path, out and back.
    pub fn impaired(&self) -> Option<(Counts, Counts)> {
        self.path.as_ref().map(Impaired::counts)
    }

    fn header(&self) -> TcpHeader {
        let mut header = TcpHeader::new(self.port, self.peer.port(), self.snd_nxt, self.window);
        header.ack = true;
        header.acknowledgment_number = self.held_ack.unwrap_or(self.rcv_nxt);
        if self.has_timestamps {
            self.stamp(&mut header, self.clock());
        }
        header
    }

    /// Acknowledges what arrives, or nothing more from here on.
    pub fn acknowledge(&mut self, on: bool) {
        self.held_ack = (!on).then_some(self.rcv_nxt);
        if on {
            self.send_ack();
        }
    }

    /// Time of this connection for timestamps, in milliseconds.
    fn clock(&self) -> u32 {
        /// A value at the beginning that leaves room for older ones.
        const START: u32 = 1_000_000;
        START + self.begin.elapsed().as_millis() as u32
    }

    fn stamp(&self, header: &mut TcpHeader, time: u32) {
        // Ten octets always fit.
        let _ = header.set_options(&[
            TcpOptionElement::Noop,
            TcpOptionElement::Noop,
            TcpOptionElement::Timestamp(time, self.peer_timestamp),
        ]);
    }

    fn send_syn(&mut self, mss: u16, options: &SynOptions, ack: bool) {
        let mut header = self.header();
        header.syn = true;
        if !ack {
            header.ack = false;
            header.acknowledgment_number = 0;
        }
        let mut elements = Vec::new();
        if mss != 0 {
            elements.push(TcpOptionElement::MaximumSegmentSize(mss));
        }
        if let Some(scale) = options.scale {
            elements.push(TcpOptionElement::WindowScale(scale));
        }
        if options.has_sack {
            elements.push(TcpOptionElement::SelectiveAcknowledgementPermitted);
        }
        if options.has_timestamps {
            let time = self.clock();
            elements.push(TcpOptionElement::Timestamp(time, self.peer_timestamp));
        }
        // All of them take 19 octets of 40.
        let _ = header.set_options(&elements);
        self.transmit(header, &[], SegmentOptions::default());
    }

    fn on_syn(&mut self, received: &Received, ours: &SynOptions) {
        self.rcv_nxt = received.header.sequence_number.wrapping_add(1);
        for option in received.header.options_iterator().flatten() {
            match option {
                TcpOptionElement::MaximumSegmentSize(mss) => self.peer_mss = Some(mss),
                TcpOptionElement::WindowScale(_) => self.scale = ours.scale.unwrap_or(0),
                TcpOptionElement::Timestamp(time, _) => {
                    self.has_timestamps = ours.has_timestamps;
                    self.peer_timestamp = time;
                }
                _ => {}
            }
        }
    }

    /// Window that the peer may fill, in octets.
    fn room(&self) -> u32 {
        u32::from(self.window) << self.scale
    }

    /// Payload of the peer's largest segment: announced by the lab or bounded by its own link, less the
    /// timestamps.
    pub fn largest_of_peer(&self, announced: Option<u16>) -> u64 {
        let own = largest_segment(self.peer);
        let link = self.peer_mss.unwrap_or(own);
        let options = if self.has_timestamps { 12 } else { 0 };
        u64::from(announced.unwrap_or(own).min(link)).saturating_sub(options)
    }

    /// Loses segments with data: the `which`-th ones from here on, the next one being 1.
    pub fn lose(&mut self, which: &[u32]) {
        self.loss.which = which.to_vec();
    }

    /// Loses frames whose IP packet has more octets.
    pub fn lose_above(&mut self, octets: usize) {
        self.loss.largest = Some(octets);
    }

    fn is_lost(&mut self, received: &Received) -> bool {
        const ETHERNET: usize = 14;
        if received.payload.is_empty() {
            return false;
        }
        let largest = self.loss.largest.unwrap_or(usize::MAX);
        let mut is_lost = received.frame.len() - ETHERNET > largest;
        for count in &mut self.loss.which {
            *count = count.saturating_sub(1);
        }
        let before = self.loss.which.len();
        self.loss.which.retain(|count| *count > 0);
        is_lost |= self.loss.which.len() < before;
        if is_lost {
            self.note(false, "lost on its way".into());
        }
        is_lost
    }

    /// Accounts for a segment with data, lost or not.
    fn look_at(&mut self, received: &Received, is_lost: bool) {
        let seq = received.header.sequence_number;
        let length = received.payload.len() as u32;
        let end = seq.wrapping_add(length);
        let is_repeated = self.highest.is_some_and(|highest| later(highest, seq));
        if self.highest.is_none_or(|highest| later(end, highest)) {
            self.highest = Some(end);
        }
        if is_lost {
            return;
        }
        self.beyond = self.beyond.max(octets_beyond(end, self.acked));
        self.last_packet = received.frame.get(14..).unwrap_or_default().to_vec();
        self.seen.push(SeenSegment {
            seq,
            length,
            is_repeated,
        });
    }

    /// Sends the ICMP error of a router about the peer's last segment with data, whose sequence number the offset
    /// changes.
    pub fn send_too_big(&mut self, mtu: u32, offset: i64) -> Result<()> {
        let mut packet = self.last_packet.clone();
        let ip = if self.peer.is_ipv4() { 20 } else { 40 };
        let Some(seq) = packet.get_mut(ip + 4..ip + 8) else {
            bail!("the peer sent no data yet");
        };
        let number = u32::from_be_bytes([seq[0], seq[1], seq[2], seq[3]]);
        seq.copy_from_slice(&number.wrapping_add(offset as u32).to_be_bytes());
        packet.truncate(ip + 20);
        let to = self.peer.ip();
        let frame = self.station.send_too_big(self.peer_mac, to, mtu, &packet);
        self.ladder.push(Line {
            at: Instant::now(),
            from_lab: true,
            text: format!("ICMP too big, MTU {mtu}"),
            frame: Some(frame),
        });
        Ok(())
    }

    fn transmit(&mut self, header: TcpHeader, payload: &[u8], options: SegmentOptions) {
        if header.ack {
            self.acked = header.acknowledgment_number;
        }
        let mut octets = header.to_bytes().to_vec();
        octets.extend(payload);
        let (mac, to) = (self.peer_mac, self.peer.ip());
        self.station.sum(to, IpNumber::TCP, &mut octets, CHECKSUM);
        if options.bad_checksum {
            octets[CHECKSUM] ^= 1;
        }
        let frames = if options.fragments {
            self.station.fragments(mac, to, IpNumber::TCP, &octets)
        } else if options.dress.is_plain() {
            vec![self.station.packet(mac, to, IpNumber::TCP, &octets)]
        } else {
            let dress = options.dress;
            vec![self.station.dressed(mac, to, IpNumber::TCP, &octets, dress)]
        };
        for frame in frames {
            self.log(true, &frame, &header, payload.len());
            self.station.send(&frame);
        }
    }

    fn log(&mut self, from_lab: bool, frame: &[u8], header: &TcpHeader, length: usize) {
        self.ladder.push(Line {
            at: Instant::now(),
            from_lab,
            text: format!(
                "TCP {} seq={} ack={} win={} len={length}",
                flags(header),
                header.sequence_number,
                header.acknowledgment_number,
                header.window_size
            ),
            frame: Some(frame.to_vec()),
        });
    }

    /// The station's permission to send an MPA Request; `None` if the others take too long.
    pub fn begin_start_up(&self) -> Option<StartUp> {
        self.station.begin_start_up(START_UP_WAIT)
    }

    /// Adds a decoded message to the ladder.
    pub fn note(&mut self, from_lab: bool, text: String) {
        self.ladder.push(Line {
            at: Instant::now(),
            from_lab,
            text,
            frame: None,
        });
    }

    /// Sends one segment with data.
    pub fn send(&mut self, payload: &[u8], options: SegmentOptions) {
        let mut header = self.header();
        header.psh = !options.no_push;
        if options.urgent {
            header.urg = true;
            header.urgent_pointer = 1;
        }
        if options.is_old && self.has_timestamps {
            self.stamp(&mut header, 1);
        }
        if options.offset != 0 || options.is_once || options.ack_offset != 0 {
            header.sequence_number = header.sequence_number.wrapping_add(options.offset as u32);
            let ack = &mut header.acknowledgment_number;
            *ack = ack.wrapping_add(options.ack_offset as u32);
            self.transmit(header, payload, options);
            return;
        }
        header.fin = options.fin;
        self.transmit(header, payload, options);
        self.add_unacked(payload);
        if options.fin {
            self.snd_nxt = self.snd_nxt.wrapping_add(1);
            self.closed = true;
            if let Some(last) = self.unacked.last_mut() {
                last.fin = true;
            }
        }
    }

    /// Adds data to those that [`Self::resend`] sends, and takes their sequence numbers.
    pub fn add_unacked(&mut self, payload: &[u8]) {
        let seq = self.snd_nxt;
        self.snd_nxt = seq.wrapping_add(payload.len() as u32);
        let payload = payload.to_vec();
        self.unacked.push(Unacked {
            seq,
            fin: false,
            payload,
            sent: Instant::now(),
        });
    }

    /// Sends all unacknowledged data from the oldest on.
    pub fn resend(&mut self) {
        for sent in self.unacked.clone() {
            self.repeat(&sent);
        }
    }

    fn repeat(&mut self, sent: &Unacked) {
        let mut header = self.header();
        header.sequence_number = sent.seq;
        header.psh = true;
        header.fin = sent.fin;
        self.transmit(header, &sent.payload, SegmentOptions::default());
    }

    pub fn send_ack(&mut self) {
        let header = self.header();
        self.transmit(header, &[], SegmentOptions::default());
    }

    /// A probe of keepalive: the last octet before SND.NXT, or none.
    pub fn send_keepalive(&mut self, length: usize) {
        let mut header = self.header();
        header.sequence_number = self.snd_nxt.wrapping_sub(1);
        self.transmit(header, &vec![0; length], SegmentOptions::default());
    }

    pub fn send_fin(&mut self) {
        let seq = self.snd_nxt;
        let mut header = self.header();
        header.fin = true;
        self.transmit(header, &[], SegmentOptions::default());
        self.snd_nxt = seq.wrapping_add(1);
        self.closed = true;
        self.unacked.push(Unacked {
            seq,
            fin: true,
            payload: Vec::new(),
            sent: Instant::now(),
        });
    }

    /// A RST, `offset` beyond the octet that the peer expects.
    pub fn send_reset(&mut self, offset: i64) {
        let mut header = self.header();
        header.rst = true;
        header.sequence_number = self.snd_nxt.wrapping_add(offset as u32);
        self.transmit(header, &[], SegmentOptions::default());
        self.closed |= offset == 0;
    }

    /// A SYN within the connection.
    pub fn send_stray_syn(&mut self, offset: i64) {
        let mut header = self.header();
        header.syn = true;
        header.ack = false;
        header.acknowledgment_number = 0;
        header.sequence_number = self.snd_nxt.wrapping_add(offset as u32);
        self.transmit(header, &[], SegmentOptions::default());
    }

    /// An ACK of data that the peer did not send.
    pub fn send_ack_beyond(&mut self, offset: i64) {
        let mut header = self.header();
        header.acknowledgment_number = self.rcv_nxt.wrapping_add(offset as u32);
        self.transmit(header, &[], SegmentOptions::default());
    }

    fn receive(&mut self, until: Instant) -> Option<Received> {
        let left = until.saturating_duration_since(Instant::now());
        match self.inbox.recv_timeout(left) {
            Ok(received) => {
                self.log(
                    false,
                    &received.frame,
                    &received.header,
                    received.payload.len(),
                );
                Some(received)
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => None,
        }
    }

    /// Handles one received segment, or the retransmission timer; false at `until`.
    pub fn pump(&mut self, until: Instant) -> bool {
        loop {
            let oldest = self.unacked.iter().map(|u| u.sent).min();
            let again = oldest.map_or(until, |sent| until.min(sent + self.retransmit));
            if let Some(received) = self.receive(again) {
                let is_lost = self.is_lost(&received);
                if !received.payload.is_empty() {
                    self.look_at(&received, is_lost);
                }
                if !is_lost {
                    self.on_segment(received);
                }
                return true;
            }
            let now = Instant::now();
            if now >= until {
                return false;
            }
            for at in 0..self.unacked.len() {
                if now >= self.unacked[at].sent + self.retransmit {
                    self.unacked[at].sent = now;
                    let sent = self.unacked[at].clone();
                    self.repeat(&sent);
                }
            }
        }
    }

    fn on_segment(&mut self, received: Received) {
        let Received {
            header,
            mut payload,
            ..
        } = received;
        if header.rst {
            // Only an exact one ends the stream, as at any receiver (RFC 5961 section 3.2).
            if header.sequence_number != self.rcv_nxt {
                self.send_ack();
            } else if self.ending != Some(Ending::Reset) {
                self.ending = Some(Ending::Reset);
                self.unacked.clear();
            }
            return;
        }
        if header.syn {
            self.send_ack();
            return;
        }
        self.sack = None;
        for option in header.options_iterator().flatten() {
            match option {
                TcpOptionElement::SelectiveAcknowledgement(first, _) => self.sack = Some(first),
                TcpOptionElement::Timestamp(time, _) => self.peer_timestamp = time,
                _ => {}
            }
        }
        if header.ack && later(header.acknowledgment_number, self.snd_nxt) {
            // Data that was never sent (RFC 9293 section 3.10.7.4).
            self.send_ack();
            return;
        }
        if header.ack && later(header.acknowledgment_number, self.snd_una) {
            self.snd_una = header.acknowledgment_number;
            let una = self.snd_una;
            self.unacked.retain(|u| {
                let end = u
                    .seq
                    .wrapping_add(u.payload.len() as u32 + u32::from(u.fin));
                later(end, una)
            });
        }
        if payload.is_empty() && !header.fin {
            self.pure_acks += 1;
            // A keepalive probe is answered.
            if later(self.rcv_nxt, header.sequence_number) {
                self.send_ack();
            }
            return;
        }
        let mut fin = header.fin;
        if self.window < WINDOW {
            let end = self.rcv_nxt.wrapping_add(self.room());
            let room = (end.wrapping_sub(header.sequence_number) as i32).max(0) as usize;
            if payload.len() > room {
                payload.truncate(room);
                fin = false;
            }
            if payload.is_empty() && !fin {
                return self.send_ack();
            }
        }
        self.data_segments += u32::from(!payload.is_empty());
        // The first copy counts.
        self.out_of_order
            .entry(header.sequence_number)
            .or_insert((payload, fin));
        while let Some((&seq, _)) = self
            .out_of_order
            .iter()
            .find(|(seq, _)| !later(**seq, self.rcv_nxt))
        {
            let Some((payload, fin)) = self.out_of_order.remove(&seq) else {
                break;
            };
            let known = self.rcv_nxt.wrapping_sub(seq) as usize;
            // Nothing follows a FIN.
            if known <= payload.len() && self.ending.is_none() {
                self.data.extend(&payload[known..]);
                self.rcv_nxt = seq.wrapping_add(payload.len() as u32);
                if fin && self.ending.is_none() {
                    self.rcv_nxt = self.rcv_nxt.wrapping_add(1);
                    self.ending = Some(Ending::Fin);
                }
            }
        }
        if self.held_ack.is_none() {
            self.send_ack();
        }
    }

    /// Octets that the peer has not acknowledged.
    pub fn in_flight(&self) -> u32 {
        self.snd_nxt.wrapping_sub(self.snd_una)
    }

    /// Port of the lab.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether the peer acknowledged everything.
    pub fn all_acked(&self) -> bool {
        self.snd_una == self.snd_nxt
    }

    /// Don't Fragment, and time to live or hop limit, of the peer's last frame. Routers never fragment IPv6.
    pub fn last_ip(&self) -> Option<(bool, u8)> {
        let line = self
            .ladder
            .iter()
            .rev()
            .find(|l| !l.from_lab && l.frame.is_some())?;
        let (ethernet, rest) = Ethernet2Header::from_slice(line.frame.as_ref()?).ok()?;
        if ethernet.ether_type == EtherType::IPV6 {
            return Some((true, *rest.get(7)?));
        }
        let (ip, _) = Ipv4Header::from_slice(rest).ok()?;
        Some((ip.dont_fragment, ip.time_to_live))
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        let ended = self.ending == Some(Ending::Reset) || self.closed && self.ending.is_some();
        if !ended {
            self.send_reset(0);
        }
        self.station.detach(self.port, self.peer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_that_was_acknowledged_is_not_beyond() {
        for acked in [1000, 10, u32::MAX] {
            let at = |offset: i32| octets_beyond(acked.wrapping_add_signed(offset), acked);
            assert_eq!([at(960), at(1), at(0), at(-960)], [960, 1, 0, 0]);
        }
    }
}
