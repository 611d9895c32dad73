//! The XDP program, which decides which frames are siwd's. It runs in the kernel for each frame that
//! the NIC receives, before the kernel allocates anything for it. It cannot copy a frame, so each
//! frame goes either to siwd or to the kernel.
//!
//! With claimed addresses ([`ClaimKind::Addresses`]), siwd owns addresses that the kernel does not have:
//! - IPv4 and IPv6 packets to a claimed address are siwd's, whatever they carry: TCP, ping, fragments,
//!   ICMP errors.
//! - An ARP packet whose target protocol address is claimed is siwd's: a request for it, and the reply
//!   to one of siwd's requests. One whose sender has a claimed address is siwd's too, which reports the
//!   conflict; and so are neighbour solicitations and advertisements of a claimed address.
//! - Everything else is the kernel's, also other advertisements to all nodes and router advertisements.
//!
//! With claimed TCP ports ([`ClaimKind::Ports`]), siwd shares the addresses of the kernel:
//! - TCP segments to a claimed address and port are siwd's.
//! - Only the first fragment of a fragmented packet has ports. It adds the packet's identification to
//!   a map, in which the others are looked up. Fragments that overtake the first go to the kernel,
//!   which then never has the whole packet, and drops them.
//! - ICMP errors are siwd's if the packet that they quote came from a claimed address and port.
//! - Everything else is the kernel's: ping, ARP and neighbour discovery as well.
//!
//! A frame with a priority tag (VLAN 0) belongs to no VLAN (IEEE 802.1Q), and counts as untagged.
//!
//! A claimed frame that no socket takes is dropped: the kernel would answer it with a reset. IPv6
//! extension headers other than the fragment header are not parsed.
//!
//! Registers: R6 the context, R7 the fragment field, R8 the end of the frame, R9 the IP header.

use crate::Result;
use crate::instruction::{
    Arithmetic, Assembler, Condition, Helper, Instruction, Label, Register, Width,
};
use Register::{R0, R1, R2, R3, R4, R6, R7, R8, R9, R10};

/// Kind of claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimKind {
    /// Whole addresses, which the kernel does not have.
    Addresses,
    /// TCP ports of addresses that the kernel has.
    Ports,
}

/// Parameters of the program. Maps are given by their descriptors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProgramConfig {
    pub kind: ClaimKind,
    /// The VLAN of the frames; `None` for frames without a tag.
    pub vlan: Option<u16>,
    /// Claims, with keys as [`claim_key`] makes them.
    pub claims: i32,
    /// Sockets by receive queue.
    pub sockets: i32,
    /// Identifications of fragmented packets that are claimed.
    pub fragments: i32,
}

/// Bytes of a key of the map of claims: an IPv6 or mapped IPv4 address, the port in network order or
/// 0, and two bytes of zero.
pub(crate) const CLAIM_KEY_BYTES: usize = 20;
/// Bytes of a key of the map of fragments: source and destination as above, identification, and
/// the Ethernet type.
pub(crate) const FRAGMENT_KEY_BYTES: usize = 40;

/// Bytes of a value in the maps of claims and fragments; only the presence of a key matters.
pub(crate) const VALUE_BYTES: usize = 4;

// Offsets on the stack, from the frame pointer.
const CLAIM_KEY: i16 = -24;
const CLAIM_PORT: i16 = CLAIM_KEY + 16;
const FRAGMENT_KEY: i16 = -64;
const FRAGMENT_VALUE: i16 = -72;

const CONTEXT_DATA: i16 = 0;
const CONTEXT_DATA_END: i16 = 4;
const CONTEXT_RX_QUEUE: i16 = 16;

const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;

const ETHERNET_BYTES: i16 = 14;
const ETHERNET_TYPE: i16 = 12;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_ARP: u16 = 0x0806;
const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const VLAN_TAG_BYTES: i16 = 4;
const VLAN_ID_MASK: i32 = 0x0fff;
const PRIORITY_TAG: u16 = 0;

const ARP_BYTES: i16 = 28;
const ARP_PROTOCOL_TYPE: i16 = 2;
const ARP_SENDER_ADDRESS: i16 = 14;
const ARP_TARGET_ADDRESS: i16 = 24;

const IPV4_BYTES: i16 = 20;
const IPV4_IDENTIFICATION: i16 = 4;
const IPV4_FRAGMENT: i16 = 6;
const IPV4_MORE_FRAGMENTS: i32 = 0x2000;
const IPV4_FRAGMENT_OFFSET: i32 = 0x1fff;
const IPV4_PROTOCOL: i16 = 9;
const IPV4_SOURCE: i16 = 12;
const IPV4_DESTINATION: i16 = 16;

const IPV6_BYTES: i16 = 40;
const IPV6_NEXT_HEADER: i16 = 6;
const IPV6_SOURCE: i16 = 8;
const IPV6_DESTINATION: i16 = 24;
/// Fields of the fragment header behind the IPv6 header (RFC 8200 section 4.5).
const IPV6_FRAGMENT_NEXT_HEADER: i16 = IPV6_BYTES;
const IPV6_FRAGMENT: i16 = IPV6_BYTES + 2;
const IPV6_FRAGMENT_IDENTIFICATION: i16 = IPV6_BYTES + 4;
const IPV6_FRAGMENT_BYTES: i16 = 8;
const IPV6_MORE_FRAGMENTS: i32 = 1;
const IPV6_FRAGMENT_OFFSET: i32 = 0xfff8;

const PROTOCOL_ICMP: i32 = 1;
const PROTOCOL_TCP: i32 = 6;
const PROTOCOL_IPV6_FRAGMENT: i32 = 44;
const PROTOCOL_ICMPV6: i32 = 58;

const TCP_SOURCE_PORT: i16 = 0;
const TCP_DESTINATION_PORT: i16 = 2;
const TCP_PORTS_BYTES: i16 = 4;

/// The packet that an error of ICMP or ICMPv6 quotes follows these bytes.
const ICMP_BYTES: i16 = 8;
/// Destination unreachable, source quench, time exceeded, parameter problem (RFC 792).
const ICMP_ERRORS: [i32; 4] = [3, 4, 11, 12];
/// Destination unreachable to parameter problem (RFC 4443) are types 1 to 4.
const ICMPV6_LAST_ERROR: i32 = 4;
const ICMPV6_NEIGHBOUR_SOLICITATION: i32 = 135;
const ICMPV6_NEIGHBOUR_ADVERTISEMENT: i32 = 136;
const ICMPV6_TARGET: i16 = IPV6_BYTES + 8;

/// The key of a claim in its map.
pub(crate) fn claim_key(address: std::net::IpAddr, port: u16) -> [u8; CLAIM_KEY_BYTES] {
    let address = match address {
        std::net::IpAddr::V4(four) => four.to_ipv6_mapped(),
        std::net::IpAddr::V6(six) => six,
    };
    let mut key = [0; CLAIM_KEY_BYTES];
    key[..16].copy_from_slice(&address.octets());
    key[16..18].copy_from_slice(&port.to_be_bytes());
    key
}

/// Value of a two-byte field as a load reads it.
fn on_wire(value: u16) -> i32 {
    i32::from(value.to_be())
}

/// Assembles the program.
///
/// # Errors
/// It cannot be assembled, which is a defect.
pub(crate) fn assemble_program(config: &ProgramConfig) -> Result<Vec<Instruction>> {
    let mut code = Assembler::default();
    let pass = code.new_label();
    let redirect = code.new_label();
    let program = Program {
        config: *config,
        pass,
        redirect,
    };
    program.emit_ethernet(&mut code);
    code.bind_label(redirect);
    // Without a socket for this queue the frame is dropped.
    code.load_map(R1, config.sockets);
    code.load_field(Width::Word, R2, R6, CONTEXT_RX_QUEUE);
    code.compute_immediate(Arithmetic::Move, R3, XDP_DROP);
    code.call_helper(Helper::RedirectMap);
    code.exit_program();
    code.bind_label(pass);
    code.compute_immediate(Arithmetic::Move, R0, XDP_PASS);
    code.exit_program();
    code.resolve_jumps()
}

struct Program {
    config: ProgramConfig,
    pass: Label,
    redirect: Label,
}

impl Program {
    /// Loads the context, skips the VLAN tag, and branches by the Ethernet type.
    fn emit_ethernet(&self, code: &mut Assembler) {
        code.compute_register(Arithmetic::Move, R6, R1);
        code.load_field(Width::Word, R9, R6, CONTEXT_DATA);
        code.load_field(Width::Word, R8, R6, CONTEXT_DATA_END);
        let untagged = code.new_label();
        self.check_length(code, R9, ETHERNET_BYTES);
        code.load_field(Width::Half, R1, R9, ETHERNET_TYPE);
        let without_tag = match self.config.vlan {
            Some(_) => self.pass,
            None => untagged,
        };
        code.jump_if(
            Condition::NotEqual,
            R1,
            on_wire(ETHERTYPE_VLAN),
            without_tag,
        );
        self.check_length(code, R9, ETHERNET_BYTES + VLAN_TAG_BYTES);
        code.load_big_endian_half(R1, R9, ETHERNET_BYTES);
        code.compute_immediate(Arithmetic::And, R1, VLAN_ID_MASK);
        let vlan = self.config.vlan.unwrap_or(PRIORITY_TAG);
        code.jump_if(Condition::NotEqual, R1, vlan.into(), self.pass);
        code.load_field(Width::Half, R1, R9, ETHERNET_TYPE + VLAN_TAG_BYTES);
        code.compute_immediate(Arithmetic::Add, R9, VLAN_TAG_BYTES.into());
        code.bind_label(untagged);
        code.compute_immediate(Arithmetic::Add, R9, ETHERNET_BYTES.into());
        let (four, six) = (code.new_label(), code.new_label());
        code.jump_if(Condition::Equal, R1, on_wire(ETHERTYPE_IPV4), four);
        code.jump_if(Condition::Equal, R1, on_wire(ETHERTYPE_IPV6), six);
        if self.config.kind == ClaimKind::Addresses {
            code.jump_if(Condition::NotEqual, R1, on_wire(ETHERTYPE_ARP), self.pass);
            self.emit_arp(code);
        } else {
            code.jump_always(self.pass);
        }
        code.bind_label(four);
        self.check_length(code, R9, IPV4_BYTES);
        match self.config.kind {
            ClaimKind::Addresses => {
                self.set_claim_address4(code, R9, IPV4_DESTINATION);
                self.redirect_if_claimed(code);
                code.jump_always(self.pass);
            }
            ClaimKind::Ports => self.emit_ports4(code),
        }
        code.bind_label(six);
        self.check_length(code, R9, IPV6_BYTES);
        match self.config.kind {
            ClaimKind::Addresses => self.emit_addresses6(code),
            ClaimKind::Ports => self.emit_ports6(code),
        }
    }

    fn emit_arp(&self, code: &mut Assembler) {
        self.check_length(code, R9, ARP_BYTES);
        code.load_field(Width::Half, R1, R9, ARP_PROTOCOL_TYPE);
        code.jump_if(Condition::NotEqual, R1, on_wire(ETHERTYPE_IPV4), self.pass);
        for address in [ARP_TARGET_ADDRESS, ARP_SENDER_ADDRESS] {
            self.set_claim_address4(code, R9, address);
            self.redirect_if_claimed(code);
        }
        code.jump_always(self.pass);
    }

    fn emit_addresses6(&self, code: &mut Assembler) {
        copy_address6(code, R9, IPV6_DESTINATION, CLAIM_KEY);
        code.store_immediate(Width::Word, R10, CLAIM_PORT, 0);
        self.redirect_if_claimed(code);
        // Solicitations and advertisements go to multicast addresses that several hosts share.
        code.load_field(Width::Byte, R1, R9, IPV6_NEXT_HEADER);
        code.jump_if(Condition::NotEqual, R1, PROTOCOL_ICMPV6, self.pass);
        self.check_length(code, R9, ICMPV6_TARGET + 16);
        code.load_field(Width::Byte, R1, R9, IPV6_BYTES);
        let has_target = code.new_label();
        let solicitation = ICMPV6_NEIGHBOUR_SOLICITATION;
        code.jump_if(Condition::Equal, R1, solicitation, has_target);
        let advertisement = ICMPV6_NEIGHBOUR_ADVERTISEMENT;
        code.jump_if(Condition::NotEqual, R1, advertisement, self.pass);
        code.bind_label(has_target);
        copy_address6(code, R9, ICMPV6_TARGET, CLAIM_KEY);
        self.redirect_if_claimed(code);
        code.jump_always(self.pass);
    }

    fn emit_ports4(&self, code: &mut Assembler) {
        let (tcp, later_fragment) = (code.new_label(), code.new_label());
        code.load_big_endian_half(R7, R9, IPV4_FRAGMENT);
        code.load_field(Width::Byte, R1, R9, IPV4_PROTOCOL);
        code.jump_if(Condition::Equal, R1, PROTOCOL_TCP, tcp);
        code.jump_if(Condition::NotEqual, R1, PROTOCOL_ICMP, self.pass);

        let any_fragment = IPV4_MORE_FRAGMENTS | IPV4_FRAGMENT_OFFSET;
        code.jump_if(Condition::AnyBit, R7, any_fragment, self.pass);
        load_header_length4(code, R2, R9);
        code.compute_register(Arithmetic::Move, R3, R9);
        code.compute_register(Arithmetic::Add, R3, R2);
        self.check_length(code, R3, ICMP_BYTES + IPV4_BYTES);
        code.load_field(Width::Byte, R1, R3, 0);
        let is_error = code.new_label();
        for error in ICMP_ERRORS {
            code.jump_if(Condition::Equal, R1, error, is_error);
        }
        code.jump_always(self.pass);
        code.bind_label(is_error);
        code.load_field(Width::Byte, R1, R3, ICMP_BYTES + IPV4_PROTOCOL);
        code.jump_if(Condition::NotEqual, R1, PROTOCOL_TCP, self.pass);
        code.load_big_endian_half(R1, R3, ICMP_BYTES + IPV4_FRAGMENT);
        code.jump_if(Condition::AnyBit, R1, IPV4_FRAGMENT_OFFSET, self.pass);
        self.set_claim_address4(code, R3, ICMP_BYTES + IPV4_SOURCE);
        code.compute_immediate(Arithmetic::Add, R3, ICMP_BYTES.into());
        load_header_length4(code, R2, R3);
        code.compute_register(Arithmetic::Add, R3, R2);
        self.check_length(code, R3, TCP_PORTS_BYTES);
        set_claim_port(code, R3, TCP_SOURCE_PORT);
        self.redirect_if_claimed(code);
        code.jump_always(self.pass);

        code.bind_label(tcp);
        code.jump_if(Condition::AnyBit, R7, IPV4_FRAGMENT_OFFSET, later_fragment);
        load_header_length4(code, R2, R9);
        code.compute_register(Arithmetic::Move, R3, R9);
        code.compute_register(Arithmetic::Add, R3, R2);
        self.check_length(code, R3, TCP_PORTS_BYTES);
        self.set_claim_address4(code, R9, IPV4_DESTINATION);
        set_claim_port(code, R3, TCP_DESTINATION_PORT);
        code.compute_immediate(Arithmetic::And, R7, IPV4_MORE_FRAGMENTS);
        self.redirect_first(code, set_fragment_key4);

        code.bind_label(later_fragment);
        set_fragment_key4(code);
        self.redirect_known_fragment(code);
    }

    fn emit_ports6(&self, code: &mut Assembler) {
        let (tcp, fragment, error) = (code.new_label(), code.new_label(), code.new_label());
        copy_address6(code, R9, IPV6_DESTINATION, CLAIM_KEY);
        code.load_field(Width::Byte, R1, R9, IPV6_NEXT_HEADER);
        code.jump_if(Condition::Equal, R1, PROTOCOL_TCP, tcp);
        code.jump_if(Condition::Equal, R1, PROTOCOL_IPV6_FRAGMENT, fragment);
        code.jump_if(Condition::Equal, R1, PROTOCOL_ICMPV6, error);
        code.jump_always(self.pass);

        code.bind_label(tcp);
        self.check_length(code, R9, IPV6_BYTES + TCP_PORTS_BYTES);
        set_claim_port(code, R9, IPV6_BYTES + TCP_DESTINATION_PORT);
        self.redirect_if_claimed(code);
        code.jump_always(self.pass);

        code.bind_label(error);
        let quoted = IPV6_BYTES + ICMP_BYTES;
        self.check_length(code, R9, quoted + IPV6_BYTES + TCP_PORTS_BYTES);
        code.load_field(Width::Byte, R1, R9, IPV6_BYTES);
        code.jump_if(Condition::Equal, R1, 0, self.pass);
        code.jump_if(Condition::Greater, R1, ICMPV6_LAST_ERROR, self.pass);
        code.load_field(Width::Byte, R1, R9, quoted + IPV6_NEXT_HEADER);
        code.jump_if(Condition::NotEqual, R1, PROTOCOL_TCP, self.pass);
        copy_address6(code, R9, quoted + IPV6_SOURCE, CLAIM_KEY);
        set_claim_port(code, R9, quoted + IPV6_BYTES + TCP_SOURCE_PORT);
        self.redirect_if_claimed(code);
        code.jump_always(self.pass);

        code.bind_label(fragment);
        let later_fragment = code.new_label();
        let behind = IPV6_BYTES + IPV6_FRAGMENT_BYTES;
        self.check_length(code, R9, behind);
        code.load_field(Width::Byte, R1, R9, IPV6_FRAGMENT_NEXT_HEADER);
        code.jump_if(Condition::NotEqual, R1, PROTOCOL_TCP, self.pass);
        code.load_big_endian_half(R7, R9, IPV6_FRAGMENT);
        code.jump_if(Condition::AnyBit, R7, IPV6_FRAGMENT_OFFSET, later_fragment);
        self.check_length(code, R9, behind + TCP_PORTS_BYTES);
        set_claim_port(code, R9, behind + TCP_DESTINATION_PORT);
        code.compute_immediate(Arithmetic::And, R7, IPV6_MORE_FRAGMENTS);
        self.redirect_first(code, set_fragment_key6);

        code.bind_label(later_fragment);
        set_fragment_key6(code);
        self.redirect_known_fragment(code);
    }

    /// Passes frames that end before `start + length`. The verifier requires this check before each
    /// load.
    fn check_length(&self, code: &mut Assembler, start: Register, length: i16) {
        code.compute_register(Arithmetic::Move, R0, start);
        code.compute_immediate(Arithmetic::Add, R0, length.into());
        code.jump_if_registers(Condition::Greater, R0, R8, self.pass);
    }

    /// Sets the claim's address to the IPv4 address at `header + offset`, without a port.
    fn set_claim_address4(&self, code: &mut Assembler, header: Register, offset: i16) {
        code.load_field(Width::Word, R1, header, offset);
        store_mapped_address(code, CLAIM_KEY);
        code.store_immediate(Width::Word, R10, CLAIM_PORT, 0);
    }

    /// Redirects the frame if the claim's key is in the map; continues otherwise.
    fn redirect_if_claimed(&self, code: &mut Assembler) {
        look_up(code, self.config.claims, CLAIM_KEY);
        code.jump_if(Condition::NotEqual, R0, 0, self.redirect);
    }

    /// Redirects a packet or its first fragment if its port is claimed, and passes it otherwise. R7 is
    /// nonzero if more fragments follow; those go the same way.
    fn redirect_first(&self, code: &mut Assembler, set_fragment_key: fn(&mut Assembler)) {
        let not_claimed = code.new_label();
        look_up(code, self.config.claims, CLAIM_KEY);
        code.jump_if(Condition::Equal, R0, 0, not_claimed);
        code.jump_if(Condition::Equal, R7, 0, self.redirect);
        set_fragment_key(code);
        code.store_immediate(Width::Word, R10, FRAGMENT_VALUE, 1);
        code.load_map(R1, self.config.fragments);
        address_of(code, R2, FRAGMENT_KEY);
        address_of(code, R3, FRAGMENT_VALUE);
        code.compute_immediate(Arithmetic::Move, R4, 0);
        code.call_helper(Helper::MapUpdate);
        code.jump_always(self.redirect);
        code.bind_label(not_claimed);
        code.jump_if(Condition::Equal, R7, 0, self.pass);
        // A reused identification belongs to this packet from now on.
        set_fragment_key(code);
        code.load_map(R1, self.config.fragments);
        address_of(code, R2, FRAGMENT_KEY);
        code.call_helper(Helper::MapDelete);
        code.jump_always(self.pass);
    }

    fn redirect_known_fragment(&self, code: &mut Assembler) {
        look_up(code, self.config.fragments, FRAGMENT_KEY);
        code.jump_if(Condition::NotEqual, R0, 0, self.redirect);
        code.jump_always(self.pass);
    }
}

/// Looks up a key: sets R0 to the address of its value, or to 0.
fn look_up(code: &mut Assembler, map: i32, key: i16) {
    code.load_map(R1, map);
    address_of(code, R2, key);
    code.call_helper(Helper::MapLookup);
}

fn address_of(code: &mut Assembler, to: Register, place: i16) {
    code.compute_register(Arithmetic::Move, to, R10);
    code.compute_immediate(Arithmetic::Add, to, place.into());
}

/// Stores the IPv4 address in R1 as `::ffff:0:0/96` at a place on the stack.
fn store_mapped_address(code: &mut Assembler, place: i16) {
    code.store_immediate(Width::Double, R10, place, 0);
    let mapped = i32::from_ne_bytes([0, 0, 0xff, 0xff]);
    code.store_immediate(Width::Word, R10, place + 8, mapped);
    code.store_register(Width::Word, R10, place + 12, R1);
}

fn copy_address6(code: &mut Assembler, header: Register, offset: i16, place: i16) {
    for half in [0, 8] {
        code.load_field(Width::Double, R1, header, offset + half);
        code.store_register(Width::Double, R10, place + half, R1);
    }
}

/// Sets the claim's port to the port at `header + offset`.
fn set_claim_port(code: &mut Assembler, header: Register, offset: i16) {
    code.load_field(Width::Half, R1, header, offset);
    code.store_immediate(Width::Word, R10, CLAIM_PORT, 0);
    code.store_register(Width::Half, R10, CLAIM_PORT, R1);
}

/// Loads the length of an IPv4 header into `to`. With a length below 20 bytes, ports are read from the
/// header itself; only invalid packets have it.
fn load_header_length4(code: &mut Assembler, to: Register, header: Register) {
    code.load_field(Width::Byte, to, header, 0);
    code.compute_immediate(Arithmetic::And, to, 0x0f);
    code.compute_immediate(Arithmetic::ShiftLeft, to, 2);
}

fn set_fragment_key4(code: &mut Assembler) {
    code.load_field(Width::Word, R1, R9, IPV4_SOURCE);
    store_mapped_address(code, FRAGMENT_KEY);
    code.load_field(Width::Word, R1, R9, IPV4_DESTINATION);
    store_mapped_address(code, FRAGMENT_KEY + 16);
    code.load_field(Width::Half, R1, R9, IPV4_IDENTIFICATION);
    code.store_register(Width::Word, R10, FRAGMENT_KEY + 32, R1);
    let family = on_wire(ETHERTYPE_IPV4);
    code.store_immediate(Width::Word, R10, FRAGMENT_KEY + 36, family);
}

fn set_fragment_key6(code: &mut Assembler) {
    copy_address6(code, R9, IPV6_SOURCE, FRAGMENT_KEY);
    copy_address6(code, R9, IPV6_DESTINATION, FRAGMENT_KEY + 16);
    code.load_field(Width::Word, R1, R9, IPV6_FRAGMENT_IDENTIFICATION);
    code.store_register(Width::Word, R10, FRAGMENT_KEY + 32, R1);
    let family = on_wire(ETHERTYPE_IPV6);
    code.store_immediate(Width::Word, R10, FRAGMENT_KEY + 36, family);
}
