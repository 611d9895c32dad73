//! RDMA Reads of memory that its owner keeps writing. The data may be torn; the connection has to
//! stand: each FPDU carries the CRC of its very bytes.
//!
//! Each test reads for a few seconds, or for as many as the environment variable
//! `SIW_LIVE_MEMORY_SECONDS` says.

mod common;

use common::net::{Netns, lacks_network, missing_program};
use common::*;
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

/// Reads the other end's memory again and again while its owner writes it; how many Reads.
fn read_while_written(reader: &End, owner: &End) -> u64 {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = StopOnDrop(&is_over);
        let scribbler = scope.spawn(|| scribble(&owner.mr, &is_over));
        let end = Instant::now() + Duration::from_secs(seconds());
        let (mut posted, mut done) = (0u64, 0u64);
        let mut failure = None;
        while failure.is_none() && (Instant::now() < end || done < posted) {
            while Instant::now() < end && posted - done < DEPTH as u64 {
                let len = LENGTHS[posted as usize % LENGTHS.len()];
                let read = SendWr {
                    opcode: Opcode::Read,
                    flags: WrFlags::SIGNALED,
                    wr_id: posted,
                    imm: 0,
                    remote_addr: owner.mr.addr(),
                    rkey: owner.mr.rkey(),
                    data: SendData::Sges(&[reader.mr.sge(0, len)]),
                };
                reader.qp.post_send(&[read]).unwrap();
                posted += 1;
            }
            if done < posted {
                let wc = reader.wc();
                if wc.status != WcStatus::SUCCESS {
                    failure = Some(wc);
                }
                done += 1;
            }
        }
        drop(stop);
        let rounds = scribbler.join().unwrap();
        assert!(failure.is_none(), "after {done} Reads: {failure:?}");
        assert!(rounds > 0 && done > 0);
        println!("{done} Reads while the memory was written {rounds} times");
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
        read_while_written(&reader, &owner);
        assert!(daemon.stop().success());
    }
}

/// Each of two daemons at its end of a veth pair.
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
    read_while_written(&ends[0], &ends[1]);
}
