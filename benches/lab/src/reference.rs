//! Reference peer: a perfect target within this process, and a lying one with a chosen fault, which the
//! cases have to find.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::ValueEnum;

use crate::link::{Datagram, Link, Station, StationGuard, mix};
use crate::mapper::{self, MapperMessage, kind};
use crate::script::Clients;
use crate::tcp::{Ending, SegmentOptions, SynOptions, Tcp};
use crate::wire::{
    CrcField, FpduOptions, FpduReader, MpaFrame, REPLY_KEY, REQUEST_KEY, ReadRequest, Segment,
    Terminate, fpdu, opcode, with_markers,
};

/// A fault of the reference peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Lie {
    /// Accepts any key in the MPA Request.
    AnyKey,
    /// Copies the reserved bits of the Request into the Reply.
    EchoReserved,
    /// Sends Terminates with the nibbles of their first octet exchanged.
    SwappedTerminate,
    /// Does not check the CRC.
    NoCrc,
    /// Does not check the bounds of a Write.
    NoBounds,
    /// Accepts any STag.
    AnyStag,
    /// Does not check the MSN.
    AnyMsn,
    /// Accepts any opcode as a Send.
    AnyOpcode,
    /// Quotes no headers in a Terminate.
    NoQuotes,
    /// Writes its pad octets as ones.
    DirtyPad,
    /// Stops answering when a Terminate was due.
    Silent,
    /// Copies the bit R of the Request into the Reply, and accepts.
    EchoRejection,
    /// Accepts private data above 512 octets.
    LongPrivateData,
    /// Answers revision 1 with revision 2.
    RevisionUp,
    /// Answers without enhanced data.
    NoEnhanced,
    /// Announces an ORD above the initiator's IRD.
    DeepOrd,
    /// Sets A although the Request has not.
    AlwaysA,
    /// Sends no Markers.
    NoMarkers,
    /// Refuses a Request that comes in pieces.
    WholeRequest,
    /// Sets reserved bits in the Reply.
    ReplyReserved,
    /// Does not check the DDP version.
    AnyDdpVersion,
    /// Does not check the RDMAP version.
    AnyRdmapVersion,
    /// Refuses reserved bits.
    ChecksReserved,
    /// Does not check the message offset.
    AnyOffset,
    /// Does not check the queue number.
    AnyQueue,
    /// Takes messages that are longer than their buffer.
    LongMessage,
    /// Checks the STag of an empty Write.
    ChecksEmptyWrite,
    /// Damages what a Write places.
    DamagedWrite,
    /// Places nothing of a Write.
    LostWrite,
    /// Reads from any STag.
    ReadAnyStag,
    /// Reads beyond the bounds.
    ReadNoBounds,
    /// Checks the source of an empty Read.
    ChecksEmptyRead,
    /// Answers a Read at another tagged offset.
    ReadWrongSink,
    /// Answers a Read with other data.
    ReadWrongData,
    /// Sends Terminates with the next code.
    WrongCode,
    /// Numbers its Terminate 2.
    TerminateNumber,
    /// Sets reserved bits of the Terminate.
    TerminateReserved,
    /// Quotes a wrong DDP Segment Length.
    QuotedLength,
    /// Goes on behind its Terminate.
    GoesOn,
    /// Answers a Terminate with a Terminate.
    AnswersTerminate,
    /// Sends wrong CRCs.
    BadOwnCrc,
    /// Sets reserved bits of DDP.
    ReservedBits,
    /// Sets the Invalidate STag field of plain Sends.
    InvalidateField,
    /// Answers port mapper requests with another handle.
    MapperHandle,
    /// Accepts port mapper requests for every port.
    MapperAcceptsAll,
    /// Answers cut port mapper requests.
    MapperTakesCut,
    /// Answers nothing any more once a Terminate was due.
    Dies,
    /// The same, until the second connection that comes after that.
    Reboots,
}

impl Lie {
    /// The value of a name.
    pub fn from_str(name: &str, ignore_case: bool) -> Result<Lie, String> {
        <Lie as ValueEnum>::from_str(name, ignore_case)
    }
}

const PATIENCE: Duration = Duration::from_secs(5);
const SIZE: u32 = 64;
/// Reads that the initiator may have outstanding.
const DEPTH: u16 = 256;

pub struct Reference {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    _station: StationGuard,
}

struct Shared {
    station: Arc<Station>,
    lie: Option<Lie>,
    stop: AtomicBool,
    dead: AtomicBool,
    count: AtomicU64,
}

impl Drop for Reference {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Reference {
    pub fn start(link: Link, ip: IpAddr, port: u16, lie: Option<Lie>) -> Reference {
        let guard = Station::start(link, ip, 40_000);
        let shared = Arc::new(Shared {
            station: guard.station.clone(),
            lie,
            stop: AtomicBool::new(false),
            dead: AtomicBool::new(false),
            count: AtomicU64::new(0),
        });
        let syns = guard.station.listen(port);
        let server = shared.clone();
        let thread = std::thread::spawn(move || {
            // Port of the first connection that a dead target did not answer.
            let mut unanswered = None;
            while !server.stop.load(Ordering::Relaxed) {
                let Ok(syn) = syns.recv_timeout(Duration::from_millis(50)) else {
                    continue;
                };
                if server.dead.load(Ordering::Relaxed) {
                    let port = syn.header.source_port;
                    let first = *unanswered.get_or_insert(port);
                    if first == port || !server.lies(Lie::Reboots) {
                        continue;
                    }
                    server.dead.store(false, Ordering::Relaxed);
                }
                let server = server.clone();
                std::thread::spawn(move || {
                    let seed = server.seed();
                    let options = SynOptions::default();
                    if let Ok(tcp) =
                        Tcp::accept(&server.station, &syn, seed as u32, &options, PATIENCE)
                    {
                        Peer::new(&server, tcp, seed, false).serve();
                    }
                });
            }
        });
        let mapper = shared.clone();
        let asked = guard.station.receive_datagrams(mapper::PORT);
        let mapper_thread = std::thread::spawn(move || {
            while !mapper.stop.load(Ordering::Relaxed) {
                if let Ok(datagram) = asked.recv_timeout(Duration::from_millis(50)) {
                    mapper.on_datagram(&datagram, port);
                }
            }
        });
        Reference {
            shared,
            threads: vec![thread, mapper_thread],
            _station: guard,
        }
    }

    /// Starts clients of the reference peer.
    pub fn clients(&self, lab: IpAddr) -> Clients {
        let shared = self.shared.clone();
        Clients::Started(Box::new(move |port| {
            let shared = shared.clone();
            std::thread::spawn(move || {
                let Some(mac) = shared.station.resolve(lab, PATIENCE) else {
                    return;
                };
                let seed = shared.seed();
                let to = SocketAddr::new(lab, port);
                if let Ok(tcp) = Tcp::connect(
                    &shared.station,
                    to,
                    mac,
                    seed as u32,
                    &SynOptions::default(),
                    PATIENCE,
                ) {
                    Peer::new(&shared, tcp, seed, true).serve();
                }
            });
            Ok(Box::new(()))
        }))
    }
}

impl Shared {
    fn lies(&self, lie: Lie) -> bool {
        self.lie == Some(lie)
    }

    /// Answers a request to the port mapper.
    fn on_datagram(&self, datagram: &Datagram, listening: u16) -> Option<()> {
        let mut message = MapperMessage::decode(&datagram.payload)?;
        let whole = message.length == 64 || self.lies(Lie::MapperTakesCut);
        let family = if self.station.ip.is_ipv4() { 4 } else { 6 };
        let known = (message.version, message.ip_version) == (0, family);
        if message.kind != kind::REQUEST || !known || !whole {
            return None;
        }
        let listens = message.accepting == self.station.ip && message.accepting_port == listening;
        message.kind = if listens || self.lies(Lie::MapperAcceptsAll) {
            kind::ACCEPT
        } else {
            kind::REJECT
        };
        message.own_port = 0;
        if self.lies(Lie::MapperHandle) {
            message.handle = message.handle.wrapping_add(1);
        }
        let mac = self.station.resolve(datagram.from.ip(), PATIENCE)?;
        let octets = message.encode();
        self.station
            .send_datagram(mapper::PORT, mac, datagram.from, &octets);
        Some(())
    }

    fn seed(&self) -> u64 {
        mix(self.count.fetch_add(1, Ordering::Relaxed), "reference")
    }
}

/// Progress of rping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Source,
    Sink,
}

/// One connection of the reference peer.
struct Peer<'a> {
    shared: &'a Shared,
    tcp: Tcp,
    client: bool,
    reader: FpduReader,
    crc: bool,
    markers: bool,
    sent: Vec<Vec<u8>>,
    memory: Vec<u8>,
    stag: u32,
    base: u64,
    /// Next MSN of queues 0 to 2, received and sent.
    expected: [u32; 3],
    next: [u32; 3],
    step: Step,
    read: Option<ReadRequest>,
    /// Octets of the Response so far.
    answered: u64,
    message: Vec<u8>,
    done: bool,
}

impl<'a> Peer<'a> {
    fn new(shared: &'a Shared, tcp: Tcp, seed: u64, client: bool) -> Peer<'a> {
        Peer {
            shared,
            tcp,
            client,
            reader: FpduReader::default(),
            crc: true,
            markers: false,
            sent: Vec::new(),
            memory: (0..SIZE)
                .map(|i| {
                    if i == SIZE - 1 {
                        0
                    } else {
                        b'a' + (i % 26) as u8
                    }
                })
                .collect(),
            stag: (seed >> 8) as u32 | 1,
            base: seed & 0xFFFF_FFFF_F000,
            expected: [1; 3],
            next: [1; 3],
            step: Step::Source,
            read: None,
            answered: 0,
            message: Vec::new(),
            done: false,
        }
    }

    fn lies(&self, lie: Lie) -> bool {
        self.shared.lies(lie)
    }

    /// Receives until `ready` says so; false at the end of the stream or of the patience.
    fn wait(&mut self, patience: Duration, ready: impl Fn(&[u8]) -> bool) -> bool {
        let until = Instant::now() + patience;
        while !ready(&self.tcp.data) {
            if self.tcp.ending.is_some() || self.shared.stop.load(Ordering::Relaxed) {
                return false;
            }
            self.tcp
                .pump((Instant::now() + Duration::from_millis(50)).min(until));
            if Instant::now() >= until {
                return false;
            }
        }
        true
    }

    fn serve(mut self) {
        let opened = if self.client {
            self.open_as_client()
        } else {
            self.open_as_server()
        };
        if opened {
            if self.client {
                self.advertise();
            }
            self.talk();
        }
        if self.tcp.ending != Some(Ending::Reset) {
            self.tcp.send_fin();
            // The peer's end, so that nothing is reset that it has not read.
            let until = Instant::now() + PATIENCE;
            while self.tcp.ending.is_none()
                && !self.shared.stop.load(Ordering::Relaxed)
                && Instant::now() < until
            {
                self.tcp
                    .pump((Instant::now() + Duration::from_millis(50)).min(until));
            }
        }
    }

    fn depths(ird: u16, ord: u16, control: u8) -> Vec<u8> {
        let control = u16::from(control);
        let mut octets = (ird | control >> 2 << 14).to_be_bytes().to_vec();
        octets.extend((ord | control << 14).to_be_bytes());
        octets
    }

    fn open_as_server(&mut self) -> bool {
        let longest = if self.lies(Lie::LongPrivateData) {
            65_535
        } else {
            512
        };
        // A wrong start is refused as soon as it is known.
        let whole = |data: &[u8]| {
            let known = data.len().min(16);
            let length = data
                .get(18..20)
                .map_or(0, |l| usize::from(l[0]) << 8 | usize::from(l[1]));
            MpaFrame::decode(data).is_some()
                || data[..known] != REQUEST_KEY[..known] && known == 16
                || length > longest
        };
        let until = Duration::from_secs(3);
        if !self.wait(until, whole) {
            return false;
        }
        let Some((request, end)) = MpaFrame::decode(&self.tcp.data) else {
            return false;
        };
        if self.lies(Lie::WholeRequest) && self.tcp.data_segments > 1 {
            return false;
        }
        let too_long = request.pd_length > 512 && !self.lies(Lie::LongPrivateData);
        let key_good = &request.key == REQUEST_KEY || self.lies(Lie::AnyKey);
        let mut enhanced = request.enhanced() && request.revision >= 2;
        let short = enhanced && request.pd_length < 4;
        enhanced &= !self.lies(Lie::NoEnhanced);
        let trailing = self.tcp.data.len() > end;
        if !key_good || too_long || !(1..=2).contains(&request.revision) || short || trailing {
            return false;
        }
        self.tcp.data.drain(..end);
        // A deeper queue than the peer can have is refused with the depth that it can have.
        let refused = matches!(request.depths(), Some((_, ord, _)) if enhanced && ord > DEPTH && ord != 0x3FFF);
        let mut private_data = Vec::new();
        if enhanced && let Some((ird, ord, control)) = request.depths() {
            let mut answer = 0;
            if control & 8 != 0 {
                // Every kind that is offered, or one for an offer without any.
                answer = if control & 7 == 0 { 10 } else { control };
            } else if self.lies(Lie::AlwaysA) {
                answer = 10;
            }
            let ird = if self.lies(Lie::DeepOrd) {
                ird + 1
            } else {
                ird
            };
            // 0x3fff leaves the depth to the upper layer.
            let depth = if refused {
                DEPTH
            } else {
                ord.max(u16::from(answer & 1))
            };
            private_data = Self::depths(depth, ird, answer);
        }
        self.markers = request.markers() && !self.lies(Lie::NoMarkers);
        let mut flags = 0x40 | if enhanced { 0x10 } else { 0 };
        if refused {
            flags |= 0x20;
        }
        if self.lies(Lie::EchoReserved) {
            flags |= request.flags & 0xF;
        }
        if self.lies(Lie::EchoRejection) {
            flags |= request.flags & 0x20;
        }
        if self.lies(Lie::ReplyReserved) {
            flags |= 0x02;
        }
        let reply = MpaFrame {
            key: *REPLY_KEY,
            flags,
            revision: if self.lies(Lie::RevisionUp) {
                2
            } else {
                request.revision
            },
            pd_length: private_data.len() as u16,
            private_data,
        };
        self.tcp.send(&reply.encode(), SegmentOptions::default());
        !refused
    }

    fn open_as_client(&mut self) -> bool {
        let private_data = Self::depths(16, 16, 0);
        let request = MpaFrame {
            key: *REQUEST_KEY,
            flags: 0x50,
            revision: 2,
            pd_length: 4,
            private_data,
        };
        self.tcp.send(&request.encode(), SegmentOptions::default());
        let whole = |data: &[u8]| {
            let known = data.len().min(16);
            MpaFrame::decode(data).is_some() || known == 16 && &data[..16] != REPLY_KEY
        };
        if !self.wait(Duration::from_secs(3), whole) {
            return false;
        }
        let Some((reply, end)) = MpaFrame::decode(&self.tcp.data) else {
            return false;
        };
        let short = reply.enhanced() && reply.pd_length < 4;
        let trailing = self.tcp.data.len() > end;
        if (&reply.key != REPLY_KEY && !self.lies(Lie::AnyKey))
            || reply.rejected()
            || short
            || trailing
            || reply.revision == 0
        {
            return false;
        }
        if !reply.enhanced() || reply.pd_length > 512 {
            return false;
        }
        self.tcp.data.drain(..end);
        self.markers = reply.markers();
        if let Some((_, ord, _)) = reply.depths()
            && ord > 16
            && ord != 0x3FFF
        {
            self.terminate(2, 0, 6, None);
            return false;
        }
        true
    }

    fn send_ulpdu(&mut self, ulpdu: Vec<u8>) {
        let options = FpduOptions {
            pad: if self.lies(Lie::DirtyPad) { 0xFF } else { 0 },
            crc: if self.lies(Lie::BadOwnCrc) {
                CrcField::Bad
            } else {
                CrcField::Good
            },
            ..FpduOptions::default()
        };
        let octets = if self.markers {
            let before = with_markers(&self.sent).len();
            self.sent.push(ulpdu);
            with_markers(&self.sent)[before..].to_vec()
        } else {
            fpdu(&ulpdu, &options)
        };
        self.tcp.send(&octets, SegmentOptions::default());
    }

    fn send_untagged(&mut self, opcode: u8, qn: u32, payload: Vec<u8>) {
        let mut msn = self.next[qn as usize];
        self.next[qn as usize] += 1;
        if qn == 2 && self.lies(Lie::TerminateNumber) {
            msn += 1;
        }
        let plain = qn == 0 && self.lies(Lie::InvalidateField);
        let segment = Segment {
            last: true,
            stag: if plain { self.stag } else { 0 },
            ddp_reserved: u8::from(self.lies(Lie::ReservedBits)),
            ddp_version: 1,
            rdmap_version: 1,
            opcode,
            qn,
            msn,
            payload,
            ..Segment::default()
        };
        self.send_ulpdu(segment.encode());
    }

    fn send_tagged(&mut self, opcode: u8, stag: u32, to: u64, payload: Vec<u8>) {
        let segment = Segment {
            tagged: true,
            last: true,
            ddp_version: 1,
            rdmap_version: 1,
            opcode,
            stag,
            to,
            payload,
            ..Segment::default()
        };
        self.send_ulpdu(segment.encode());
    }

    fn advertise(&mut self) {
        let mut payload = self.base.to_be_bytes().to_vec();
        payload.extend(self.stag.to_be_bytes());
        payload.extend(SIZE.to_be_bytes());
        self.send_untagged(opcode::SEND, 0, payload);
    }

    /// Sends a Terminate and ends the stream.
    fn terminate(&mut self, layer: u8, etype: u8, code: u8, offender: Option<&[u8]>) {
        self.done = !self.lies(Lie::GoesOn);
        if self.lies(Lie::Dies) || self.lies(Lie::Reboots) {
            self.shared.dead.store(true, Ordering::Relaxed);
        }
        if self.lies(Lie::Silent) {
            return;
        }
        let mut terminate = Terminate {
            layer,
            etype,
            code: if self.lies(Lie::WrongCode) {
                code + 1
            } else {
                code
            },
            headers: 0,
            reserved: if self.lies(Lie::TerminateReserved) {
                1
            } else {
                0
            },
            quoted: Vec::new(),
        };
        if let Some(ulpdu) = offender.filter(|_| !self.lies(Lie::NoQuotes)) {
            let header = if ulpdu[0] & 0x80 != 0 { 14 } else { 18 };
            terminate.headers = 6;
            let wrong = u16::from(self.lies(Lie::QuotedLength));
            terminate.quoted = (ulpdu.len() as u16 + wrong).to_be_bytes().to_vec();
            terminate.quoted.extend(&ulpdu[..header]);
            if layer == 0
                && etype == 1
                && ulpdu.len() >= header + 28
                && ulpdu[1] & 0xF == opcode::READ_REQUEST
            {
                terminate.headers = 7;
                terminate.quoted.extend(&ulpdu[header..header + 28]);
            }
        }
        if self.lies(Lie::SwappedTerminate) {
            (terminate.layer, terminate.etype) = (terminate.etype, terminate.layer);
        }
        self.send_untagged(opcode::TERMINATE, 2, terminate.encode());
    }

    fn talk(&mut self) {
        while !self.done && !self.shared.stop.load(Ordering::Relaxed) {
            let data = std::mem::take(&mut self.tcp.data);
            self.reader.push(&data);
            match self.reader.next_fpdu() {
                Some(fpdu) if !fpdu.crc_good && self.crc && !self.lies(Lie::NoCrc) => {
                    self.terminate(2, 0, 2, None)
                }
                Some(fpdu) => self.on_ulpdu(&fpdu.ulpdu),
                None if self.tcp.ending.is_some() => return,
                None => {
                    self.tcp.pump(Instant::now() + Duration::from_millis(50));
                }
            }
        }
    }

    fn on_ulpdu(&mut self, ulpdu: &[u8]) {
        let Some(mut segment) = Segment::decode(ulpdu) else {
            return self.terminate(2, 0, 3, None);
        };
        let any_opcode = self.lies(Lie::AnyOpcode);
        if segment.ddp_version != 1 && !self.lies(Lie::AnyDdpVersion) {
            let (etype, code) = if segment.tagged { (1, 4) } else { (2, 6) };
            return self.terminate(1, etype, code, Some(ulpdu));
        }
        if segment.rdmap_version != 1 && !self.lies(Lie::AnyRdmapVersion) {
            return self.terminate(0, 2, 5, Some(ulpdu));
        }
        if segment.ddp_reserved != 0 && self.lies(Lie::ChecksReserved) {
            return self.terminate(1, 0, 0, Some(ulpdu));
        }
        if segment.opcode > 7 && any_opcode {
            segment.opcode = opcode::SEND;
        }
        let tagged_opcode = [opcode::WRITE, opcode::READ_RESPONSE].contains(&segment.opcode);
        if segment.opcode > 7 || segment.tagged != tagged_opcode {
            return self.terminate(0, 2, 6, Some(ulpdu));
        }
        if segment.tagged {
            self.on_tagged(&segment, ulpdu);
        } else {
            self.on_untagged(&segment, ulpdu);
        }
    }

    fn on_tagged(&mut self, segment: &Segment, ulpdu: &[u8]) {
        if segment.opcode == opcode::READ_RESPONSE && self.read.is_none() {
            return self.terminate(0, 2, 6, Some(ulpdu));
        }
        let length = segment.payload.len() as u64;
        if length > 0 || self.lies(Lie::ChecksEmptyWrite) {
            if segment.stag != self.stag && !self.lies(Lie::AnyStag) {
                return self.terminate(1, 1, 0, Some(ulpdu));
            }
            let Some(end) = segment.to.checked_add(length) else {
                return self.terminate(1, 1, 3, Some(ulpdu));
            };
            let outside = segment.to < self.base || end > self.base + u64::from(SIZE);
            if outside && !self.lies(Lie::NoBounds) {
                return self.terminate(1, 1, 1, Some(ulpdu));
            }
            let is_write = segment.opcode == opcode::WRITE;
            let lost = is_write && self.lies(Lie::LostWrite);
            if !outside && !lost {
                let at = (segment.to - self.base) as usize;
                let place = &mut self.memory[at..at + segment.payload.len()];
                place.copy_from_slice(&segment.payload);
                if is_write && self.shared.lies(Lie::DamagedWrite) {
                    place[0] ^= 1;
                }
            }
        }
        if segment.opcode == opcode::READ_RESPONSE {
            self.answered += length;
        }
        if segment.opcode == opcode::READ_RESPONSE && segment.last {
            let size = self.read.take().map_or(0, |read| u64::from(read.size));
            if std::mem::take(&mut self.answered) != size {
                return self.terminate(1, 1, 1, Some(ulpdu));
            }
            self.step = Step::Sink;
            self.advertise();
        }
    }

    fn on_untagged(&mut self, segment: &Segment, ulpdu: &[u8]) {
        let right = match segment.opcode {
            opcode::READ_REQUEST => 1,
            opcode::TERMINATE => 2,
            _ => 0,
        };
        if segment.qn != right && !self.lies(Lie::AnyQueue) {
            return self.terminate(1, 2, 1, Some(ulpdu));
        }
        let expected = &mut self.expected[right as usize];
        if segment.msn != *expected && !self.shared.lie.is_some_and(|l| l == Lie::AnyMsn) {
            return self.terminate(1, 2, 3, Some(ulpdu));
        }
        if segment.last {
            *expected += 1;
        }
        match segment.opcode {
            opcode::TERMINATE if self.lies(Lie::AnswersTerminate) => {
                self.terminate(0, 0, 0, None);
            }
            opcode::TERMINATE => self.done = true,
            opcode::READ_REQUEST => self.on_read(segment, ulpdu),
            _ => {
                let in_order = segment.mo as usize == self.message.len();
                if !in_order && !self.lies(Lie::AnyOffset) {
                    return self.terminate(1, 2, 4, Some(ulpdu));
                }
                let too_long = self.message.len() + segment.payload.len() > 16;
                if too_long && !self.lies(Lie::LongMessage) {
                    return self.terminate(1, 2, 5, Some(ulpdu));
                }
                if [opcode::SEND_INVALIDATE, opcode::SEND_SE_INVALIDATE].contains(&segment.opcode)
                    && segment.stag != self.stag
                {
                    return self.terminate(0, 2, 9, Some(ulpdu));
                }
                self.message.extend(&segment.payload);
                if segment.last {
                    let message = std::mem::take(&mut self.message);
                    self.on_send(&message);
                }
            }
        }
    }

    fn on_read(&mut self, segment: &Segment, ulpdu: &[u8]) {
        let Some(read) =
            ReadRequest::decode(&segment.payload).filter(|_| segment.payload.len() == 28)
        else {
            return self.terminate(0, 2, 0xFF, Some(ulpdu));
        };
        let mut data = Vec::new();
        if read.size > 0 || self.lies(Lie::ChecksEmptyRead) {
            if read.source_stag != self.stag && !self.lies(Lie::ReadAnyStag) {
                return self.terminate(0, 1, 0, Some(ulpdu));
            }
            let Some(end) = read.source_to.checked_add(read.size.into()) else {
                return self.terminate(0, 1, 4, Some(ulpdu));
            };
            let outside = read.source_to < self.base || end > self.base + u64::from(SIZE);
            let lies = self.lies(Lie::ReadNoBounds) || self.lies(Lie::ReadAnyStag);
            if outside && !lies {
                return self.terminate(0, 1, 1, Some(ulpdu));
            }
            let at = read.source_to.wrapping_sub(self.base) as usize;
            let whole = self.memory.get(at..).unwrap_or_default();
            data = whole.iter().copied().take(read.size as usize).collect();
            data.resize(read.size as usize, 0);
            if self.lies(Lie::ReadWrongData) {
                data[0] ^= 1;
            }
        }
        let off = u64::from(self.lies(Lie::ReadWrongSink));
        self.send_tagged(
            opcode::READ_RESPONSE,
            read.sink_stag,
            read.sink_to.wrapping_add(off),
            data,
        );
    }

    fn on_send(&mut self, message: &[u8]) {
        if self.client {
            // The lab's word that it has read, or written: the next advertisement.
            self.advertise();
            return;
        }
        let Some(message) = message.first_chunk::<16>() else {
            return;
        };
        let base = message[..8].iter().fold(0, |n, o| n << 8 | u64::from(*o));
        let stag = message[8..12].iter().fold(0, |n, o| n << 8 | u32::from(*o));
        let size = message[12..].iter().fold(0, |n, o| n << 8 | u32::from(*o));
        match self.step {
            Step::Source => {
                let read = ReadRequest {
                    sink_stag: self.stag,
                    sink_to: self.base,
                    size: size.min(SIZE),
                    source_stag: stag,
                    source_to: base,
                };
                self.read = Some(read);
                self.send_untagged(opcode::READ_REQUEST, 1, read.encode());
            }
            Step::Sink => {
                let end = self
                    .memory
                    .iter()
                    .position(|o| *o == 0)
                    .map_or(self.memory.len(), |at| at + 1);
                let data = self.memory[..end].to_vec();
                self.step = Step::Source;
                self.send_tagged(opcode::WRITE, stag, base, data);
                self.advertise();
            }
        }
    }
}
