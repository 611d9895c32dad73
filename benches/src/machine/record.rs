//! Description of the machine and the software.

use serde::{Deserialize, Serialize};
use std::fs;

/// Processor, kernel, DPDK and the version of this program.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineRecord {
    /// Model name of the processor.
    pub cpu: String,
    /// Logical processors that are online.
    pub processors: usize,
    /// True if the machine is a hypervisor's guest.
    pub virtual_machine: bool,
    /// Kernel release.
    pub kernel: String,
    /// DPDK's name and version.
    pub dpdk: String,
    /// The commit that this program was built from; empty outside a checkout.
    pub commit: String,
}

impl MachineRecord {
    /// Describes the machine that this process runs on.
    pub fn read() -> MachineRecord {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        MachineRecord {
            cpu: cpuinfo_field(&cpuinfo, "model name").unwrap_or_else(|| "unknown".into()),
            processors: cpuinfo
                .lines()
                .filter(|line| line.starts_with("processor"))
                .count(),
            virtual_machine: cpuinfo_field(&cpuinfo, "flags")
                .is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            kernel: kernel.trim().into(),
            dpdk: dpdk::Eal::version(),
            commit: env!("SIWD_COMMIT").into(),
        }
    }

    /// Processor with family and model, kernel and DPDK in one line.
    pub fn summary(&self) -> String {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name| cpuinfo_field(&cpuinfo, name).unwrap_or_else(|| "unknown".into());
        format!(
            "{}, family {} model {}, {} cores{}, Linux {}, {}",
            self.cpu,
            field("cpu family"),
            field("model"),
            self.processors,
            if self.virtual_machine {
                " of a virtual machine"
            } else {
                ""
            },
            self.kernel,
            self.dpdk
        )
    }
}

/// The first value of a key in proc_cpuinfo(5).
fn cpuinfo_field(text: &str, key: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| value.trim().to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_cpuinfo_are_found_by_their_whole_name() {
        let text = "processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nmodel\t\t: 106\nflags\t\t: fpu hypervisor\n";
        assert_eq!(
            cpuinfo_field(text, "model name").as_deref(),
            Some("A CPU @ 2 GHz")
        );
        assert_eq!(cpuinfo_field(text, "model").as_deref(), Some("106"));
        assert_eq!(cpuinfo_field(text, "stepping"), None);
    }

    #[test]
    fn this_machine_has_processors_a_kernel_and_dpdk() {
        let machine = MachineRecord::read();
        assert!(machine.processors > 0, "{machine:?}");
        assert!(machine.kernel.contains('.'), "{machine:?}");
        assert!(machine.dpdk.starts_with("DPDK"), "{machine:?}");
        let summary = machine.summary();
        assert!(summary.contains("family "), "{summary}");
        assert!(summary.contains(&machine.kernel), "{summary}");
    }
}
