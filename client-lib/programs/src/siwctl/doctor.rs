//! Checks of this machine: resources that siwd needs, or without which it is slow. They read files of the
//! kernel and need no daemon.

use crate::objects::printable;
use serde_json::{Value, json};
use siw_shm::control::{ControlSocket, socket_path};
use std::fmt::Write;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// Weight of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weight {
    Fine,
    /// siwd works, but slower or for fewer programs.
    Advice,
    /// Something does not work.
    Fault,
}

impl Weight {
    fn name(self) -> &'static str {
        match self {
            Weight::Fine => "ok",
            Weight::Advice => "advice",
            Weight::Fault => "fault",
        }
    }
}

/// A fact about the machine, and the command that changes it.
#[derive(Debug)]
struct Finding {
    weight: Weight,
    subject: &'static str,
    text: String,
    command: Option<String>,
}

impl Finding {
    fn fine(subject: &'static str, text: impl Into<String>) -> Finding {
        Finding {
            weight: Weight::Fine,
            subject,
            text: text.into(),
            command: None,
        }
    }

    fn new(weight: Weight, subject: &'static str, text: String, command: String) -> Finding {
        Finding {
            weight,
            subject,
            text,
            command: Some(command),
        }
    }

    fn to_json(&self) -> Value {
        json!({
            "level": self.weight.name(),
            "subject": self.subject,
            "text": self.text,
            "command": self.command,
        })
    }
}

/// Examines the machine and the daemon. Returns the output, and true if nothing is at fault.
pub fn run(socket: Option<&Path>, as_json: bool) -> (String, bool) {
    let mut findings = machine(Path::new("/"));
    findings.extend(daemon(socket));
    let is_sound = findings
        .iter()
        .all(|finding| finding.weight != Weight::Fault);
    if as_json {
        let rows: Vec<Value> = findings.iter().map(Finding::to_json).collect();
        return (format!("{}\n", Value::from(rows)), is_sound);
    }
    let mut out = String::new();
    for finding in &findings {
        let _ = writeln!(
            out,
            "{:<6} {:<12} {}",
            finding.weight.name(),
            finding.subject,
            printable(&finding.text)
        );
        if let Some(command) = &finding.command {
            let _ = writeln!(out, "{:19} {command}", "");
        }
    }
    (out, is_sound)
}

/// Findings about the machine with this root folder.
fn machine(root: &Path) -> Vec<Finding> {
    let mut findings = kernel(root);
    findings.extend(hugepages(root));
    findings.push(iommu(root));
    findings.extend(nics(root));
    findings.push(cores(root));
    findings.push(userfaultfd(root));
    findings
}

/// Text of a file without the line feed at its end; empty if it cannot be read.
fn read(path: impl AsRef<Path>) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim_end().to_owned()
}

fn number(path: impl AsRef<Path>) -> Option<u64> {
    read(path).parse().ok()
}

/// Names in a folder, sorted.
fn names(folder: impl AsRef<Path>) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

fn kernel(root: &Path) -> Vec<Finding> {
    let release = read(root.join("proc/sys/kernel/osrelease"));
    let mut numbers = release.split(['.', '-']).map(str::parse::<u32>);
    let mut next = || numbers.next().and_then(Result::ok).unwrap_or(0);
    let version = (next(), next());
    let mut findings = vec![match version {
        // Write protection of shared memory by userfaultfd(2).
        version if version >= (5, 19) => Finding::fine("kernel", release),
        _ => Finding::new(
            Weight::Advice,
            "kernel",
            format!(
                "{release}: programs with threads stop while they register memory; from 5.19 on they do not"
            ),
            "install a newer kernel".to_owned(),
        ),
    }];
    let swaps = read(root.join("proc/swaps"));
    if swaps.lines().count() > 1 {
        findings.push(Finding::new(
            Weight::Advice,
            "swap",
            "the kernel may swap out memory of clients unless siwd locks it".to_owned(),
            "LimitMEMLOCK=infinity in the unit of siwd, or swapoff -a".to_owned(),
        ));
    }
    findings
}

fn hugepages(root: &Path) -> Vec<Finding> {
    let folder = root.join("sys/devices/system/node");
    let nodes = names(&folder).into_iter();
    let nodes = nodes.filter(|name| {
        name.strip_prefix("node")
            .is_some_and(|digits| digits.parse::<u32>().is_ok())
    });
    nodes
        .map(|node| {
            let pages = folder.join(&node).join("hugepages/hugepages-2048kB");
            let total = number(pages.join("nr_hugepages")).unwrap_or(0);
            let free = number(pages.join("free_hugepages")).unwrap_or(0);
            let text = format!("{node}: {free} of {total} pages of 2 MiB are free");
            match total {
                0 => Finding::new(
                    Weight::Advice,
                    "hugepages",
                    format!("{text}: siwd starts only with hugepages = \"auto\" or \"never\", and is slower"),
                    format!(
                        "echo 1024 > /sys/devices/system/node/{node}/hugepages/hugepages-2048kB/nr_hugepages"
                    ),
                ),
                _ => Finding::fine("hugepages", text),
            }
        })
        .collect()
}

fn iommu(root: &Path) -> Finding {
    match names(root.join("sys/class/iommu")).len() {
        0 => Finding::new(
            Weight::Advice,
            "IOMMU",
            "none: a NIC that siwd drives can reach all memory, and binding it to vfio-pci needs root".to_owned(),
            "intel_iommu=on or amd_iommu=on on the kernel's command line".to_owned(),
        ),
        count => Finding::fine("IOMMU", format!("{count} active")),
    }
}

/// Network devices on PCI with their drivers.
fn nics(root: &Path) -> Vec<Finding> {
    const NETWORK: &str = "0x02";
    let folder = root.join("sys/bus/pci/devices");
    let is_nic = |name: &String| read(folder.join(name).join("class")).starts_with(NETWORK);
    let nics: Vec<String> = names(&folder).into_iter().filter(is_nic).collect();
    if nics.is_empty() {
        return vec![Finding::fine(
            "NIC",
            "none on the PCI bus; virtual links need none",
        )];
    }
    let describe = |name: &String| {
        let driver = fs::read_link(folder.join(name).join("driver")).ok();
        let driver = driver.and_then(|link| Some(link.file_name()?.to_string_lossy().into_owned()));
        let node = number(folder.join(name).join("numa_node"));
        let node = node.map_or("unknown NUMA node".to_owned(), |node| {
            format!("NUMA node {node}")
        });
        let text = format!(
            "{name} on {node}, driver {}",
            driver.as_deref().unwrap_or("none")
        );
        match driver.as_deref() {
            Some("vfio-pci" | "uio_pci_generic" | "igb_uio" | "mlx5_core" | "mlx4_core") => {
                Finding::fine("NIC", format!("{text}: siwd can use it"))
            }
            _ => Finding::new(
                Weight::Advice,
                "NIC",
                format!("{text}: siwd can use it after it is bound to vfio-pci, or through af_xdp"),
                "siwd devices".to_owned(),
            ),
        }
    };
    nics.iter().map(describe).collect()
}

fn cores(root: &Path) -> Finding {
    let isolated = read(root.join("sys/devices/system/cpu/isolated"));
    if isolated.is_empty() {
        return Finding::new(
            Weight::Advice,
            "cores",
            "none is isolated: the kernel runs other threads on the cores of workers".to_owned(),
            "isolcpus=2,3 nohz_full=2,3 on the kernel's command line, and cores = [2, 3] in [workers]".to_owned(),
        );
    }
    Finding::fine("cores", format!("isolated: {isolated}"))
}

/// Programs with threads need userfaultfd(2) to register memory without being stopped.
fn userfaultfd(root: &Path) -> Finding {
    let by_sysctl = number(root.join("proc/sys/vm/unprivileged_userfaultfd")) == Some(1);
    let device = fs::metadata(root.join("dev/userfaultfd"));
    let group = device
        .as_ref()
        .map(|device| (device.mode() & 0o060 == 0o060, device.gid()));
    match group {
        _ if by_sysctl => Finding::fine("userfaultfd", "open to all users"),
        Ok((true, gid)) => Finding::fine("userfaultfd", format!("open to group {gid}")),
        _ => Finding::new(
            Weight::Advice,
            "userfaultfd",
            "for root only: programs of other users that have threads which block signals cannot register memory"
                .to_owned(),
            "chgrp rdma /dev/userfaultfd && chmod 660 /dev/userfaultfd (a udev rule of the package siwd)".to_owned(),
        ),
    }
}

/// The control socket, and the daemon behind it.
fn daemon(socket: Option<&Path>) -> Vec<Finding> {
    let path = match socket_path(socket) {
        Ok(path) => path,
        Err(foreign) => {
            return vec![Finding::new(
                Weight::Fault,
                "siwd",
                format!("control socket {}: {foreign}", foreign.path.display()),
                format!(
                    "ls -l {}; set SIWD_SOCKET to another",
                    foreign.path.display()
                ),
            )];
        }
    };
    let shown = path.display().to_string();
    let metadata = match fs::metadata(&path) {
        Ok(metadata) => metadata,
        Err(error) => {
            return vec![Finding::new(
                Weight::Fault,
                "siwd",
                format!("control socket {shown}: {error}"),
                "systemctl status siwd; siwd --config FILE --check".to_owned(),
            )];
        }
    };
    let access = format!(
        "control socket {shown}: mode {:04o}, group {}",
        metadata.permissions().mode() & 0o777,
        metadata.gid()
    );
    let mut findings = vec![Finding::fine("access", access)];
    match siw::Context::open(Some(&path)) {
        Ok(daemon) => {
            findings.push(Finding::fine("siwd", daemon.daemon_version()));
            let stats = crate::statistics::read(&daemon).unwrap_or_default();
            findings.extend(settings(&stats));
            findings.extend(offloads(&stats));
        }
        Err(error) => findings.push(Finding::new(
            Weight::Fault,
            "siwd",
            error.to_string(),
            format!("ls -l {shown}; systemctl status siwd"),
        )),
    }
    findings.extend(locked_memory(&path));
    findings
}

/// Settings of the daemon that make it slower than it could be; operators see them.
fn settings(stats: &Value) -> Vec<Finding> {
    let settings = &stats["settings"];
    let mut findings = Vec::new();
    if let Some(version) = settings["dpdk"].as_str() {
        findings.push(Finding::fine("DPDK", version));
    }
    if settings["hugepages"] == false {
        findings.push(Finding::new(
            Weight::Advice,
            "hugepages",
            "siwd runs without".to_owned(),
            "reserve hugepages, then systemctl restart siwd".to_owned(),
        ));
    }
    findings
}

/// Devices that drop frames because a sender on this machine leaves their checksums or segmentation to an
/// offload that does not take place.
fn offloads(stats: &Value) -> Vec<Finding> {
    const REASONS: [&str; 2] = ["SiwOffloadedChecksums", "SiwOffloadedSegments"];
    let rows = crate::statistics::rows(stats, "drops").iter();
    let rows = rows.filter(|row| {
        REASONS.iter().any(|reason| row["reason"] == *reason) && row["count"].as_u64() > Some(0)
    });
    rows.map(|row| {
        let word = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
        Finding::new(
            Weight::Fault,
            "offloads",
            format!(
                "{} has dropped {} frames ({}) of a sender on this machine, such as the other end of a veth pair",
                word("device"),
                row["count"],
                word("reason")
            ),
            "ethtool -K PEER tx off tso off gso off gro off, with the sender's interface for PEER".to_owned(),
        )
    })
    .collect()
}

/// Finds out if the daemon may lock memory, by the limit of its process, which this one need not have.
fn locked_memory(socket: &Path) -> Option<Finding> {
    let conn = ControlSocket::connect_to(socket).ok()?;
    let peer = rustix::net::sockopt::socket_peercred(conn.as_fd()).ok()?;
    let pid = peer.pid.as_raw_nonzero();
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))?;
    let limit = line.split_whitespace().next()?;
    Some(match limit {
        "unlimited" => Finding::fine("memlock", "unlimited for siwd"),
        limit => Finding::new(
            Weight::Advice,
            "memlock",
            format!("siwd (pid {pid}) may lock {limit} bytes unless it has CAP_IPC_LOCK"),
            "LimitMEMLOCK=infinity in the unit of siwd".to_owned(),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn each_lack_of_a_machine_has_its_command() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        write(root, "proc/sys/kernel/osrelease", "5.4.0-77-generic\n");
        write(root, "proc/swaps", "Filename Type\n/dev/sda2 partition\n");
        let pages = "sys/devices/system/node/node1/hugepages/hugepages-2048kB";
        write(root, &format!("{pages}/nr_hugepages"), "0\n");
        write(root, "sys/bus/pci/devices/0000:03:00.0/class", "0x020000\n");
        write(root, "sys/bus/pci/devices/0000:03:00.0/numa_node", "1\n");
        write(root, "sys/bus/pci/devices/0000:00:1f.2/class", "0x010601\n");
        let findings = machine(root);
        assert_eq!(findings.len(), 7, "{findings:?}");
        for finding in &findings {
            assert!(
                finding.weight == Weight::Advice && finding.command.is_some(),
                "{finding:?}"
            );
        }
        let command = findings[2].command.as_deref().unwrap();
        assert!(command.contains(pages), "{command}");

        write(root, "proc/sys/kernel/osrelease", "6.1.0\n");
        write(root, "proc/swaps", "Filename Type\n");
        write(root, &format!("{pages}/nr_hugepages"), "512\n");
        write(root, &format!("{pages}/free_hugepages"), "100\n");
        write(root, "sys/class/iommu/dmar0/x", "");
        write(root, "sys/devices/system/cpu/isolated", "2-3\n");
        write(root, "proc/sys/vm/unprivileged_userfaultfd", "1\n");
        let nic = root.join("sys/bus/pci/devices/0000:03:00.0");
        std::os::unix::fs::symlink("../../drivers/vfio-pci", nic.join("driver")).unwrap();
        let findings = machine(root);
        for finding in &findings {
            assert_eq!(finding.weight, Weight::Fine, "{finding:?}");
        }
        assert!(findings[1].text.contains("100 of 512"), "{findings:?}");
    }

    #[test]
    fn dropped_frames_of_offloads_are_a_fault_with_a_command() {
        let row = |reason: &str, count: u64| json!({ "device": "siw0", "reason": reason, "count": count });
        let stats = json!({ "drops": [
            row("TcpInCsumErrors", 5),
            row("SiwOffloadedChecksums", 7),
            row("SiwOffloadedSegments", 0),
        ] });
        let found = offloads(&stats);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].weight == Weight::Fault && found[0].text.contains("siw0 has dropped 7"));
        assert!(found[0].command.as_deref().unwrap().contains("tx off"));
    }

    #[test]
    fn without_a_daemon_the_socket_is_at_fault() {
        let (text, is_sound) = run(Some("/nonexistent/siwd.sock".as_ref()), false);
        assert!(!is_sound && text.contains("fault  siwd"), "{text}");
        let (text, _) = run(Some("/nonexistent/siwd.sock".as_ref()), true);
        let rows: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(rows.as_array().unwrap().last().unwrap()["level"], "fault");
    }
}
