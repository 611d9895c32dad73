//! A siwd of our own with two devices on one link, for a contender.

use super::run_program::RunningProgram;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A running daemon; stopped when dropped.
pub(super) struct OwnDaemon {
    program: RunningProgram,
    folder: PathBuf,
}

/// A program that was built beside this one.
pub(super) fn sibling_program(name: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    own.parent().unwrap_or(Path::new(".")).join(name)
}

impl OwnDaemon {
    /// Starts it with one worker. `mtu`: none for the default of the embedded link.
    pub(super) fn start(worker_core: usize, mtu: Option<u32>) -> Result<OwnDaemon, String> {
        let folder = std::env::temp_dir().join(format!("siw-perf-{}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
        let config = folder.join("siwd.toml");
        let socket = folder.join("siwd.sock");
        let mtu = mtu.map_or(String::new(), |mtu| format!("mtu = {mtu}\n"));
        let device = |name, addresses: &str| {
            format!(
                "[[device]]\nname = \"{name}\"\npair = \"loopback\"\naddresses = [{addresses}]\n{mtu}"
            )
        };
        let text = format!(
            "[workers]\ncores = [{worker_core}]\nidle = \"adaptive\"\n[control]\nsocket = \"{}\"\n\
             [dpdk]\nhugepages = \"auto\"\n{}{}",
            socket.display(),
            device("siw0", "\"10.77.0.1/24\""),
            device("siw1", "\"10.77.0.2/24\""),
        );
        std::fs::write(&config, text).map_err(|error| error.to_string())?;
        let mut command = Command::new(sibling_program("siwd"));
        command.arg("--config").arg(&config).arg("--json");
        let mut program = RunningProgram::start_piped(&mut command)?;
        let stdout = program.child().stdout.take().ok_or("siwd has no output")?;
        let mut line = String::new();
        // The line comes when it is ready; none when it ended.
        BufReader::new(stdout)
            .read_line(&mut line)
            .map_err(|error| error.to_string())?;
        if line.is_empty() {
            return Err("siwd did not start; run siwd --check for the reason".into());
        }
        Ok(OwnDaemon { program, folder })
    }

    /// Its control socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.folder.join("siwd.sock")
    }
}

impl Drop for OwnDaemon {
    fn drop(&mut self) {
        self.program.stop();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
