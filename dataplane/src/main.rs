//! `siwd`: the daemon's command line.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use siwd::config::{Config, ConfigSource, SocketPathError, check_socket_path};
use siwd::host::LogFormat;
use siwd::prepared::Prepared;

#[global_allocator]
static ALLOCATOR: siw_heap::MiMalloc = siw_heap::MiMalloc;

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

    /// Check whether siwd would start with this configuration on this machine, change nothing, and
    /// exit: 0: it would; 1: the file has an error; 3: this machine lacks something; 4: it would, with
    /// warnings. Properties of a NIC show only at a start.
    #[arg(long)]
    check: bool,

    /// The part of --check that runs in a process of its own.
    #[arg(long, hide = true, requires = "check")]
    rehearse: bool,

    /// Log level (error, warn, info, debug, trace), or a filter like
    /// `siwd=debug,siw_tcp=info`.
    #[arg(long, value_name = "FILTER", default_value = "info")]
    log: String,

    /// Format of the log.
    #[arg(long, value_name = "FORMAT", value_enum, default_value = "text")]
    log_format: LogFormat,

    /// Use this control socket instead of the configured one.
    #[arg(long, value_name = "PATH", value_parser = parse_socket)]
    socket: Option<PathBuf>,

    /// Write every frame to this pcapng file.
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,

    /// Print the JSON schema of the configuration file, for editors.
    #[arg(long, exclusive = true)]
    schema: bool,

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

fn main() -> ExitCode {
    siw_heap::keep_free_memory();
    let args = DaemonArgs::parse();
    if args.schema {
        println!("{:#}", siwd::config::configuration_schema());
        return ExitCode::SUCCESS;
    }
    if let Err(error) = siwd::host::log_to_stderr(&args.log, args.log_format) {
        eprintln!("siwd: {error}");
        return ExitCode::from(2);
    }
    if let Some(DaemonCommand::Devices { json }) = args.command {
        println!("{}", siwd::device_list::describe_devices(json).trim_end());
        return ExitCode::SUCCESS;
    }
    let outcome = if args.check {
        run_check(&args)
    } else {
        siwd::daemon::run_daemon(config_source(&args), args.json)
            .map(|()| 0)
            .unwrap_or_else(|error| {
                eprintln!("siwd: {error}");
                FILE_ERROR
            })
    };
    // Workers and threads of drivers may still run: no exit handlers.
    dpdk::exit_process(outcome)
}

/// Exit statuses of `--check`; 2 is that of a wrong command line. A start that fails ends with 1.
const FILE_ERROR: i32 = 1;
const MACHINE_ERROR: i32 = 3;
const WARNINGS: i32 = 4;

fn parse_socket(text: &str) -> Result<PathBuf, SocketPathError> {
    let path = PathBuf::from(text);
    check_socket_path(&path).map(|()| path)
}

/// Source of the configuration that the command line names.
fn config_source(args: &DaemonArgs) -> ConfigSource {
    ConfigSource {
        file: args.config.clone(),
        socket: args.socket.clone(),
        capture: args.capture.clone(),
    }
}

/// Names of the offloads that each device requests.
fn asked_offloads(config: &Config) -> Result<BTreeMap<String, Vec<&'static str>>, String> {
    let devices = config.devices.iter().map(|device| {
        let name = device.get_ref().name.get_ref().0.clone();
        match siwd::offloads::name_asked_offloads(device.get_ref()) {
            Ok(offloads) => Ok((name, offloads)),
            Err(error) => Err(format!("device {name}: {error}")),
        }
    });
    devices.collect()
}

/// Checks the file, then this machine; returns the exit status.
fn run_check(args: &DaemonArgs) -> i32 {
    let source = config_source(args);
    let loaded = source.load().map_err(|error| error.to_string());
    let loaded = loaded.and_then(|config| {
        let asked = asked_offloads(&config)?;
        Ok((config, asked))
    });
    let (config, asked) = match loaded {
        Ok(loaded) => loaded,
        Err(message) => {
            if args.json {
                println!(
                    "{}",
                    serde_json::json!({ "ok": false, "fault": "file", "error": message, "errors": [message] })
                );
            }
            eprintln!("siwd: {message}");
            return FILE_ERROR;
        }
    };
    let devices = config.devices.len();
    let prepared = Prepared::new(config);
    if args.rehearse {
        return prepared.rehearse().map_or_else(
            |error| {
                eprintln!("siwd: {error}");
                MACHINE_ERROR
            },
            |()| 0,
        );
    }
    let mut report = prepared.check_host();
    let claims = prepared.check_claims();
    report.errors.extend(claims.errors);
    report.warnings.extend(claims.warnings);
    let mut errors: Vec<String> = report.errors.iter().map(ToString::to_string).collect();
    // DPDK would only repeat what is missing already.
    if errors.is_empty() {
        errors.extend(rehearse_start());
    }
    let name = source.name();
    for warning in &report.warnings {
        tracing::warn!("{warning}");
    }
    for error in &errors {
        eprintln!("siwd: would not start on this machine: {error}");
    }
    if args.json {
        println!(
            "{}",
            serde_json::json!({
                "ok": errors.is_empty(),
                "config": name,
                "devices": devices,
                "asked_offloads": asked,
                "fault": (!errors.is_empty()).then_some("machine"),
                "error": errors.first(),
                "errors": errors,
                "warnings": report.warnings,
            })
        );
    } else if errors.is_empty() {
        println!("{name}: ok, {devices} device(s)");
        for (device, offloads) in asked.iter().filter(|(_, offloads)| !offloads.is_empty()) {
            println!(
                "  {device} asks its port for {}; what it grants is logged at the start",
                offloads.join(" ")
            );
        }
    }
    match (errors.is_empty(), report.warnings.is_empty()) {
        (false, _) => MACHINE_ERROR,
        (true, false) => WARNINGS,
        (true, true) => 0,
    }
}

/// Starts DPDK in a process of its own, since it can be started only once, may end the process, and
/// prints to stdout. Returns the reason why it fails.
fn rehearse_start() -> Option<String> {
    let run = || {
        std::process::Command::new("/proc/self/exe")
            .args(std::env::args_os().skip(1))
            .arg("--rehearse")
            .output()
    };
    match run() {
        Ok(output) if output.status.success() => None,
        Ok(output) => {
            let text = format!("\n{}", String::from_utf8_lossy(&output.stderr));
            let reason = text
                .rsplit_once("\nsiwd: ")
                .map(|(_, reason)| reason.trim());
            Some(reason.map_or_else(
                || format!("DPDK ended the process: {}", output.status),
                str::to_owned,
            ))
        }
        Err(error) => Some(format!("the check cannot start a process: {error}")),
    }
}
