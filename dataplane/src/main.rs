//! `siwd`: the daemon's command line.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use siwd::config::{ByteSize, CaptureConfig, Config};
use siwd::prepared::Prepared;

/// Keeps the state of each queue pair together, in huge pages if the host provides them, and returns
/// free memory to the host.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A software RNIC in user space: iWARP over DPDK, served through shared memory.
#[derive(Debug, Parser)]
#[command(name = "siwd", version, about)]
struct DaemonArgs {
    #[command(subcommand)]
    command: Option<DaemonCommand>,

    /// Configuration file (TOML). Without it the embedded loopback runs: siw0 and siw1,
    /// joined by a pair of DPDK rings.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Check the configuration file and exit; warn about resources that this host lacks for it.
    #[arg(long)]
    check: bool,

    /// Log level (error, warn, info, debug, trace), or a filter like
    /// `siwd=debug,siw_tcp=info`.
    #[arg(long, value_name = "FILTER", default_value = "info")]
    log: String,

    /// Use this control socket instead of the configured one.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Write every frame to this pcapng file.
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,

    /// Print the ready line and the result of --check as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum DaemonCommand {
    /// List the NICs that siwd could use, and the commands that make them usable.
    Devices {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

const EMBEDDED: &str = include_str!("../../config/loopback.toml");

fn main() -> ExitCode {
    let args = DaemonArgs::parse();
    if let Err(error) = siwd::host::log_to_stderr(&args.log) {
        eprintln!("siwd: {error}");
        return ExitCode::from(2);
    }
    if let Some(DaemonCommand::Devices { json }) = args.command {
        println!("{}", siwd::device_list::describe_devices(json).trim_end());
        return ExitCode::SUCCESS;
    }
    match run_args(&args) {
        // Threads of drivers may still run: no exit handlers.
        Ok(()) => dpdk::exit_process(0),
        Err(message) => {
            if args.json && args.check {
                println!("{}", serde_json::json!({ "ok": false, "error": message }));
            }
            eprintln!("siwd: {message}");
            // Workers may run already.
            dpdk::exit_process(1)
        }
    }
}

fn run_args(args: &DaemonArgs) -> Result<(), String> {
    let mut config = match &args.config {
        Some(path) => Config::load_file(path),
        None => Config::parse_text("(embedded loopback)".as_ref(), EMBEDDED),
    }
    .map_err(|error| error.to_string())?;
    if let Some(socket) = &args.socket {
        config.control.socket = socket.clone();
    }
    if let Some(file) = &args.capture {
        config.capture = Some(CaptureConfig {
            file: file.clone(),
            limit: config
                .capture
                .map_or(ByteSize(256 << 20), |capture| capture.limit),
        });
    }
    if args.check {
        let devices = config.devices.len();
        let mut asked = Vec::new();
        for device in &config.devices {
            let name = device.get_ref().name.get_ref().0.clone();
            let offloads = siwd::offloads::name_asked_offloads(device.get_ref())
                .map_err(|error| format!("device {name}: {error}"))?;
            asked.push((name, offloads));
        }
        // The file is valid on any host; this one may lack resources that it names.
        if let Err(missing) = Prepared::new(config).check_host() {
            tracing::warn!("siwd would not start on this host: {missing}");
        }
        let name = args.config.as_ref().map_or_else(
            || "(embedded loopback)".into(),
            |path| path.display().to_string(),
        );
        if args.json {
            println!(
                "{}",
                serde_json::json!({
                    "ok": true,
                    "config": name,
                    "devices": devices,
                    "asked_offloads": asked.into_iter().collect::<std::collections::BTreeMap<_, _>>(),
                })
            );
        } else {
            println!("{name}: ok, {devices} device(s)");
            for (device, offloads) in asked.iter().filter(|(_, offloads)| !offloads.is_empty()) {
                println!(
                    "  {device} asks its port for {}; what it grants is logged at the start",
                    offloads.join(" ")
                );
            }
        }
        return Ok(());
    }
    siwd::daemon::run_daemon(config, args.json).map_err(|error| error.to_string())
}
