//! Reference peer: a perfect target within this process, and a lying one with a chosen fault, which the
//! cases have to find.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::ValueEnum;

use crate::link::{Link, Station, StationGuard};
use crate::script::{Clients, mix};
use crate::tcp::{Ending, SegmentOptions, SynOptions, Tcp};
use crate::wire::{
    FpduOptions, FpduReader, MpaFrame, REPLY_KEY, REQUEST_KEY, ReadRequest, Segment, Terminate,
    fpdu, opcode, with_markers,
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
}

impl Lie {
    /// The value of a name.
    pub fn from_str(name: &str, ignore_case: bool) -> Result<Lie, String> {
        <Lie as ValueEnum>::from_str(name, ignore_case)
    }
}

const PATIENCE: Duration = Duration::from_secs(5);
const SIZE: u32 = 64;

pub struct Reference {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    _station: StationGuard,
}

struct Shared {
    station: Arc<Station>,
    lie: Option<Lie>,
    stop: AtomicBool,
    count: AtomicU64,
}

impl Drop for Reference {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Reference {
    pub fn start(link: Link, ip: Ipv4Addr, port: u16, lie: Option<Lie>) -> Reference {
        let guard = Station::start(link, ip, 40_000);
        let shared = Arc::new(Shared {
            station: guard.station.clone(),
            lie,
            stop: AtomicBool::new(false),
            count: AtomicU64::new(0),
        });
        let syns = guard.station.listen(port);
        let server = shared.clone();
        let thread = std::thread::spawn(move || {
            while !server.stop.load(Ordering::Relaxed) {
                let Ok(syn) = syns.recv_timeout(Duration::from_millis(50)) else {
                    continue;
                };
                let server = server.clone();
                std::thread::spawn(move || {
                    let seed = server.seed();
                    if let Ok(tcp) = Tcp::accept(&server.station, &syn, seed as u32, PATIENCE) {
                        Peer::new(&server, tcp, seed, false).serve();
                    }
                });
            }
        });
        Reference {
            shared,
            thread: Some(thread),
            _station: guard,
        }
    }

    /// Starts clients of the reference peer.
    pub fn clients(&self, lab: Ipv4Addr) -> Clients {
        let shared = self.shared.clone();
        Clients::Started(Box::new(move |port| {
            let shared = shared.clone();
            std::thread::spawn(move || {
                let Some(mac) = shared.station.resolve(lab, PATIENCE) else {
                    return;
                };
                let seed = shared.seed();
                let to = SocketAddrV4::new(lab, port);
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
            message: Vec::new(),
            done: false,
        }
    }

    fn lies(&self, lie: Lie) -> bool {
        self.shared.lie == Some(lie)
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
        // A wrong start is refused as soon as it is known.
        let whole = |data: &[u8]| {
            let known = data.len().min(16);
            let length = data
                .get(18..20)
                .map_or(0, |l| usize::from(l[0]) << 8 | usize::from(l[1]));
            MpaFrame::decode(data).is_some()
                || data[..known] != REQUEST_KEY[..known] && known == 16
                || length > 512
        };
        let until = Duration::from_secs(3);
        if !self.wait(until, whole) {
            return false;
        }
        let Some((request, end)) = MpaFrame::decode(&self.tcp.data) else {
            return false;
        };
        let key_good = &request.key == REQUEST_KEY || self.lies(Lie::AnyKey);
        let enhanced = request.enhanced() && request.revision >= 2;
        let short = enhanced && request.pd_length < 4;
        let trailing = self.tcp.data.len() > end;
        if !key_good
            || request.pd_length > 512
            || !(1..=2).contains(&request.revision)
            || short
            || trailing
        {
            return false;
        }
        self.tcp.data.drain(..end);
        let mut private_data = Vec::new();
        if enhanced && let Some((ird, ord, control)) = request.depths() {
            let mut answer = 0;
            if control & 8 != 0 {
                let offered = control & 7;
                let kind = [2, 1, 4]
                    .into_iter()
                    .find(|k| offered & k != 0)
                    .unwrap_or(2);
                answer = 8 | kind;
            }
            // 0x3fff leaves the depth to the upper layer.
            private_data = Self::depths(ord, ird, answer);
        }
        self.markers = request.markers();
        let flags = 0x40
            | if enhanced { 0x10 } else { 0 }
            | if self.lies(Lie::EchoReserved) {
                request.flags & 0xF
            } else {
                0
            };
        let reply = MpaFrame {
            key: *REPLY_KEY,
            flags,
            revision: request.revision,
            pd_length: private_data.len() as u16,
            private_data,
        };
        self.tcp.send(&reply.encode(), SegmentOptions::default());
        true
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
        let msn = self.next[qn as usize];
        self.next[qn as usize] += 1;
        let segment = Segment {
            last: true,
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
        self.done = true;
        if self.lies(Lie::Silent) {
            return;
        }
        let mut terminate = Terminate {
            layer,
            etype,
            code,
            headers: 0,
            reserved: 0,
            quoted: Vec::new(),
        };
        if let Some(ulpdu) = offender.filter(|_| !self.lies(Lie::NoQuotes)) {
            let header = if ulpdu[0] & 0x80 != 0 { 14 } else { 18 };
            terminate.headers = 6;
            terminate.quoted = (ulpdu.len() as u16).to_be_bytes().to_vec();
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
        if segment.ddp_version != 1 {
            let (etype, code) = if segment.tagged { (1, 4) } else { (2, 6) };
            return self.terminate(1, etype, code, Some(ulpdu));
        }
        if segment.rdmap_version != 1 {
            return self.terminate(0, 2, 5, Some(ulpdu));
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
        if length > 0 {
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
            if !outside {
                let at = (segment.to - self.base) as usize;
                self.memory[at..at + segment.payload.len()].copy_from_slice(&segment.payload);
            }
        }
        if segment.opcode == opcode::READ_RESPONSE && segment.last {
            self.read = None;
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
        if segment.qn != right {
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
            opcode::TERMINATE => self.done = true,
            opcode::READ_REQUEST => self.on_read(segment, ulpdu),
            _ => {
                if segment.mo as usize != self.message.len() {
                    return self.terminate(1, 2, 4, Some(ulpdu));
                }
                if self.message.len() + segment.payload.len() > 16 {
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
        if read.size > 0 {
            if read.source_stag != self.stag {
                return self.terminate(0, 1, 0, Some(ulpdu));
            }
            let Some(end) = read.source_to.checked_add(read.size.into()) else {
                return self.terminate(0, 1, 4, Some(ulpdu));
            };
            if read.source_to < self.base || end > self.base + u64::from(SIZE) {
                return self.terminate(0, 1, 1, Some(ulpdu));
            }
            let at = (read.source_to - self.base) as usize;
            data = self.memory[at..at + read.size as usize].to_vec();
        }
        self.send_tagged(opcode::READ_RESPONSE, read.sink_stag, read.sink_to, data);
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
