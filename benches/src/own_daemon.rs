//! siwd instances that a measurement starts for itself.

use crate::running_program::RunningProgram;
use anyhow::{Context, anyhow, bail};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A running daemon with a folder of its own; stopped when dropped.
pub(crate) struct OwnDaemon {
    program: RunningProgram,
    folder: PathBuf,
}

/// Path of a program in the same folder as this one.
pub(crate) fn sibling_program(name: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    own.parent().unwrap_or(Path::new(".")).join(name)
}

static NEXT: AtomicU32 = AtomicU32::new(0);

impl OwnDaemon {
    /// Starts the siwd beside this program with a configuration, and waits until it is ready. Its
    /// folder has its control socket, and may have other files that the configuration names.
    pub(crate) fn start(
        configuration: impl FnOnce(&Path) -> anyhow::Result<String>,
    ) -> anyhow::Result<OwnDaemon> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("siw-perf-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder)?;
        let (config, log) = (folder.join("siwd.toml"), folder.join("siwd.log"));
        std::fs::write(&config, configuration(&folder)?)?;
        let mut command = Command::new(sibling_program("siwd"));
        command.arg("--config").arg(&config).arg("--json");
        command.arg("--socket").arg(folder.join("siwd.sock"));
        let program = RunningProgram::start_piped(&mut command, File::create(&log)?.into())?;
        let mut daemon = OwnDaemon { program, folder };
        let stdout = daemon.program.child().stdout.take();
        let stdout = stdout.ok_or_else(|| anyhow!("siwd has no output"))?;
        let mut line = String::new();
        // The daemon prints a line when it is ready, and none if it exits.
        BufReader::new(stdout).read_line(&mut line)?;
        if line.is_empty() {
            let log = std::fs::read_to_string(&log).context("siwd did not start")?;
            let reason = log.lines().rfind(|line| !line.trim().is_empty());
            bail!(
                "siwd did not start: {}",
                reason.unwrap_or("it printed nothing")
            );
        }
        Ok(daemon)
    }

    /// Process id of the daemon.
    pub(crate) fn pid(&self) -> u32 {
        self.program.pid()
    }

    /// Its folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Path of its control socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.join("siwd.sock")
    }
}

impl Drop for OwnDaemon {
    fn drop(&mut self) {
        self.program.stop();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
