//! iWARP stream of the lab with a target that runs rping: start-up, FPDUs, and the rounds of rping, by
//! which the lab learns STags and verifies the target's memory.
//!
//! A round with `rping -s` on the target: the lab advertises a buffer with a Send; the target reads it
//! into its own buffer and answers with a Send; the lab advertises a buffer again; the target writes its
//! own buffer there, up to and including the first zero octet, and answers with a Send. The sink of the
//! Read is registered for remote access, so its STag serves for the cases. With `rping -c` the target
//! advertises its buffer, which the lab reads; it advertises a second one, which the lab writes.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::link::StartUp;
use crate::mapper::MapperMessage;
use crate::rules::broken_by;
use crate::tcp::{Ending, SegmentOptions, Tcp};
use crate::wire::{
    Fpdu, FpduOptions, FpduReader, MpaFrame, REPLY_KEY, REQUEST_KEY, ReadRequest, Segment, fpdu,
    marked_fpdu, opcode,
};

/// Size of the ping data: the default of rping.
pub const PING_SIZE: u32 = 64;

/// Payload of a tagged segment of the lab.
const TAGGED_PAYLOAD: usize = 1024;

/// Part of the target, from the specification's view.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The target runs `rping -s`.
    Responder,
    /// The target runs `rping -c`.
    Initiator,
}

/// Fields of the lab's start frame in the standard opening.
#[derive(Debug, Clone)]
pub struct Opening {
    pub flags: u8,
    pub revision: u8,
    pub ird: u16,
    pub ord: u16,
    /// A, B, C, D as bits 3 to 0.
    pub control: u8,
    pub private_data: Vec<u8>,
}

impl Default for Opening {
    fn default() -> Opening {
        Opening {
            flags: 0x50,
            revision: 2,
            ird: 16,
            ord: 16,
            control: 0,
            private_data: Vec::new(),
        }
    }
}

impl Opening {
    pub fn frame(&self, key: &[u8; 16]) -> MpaFrame {
        let mut private_data = Vec::new();
        if self.flags & 0x10 != 0 {
            let control = u16::from(self.control);
            private_data.extend((self.ird & 0x3FFF | control >> 2 << 14).to_be_bytes());
            private_data.extend((self.ord & 0x3FFF | control << 14).to_be_bytes());
        }
        private_data.extend(&self.private_data);
        MpaFrame {
            key: *key,
            flags: self.flags,
            revision: self.revision,
            pd_length: private_data.len() as u16,
            private_data,
        }
    }
}

/// Next thing that the target does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Mpa(MpaFrame),
    /// The segment is missing where the ULPDU is too short for its header.
    Fpdu(Fpdu, Option<Segment>),
    /// Message of the target's port mapper; `None`: a datagram that is none.
    Mapper(Option<MapperMessage>),
    Fin,
    Reset,
    /// Nothing until the time limit.
    Quiet,
}

impl Event {
    pub fn describe(&self) -> String {
        match self {
            Event::Mpa(frame) => frame.describe(),
            Event::Mapper(Some(message)) => message.describe(),
            Event::Mapper(None) => "a datagram that is too short for the port mapper".into(),
            Event::Fpdu(fpdu, segment) => {
                let mut text = match segment {
                    Some(segment) => segment.describe(),
                    None => format!(
                        "FPDU with a ULPDU of {} octets, too short for its header",
                        fpdu.ulpdu.len()
                    ),
                };
                if !fpdu.crc_good {
                    text += ", BAD CRC";
                }
                if !fpdu.pad_zero {
                    text += ", pad not zero";
                }
                if fpdu.markers > 0 {
                    text += &format!(", {} markers", fpdu.markers);
                }
                if !fpdu.markers_right {
                    text += ", WRONG MARKER";
                }
                text
            }
            Event::Fin => "FIN".into(),
            Event::Reset => "RST".into(),
            Event::Quiet => "nothing".into(),
        }
    }
}

/// A conversation that did not go on, and the event that ended it.
#[derive(Debug)]
pub struct Broken {
    pub text: String,
    pub event: Box<Event>,
}

/// Memory of the target that the lab may write and read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    pub stag: u32,
    pub base: u64,
    pub len: u32,
}

/// Position in rping's round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Between rounds; the target waits for an advertisement.
    Idle,
    AwaitRead,
    AnswerRead(ReadRequest),
    AwaitGo,
    /// The target has read; its buffer is known.
    Region,
    AwaitWrite,
    AwaitWritten,
    /// The client's first advertisement.
    AwaitSource,
    /// The client's source is known.
    Source,
    AwaitResponse,
    AwaitSink,
}

/// An FPDU of the target.
#[derive(Debug, Clone)]
pub struct SeenFpdu {
    /// Sequence number of its first octet, or of the marker before it.
    pub seq: u32,
    pub fpdu: Fpdu,
    pub segment: Option<Segment>,
}

pub struct Stream {
    pub tcp: Tcp,
    pub role: Role,
    /// Start frame of the lab, once it was sent.
    pub ours: Option<MpaFrame>,
    /// Start frame of the target.
    pub theirs: Option<MpaFrame>,
    reader: FpduReader,
    reader_fed: bool,
    /// Sequence number of the target's next FPDU.
    next_fpdu: u32,
    /// FPDUs since the last look at the flow.
    pub seen: Vec<SeenFpdu>,
    /// Read Requests of the target without a Response.
    pub reads: VecDeque<ReadRequest>,
    /// Octets of FPDUs that were sent, by which markers are placed.
    position: u64,
    /// Next MSN of each queue.
    pub msn: [u32; 4],
    pub phase: Phase,
    pub region: Option<Region>,
    /// Expected content of the target's buffer.
    pub image: Vec<u8>,
    received: Vec<u8>,
    pub lab_stag: u32,
    pub lab_base: u64,
    /// Segments of the target that break a rule for senders.
    pub violations: Vec<String>,
    /// Last DDP segment that a case sent: its ULPDU.
    pub sent: Vec<u8>,
    pub patience: Duration,
    reported: bool,
    /// Held until the target answers the Request.
    start_up: Option<StartUp>,
}

impl Stream {
    pub fn new(tcp: Tcp, role: Role, seed: u64, patience: Duration) -> Stream {
        let mut image: Vec<u8> = (0..PING_SIZE - 1)
            .map(|i| b'A' + ((u64::from(i) + seed) % 26) as u8)
            .collect();
        image.push(0);
        Stream {
            tcp,
            role,
            ours: None,
            theirs: None,
            reader: FpduReader::default(),
            reader_fed: false,
            next_fpdu: 0,
            seen: Vec::new(),
            reads: VecDeque::new(),
            position: 0,
            msn: [1; 4],
            phase: if role == Role::Responder {
                Phase::Idle
            } else {
                Phase::AwaitSource
            },
            region: None,
            image,
            received: Vec::new(),
            lab_stag: 0x1AB0_0000 | (seed as u32 & 0xFFFF),
            lab_base: 0x2000_0000 + (seed & 0xFFFF) * 64,
            violations: Vec::new(),
            sent: Vec::new(),
            patience,
            reported: false,
            start_up: None,
        }
    }

    /// Waits until no other stream of the lab awaits a Reply; to be called before a Request is sent.
    pub fn begin_start_up(&mut self) {
        if self.start_up.is_none() && self.theirs.is_none() {
            self.start_up = self.tcp.begin_start_up();
        }
    }

    pub fn crc(&self) -> bool {
        [&self.ours, &self.theirs]
            .into_iter()
            .flatten()
            .any(MpaFrame::crc)
    }

    fn started(&self) -> bool {
        self.ours.is_some() && self.theirs.is_some()
    }

    /// The next event of the target.
    pub fn event(&mut self, patience: Duration) -> Event {
        let event = self.next_event(patience);
        self.start_up = None;
        event
    }

    fn next_event(&mut self, patience: Duration) -> Event {
        let until = Instant::now() + patience;
        loop {
            if let Some(event) = self.take_event() {
                if !(matches!(event, Event::Fin | Event::Reset)
                    && std::mem::replace(&mut self.reported, true))
                {
                    self.tcp.note(false, event.describe());
                }
                return event;
            }
            if !self.tcp.pump(until) {
                return Event::Quiet;
            }
        }
    }

    fn take_event(&mut self) -> Option<Event> {
        if self.theirs.is_none() {
            // A start frame begins with its key; FPDUs of a target that skips it do not.
            if let Some((frame, end)) = MpaFrame::decode(&self.tcp.data) {
                self.tcp.data.drain(..end);
                let behind =
                    self.tcp.data.len() + usize::from(self.tcp.ending == Some(Ending::Fin));
                self.next_fpdu = self.tcp.rcv_nxt.wrapping_sub(behind as u32);
                self.theirs = Some(frame.clone());
                return Some(Event::Mpa(frame));
            }
        } else {
            if !self.reader_fed {
                self.reader_fed = true;
                self.reader.markers = self.ours.as_ref().is_some_and(MpaFrame::markers);
            }
            let data = std::mem::take(&mut self.tcp.data);
            self.reader.push(&data);
            if let Some(mut fpdu) = self.reader.next_fpdu() {
                fpdu.crc_good |= !self.crc();
                let segment = Segment::decode(&fpdu.ulpdu);
                self.check(&fpdu, segment.as_ref());
                if let Some(segment) = &segment {
                    self.on_segment(segment);
                }
                self.seen.push(SeenFpdu {
                    seq: self.next_fpdu,
                    fpdu: fpdu.clone(),
                    segment: segment.clone(),
                });
                self.next_fpdu = self.next_fpdu.wrapping_add(fpdu.length as u32);
                return Some(Event::Fpdu(fpdu, segment));
            }
        }
        match self.tcp.ending? {
            Ending::Fin => Some(Event::Fin),
            Ending::Reset => Some(Event::Reset),
        }
    }

    /// Rules for senders that every segment of the target must keep.
    fn check(&mut self, fpdu: &Fpdu, segment: Option<&Segment>) {
        for text in broken_by(fpdu, segment) {
            self.violations.push(format!(
                "{text}: {}",
                Event::Fpdu(fpdu.clone(), segment.cloned()).describe()
            ));
        }
    }

    fn on_segment(&mut self, segment: &Segment) {
        let is_send = segment.opcode == opcode::SEND || segment.opcode == opcode::SEND_SE;
        if segment.opcode == opcode::READ_REQUEST
            && let Some(read) = ReadRequest::decode(&segment.payload)
        {
            self.reads.push_back(read);
        }
        self.phase = match self.phase {
            Phase::AwaitRead if segment.opcode == opcode::READ_REQUEST => {
                let Some(read) = ReadRequest::decode(&segment.payload) else {
                    return;
                };
                self.region = Some(Region {
                    stag: read.sink_stag,
                    base: read.sink_to,
                    len: read.size,
                });
                Phase::AnswerRead(read)
            }
            Phase::AwaitGo if is_send => Phase::Region,
            Phase::AwaitWrite if segment.opcode == opcode::WRITE => {
                self.received.extend(&segment.payload);
                if segment.last {
                    Phase::AwaitWritten
                } else {
                    Phase::AwaitWrite
                }
            }
            Phase::AwaitWritten if is_send => Phase::Idle,
            Phase::AwaitSource | Phase::AwaitSink if is_send && segment.payload.len() >= 16 => {
                let long = |at: usize| {
                    segment.payload[at..at + 8]
                        .iter()
                        .fold(0, |n, o| n << 8 | u64::from(*o))
                };
                let (base, rest) = (long(0), long(8));
                self.region = Some(Region {
                    stag: (rest >> 32) as u32,
                    base,
                    len: rest as u32,
                });
                if self.phase == Phase::AwaitSource {
                    Phase::Source
                } else {
                    self.write_sink();
                    Phase::AwaitSource
                }
            }
            Phase::AwaitResponse if segment.opcode == opcode::READ_RESPONSE => {
                self.received.extend(&segment.payload);
                if segment.last {
                    self.image = std::mem::take(&mut self.received);
                    self.send_go();
                    Phase::AwaitSink
                } else {
                    Phase::AwaitResponse
                }
            }
            other => other,
        };
    }

    pub fn send_frame(&mut self, frame: &MpaFrame) {
        self.begin_start_up();
        self.tcp.note(true, frame.describe());
        self.tcp.send(&frame.encode(), SegmentOptions::default());
        self.ours = Some(frame.clone());
    }

    /// Sends a well-formed segment.
    pub fn send_segment(&mut self, segment: &Segment) {
        self.tcp.note(true, segment.describe());
        let octets = self.fpdu(&segment.encode(), &FpduOptions::default(), false);
        self.tcp.send(&octets, SegmentOptions::default());
    }

    /// The stream's next FPDU, with markers if the target asked for them or the case wants them.
    pub fn fpdu(&mut self, ulpdu: &[u8], options: &FpduOptions, is_marked: bool) -> Vec<u8> {
        let octets = if is_marked || self.theirs.as_ref().is_some_and(MpaFrame::markers) {
            marked_fpdu(ulpdu, options, self.position)
        } else {
            fpdu(ulpdu, options)
        };
        self.position += octets.len() as u64;
        octets
    }

    /// Octets that [`Self::fpdu`] made are not part of the stream.
    pub fn forget_fpdus(&mut self, octets: usize) {
        self.position -= octets as u64;
    }

    pub fn untagged(&mut self, opcode: u8, payload: &[u8]) -> Segment {
        let qn = match opcode {
            opcode::READ_REQUEST | opcode::ATOMIC_REQUEST => 1,
            opcode::TERMINATE => 2,
            opcode::ATOMIC_RESPONSE => 3,
            _ => 0,
        };
        Segment {
            last: true,
            ddp_version: 1,
            rdmap_version: 1,
            opcode,
            qn,
            msn: self.msn[qn as usize],
            payload: payload.to_vec(),
            ..Segment::default()
        }
    }

    pub fn send_untagged(&mut self, opcode: u8, payload: &[u8]) {
        let segment = self.untagged(opcode, payload);
        let msn = &mut self.msn[segment.qn as usize];
        *msn = msn.wrapping_add(1);
        self.send_segment(&segment);
    }

    pub fn send_tagged(&mut self, opcode: u8, stag: u32, to: u64, payload: &[u8]) {
        let mut at = 0;
        loop {
            let end = payload.len().min(at + TAGGED_PAYLOAD);
            let segment = Segment {
                tagged: true,
                last: end == payload.len(),
                ddp_version: 1,
                rdmap_version: 1,
                opcode,
                stag,
                to: to.wrapping_add(at as u64),
                payload: payload[at..end].to_vec(),
                ..Segment::default()
            };
            self.send_segment(&segment);
            at = end;
            if at == payload.len() {
                break;
            }
        }
        if opcode == opcode::READ_RESPONSE {
            self.reads.pop_front();
        }
    }

    /// rping's advertisement of the lab's buffer.
    pub fn advertisement(&self, size: u32) -> Vec<u8> {
        let mut octets = self.lab_base.to_be_bytes().to_vec();
        octets.extend(self.lab_stag.to_be_bytes());
        octets.extend(size.to_be_bytes());
        octets
    }

    /// Accounts for an advertisement that a case sent by itself.
    pub fn on_advertisement_sent(&mut self) {
        self.received.clear();
        self.phase = match self.phase {
            Phase::Idle => Phase::AwaitRead,
            Phase::Region => Phase::AwaitWrite,
            other => other,
        };
    }

    fn send_go(&mut self) {
        let payload = self.advertisement(PING_SIZE);
        self.send_untagged(opcode::SEND, &payload);
    }

    fn write_sink(&mut self) {
        let Some(region) = self.region else { return };
        let mut data = self.image.clone();
        data.truncate(region.len as usize);
        self.send_tagged(opcode::WRITE, region.stag, region.base, &data);
        self.send_go();
    }

    /// Opens the MPA stream with the lab's start frame.
    pub fn open(&mut self, opening: &Opening) -> Result<(), Broken> {
        if self.role == Role::Responder {
            self.send_frame(&opening.frame(REQUEST_KEY));
        }
        let frame = match self.event(self.patience) {
            Event::Mpa(frame) => frame,
            event => return Err(self.broken("no MPA start frame", event)),
        };
        let key = if self.role == Role::Responder {
            REPLY_KEY
        } else {
            REQUEST_KEY
        };
        if &frame.key != key || frame.rejected() {
            return Err(self.broken("not opened", Event::Mpa(frame)));
        }
        if self.role == Role::Initiator {
            let mut opening = opening.clone();
            if !frame.enhanced() {
                opening.flags &= !0x10;
            }
            opening.revision = opening.revision.min(frame.revision);
            if let Some((_, _, control)) = frame.depths()
                && control & 8 != 0
                && opening.control == 0
            {
                // Peer to peer, with the ready-to-receive kind that the target offers first.
                let kind = [2, 1, 4].into_iter().find(|kind| control & kind != 0);
                opening.control = 8 | kind.unwrap_or(0);
            }
            self.send_frame(&opening.frame(REPLY_KEY));
        }
        Ok(())
    }

    fn broken(&self, what: &str, event: Event) -> Broken {
        Broken {
            text: format!("{what}; the target's next step: {}", event.describe()),
            event: Box::new(event),
        }
    }

    /// Continues rping's round until `stop`.
    pub fn run_until(&mut self, stop: Phase) -> Result<(), Broken> {
        let mut first = true;
        while first || self.phase != stop {
            first = false;
            match self.phase {
                Phase::Idle | Phase::Region => {
                    let payload = self.advertisement(PING_SIZE);
                    self.on_advertisement_sent();
                    self.send_untagged(opcode::SEND, &payload);
                }
                Phase::AnswerRead(read) => {
                    let mut data = self.image.clone();
                    data.resize(read.size as usize, 0);
                    self.phase = Phase::AwaitGo;
                    self.send_tagged(opcode::READ_RESPONSE, read.sink_stag, read.sink_to, &data);
                }
                Phase::Source => {
                    let Some(region) = self.region else { continue };
                    let read = ReadRequest {
                        sink_stag: self.lab_stag,
                        sink_to: self.lab_base,
                        size: region.len,
                        source_stag: region.stag,
                        source_to: region.base,
                    };
                    self.received.clear();
                    self.phase = Phase::AwaitResponse;
                    self.send_untagged(opcode::READ_REQUEST, &read.encode());
                }
                _ => {
                    let before = self.phase;
                    let event = self.event(self.patience);
                    // The ready-to-receive message, if that is the kind agreed on.
                    if matches!(&event, Event::Fpdu(_, Some(s)) if s.opcode == opcode::WRITE && s.payload.is_empty())
                    {
                        continue;
                    }
                    let unexpected = !matches!(event, Event::Fpdu(_, Some(_)));
                    let stuck = self.phase == before
                        && self.phase != Phase::AwaitWrite
                        && self.phase != Phase::AwaitResponse;
                    let terminated =
                        matches!(&event, Event::Fpdu(_, Some(s)) if s.opcode == opcode::TERMINATE);
                    if unexpected || stuck || terminated {
                        return Err(self.broken("the conversation does not go on", event));
                    }
                    if self.phase == Phase::AwaitWritten {
                        self.verify(&event)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Compares the target's buffer, as it wrote it to the lab, with the expected content.
    fn verify(&mut self, event: &Event) -> Result<(), Broken> {
        let got = std::mem::take(&mut self.received);
        let text = self
            .image
            .iter()
            .position(|octet| *octet == 0)
            .map_or(self.image.len(), |at| at + 1);
        let differs = (0..text.max(got.len())).find(|at| got.get(*at) != self.image.get(*at));
        match differs {
            Some(at) if at < text => {
                let show = |octets: &[u8]| {
                    octets
                        .get(at)
                        .map_or("nothing".to_owned(), |o| format!("{o:#04x}"))
                };
                let text = format!(
                    "the target's memory differs at octet {at}: expected {}, found {}",
                    show(&self.image),
                    show(&got)
                );
                Err(Broken {
                    text,
                    event: Box::new(event.clone()),
                })
            }
            _ => Ok(()),
        }
    }

    /// Ends the current round of rping, or makes a whole one, and verifies the data.
    pub fn lives(&mut self) -> Result<(), Broken> {
        let rest = match self.role {
            Role::Responder => Phase::Idle,
            Role::Initiator => Phase::AwaitSource,
        };
        self.run_until(rest)
    }

    /// Continues to the phase in which the target's region is known.
    pub fn reach_region(&mut self) -> Result<(), Broken> {
        match self.role {
            Role::Responder => self.run_until(Phase::Region),
            Role::Initiator => self.run_until(Phase::Source),
        }
    }

    pub fn established(&self) -> bool {
        self.started()
    }

    /// Ends the stream in order and waits for the target's end.
    pub fn close(&mut self) -> Result<(), Broken> {
        self.tcp.send_fin();
        loop {
            match self.event(self.patience) {
                Event::Fin | Event::Reset => return Ok(()),
                Event::Quiet => return Err(self.broken("no end of the stream", Event::Quiet)),
                _ => {}
            }
        }
    }
}
