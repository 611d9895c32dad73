//! Two network namespaces joined by a veth pair, for contenders that use the kernel's TCP.

use super::run_program::run_to_end;
use anyhow::anyhow;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Address in the second namespace.
pub(super) const SERVER_ADDRESS: &str = "10.79.0.2";

/// Settings of the veth devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct VethSettings {
    pub(super) mtu: u32,
    /// TSO, GSO, GRO and checksum offload; without them each segment is a frame.
    pub(super) offloads: bool,
}

/// Two namespaces, removed with their devices when dropped.
pub(super) struct NamespacePair {
    names: [String; 2],
}

static NEXT: AtomicU32 = AtomicU32::new(0);

fn ip(args: &[&str]) -> anyhow::Result<()> {
    run_to_end(Command::new("ip").args(args)).map(|_| ())
}

/// Waits for the link: the kernel announces it shortly after both ends are up, and some programs do
/// not use it earlier.
fn wait_until_link_is_up(namespace: &str) -> anyhow::Result<()> {
    for _ in 0..200 {
        let mut command = Command::new("ip");
        let state = run_to_end(command.args(["-n", namespace, "link", "show", "eth0"]))?;
        if state.contains("state UP") {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Err(anyhow!("the veth pair did not come up"))
}

impl NamespacePair {
    /// Creates the namespaces; needs root.
    pub(super) fn create(settings: VethSettings) -> anyhow::Result<NamespacePair> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |end| format!("siwperf{}{}{end}", std::process::id(), number);
        let pair = NamespacePair {
            names: [name("a"), name("b")],
        };
        let [first, second] = [&pair.names[0][..], &pair.names[1][..]];
        for name in [first, second] {
            ip(&["netns", "add", name])
                .map_err(|error| anyhow!("network namespaces need root: {error}"))?;
        }
        ip(&[
            "-n", first, "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", second,
        ])?;
        ip(&["-n", first, "addr", "add", "10.79.0.1/24", "dev", "eth0"])?;
        ip(&[
            "-n",
            second,
            "addr",
            "add",
            &format!("{SERVER_ADDRESS}/24"),
            "dev",
            "eth0",
        ])?;
        for name in [first, second] {
            ip(&["-n", name, "link", "set", "lo", "up"])?;
            ip(&[
                "-n",
                name,
                "link",
                "set",
                "eth0",
                "mtu",
                &settings.mtu.to_string(),
                "up",
            ])?;
            if !settings.offloads {
                let features = ["tso", "gso", "gro", "tx", "rx", "sg"];
                let mut command = pair.command_in(name, "ethtool");
                command.args(["-K", "eth0"]);
                for feature in features {
                    command.args([feature, "off"]);
                }
                run_to_end(&mut command)?;
            }
        }
        for name in [first, second] {
            wait_until_link_is_up(name)?;
        }
        Ok(pair)
    }

    /// Command for a program in the first namespace, pinned to one core.
    pub(super) fn client(&self, core: usize, program: &str) -> Command {
        self.pinned(&self.names[0], core, program)
    }

    /// Command for a program in the second namespace, pinned to one core.
    pub(super) fn server(&self, core: usize, program: &str) -> Command {
        self.pinned(&self.names[1], core, program)
    }

    fn command_in(&self, name: &str, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", name, program]);
        command
    }

    fn pinned(&self, name: &str, core: usize, program: &str) -> Command {
        let mut command = self.command_in(name, "taskset");
        command.args(["-c", &core.to_string(), program]);
        command
    }

    /// Waits until a process listens on a TCP port of the second namespace.
    pub(super) fn wait_for_listener(&self, port: u16) -> anyhow::Result<()> {
        let filter = format!("sport = :{port}");
        for _ in 0..200 {
            let mut command = self.command_in(&self.names[1], "ss");
            if !run_to_end(command.args(["-Hltn", &filter]))?
                .trim()
                .is_empty()
            {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(25));
        }
        Err(anyhow!("nothing listens at port {port} after 5 s"))
    }
}

impl Drop for NamespacePair {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&["netns", "del", name]);
        }
    }
}
