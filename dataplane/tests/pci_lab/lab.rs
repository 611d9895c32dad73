//! A guest with siwd's programs and PCI NICs, for the tests in this folder.

use std::path::PathBuf;

use crate::common::guest::{Done, Evidence, GUEST_PATIENCE, Guest, lacks_emulator};
use crate::common::net::{judge, missing_program, tshark_fields, write_matching};
use crate::common::{client_program, daemon_example};

/// Set by `deploy/lab/pci/run --all`.
const EVERYTHING: &str = "SIWD_PCI_LAB";

/// Whether the long selection runs.
pub fn runs_everything() -> bool {
    std::env::var_os(EVERYTHING).is_some()
}

/// Amount of data moved between two NICs.
pub struct Amount {
    largest: usize,
    small_messages: usize,
    connections: usize,
}

const SHORT: Amount = Amount {
    largest: 65_536,
    small_messages: 200,
    connections: 5,
};
const LONG: Amount = Amount {
    largest: 16 << 20,
    small_messages: 10_000,
    connections: 100,
};

pub fn amount() -> Amount {
    if runs_everything() { LONG } else { SHORT }
}

pub fn lacks_lab() -> Option<String> {
    lacks_emulator().or_else(|| missing_program("tshark"))
}

/// The PCI addresses of a pair's NICs.
pub fn pair_addresses(pair: usize) -> Vec<String> {
    (0..2)
        .map(|end| format!("0000:00:{:x}.0", 0x10 + pair * 2 + end))
        .collect()
}

/// A guest with siwd's programs.
pub struct Lab {
    pub guest: Guest,
    record: Evidence,
}

impl Lab {
    /// Boots a guest; its NICs are on hubs, or on taps of the namespace that the caller runs in.
    pub fn boot(args: &[&str]) -> Lab {
        let record = Evidence(tempfile::tempdir().unwrap());
        let programs = [
            env!("CARGO_BIN_EXE_siwd").into(),
            client_program("siw-ping"),
            client_program("siwctl"),
            daemon_example("transfers"),
            daemon_example("outages"),
        ];
        let folder = record.0.path().to_str().unwrap();
        let qmp = record.0.path().join("qmp");
        let mut all = vec!["--record", folder, "--qmp", qmp.to_str().unwrap()];
        all.extend(args);
        for program in &programs {
            all.extend(["--program", program.to_str().unwrap()]);
        }
        let guest = Guest::boot_pci(&all);
        Lab { guest, record }
    }

    /// Sends QEMU a QMP command.
    pub fn tell_emulator(&self, command: &str, arguments: &serde_json::Value) {
        Guest::tell_emulator(&self.record.0.path().join("qmp"), command, arguments);
    }

    /// Starts siwd on the NICs of a pair as siw0 and siw1, and waits until it is ready.
    pub fn start_siwd(&self, pair: usize, more: &str, device: &str) {
        self.start_siwd_on(&pair_addresses(pair), more, device);
    }

    /// Starts siwd on NICs as siw0, siw1, ..., with each two of them in one network: 10.77.0.1,
    /// 10.77.0.2, 10.77.1.1, ...
    pub fn start_siwd_on(&self, nics: &[String], more: &str, device: &str) {
        let done = self.try_siwd_on(nics, more, device);
        assert_eq!(done.status, Some(0), "siwd on {nics:?}: {}", done.out);
    }

    pub fn try_siwd(&self, pair: usize, more: &str, device: &str) -> Done {
        self.try_siwd_on(&pair_addresses(pair), more, device)
    }

    /// `more` holds settings of `[dpdk]` and further tables.
    pub fn try_siwd_on(&self, nics: &[String], more: &str, device: &str) -> Done {
        let workers = if more.contains("[workers]") {
            ""
        } else {
            "[workers]\ncores = [1]\n"
        };
        let buffers = if more.contains("buffers") {
            ""
        } else {
            "buffers = 8192\n"
        };
        let mut config = format!("{workers}[dpdk]\n{buffers}{more}\n");
        for (index, nic) in nics.iter().enumerate() {
            let (network, host) = (index / 2, index % 2 + 1);
            config += &format!(
                "[[device]]\nname = \"siw{index}\"\npci = \"{nic}\"\naddresses = [\"10.77.{network}.{host}/24\"]\n{device}\n"
            );
        }
        // The daemon's process outlives the command. The command ends with the ready line or with
        // siwd's error output.
        let script = format!(
            "printf '{}' >/tmp/siwd.toml; mkdir -p /run/siwd; rm -f /tmp/ready; mkfifo /tmp/ready; \
             setsid sh -c 'siwd --config /tmp/siwd.toml >/tmp/ready 2>/tmp/siwd.log; echo ended >/tmp/ready' </dev/null >/dev/null 2>&1 & \
             read line </tmp/ready; case $line in *ready*) ;; *) cat /tmp/siwd.log; exit 1 ;; esac",
            config.replace('\n', "\\n")
        );
        self.guest.start(&script).wait(GUEST_PATIENCE)
    }

    /// Sends SIGTERM and waits for the end; returns the log.
    pub fn stop_siwd(&self) -> String {
        self.guest.run(
            "kill $(pidof siwd); while pidof siwd >/dev/null; do sleep 0.05; done; cat /tmp/siwd.log",
        )
    }

    pub fn transfer(&self, who: &str, amount: &Amount) {
        let Amount {
            largest,
            small_messages,
            connections,
        } = amount;
        let done = self
            .guest
            .start(&format!(
                "transfers /run/siwd/siwd.sock siw0 10.77.0.2 {largest} {small_messages} {connections}"
            ))
            .wait(GUEST_PATIENCE);
        assert_eq!(done.status, Some(0), "{who}: {}{}", done.err, self.log());
        println!("{who}: {}", done.out.trim());
    }

    pub fn log(&self) -> String {
        self.guest.run("cat /tmp/siwd.log; dmesg | tail -n 5")
    }

    /// Starts a program in the guest that writes to a file; [`Lab::await_line`] reads it.
    pub fn start_in_background(&self, command: &str, output: &str) {
        self.guest.run(&format!(
            "setsid sh -c '{command} >{output} 2>&1; echo ended $? >>{output}' </dev/null >/dev/null 2>&1 &"
        ));
    }

    /// Waits for a line with this text in a file in the guest; returns the file.
    pub fn await_line(&self, file: &str, text: &str) -> String {
        let done = self
            .guest
            .start(&format!(
                "n=0; while ! grep -q \"{text}\\|ended\" {file}; do n=$((n + 1)); [ $n -lt 200 ] || break; sleep 0.1; done; \
                 cat {file}; grep -q \"{text}\" {file}"
            ))
            .wait(GUEST_PATIENCE);
        assert_eq!(
            done.status,
            Some(0),
            "{text:?} does not come: {}\n{}",
            done.out,
            self.log()
        );
        done.out
    }

    /// siw-ping between siw0 and siw1.
    pub fn ping(&self, who: &str, rounds: usize) {
        self.ping_in(0, who, rounds, 1000);
    }

    /// siw-ping with messages of `size` bytes between the two devices of a network.
    pub fn ping_in(&self, network: usize, who: &str, rounds: usize, size: usize) {
        let (to, from) = (format!("10.77.{network}.2"), format!("10.77.{network}.1"));
        let done = self
            .guest
            .start(&format!(
                "siw-ping -s -a {to} -P & while ! siw-ping -c -a {to} -I {from} -C 1 2>/dev/null; do sleep 0.1; done; \
                 siw-ping -c -a {to} -I {from} -C {rounds} -S {size} -V; status=$?; kill $!; exit $status"
            ))
            .wait(GUEST_PATIENCE);
        assert_eq!(done.status, Some(0), "{who}: {done:?}{}", self.log());
    }

    /// Kills a client while it sends; the daemon keeps serving others.
    pub fn kill_client(&self) {
        self.guest.run(
            "siw-ping -s -a 10.77.0.2 -P >/dev/null 2>&1 & server=$!; \
             while ! siw-ping -c -a 10.77.0.2 -I 10.77.0.1 -C 1 2>/dev/null; do sleep 0.1; done; \
             siw-ping -c -a 10.77.0.2 -I 10.77.0.1 -S 60000 & sleep 0.3; \
             kill -KILL $!; kill -KILL $server; pidof siwd >/dev/null",
        );
    }

    /// CPU usage of an idle siwd, in percent of a core.
    pub fn idle_percent(&self) -> u32 {
        // User and system time in hundredths of a second.
        let used = "$(($(cut -d' ' -f14,15 /proc/$(pidof siwd)/stat | tr ' ' +)))";
        let text = self.guest.run(&format!(
            "sleep 0.2; a={used}; sleep 2; b={used}; echo $(((b - a) / 2))"
        ));
        text.trim().parse().unwrap()
    }

    /// Faults reported by the IOMMU, except those at address 0, which vmxnet3's model reads during
    /// a reset.
    pub fn assert_no_iommu_faults(&self) {
        let faults = self
            .guest
            .run("dmesg | grep 'DMAR.*fault addr' | grep -v 'fault addr 0x0 ' || true");
        assert_eq!(faults, "");
    }

    /// Segments that both devices of the running siwd sent again, without those that arrived twice,
    /// because the hub had reordered frames.
    pub fn lost_segments(&self) -> u64 {
        let text = self.guest.run("siwctl stat --json");
        let stats: serde_json::Value = serde_json::from_str(&text).unwrap();
        let sum = |name: &str| -> u64 {
            let devices = stats["devices"].as_array().unwrap().iter();
            devices
                .map(|device| device["merged"][name].as_u64().unwrap())
                .sum()
        };
        sum("TcpRetransSegs").saturating_sub(sum("SiwOutOfWindow"))
    }

    /// Dissects the frames between the NICs of a pair: no frame is malformed, has a wrong checksum
    /// or exceeds `mtu`, which also proves that TSO packets were segmented. `cuts_packets`: the model
    /// cut some into IP fragments, which are left out.
    pub fn judge_pair(&self, pair: usize, mtu: usize, cuts_packets: bool) {
        let recorded = self.recorded(pair);
        let fragments = "ip.flags.mf == 1 || ip.frag_offset > 0";
        let file = if cuts_packets {
            let whole = self.record.0.path().join(format!("whole{pair}.pcap"));
            write_matching(&recorded, &format!("!({fragments})"), &whole);
            whole
        } else {
            let found = tshark_fields(&recorded, fragments, &["frame.number"]);
            assert!(found.is_empty(), "IP fragments: {found:?}");
            recorded
        };
        let verdict = judge(&file);
        assert!(verdict.good_crcs > 0, "nothing was recorded of pair {pair}");
        let longest = mtu + 18;
        let longer = tshark_fields(
            &file,
            &format!("frame.len > {longest}"),
            &["frame.number", "frame.len"],
        );
        assert!(longer.is_empty(), "frames beyond the MTU: {longer:?}");
    }

    /// The capture file of a pair.
    pub fn recorded(&self, pair: usize) -> PathBuf {
        self.record.0.path().join(format!("pair{pair}.pcap"))
    }
}
