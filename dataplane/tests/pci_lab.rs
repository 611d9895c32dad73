//! siwd on PCI NICs, in a guest that emulates them: vfio with and without an IOMMU, uio. What passes is
//! recorded outside of siwd and of the guest, and dissected.
//!
//! `deploy/lab/pci/run --all` runs the long selection.

mod common;

use std::sync::{Mutex, PoisonError};

use common::guest::{Done, Evidence, GUEST_PATIENCE, Guest, lacks_emulator};
use common::net::{judge, missing_program};
use common::{client_program, daemon_example};

/// What is moved between two NICs.
struct Amount {
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

fn amount() -> Amount {
    match std::env::var_os("SIWD_PCI_LAB") {
        Some(_) => LONG,
        None => SHORT,
    }
}

fn lacks_lab() -> Option<String> {
    lacks_emulator().or_else(|| missing_program("tshark"))
}

/// A guest with siwd's programs.
struct Lab {
    guest: Guest,
    record: Evidence,
}

impl Lab {
    fn boot(args: &[&str]) -> Lab {
        let record = Evidence(tempfile::tempdir().unwrap());
        let programs = [
            env!("CARGO_BIN_EXE_siwd").into(),
            client_program("siw-ping"),
            daemon_example("transfers"),
        ];
        let folder = record.0.path().to_str().unwrap();
        let mut all = vec!["--record", folder];
        all.extend(args);
        for program in &programs {
            all.extend(["--program", program.to_str().unwrap()]);
        }
        let guest = Guest::boot_pci(&all);
        Lab { guest, record }
    }

    /// Starts siwd on the NICs of a pair as siw0 and siw1, and waits until it serves.
    fn start_siwd(&self, pair: usize, more: &str, device: &str) {
        let done = self.try_siwd(pair, more, device);
        assert_eq!(done.status, Some(0), "siwd on pair {pair}: {}", done.out);
    }

    fn try_siwd(&self, pair: usize, more: &str, device: &str) -> Done {
        let mut config = format!("[workers]\ncores = [1]\n[dpdk]\nbuffers = 8192\n{more}\n");
        for end in 0..2 {
            let slot = 0x10 + pair * 2 + end;
            config += &format!(
                "[[device]]\nname = \"siw{end}\"\npci = \"0000:00:{slot:x}.0\"\naddresses = [\"10.77.0.{}/24\"]\n{device}\n",
                end + 1
            );
        }
        // The daemon's own process outlives the command; the command ends with the ready line, or
        // with what siwd said instead.
        let script = format!(
            "printf '{}' >/tmp/siwd.toml; mkdir -p /run/siwd; rm -f /tmp/ready; mkfifo /tmp/ready; \
             setsid sh -c 'siwd --config /tmp/siwd.toml >/tmp/ready 2>/tmp/siwd.log; echo ended >/tmp/ready' </dev/null >/dev/null 2>&1 & \
             read line </tmp/ready; case $line in *ready*) ;; *) cat /tmp/siwd.log; exit 1 ;; esac",
            config.replace('\n', "\\n")
        );
        self.guest.start(&script).wait(GUEST_PATIENCE)
    }

    /// SIGTERM, and waits for its end; what it logged.
    fn stop_siwd(&self) -> String {
        self.guest.run(
            "kill $(pidof siwd); while pidof siwd >/dev/null; do sleep 0.05; done; cat /tmp/siwd.log",
        )
    }

    fn transfer(&self, who: &str, amount: &Amount) {
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

    fn log(&self) -> String {
        self.guest.run("cat /tmp/siwd.log; dmesg | tail -n 5")
    }

    /// siw-ping between the two devices.
    fn ping(&self, who: &str, rounds: usize) {
        let done = self
            .guest
            .start(&format!(
                "siw-ping -s -a 10.77.0.2 -P & while ! siw-ping -c -a 10.77.0.2 -I 10.77.0.1 -C 1 2>/dev/null; do sleep 0.1; done; \
                 siw-ping -c -a 10.77.0.2 -I 10.77.0.1 -C {rounds} -S 1000 -V; status=$?; kill $!; exit $status"
            ))
            .wait(GUEST_PATIENCE);
        assert_eq!(done.status, Some(0), "{who}: {done:?}");
    }

    /// A client that is killed while it sends; the daemon serves on.
    fn kill_client(&self) {
        self.guest.run(
            "siw-ping -s -a 10.77.0.2 -P >/dev/null 2>&1 & server=$!; \
             while ! siw-ping -c -a 10.77.0.2 -I 10.77.0.1 -C 1 2>/dev/null; do sleep 0.1; done; \
             siw-ping -c -a 10.77.0.2 -I 10.77.0.1 -S 60000 & sleep 0.3; \
             kill -KILL $!; kill -KILL $server; pidof siwd >/dev/null",
        );
    }

    /// Faults that the IOMMU reported, but those at address 0: vmxnet3's model reads that when it is
    /// reset.
    fn assert_no_iommu_faults(&self) {
        let faults = self
            .guest
            .run("dmesg | grep 'DMAR.*fault addr' | grep -v 'fault addr 0x0 ' || true");
        assert_eq!(faults, "");
    }

    fn judge_pair(&self, pair: usize) {
        let file = self.record.0.path().join(format!("pair{pair}.pcap"));
        let verdict = judge(&file);
        assert!(verdict.good_crcs > 0, "nothing was recorded of pair {pair}");
    }
}

/// All that siwd must do on one pair of NICs.
fn exercise_pair(lab: &Lab, pair: usize, who: &str, device: &str) {
    lab.start_siwd(pair, "", device);
    lab.ping(who, 100);
    lab.transfer(who, &amount());
    lab.kill_client();
    lab.stop_siwd();
    // Stopped and started again: the NIC is as it was.
    lab.start_siwd(pair, "", device);
    lab.ping(who, 3);
    let log = lab.stop_siwd();
    assert!(!log.contains("ERROR siwd"), "{who}: {log}");
}

/// vmxnet3's model cuts TSO packets into IP fragments when the other side takes no uncut ones.
fn device_settings(kind: &str) -> &'static str {
    match kind {
        "vmxnet3" => "tso = \"off\"",
        _ => "",
    }
}

fn exercise_all(iommu: &str, driver: &str, kinds: &[&str]) {
    let mut args = vec!["--iommu", iommu];
    for kind in kinds {
        args.extend(["--pair", kind]);
    }
    let lab = Lab::boot(&args);
    lab.guest.run(&format!("nics bind {driver}"));
    for (pair, kind) in kinds.iter().enumerate() {
        exercise_pair(
            &lab,
            pair,
            &format!("{kind}, {driver}, IOMMU {iommu}"),
            device_settings(kind),
        );
    }
    lab.assert_no_iommu_faults();
    for pair in 0..kinds.len() {
        lab.judge_pair(pair);
    }
}

/// One guest at a time: each keeps both cores of a small machine busy.
static GUESTS: Mutex<()> = Mutex::new(());

#[test]
fn siwd_works_on_pci_nics_behind_an_iommu() {
    skip_if!(lacks_lab());
    let _alone = GUESTS.lock().unwrap_or_else(PoisonError::into_inner);
    exercise_all("48", "vfio-pci", &["e1000", "e1000e", "vmxnet3", "virtio"]);
}

#[test]
fn siwd_works_on_pci_nics_without_an_iommu() {
    skip_if!(lacks_lab());
    let _alone = GUESTS.lock().unwrap_or_else(PoisonError::into_inner);
    exercise_all("off", "vfio-pci", &["virtio-legacy"]);
    if std::env::var_os("SIWD_PCI_LAB").is_some() {
        exercise_all(
            "off",
            "vfio-pci",
            &["e1000", "e1000e", "vmxnet3", "virtio", "virtio-packed"],
        );
        exercise_all("off", "uio_pci_generic", &["e1000", "e1000e", "vmxnet3"]);
    }
}

/// Client memory lies above what the IOMMU translates; it is sent by reference all the same.
#[test]
fn registered_memory_is_sent_through_a_narrow_iommu() {
    skip_if!(lacks_lab());
    let _alone = GUESTS.lock().unwrap_or_else(PoisonError::into_inner);
    let lab = Lab::boot(&["--iommu", "39", "--pair", "virtio-packed"]);
    lab.guest.run("nics bind vfio-pci");
    for payload in ["reference", "copy"] {
        let device = format!("tx_payload = \"{payload}\"");
        lab.start_siwd(0, "", &device);
        lab.transfer(&format!("virtio-packed, IOMMU 39, {payload}"), &amount());
        lab.stop_siwd();
    }
    lab.assert_no_iommu_faults();
    lab.judge_pair(0);
}

#[test]
fn a_nic_that_cannot_be_used_is_named_with_the_command_that_helps() {
    skip_if!(lacks_lab());
    let _alone = GUESTS.lock().unwrap_or_else(PoisonError::into_inner);
    let lab = Lab::boot(&["--iommu", "off", "--pair", "e1000"]);
    lab.guest.run("nics bind none");
    let unbound = lab.try_siwd(0, "", "");
    assert_eq!(unbound.status, Some(1));
    assert!(
        unbound
            .out
            .contains("device siw0: 0000:00:10.0 is bound to no driver")
            && unbound.out.contains("enable_unsafe_noiommu_mode"),
        "{}",
        unbound.out
    );
    let listed = lab.guest.run("siwd devices");
    assert!(
        listed.contains("pci = \"0000:00:10.0\"") && listed.contains("without a driver"),
        "{listed}"
    );

    lab.guest.run("nics bind uio_pci_generic");
    let listed = lab.guest.run("siwd devices --json");
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let first = &listed["devices"][0];
    assert_eq!(first["driver"], "uio_pci_generic", "{listed}");
    assert_eq!(
        (&first["ready"], &first["iommu_width"]),
        (&true.into(), &serde_json::Value::Null)
    );
    let no_iommu = lab.try_siwd(0, "iova = \"va\"", "");
    assert!(
        no_iommu.out.contains("has no IOMMU, which iova = \"va\""),
        "{}",
        no_iommu.out
    );
    lab.start_siwd(0, "", "");
    lab.ping("e1000, uio_pci_generic", 3);
    let log = lab.stop_siwd();
    assert!(
        log.contains("physical addresses") && log.contains("offloads device=siw0"),
        "{log}"
    );
}
