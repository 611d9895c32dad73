//! Packetdrill scripts run against [`siw_tcp::Stack`], in virtual time.
//!
//! A script is a list of events with times: system calls and what they return, packets that the
//! peer sends (`<`), packets that the stack must send (`>`), and assertions. The language is the
//! part of packetdrill's that a TCP over a sans-IO engine can mean:
//!
//! ```text
//! --tolerance_usecs=1000                 // packetdrill's own options, where they mean something
//! --so_flags="congestion=newreno mss..." // the engine's, see `options`
//! 0    socket(..., SOCK_STREAM, IPPROTO_TCP) = 3
//! +0   bind(3, ..., ...) = 0
//! +0   listen(3, 1) = 0
//! +.1  < S 0:0(0) win 32792 <mss 1000,sackOK,nop,nop,nop,wscale 7>
//! +0   > S. 0:0(0) ack 1 <...>
//! +.1  < . 1:1(0) ack 1 win 257
//! +0   accept(3, ..., ...) = 4
//! +0...0.2 read(4, ..., 1000) = 1000     // blocks; returns at the second time
//! +0~+.1 > . 1:1(0) ack 1001             // between two times
//! *    > . 1:1(0) ack 1001               // any time
//! +0   < 40002 > 8080 S 0:0(0) win 1000  // another peer
//! +0   < [ce] . 1:1001(1000) ack 1 win 257
//! +0   < icmp unreachable frag_needed mtu 1200 [1:1461(1460)]
//! +0   %{ assert cwnd == 10 * mss, retransmits == 0 }%
//! ```
//!
//! Sequence numbers of the stack count from the first SYN that the script expects of it, as do its
//! timestamps; those of the peer are what the script says. Every payload byte is a function of its
//! place in the stream and is checked in both directions, repetitions included.
//!
//! Stricter than packetdrill: a packet that no line expects is an error at the next line that is
//! later than it, and at the end of the script.
//!
//! [`Host`] is the socket layer over the stack, and is used by the shared object too.
#![forbid(unsafe_code)]

mod calls;
mod capture;
mod errno;
mod expr;
mod host;
mod lexer;
mod link;
mod notation;
mod options;
mod packet;
mod packet_parser;
mod parser;
mod run;
mod script;
mod sockets;

pub use capture::write_pcapng;
pub use errno::Errno;
pub use host::Host;
pub use options::{Setup, engine_flags};
pub use run::{Captured, Outcome, run};
pub use script::Failure;
pub use sockets::{Ready, Shutdown, SockOpt};
