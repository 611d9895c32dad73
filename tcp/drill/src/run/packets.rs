//! The packets of a script: those that the peer sends, and those that the stack must send.

use std::net::SocketAddr;
use std::time::Duration;

use crate::notation;
use crate::packet::{self, ACK, EcnSpec, IcmpSpec, SYN, TcpOption, TcpSpec, WireSegment};
use crate::run::compare::{compare_segment, in_script_numbers, timestamp_of};
use crate::run::{CapturedPacket, Runner, START, format_seconds, stream_byte};
use crate::script::{LineError, ScriptEvent};

impl Runner {
    /// Returns the stack's port and the peer's for a segment that the peer sends.
    fn ports_of(&self, spec: &TcpSpec) -> (u16, u16) {
        spec.ports
            .map_or(self.current_ports, |(from, to)| (to, from))
    }

    /// Sends a segment of the peer, with its acknowledgment, SACK blocks and echoed timestamp converted to
    /// the numbers of the wire.
    pub(super) fn inject_segment(&mut self, spec: &TcpSpec) {
        let (local, remote) = self.ports_of(spec);
        let flow = self.flows.entry((local, remote)).or_default();
        if spec.flags & SYN != 0 {
            if spec.flags & ACK == 0 && spec.seq != flow.peer_isn {
                flow.reopened = true;
            }
            flow.peer_isn = spec.seq;
        }
        let seq_offset = flow.seq_offset.unwrap_or(0);
        let mut options = spec.options.clone().unwrap_or_default();
        for option in &mut options {
            match option {
                TcpOption::Sack(blocks) => {
                    for (left, right) in blocks {
                        *left = left.wrapping_add(seq_offset);
                        *right = right.wrapping_add(seq_offset);
                    }
                }
                TcpOption::Timestamps { ecr, .. } if spec.flags & ACK != 0 => {
                    *ecr = ecr.wrapping_add(flow.timestamp_offset.unwrap_or(0));
                }
                _ => {}
            }
        }
        // The SYN takes one sequence number: the first byte of the stream follows it, in the same segment or
        // a later one.
        let start = spec.seq.wrapping_add(u32::from(spec.flags & SYN != 0));
        let first = start.wrapping_sub(flow.peer_isn).wrapping_sub(1);
        let payload = (0..spec.len)
            .map(|index| stream_byte(first.wrapping_add(index).into()))
            .collect();
        let segment = WireSegment {
            src: SocketAddr::new(self.host.setup.remote, remote),
            dst: SocketAddr::new(self.host.setup.local, local),
            ecn: match spec.ecn {
                Some(EcnSpec::Exactly(codepoint)) => codepoint,
                _ => 0,
            },
            flags: spec.flags,
            seq: spec.seq,
            ack: spec.ack.map_or(0, |ack| ack.wrapping_add(seq_offset)),
            window: spec.window.unwrap_or(0),
            urgent: spec.urgent.unwrap_or(0),
            options,
            payload,
        };
        self.trace.push(format!(
            "{} < {}",
            format_seconds(self.now()),
            notation::format_spec(spec)
        ));
        self.deliver_packet(segment.to_packet());
    }

    /// Delivers a packet of the peer to the stack, and records it for the capture.
    fn deliver_packet(&mut self, packet: Vec<u8>) {
        self.host.receive_packet(&packet);
        self.packets.push(CapturedPacket {
            at: Duration::from_nanos(self.now()),
            inbound: true,
            packet,
        });
    }

    /// Sends an ICMP error about a segment of the stack, given by sequence number and length.
    pub(super) fn inject_icmp_error(
        &mut self,
        spec: &IcmpSpec,
        line: usize,
    ) -> Result<(), LineError> {
        let v6 = self.host.setup.local.is_ipv6();
        let (kind, code) = packet::icmp_type_and_code(v6, spec)
            .map_err(|message| LineError::new(line, message))?;
        let flow = self
            .flows
            .get(&self.current_ports)
            .copied()
            .unwrap_or_default();
        let quoted = WireSegment {
            src: SocketAddr::new(self.host.setup.local, self.current_ports.0),
            dst: SocketAddr::new(self.host.setup.remote, self.current_ports.1),
            ecn: 0,
            flags: ACK,
            seq: spec.quoted.0.wrapping_add(flow.seq_offset.unwrap_or(0)),
            ack: 0,
            window: 0,
            urgent: 0,
            options: vec![],
            payload: vec![0; spec.quoted.1 as usize],
        };
        self.trace.push(format!(
            "{} < icmp {} {}",
            format_seconds(self.now()),
            spec.kind,
            spec.code.as_deref().unwrap_or("")
        ));
        self.deliver_packet(packet::build_icmp_error(
            kind,
            code,
            spec.mtu.unwrap_or(0),
            &quoted,
        ));
        Ok(())
    }

    /// Formats a packet of the stack in the notation of scripts, for messages.
    pub(super) fn describe_packet(&self, raw: &[u8]) -> String {
        match WireSegment::parse(raw) {
            Err(error) => format!("a packet of {} bytes: {error}", raw.len()),
            Ok(segment) => {
                let key = (segment.src.port(), segment.dst.port());
                let flow = self.flows.get(&key).copied().unwrap_or_default();
                let ports = (key != self.current_ports).then_some(key);
                notation::format_spec(&TcpSpec {
                    ports,
                    ..in_script_numbers(&segment, &flow)
                })
            }
        }
    }

    /// Waits until `to` for the stack to send a packet and compares it with `spec`. Returns when the packet
    /// was sent.
    pub(super) fn expect_packet(
        &mut self,
        spec: &TcpSpec,
        from: u64,
        to: u64,
        event: &ScriptEvent,
    ) -> Result<u64, LineError> {
        let limit = to.saturating_add(self.tolerance);
        while self.host.oldest_packet_time().is_none() && self.advance_once(limit)? {}
        let expected = notation::format_spec(spec);
        let Some((at, raw)) = self.host.take_packet() else {
            return Err(LineError::new(
                event.line,
                format!(
                    "missing packet: none was sent until {}\n  expected: {} > {expected}",
                    format_seconds(limit),
                    format_seconds(from)
                ),
            ));
        };
        let at = at.duration_since(START).as_nanos() as u64;
        let fail = |actual: &str, difference: String| {
            Err(LineError::new(
                event.line,
                format!(
                    "{difference}\n  expected: {} > {expected}\n  actual:   {} > {actual}",
                    format_seconds(from),
                    format_seconds(at)
                ),
            ))
        };
        self.packets.push(CapturedPacket {
            at: Duration::from_nanos(at),
            inbound: false,
            packet: raw.clone(),
        });
        let segment = match WireSegment::parse(&raw) {
            Ok(segment) => segment,
            Err(error) => return fail("a malformed packet", format!("bad packet: {error}")),
        };
        let key = (segment.src.port(), segment.dst.port());
        // A SYN that opens a connection may come from any port, which becomes the current one.
        let expected_ports = spec.ports.unwrap_or(
            if segment.flags & (SYN | ACK) == SYN && spec.flags == segment.flags {
                key
            } else {
                self.current_ports
            },
        );
        if key == expected_ports {
            self.learn_offsets(&segment, spec);
            if spec.ports.is_none() {
                self.current_ports = key;
            }
        }
        let actual = self.describe_packet(&raw);
        self.trace
            .push(format!("{} > {actual}", format_seconds(at)));
        let flow = self.flows.get(&key).copied().unwrap_or_default();
        if key != expected_ports {
            return fail(&actual, format!("wrong ports: {} > {}", key.0, key.1));
        }
        if let Err(difference) = compare_segment(spec, &segment, &flow, self.tolerance) {
            return fail(&actual, difference);
        }
        if at.saturating_add(self.tolerance) < from || at > limit {
            let range = if from == to {
                format_seconds(from)
            } else {
                format!("{} to {}", format_seconds(from), format_seconds(to))
            };
            return fail(
                &actual,
                format!("wrong time: {}, not {range}", format_seconds(at)),
            );
        }
        Ok(at)
    }

    /// Learns the offsets between the numbers of the script and of the wire: for sequence numbers from a
    /// SYN of the stack, for timestamps from the first one that it sends.
    fn learn_offsets(&mut self, segment: &WireSegment, spec: &TcpSpec) {
        let flow = self
            .flows
            .entry((segment.src.port(), segment.dst.port()))
            .or_default();
        if segment.flags & SYN != 0
            && (flow.seq_offset.is_none()
                || flow.reopened
                || (segment.flags & ACK == 0 && segment.seq != flow.isn))
        {
            flow.seq_offset = Some(segment.seq.wrapping_sub(spec.seq));
            (flow.isn, flow.timestamp_offset, flow.reopened) = (segment.seq, None, false);
            self.isns.push(segment.seq);
        }
        if flow.timestamp_offset.is_none()
            && let (Some(actual), Some(expected)) = (
                timestamp_of(&segment.options),
                spec.options.as_deref().map_or(Some(0), timestamp_of),
            )
        {
            flow.timestamp_offset = Some(actual.wrapping_sub(expected));
        }
    }
}
