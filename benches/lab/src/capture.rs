//! Rules for senders, judged on a capture of anybody's connections.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use anyhow::{Context, Result, bail};
use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use pcap_file::DataLink;
use pcap_file::pcap::PcapReader;
use pcap_file::pcapng::{Block, PcapNgReader};

use crate::rules::broken_by;
use crate::stream::Event;
use crate::wire::{
    Fpdu, FpduReader, MpaFrame, REPLY_KEY, REQUEST_KEY, ReadRequest, Segment, opcode,
};

/// Octets of a connection that are waited for in a hole of the capture, at most.
const MAX_HELD: usize = 1 << 20;

/// Broken rules of one connection.
#[derive(Debug)]
pub struct Connection {
    pub initiator: SocketAddr,
    pub responder: SocketAddr,
    pub messages: Vec<Message>,
    pub findings: Vec<Finding>,
    /// Reasons why a part of the connection was not judged.
    pub notes: Vec<String>,
}

/// One FPDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// Number of the frame that completes it.
    pub frame: usize,
    pub from_initiator: bool,
    pub ulpdu_length: usize,
    pub opcode: u8,
}

#[derive(Debug)]
pub struct Finding {
    /// Number of the frame in the capture, from 1 as Wireshark counts.
    pub frame: usize,
    pub from: SocketAddr,
    pub text: String,
}

/// Both directions of a TCP connection.
type Pair = (SocketAddr, SocketAddr);

#[derive(Default)]
struct Direction {
    next: Option<u32>,
    /// Segments behind a hole, with the number of their frame.
    held: BTreeMap<u32, (Vec<u8>, usize)>,
    /// In order, and not taken yet.
    data: Vec<u8>,
    frame: Option<MpaFrame>,
    reader: FpduReader,
    fpdus: usize,
    /// Next MSN of each queue, and octets of the message under way.
    msn: HashMap<u32, u32>,
    offset: HashMap<u32, u32>,
    terminated: bool,
    /// Reads that wait for their responses: sink STag, TO and size.
    reads: Vec<ReadRequest>,
    broken: bool,
}

#[derive(Default)]
struct Judged {
    /// Index 0: from the initiator.
    sides: [Direction; 2],
    messages: Vec<Message>,
    findings: Vec<Finding>,
    notes: Vec<String>,
}

/// Judges every iWARP connection of a capture file (pcap or pcapng) whose beginning it has.
pub fn check(file: &Path) -> Result<Vec<Connection>> {
    let mut judged: BTreeMap<Pair, Judged> = BTreeMap::new();
    for (index, (link, frame)) in frames(file)?.into_iter().enumerate() {
        on_frame(&mut judged, link, &frame, index + 1);
    }
    let mut all = Vec::new();
    for ((initiator, responder), mut one) in judged {
        if one.sides[0].frame.is_none() {
            continue;
        }
        for (side, name) in [(0, "initiator"), (1, "responder")] {
            if !one.sides[side].held.is_empty() {
                one.notes.push(format!(
                    "octets of the {name} are missing in the capture; what follows them was not judged"
                ));
            }
        }
        all.push(Connection {
            initiator,
            responder,
            messages: one.messages,
            findings: one.findings,
            notes: one.notes,
        });
    }
    if all.is_empty() {
        bail!(
            "{} has no iWARP connection from its MPA Request on",
            file.display()
        );
    }
    Ok(all)
}

/// Link type and octets of every frame.
fn frames(file: &Path) -> Result<Vec<(DataLink, Vec<u8>)>> {
    let no_capture = || format!("{} is no capture (pcap or pcapng)", file.display());
    let mut octets = Vec::new();
    File::open(file)
        .and_then(|mut file| file.read_to_end(&mut octets))
        .with_context(|| format!("cannot read {}", file.display()))?;
    let mut all = Vec::new();
    if octets.starts_with(&[0x0A, 0x0D, 0x0D, 0x0A]) {
        let mut reader = PcapNgReader::new(&octets[..]).with_context(no_capture)?;
        let mut links = Vec::new();
        while let Some(block) = reader.next_block() {
            match block.with_context(no_capture)? {
                Block::InterfaceDescription(interface) => links.push(interface.linktype),
                Block::EnhancedPacket(packet) => {
                    let link = links.get(packet.interface_id as usize);
                    all.push((*link.with_context(no_capture)?, packet.data.into_owned()));
                }
                Block::SimplePacket(packet) => {
                    let link = links.first().with_context(no_capture)?;
                    all.push((*link, packet.data.into_owned()));
                }
                _ => {}
            }
        }
    } else {
        let mut reader = PcapReader::new(&octets[..]).with_context(no_capture)?;
        let link = reader.header().datalink;
        while let Some(packet) = reader.next_packet() {
            all.push((link, packet.with_context(no_capture)?.data.into_owned()));
        }
    }
    Ok(all)
}

fn on_frame(
    judged: &mut BTreeMap<Pair, Judged>,
    link: DataLink,
    frame: &[u8],
    number: usize,
) -> Option<()> {
    let packet = match link {
        DataLink::ETHERNET => SlicedPacket::from_ethernet(frame),
        DataLink::LINUX_SLL => SlicedPacket::from_linux_sll(frame),
        _ => SlicedPacket::from_ip(frame),
    };
    let packet = packet.ok()?;
    let (source, destination): (IpAddr, IpAddr) = match packet.net? {
        NetSlice::Ipv4(ip) => (
            ip.header().source_addr().into(),
            ip.header().destination_addr().into(),
        ),
        NetSlice::Ipv6(ip) => (
            ip.header().source_addr().into(),
            ip.header().destination_addr().into(),
        ),
        NetSlice::Arp(_) => return None,
    };
    let Some(TransportSlice::Tcp(tcp)) = packet.transport else {
        return None;
    };
    let from = SocketAddr::new(source, tcp.source_port());
    let to = SocketAddr::new(destination, tcp.destination_port());
    let (pair, side) = match tcp.syn() {
        true if !tcp.ack() => {
            // The addresses may be used again.
            let fresh = judged
                .get(&(from, to))
                .is_none_or(|one| one.sides[0].next != Some(tcp.sequence_number().wrapping_add(1)));
            if fresh {
                judged.insert((from, to), Judged::default());
            }
            ((from, to), 0)
        }
        _ if judged.contains_key(&(from, to)) => ((from, to), 0),
        _ => ((to, from), 1),
    };
    let one = judged.get_mut(&pair)?;
    if tcp.syn() {
        one.sides[side].next = Some(tcp.sequence_number().wrapping_add(1));
        return Some(());
    }
    one.on_segment(side, from, tcp.sequence_number(), tcp.payload(), number);
    Some(())
}

impl Judged {
    fn on_segment(
        &mut self,
        side: usize,
        from: SocketAddr,
        seq: u32,
        payload: &[u8],
        number: usize,
    ) {
        let direction = &mut self.sides[side];
        let Some(mut next) = direction.next.filter(|_| !payload.is_empty()) else {
            return;
        };
        let held: usize = direction.held.values().map(|(p, _)| p.len()).sum();
        if held < MAX_HELD {
            direction.held.insert(seq, (payload.to_vec(), number));
        }
        while let Some(seq) = self.sides[side]
            .held
            .keys()
            .copied()
            .find(|seq| next.wrapping_sub(*seq) as i32 >= 0)
        {
            let Some((payload, number)) = self.sides[side].held.remove(&seq) else {
                break;
            };
            let known = next.wrapping_sub(seq) as usize;
            if let Some(fresh) = payload.get(known..) {
                next = seq.wrapping_add(payload.len() as u32);
                self.sides[side].next = Some(next);
                self.sides[side].data.extend(fresh);
                self.take(side, from, number);
            }
        }
    }

    fn find(&mut self, frame: usize, from: SocketAddr, text: String) {
        self.findings.push(Finding { frame, from, text });
    }

    /// Takes the start frame, then FPDUs, from the octets of a side.
    fn take(&mut self, side: usize, from: SocketAddr, number: usize) {
        if self.sides[side].frame.is_none() {
            let key = [REQUEST_KEY, REPLY_KEY][side];
            let data = &self.sides[side].data;
            if self.sides[side].broken || data.len() >= 16 && &data[..16] != key {
                self.sides[side].broken = true;
                return;
            }
            let Some((frame, end)) = MpaFrame::decode(data) else {
                return;
            };
            self.sides[side].data.drain(..end);
            for text in self.broken_start(side, &frame) {
                self.find(number, from, format!("{text}: {}", frame.describe()));
            }
            self.sides[side].frame = Some(frame);
        }
        // The other side asks for markers in this direction; without its frame they are unknown.
        let Some(other) = &self.sides[1 - side].frame else {
            if side == 1 || !self.sides[side].data.is_empty() {
                self.find(
                    number,
                    from,
                    "octets behind the start frame before the other side's (RFC 5044 section 7.1.2)"
                        .into(),
                );
                self.sides[side].broken = true;
            }
            return;
        };
        let markers = other.markers();
        let crc = self.sides.iter().flat_map(|s| &s.frame).any(MpaFrame::crc);
        let direction = &mut self.sides[side];
        direction.reader.markers = markers;
        let data = std::mem::take(&mut direction.data);
        direction.reader.push(&data);
        while let Some(mut fpdu) = self.sides[side].reader.next_fpdu() {
            fpdu.crc_good |= !crc;
            self.sides[side].fpdus += 1;
            let segment = Segment::decode(&fpdu.ulpdu);
            self.messages.push(Message {
                frame: number,
                from_initiator: side == 0,
                ulpdu_length: fpdu.ulpdu.len(),
                opcode: segment.as_ref().map_or(0xFF, |s| s.opcode),
            });
            let event = Event::Fpdu(fpdu.clone(), segment.clone()).describe();
            for text in self.broken_rules(side, &fpdu, segment.as_ref()) {
                self.find(number, from, format!("{text}: {event}"));
            }
        }
    }

    fn broken_start(&self, side: usize, frame: &MpaFrame) -> Vec<&'static str> {
        let mut broken = Vec::new();
        if frame.flags & 0xF != 0 {
            broken.push("reserved bits set (RFC 5044 section 7.1.1)");
        }
        if frame.pd_length > 512 {
            broken.push("PD_Length above 512 (RFC 5044 section 7.1.1)");
        }
        if side == 0 && frame.rejected() {
            broken.push("R set in a Request (RFC 5044 section 7.1.1)");
        }
        if frame.enhanced() && frame.revision >= 2 && frame.pd_length < 4 {
            broken.push("S without the four octets of enhanced data (RFC 6581 section 9)");
        }
        if frame.enhanced() && frame.revision < 2 {
            broken.push("S set in revision 0 or 1, where it is reserved (RFC 5044 section 7.1.1)");
        }
        if side == 1
            && let Some(request) = &self.sides[0].frame
        {
            if frame.revision > request.revision {
                broken.push("Reply of a higher revision than the Request (RFC 6581 section 10)");
            }
            if let (Some((ird, ..)), Some((_, ord, _))) = (request.depths(), frame.depths())
                && ord > ird
                && !frame.rejected()
                && ord != 0x3FFF
            {
                broken.push("ORD above the initiator's IRD (RFC 6581 section 9.1)");
            }
        }
        broken
    }

    fn broken_rules(
        &mut self,
        side: usize,
        fpdu: &Fpdu,
        segment: Option<&Segment>,
    ) -> Vec<&'static str> {
        let mut broken = broken_by(fpdu, segment);
        if side == 1 && self.sides[0].fpdus == 0 {
            broken.push(
                "FPDU of the responder before the first of the initiator (RFC 5044 section 7.1.2)",
            );
        }
        if self.sides[side].terminated {
            broken.push("FPDU behind a Terminate (RFC 5040 section 5.4)");
        }
        let Some(segment) = segment else {
            return broken;
        };
        let responses_allowed = self.sides[1 - side].depth_of_reads();
        let direction = &mut self.sides[side];
        if segment.tagged {
            if segment.opcode == opcode::READ_RESPONSE {
                broken.extend(self.sides[1 - side].on_response(segment));
            }
            return broken;
        }
        let msn = direction.msn.entry(segment.qn).or_insert(1);
        if *msn != segment.msn {
            broken.push("MSN out of order (RFC 5041 section 5.3)");
        }
        let offset = direction.offset.entry(segment.qn).or_default();
        if *offset != segment.mo {
            broken.push("MO does not follow the segment before (RFC 5041 section 5.3)");
        }
        if segment.last {
            *msn = segment.msn.wrapping_add(1);
            *offset = 0;
        } else {
            *offset = segment.mo.wrapping_add(segment.payload.len() as u32);
        }
        let queue = match segment.opcode {
            opcode::READ_REQUEST | 10 => 1,
            opcode::TERMINATE => 2,
            11 => 3,
            _ => 0,
        };
        if segment.qn != queue {
            broken.push("queue of another opcode (RFC 5040 section 4.1)");
        }
        match segment.opcode {
            opcode::TERMINATE => direction.terminated = true,
            opcode::READ_REQUEST => {
                direction
                    .reads
                    .extend(ReadRequest::decode(&segment.payload));
                if responses_allowed.is_some_and(|depth| direction.reads.len() > depth) {
                    broken.push("more Reads than the other side's IRD (RFC 5040 section 6.1)");
                }
            }
            _ => {}
        }
        broken
    }
}

impl Direction {
    /// IRD that this side told, if it is negotiated.
    fn depth_of_reads(&self) -> Option<usize> {
        let (ird, ..) = self.frame.as_ref()?.depths()?;
        (ird != 0x3FFF).then_some(ird.into())
    }

    /// Accounts for a response to the oldest Read of this side.
    fn on_response(&mut self, segment: &Segment) -> Option<&'static str> {
        let Some(read) = self.reads.first_mut() else {
            return Some("Read Response without a Read (RFC 5040 section 5.2)");
        };
        let length = segment.payload.len() as u32;
        let right = segment.stag == read.sink_stag
            && (segment.to == read.sink_to || length == 0)
            && length <= read.size
            && (!segment.last || length == read.size);
        read.sink_to = read.sink_to.wrapping_add(length.into());
        read.size = read.size.saturating_sub(length);
        if segment.last {
            self.reads.remove(0);
        }
        (!right).then_some("Read Response does not match its Read (RFC 5040 section 5.2.2)")
    }
}
