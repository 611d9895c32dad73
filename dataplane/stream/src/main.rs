//! Byte-stream services over siwd's TCP on a DPDK port: the endpoint of tests whose peers are plain
//! socket programs (`dataplane/tests/common/stream.rs`).

#![forbid(unsafe_code)]

use std::error::Error;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{ArgGroup, Parser};
use siw_stream::{ConnectPlan, ServiceOffer, StreamPlan, StreamService};
use siwd::config::{ByteSize, CaptureConfig, Config};
use siwd::device::OpenDevice;

/// Byte-stream services over siwd's own TCP on a DPDK port.
///
/// Linux as a peer, over a tap:
///   siw-stream --devargs net_tap0,iface=siwtap0 --address 10.77.0.1/24 --listen echo:7
///   ip addr add 10.77.0.2/24 dev siwtap0 && ip link set siwtap0 up && nc 10.77.0.1 7
#[derive(Debug, Parser)]
#[command(name = "siw-stream", version, verbatim_doc_comment)]
#[command(group(ArgGroup::new("port").required(true).args(["config", "devargs", "pci"])))]
#[command(group(ArgGroup::new("task").required(true).multiple(true).args(["listen", "connect"])))]
struct Args {
    /// Take devices, idle policy and buffers from this file, as siwd does.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A DPDK virtual device, for example net_tap0,iface=siwtap0 or net_af_packet0,iface=veth0.
    #[arg(long, value_name = "ARGS")]
    devargs: Option<String>,
    /// A PCI NIC that is bound to vfio-pci, for example 0000:03:00.0.
    #[arg(long, value_name = "ADDRESS")]
    pci: Option<String>,
    /// An address with its prefix length; give the option once for each.
    #[arg(long, value_name = "IP/PREFIX", conflicts_with = "config")]
    address: Vec<String>,
    /// IPv4 router for other networks.
    #[arg(long, value_name = "IP", conflicts_with = "config")]
    gateway: Option<Ipv4Addr>,
    /// IPv6 router for other networks.
    #[arg(long, value_name = "IP", conflicts_with = "config")]
    gateway6: Option<Ipv6Addr>,
    /// IP bytes in a frame, 576 to 9000; 1500 when absent.
    #[arg(long, value_name = "BYTES", conflicts_with = "config")]
    mtu: Option<u16>,
    /// Ethernet address; the port's own, or a drawn one, when absent.
    #[arg(long, value_name = "MAC", conflicts_with = "config")]
    mac: Option<String>,
    /// 802.1Q tag.
    #[arg(long, value_name = "1..4094", conflicts_with = "config")]
    vlan: Option<u16>,
    /// Receive window of a connection, for example 256KiB.
    #[arg(long, value_name = "SIZE", conflicts_with = "config")]
    window: Option<ByteSize>,
    /// Minimum retransmission timeout in milliseconds.
    #[arg(long, value_name = "MS", conflicts_with = "config")]
    rto_min: Option<u32>,
    /// Packet buffers.
    #[arg(long, value_name = "COUNT", conflicts_with = "config")]
    buffers: Option<u32>,
    /// Require hugepages; without this option they are used if enough are free.
    #[arg(long, conflicts_with = "config")]
    hugepages: bool,
    /// Use normal pages.
    #[arg(long, conflicts_with_all = ["config", "hugepages"])]
    no_hugepages: bool,
    /// The core to run on; the last allowed one when absent.
    #[arg(long, value_name = "CORE", conflicts_with = "config")]
    core: Option<usize>,
    /// Spin when idle.
    #[arg(long, conflicts_with = "config")]
    poll: bool,

    /// Offer a service: discard, echo, source, check, exchange or reset.
    #[arg(long, value_name = "SERVICE:PORT")]
    listen: Vec<ServiceOffer>,
    /// Connections of each service that may wait to be accepted.
    #[arg(long, value_name = "COUNT", default_value_t = 1024)]
    backlog: usize,
    /// Open connections to this address and port.
    #[arg(long, value_name = "IP:PORT")]
    connect: Option<SocketAddr>,
    /// Service to run on connections opened from here.
    #[arg(
        long,
        value_name = "SERVICE",
        default_value = "source",
        requires = "connect"
    )]
    role: StreamService,
    /// Number of concurrent connections.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "connect")]
    count: u32,
    /// Connect from this address.
    #[arg(long, value_name = "IP", requires = "connect")]
    source: Option<IpAddr>,
    /// Connect from this device of the configuration; its first when absent.
    #[arg(long, value_name = "NAME", requires = "connect")]
    device: Option<String>,
    /// Length of each stream of the pattern, for example 64MiB; unlimited when absent.
    #[arg(long, value_name = "SIZE")]
    bytes: Option<ByteSize>,
    /// Close everything and exit after this time.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    seconds: Option<f64>,
    /// Seed of the pattern that is sent and verified.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Time after the opening of a connection for which received data are left unread.
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pause: u64,
    /// Maximum number of connections, including those in TIME-WAIT.
    #[arg(long, value_name = "COUNT", default_value_t = 16384)]
    connections: usize,

    /// Write every frame to this pcapng file.
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
    /// Print the ready line and the result as JSON, one object per line.
    #[arg(long)]
    json: bool,
    /// Log level: error, warn, info, debug or trace.
    #[arg(long, value_name = "FILTER", default_value = "warn")]
    log: String,
}

fn parse_seconds(text: &str) -> Result<f64, Box<dyn Error + Send + Sync>> {
    text.parse::<f64>()
        .ok()
        .filter(|seconds| seconds.is_finite() && *seconds > 0.0 && *seconds < 1e9)
        .ok_or_else(|| format!("{text:?}: write seconds above 0, for example 2.5").into())
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Err(error) = siwd::host::log_to_stderr(&args.log, siwd::host::LogFormat::Text) {
        eprintln!("siw-stream: {error}");
        return ExitCode::from(2);
    }
    match run_endpoint(&args) {
        // Threads of drivers may still run: no exit handlers.
        Ok(has_succeeded) => dpdk::exit_process(i32::from(!has_succeeded)),
        Err(error) => {
            let message = error.to_string();
            if args.json {
                println!("{}", serde_json::json!({ "error": message }));
            }
            eprintln!("siw-stream: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run_endpoint(args: &Args) -> Result<bool, Box<dyn Error>> {
    let config = load_config(args)?;
    let plan = StreamPlan {
        offers: args.listen.clone(),
        connects: args.connect.map(|to| ConnectPlan {
            to,
            service: args.role,
            count: args.count,
            source: args.source,
        }),
        backlog: args.backlog,
        connections: args.connections,
        bytes: args.bytes.map(|bytes| bytes.0),
        seconds: args.seconds,
        seed: args.seed,
        pause: Duration::from_millis(args.pause),
        device: args.device.clone(),
    };
    let report = siw_stream::run(&config, &plan, |devices| print_ready(args, devices))?;
    if args.json {
        println!("{}", report.to_json());
    } else {
        println!("{}", report.to_text());
    }
    let _ = std::io::stdout().flush();
    Ok(report.totals.failures() == 0)
}

fn print_ready(args: &Args, devices: &[OpenDevice]) {
    let views: Vec<_> = devices.iter().map(OpenDevice::client_view).collect();
    if args.json {
        let devices: Vec<_> = views
            .iter()
            .map(|view| {
                let addresses: Vec<_> = view.addresses.iter().map(|address| address.addr.to_string()).collect();
                let mac: Vec<_> = view.mac.iter().map(|byte| format!("{byte:02x}")).collect();
                serde_json::json!({
                    "name": view.name, "mac": mac.join(":"), "addresses": addresses, "mtu": view.mtu,
                })
            })
            .collect();
        println!(
            "{}",
            serde_json::json!({ "ready": true, "devices": devices })
        );
    } else {
        for view in &views {
            let addresses: Vec<_> = view
                .addresses
                .iter()
                .map(|address| address.addr.to_string())
                .collect();
            println!("siw-stream ready: {} {}", view.name, addresses.join(" "));
        }
    }
    let _ = std::io::stdout().flush();
}

/// Loads the file, or a configuration made from the options, so that both are checked alike.
fn load_config(args: &Args) -> Result<Config, Box<dyn Error>> {
    let mut config = match &args.config {
        Some(path) => Config::load_file(path)?,
        None => {
            let text = options_as_toml(args);
            Config::parse_text(Path::new("options"), &text).map_err(|error| match error {
                siwd::config::ConfigError::Invalid { message, .. } => message,
                other => other.to_string(),
            })?
        }
    };
    if let Some(file) = &args.capture {
        let limit = config.capture.map(|capture| capture.limit);
        config.capture = Some(CaptureConfig::new(file.clone(), limit));
    }
    Ok(config)
}

fn options_as_toml(args: &Args) -> String {
    use toml::Value;
    let mut device = toml::Table::new();
    let mut set = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            device.insert(key.into(), value);
        }
    };
    let text = |value: &dyn ToString| Value::String(value.to_string());
    let number = |value: u32| Value::Integer(value.into());
    set("name", Some(text(&"stream0")));
    set("devargs", args.devargs.as_ref().map(|value| text(value)));
    set("pci", args.pci.as_ref().map(|value| text(value)));
    let addresses = args.address.iter().map(|address| text(address)).collect();
    set("addresses", Some(Value::Array(addresses)));
    set("gateway", args.gateway.map(|address| text(&address)));
    set("gateway6", args.gateway6.map(|address| text(&address)));
    set("mtu", args.mtu.map(|mtu| number(mtu.into())));
    set("mac", args.mac.as_ref().map(|mac| text(mac)));
    set("vlan", args.vlan.map(|vlan| number(vlan.into())));
    let mut tcp = toml::Table::new();
    if let Some(window) = args.window {
        tcp.insert("receive_window".into(), text(&window.0));
    }
    if let Some(ms) = args.rto_min {
        tcp.insert("rto_min_ms".into(), number(ms));
    }
    set("tcp", Some(Value::Table(tcp)));

    let mut dpdk = toml::Table::new();
    let hugepages = match (args.hugepages, args.no_hugepages) {
        (true, _) => "require",
        (_, true) => "never",
        _ => "auto",
    };
    dpdk.insert("hugepages".into(), text(&hugepages));
    if let Some(count) = args.buffers {
        dpdk.insert("buffers".into(), number(count));
    }
    let mut workers = toml::Table::new();
    let idle = if args.poll { "poll" } else { "adaptive" };
    workers.insert("idle".into(), text(&idle));
    if let Some(core) = args.core {
        workers.insert("cores".into(), Value::Array(vec![number(core as u32)]));
    }
    let mut file = toml::Table::new();
    file.insert("device".into(), Value::Array(vec![Value::Table(device)]));
    file.insert("dpdk".into(), Value::Table(dpdk));
    file.insert("workers".into(), Value::Table(workers));
    file.to_string()
}
