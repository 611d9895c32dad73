//! One archive for a report of a problem: lists, counters, settings and ends of siwd, and the findings of
//! `doctor`. It has no payload, keys or private data; it names programs, users and addresses.

use crate::objects::read_list;
use anyhow::Context as _;
use clap::Args;
use siw::ObjectList;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use zip::write::SimpleFileOptions;

#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Archive to write, which must not exist
    #[arg(default_value = "siwd-report.zip")]
    file: PathBuf,
}

/// Lists in the archive. Memory regions are counted only: their keys give access to memory.
const LISTS: [(&str, ObjectList); 7] = [
    ("clients", ObjectList::Clients),
    ("queue-pairs", ObjectList::QueuePairs),
    ("completion-queues", ObjectList::CompletionQueues),
    ("cm-ids", ObjectList::CmIds),
    ("connections", ObjectList::Connections),
    ("ends", ObjectList::Ends),
    ("faults", ObjectList::Faults),
];

/// Files of the kernel in the archive.
const FILES: [&str; 6] = [
    "/proc/version",
    "/proc/cmdline",
    "/proc/meminfo",
    "/proc/interrupts",
    "/proc/softirqs",
    "/sys/devices/system/cpu/online",
];

/// Writes the archive. Parts that cannot be read, without a daemon all of its own, have the reason
/// instead.
pub fn run(socket: Option<&Path>, args: &ReportArgs) -> anyhow::Result<String> {
    let name = args.file.display();
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&args.file)
        .with_context(|| format!("cannot create {name}"))?;
    let mut archive = zip::ZipWriter::new(file);
    let mut add = |part: &str, content: &str| -> anyhow::Result<()> {
        archive.start_file(format!("siwd-report/{part}"), SimpleFileOptions::default())?;
        archive.write_all(content.as_bytes())?;
        Ok(())
    };
    let written = (|| {
        let (findings, _) = crate::doctor::run(socket, false);
        add("doctor.txt", &findings)?;
        for path in FILES {
            let text = std::fs::read_to_string(path).unwrap_or_else(|error| format!("{error}\n"));
            add(&format!("machine{path}"), &text)?;
        }
        let daemon = match siw::Context::open(socket) {
            Ok(daemon) => daemon,
            Err(error) => return add("siwd.txt", &format!("{error}\n")),
        };
        add("siwd.txt", &format!("{}\n", daemon.daemon_version()))?;
        let statistics = daemon
            .read_stats()
            .unwrap_or_else(|error| error.to_string());
        add("statistics.json", &statistics)?;
        for (part, list) in LISTS {
            let rows = match read_list(&daemon, list) {
                Ok(rows) => rows.iter().map(|row| format!("{row}\n")).collect(),
                Err(error) => format!("{error:#}\n"),
            };
            add(&format!("{part}.json"), &rows)?;
        }
        Ok(())
    })();
    let written = written.and_then(|()| Ok(archive.finish().map(drop)?));
    if let Err(error) = written {
        let _ = std::fs::remove_file(&args.file);
        return Err(error.context(format!("cannot write {name}")));
    }
    Ok(format!("{name}: it names programs, users and addresses\n"))
}
