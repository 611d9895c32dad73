//! Everything that siwd and the Linux kernel's iWARP (siw) both can, with each other, in every
//! size that is an edge: transfers checked byte for byte at both ends, captures judged by tshark.

mod common;

use std::path::PathBuf;

use common::guest::{Evidence, Guest, lacks_guest};
use common::matrix::{Plan, Role, play};
use common::net::{Netns, judge, missing_program};
use common::*;

const V4: (&str, &str) = ("10.77.0.1", "10.77.0.2");
const V6: (&str, &str) = ("fd77::1", "fd77::2");

fn config(mtu: usize) -> String {
    format!(
        r#"
[dpdk]
hugepages = "never"
buffers = 8192
[[device]]
name = "siw0"
devargs = "net_af_packet0,iface=lab0"
mac = "02:00:00:77:00:01"
addresses = ["10.77.0.1/24", "fd77::1/64"]
mtu = {mtu}
"#
    )
}

/// What the tests of a guest share.
struct Lab {
    guest: Guest,
    ns: Netns,
    port: u16,
}

impl Lab {
    fn new() -> Lab {
        let ns = Netns::new();
        let guest = Guest::boot(&ns, &["--ip", "10.77.0.2/24", "--ip6", "fd77::2/64"]);
        Lab {
            guest,
            ns,
            port: 7200,
        }
    }

    fn siwd(&self, mtu: usize) -> (Daemon, PathBuf, Evidence) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("siw.pcapng");
        let args = ["--capture", file.to_str().unwrap()];
        (self.ns.siwd(&config(mtu), &args), file, Evidence(dir))
    }

    fn plan(&mut self, role: Role, (us, them): (&str, &str), length: usize) -> Plan {
        self.port += 1;
        Plan {
            role,
            us: us.parse().unwrap(),
            them: them.parse().unwrap(),
            port: self.port,
            crc: true,
            length,
            depth: (16, 16),
            guest_depth: (16, 16),
            ops: Vec::new(),
        }
    }
}

/// TCP's payload in a full frame: with timestamps, as both sides use them.
fn segment(mtu: usize, us: &str) -> usize {
    mtu - if us.contains(':') { 40 } else { 20 } - 20 - 12
}

/// All operations of both sides with all sizes, each size that is an edge with its neighbours.
fn ops(segment: usize, large: &[usize]) -> Vec<String> {
    let ulpdu = segment - 6 - segment % 4;
    let mut sizes = vec![0, 1, 4, 63, 64, 65];
    for edge in [segment, ulpdu - 14, ulpdu - 18] {
        sizes.extend(edge - 1..=edge + 1);
    }
    sizes.extend(large);
    sizes.sort_unstable();
    sizes.dedup();
    let all = sizes.iter();
    all.flat_map(|size| "wrsiWRSI".chars().map(move |op| format!("{op}{size}")))
        .collect()
}

#[test]
fn everything_works_both_ways_in_all_sizes() {
    skip_if!(lacks_guest().or_else(|| missing_program("tshark")));
    let mut lab = Lab::new();
    let (siwd, file, _dir) = lab.siwd(1500);
    for role in [Role::Initiator, Role::Responder] {
        for family in [V4, V6] {
            for crc in [true, false] {
                let mut plan = lab.plan(role, family, 1 << 20);
                plan.crc = crc;
                let large: &[usize] = if crc { &[65_536, 1 << 20] } else { &[65_536] };
                plan.ops = ops(segment(1500, family.0), large);
                let outcome = play(&siwd, &lab.guest, &plan, None);
                assert_eq!(outcome.info.crc, crc);
            }
        }
    }
    assert!(siwd.stop().success());
    assert!(judge(&file).good_crcs > 10_000);
}
