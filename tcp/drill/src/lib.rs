//! Packetdrill scripts run against [`siw_tcp::Stack`], in virtual time.
//!
//! A script is a list of timed events: system calls with their results, packets that the peer sends
//! (`<`), packets that the stack must send (`>`), and assertions. The language is packetdrill's
//! without the parts that need a kernel:
//!
//! ```text
//! --tolerance_usecs=1000                 // packetdrill's own options, as far as they apply
//! --so_flags="congestion=newreno"        // the stack's, see `apply_engine_flags`
//! 0    socket(..., SOCK_STREAM, IPPROTO_TCP) = 3
//! +0   bind(3, ..., ...) = 0
//! +0   listen(3, 1) = 0
//! +.1  < S 0:0(0) win 32792 <mss 1000,sackOK,nop,nop,nop,wscale 7>
//! +0   > S. 0:0(0) ack 1 <...>
//! +.1  < . 1:1(0) ack 1 win 257
//! +0   accept(3, ..., ...) = 4
//! +0...0.2 read(4, ..., 1000) = 1000     // blocks, and returns at the second time
//! +0~+.1 > . 1:1(0) ack 1001             // between two times
//! *    > . 1:1(0) ack 1001               // any time
//! +0   < 40002 > 8080 S 0:0(0) win 1000  // another peer
//! +0   < [ce] . 1:1001(1000) ack 1 win 257
//! +0   < icmp unreachable frag_needed mtu 1200 [1:1461(1460)]
//! +0   %{ assert cwnd == 10 * mss, retransmits == 0 }%
//! ```
//!
//! Sequence numbers and timestamps of the stack are relative to its first SYN that the script expects;
//! those of the peer are absolute. Every payload byte is a function of its stream offset and is checked
//! in both directions, also in retransmissions.
//!
//! One rule is stricter than packetdrill's: an unexpected packet is an error at the next line with a
//! later time, or at the end of the script.
//!
//! ```
//! let script = "
//! 0    socket(..., SOCK_STREAM, IPPROTO_TCP) = 3
//! +0   bind(3, ..., ...) = 0
//! +0   listen(3, 1) = 0
//! +.1  < S 0:0(0) win 32792 <mss 1000,nop,nop,sackOK>
//! +0   > S. 0:0(0) ack 1 <mss 1460,nop,nop,sackOK>
//! +.1  < . 1:1(0) ack 1 win 32792
//! +0   accept(3, ..., ...) = 4
//! ";
//! let outcome = siw_drill::run_script("passive_open.pkt", script);
//! assert_eq!(outcome.result, Ok(()));
//! assert_eq!(outcome.packets.len(), 3);
//! ```
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod calls;
mod capture;
mod errno;
mod expr;
mod host;
mod icmp;
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
pub use run::{CapturedPacket, RunOutcome, run_script};
pub use script::ScriptFailure;
