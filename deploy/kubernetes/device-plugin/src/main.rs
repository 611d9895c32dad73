//! `siw-device-plugin`: see the library.

use clap::Parser;
use siw_device_plugin::{Node, Settings, run};
use std::path::PathBuf;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Kubernetes device plugin: gives pods the devices of this node's siwd.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The kubelet's folder for plugins
    #[arg(
        long,
        value_name = "FOLDER",
        default_value = "/var/lib/kubelet/device-plugins"
    )]
    folder: PathBuf,
    /// CDI specification of siwd's devices
    #[arg(long, value_name = "FILE", default_value = "/var/run/cdi/siwd.json")]
    spec: PathBuf,
    /// Control socket of siwd
    #[arg(
        long,
        value_name = "PATH",
        env = "SIWD_SOCKET",
        default_value = "/run/siwd/siwd.sock"
    )]
    socket: PathBuf,
    /// Pods that may share a device
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    shares: u32,
    /// Name of the resource
    #[arg(long, value_name = "NAME", default_value = "siwd.dev/rnic")]
    resource: String,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let settings = Settings {
        folder: arguments.folder,
        resource: arguments.resource,
        node: Node {
            spec: arguments.spec,
            socket: arguments.socket,
            shares: arguments.shares,
        },
        interval: Duration::from_secs(1),
    };
    let mut end = signal(SignalKind::terminate())?;
    tokio::select! {
        () = run(settings) => {}
        _ = end.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
    Ok(())
}
