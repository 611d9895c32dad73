//! RDMA Reads of memory that its owner keeps writing, and RDMA Writes from such memory, as in
//! QEMU's migration of a running guest. The data may be torn, but the connection must survive: the
//! CRC of each FPDU, if any, covers exactly the bytes sent.
//!
//! Each test runs for a few seconds, or for `SIW_LIVE_MEMORY_SECONDS` seconds if this environment
//! variable is set.

use crate::common::net::{Netns, lacks_network, missing_program};
use crate::common::*;
use siw::{Opcode, SendData, SendWr, WcStatus, WrFlags};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

const MEMORY: usize = 256 << 10;
/// Reads that are outstanding at once.
const DEPTH: usize = 8;
const LENGTHS: [usize; 6] = [64, 700, 1428, 10_000, 65_536, 200_000];

fn seconds() -> u64 {
    let wanted = std::env::var("SIW_LIVE_MEMORY_SECONDS");
    wanted.map_or(3, |text| text.parse().expect("a number of seconds"))
}

/// Reads from or writes to the peer's memory repeatedly while the source is being written. Returns
/// the number of transfers.
fn transfer_while_written(opcode: Opcode, poster: &End, peer: &End) -> u64 {
    let source = if opcode == Opcode::Read { peer } else { poster };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = StopOnDrop(&is_over);
        let scribbler = scope.spawn(|| scribble(&source.mr, &is_over));
        let end = Instant::now() + Duration::from_secs(seconds());
        let (mut posted, mut done) = (0u64, 0u64);
        let mut failure = None;
        while failure.is_none() && (Instant::now() < end || done < posted) {
            while Instant::now() < end && posted - done < DEPTH as u64 {
                let len = LENGTHS[posted as usize % LENGTHS.len()];
                let request = SendWr {
                    opcode,
                    flags: WrFlags::SIGNALED,
                    wr_id: posted,
                    imm: 0,
                    remote_addr: peer.mr.addr(),
                    rkey: peer.mr.rkey(),
                    data: SendData::Sges(&[poster.mr.sge(0, len)]),
                };
                poster.qp.post_send(&[request]).unwrap();
                posted += 1;
            }
            if done < posted {
                let wc = poster.wc();
                if wc.status != WcStatus::SUCCESS {
                    failure = Some(wc);
                }
                done += 1;
            }
        }
        drop(stop);
        let rounds = scribbler.join().unwrap();
        assert!(failure.is_none(), "{opcode:?}, {done} done: {failure:?}");
        assert!(rounds > 0 && done > 0);
        println!("{opcode:?}: {done} while the memory was written {rounds} times");
        done
    })
}

#[test]
fn reads_over_a_ring_pair_survive_writes_to_their_source() {
    for payload in ["auto", "copy", "reference"] {
        let line = format!("pair = \"lo\"\ntx_payload = \"{payload}\"");
        let config = LOOPBACK.replace("pair = \"lo\"", &line);
        let daemon = Daemon::start(&config, &[]);
        let (reader, owner) = pair(&daemon, MEMORY);
        transfer_while_written(Opcode::Read, &reader, &owner);
        assert!(daemon.stop().success());
    }
}

/// With "auto", a message is sent by reference only if its stream has no CRC, so a change of the
/// source never makes a CRC wrong.
#[test]
fn writes_over_a_pair_with_long_frames_survive_writes_to_their_source() {
    for crc in ["off", "on"] {
        let more = format!("/64\"]\nmtu = 33024\n[device.mpa]\ncrc = \"{crc}\"");
        let daemon = Daemon::start(&LOOPBACK.replace("/64\"]", &more), &[]);
        let (writer, target) = pair(&daemon, MEMORY);
        transfer_while_written(Opcode::Write, &writer, &target);
        assert!(daemon.stop().success());
    }
}

/// Two daemons, one at each end of a veth pair.
#[test]
fn reads_over_af_packet_survive_writes_to_their_source() {
    skip_if!(lacks_network().or(missing_program("ethtool")));
    let ns = Netns::new();
    ns.veth(1500);
    let daemons = [0, 1].map(|end| {
        let config = format!(
            "[dpdk]\nhugepages = \"never\"\nbuffers = 4096\n[[device]]\nname = \"siw0\"\n\
             devargs = \"net_af_packet0,iface=veth{end}\"\ntx_payload = \"reference\"\n\
             addresses = [\"10.79.0.{}/24\"]\n",
            end + 1
        );
        ns.siwd(&config, &[])
    });
    let ends = daemons
        .each_ref()
        .map(|daemon| End::new(&daemon.context(), MEMORY));
    connect(&ends[0], &ends[1], "siw0", "10.79.0.2:0".parse().unwrap());
    transfer_while_written(Opcode::Read, &ends[0], &ends[1]);
}
