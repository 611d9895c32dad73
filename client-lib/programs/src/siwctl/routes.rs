//! Addresses, routes and neighbours of a device, in the words of ip(8).

use anyhow::Context as _;
use clap::{Args, Subcommand};
use serde_json::Value;
use std::fmt::Write;
use std::net::IpAddr;

#[derive(Debug, Subcommand)]
pub enum RouteCommand {
    /// Add a route until siwd restarts; those of the configuration take precedence
    Add {
        /// Destinations, such as 10.80.0.0/16
        network: String,
        /// Neighbour that forwards
        #[arg(long, value_name = "ROUTER")]
        via: IpAddr,
        #[command(flatten)]
        device: Device,
    },
    /// Remove a route that was added
    Del {
        /// Destinations
        network: String,
        #[command(flatten)]
        device: Device,
    },
    /// Remove all routes that were added
    Flush {
        #[command(flatten)]
        device: Device,
    },
    /// Routes that were added
    Show {
        #[command(flatten)]
        device: Device,
    },
}

#[derive(Debug, Subcommand)]
pub enum AddressCommand {
    /// Add an address until siwd restarts; listeners on all addresses listen on it at once
    Add {
        /// Address with prefix length, such as 10.77.0.9/24
        address: String,
        #[command(flatten)]
        device: Device,
    },
    /// Remove an address that no connection or listener uses; one of the configuration is back after a
    /// restart
    Del {
        /// Address
        address: String,
        #[command(flatten)]
        device: Device,
    },
    /// Remove all addresses that were added
    Flush {
        #[command(flatten)]
        device: Device,
    },
    /// Addresses, and how long they stay
    Show {
        #[command(flatten)]
        device: Device,
    },
}

#[derive(Debug, Subcommand)]
pub enum NeighbourCommand {
    /// Set the Ethernet address of a neighbour, without ARP or NDP, until it is deleted or siwd restarts
    Add {
        /// IP address of the neighbour
        address: IpAddr,
        /// Ethernet address, such as 02:00:00:00:00:09
        #[arg(long, value_name = "MAC")]
        lladdr: String,
        #[command(flatten)]
        device: Device,
    },
    /// Forget the Ethernet addresses of all neighbours: siwd asks for them again
    Flush {
        #[command(flatten)]
        device: Device,
    },
    /// Forget the Ethernet address of a neighbour
    Del {
        /// IP address of the neighbour
        address: IpAddr,
        #[command(flatten)]
        device: Device,
    },
}

#[derive(Debug, Args)]
pub struct Device {
    /// Name of the device
    #[arg(long, value_name = "NAME")]
    device: String,
}

impl Device {
    /// Index of the device in the daemon.
    fn find(&self, daemon: &siw::Context) -> anyhow::Result<u32> {
        find_device(daemon, &self.device)
    }
}

/// Index of the device of this name.
pub fn find_device(daemon: &siw::Context, name: &str) -> anyhow::Result<u32> {
    let devices = daemon.query_devices()?;
    let found = devices.iter().find(|device| device.name == name);
    let index = found.map(|device| device.index);
    index.with_context(|| format!("siwd has no device {name:?}"))
}

/// Executes `siwctl route`: prints the routes that were added.
pub fn change_routes(
    daemon: &siw::Context,
    command: &RouteCommand,
    as_json: bool,
) -> anyhow::Result<String> {
    let (device, change) = match command {
        RouteCommand::Add {
            network,
            via,
            device,
        } => (device, format!("add {network} via {via}")),
        RouteCommand::Del { network, device } => (device, format!("del {network}")),
        RouteCommand::Flush { device } => (device, "flush".to_owned()),
        RouteCommand::Show { device } => (device, "show".to_owned()),
    };
    let device = device.find(daemon)?;
    let mut routes: Vec<Value> = Vec::new();
    let mut text = daemon.change_routes(device, &change)?;
    loop {
        let more: Vec<Value> = serde_json::from_str(&text).context("invalid answer of siwd")?;
        if more.is_empty() {
            break;
        }
        routes.extend(more);
        text = daemon.change_routes(device, &format!("show {}", routes.len()))?;
    }
    if as_json {
        return Ok(format!("{}\n", Value::Array(routes)));
    }
    let mut out = String::new();
    for route in routes {
        let word = |key: &str| route[key].as_str().unwrap_or_default().to_owned();
        let _ = writeln!(
            out,
            "{} via {} dev {}",
            word("to"),
            word("via"),
            word("device")
        );
    }
    Ok(out)
}

/// Executes `siwctl addr`: prints the addresses of the device.
pub fn change_addresses(
    daemon: &siw::Context,
    command: &AddressCommand,
    as_json: bool,
) -> anyhow::Result<String> {
    let (device, change) = match command {
        AddressCommand::Add { address, device } => (device, format!("add {address}")),
        AddressCommand::Del { address, device } => (device, format!("del {address}")),
        AddressCommand::Flush { device } => (device, "flush".to_owned()),
        AddressCommand::Show { device } => (device, "show".to_owned()),
    };
    let text = daemon.change_addresses(device.find(daemon)?, &change)?;
    if as_json {
        return Ok(text + "\n");
    }
    let rows: Vec<Value> = serde_json::from_str(&text).context("invalid answer of siwd")?;
    let mut out = String::new();
    for row in rows {
        let word = |key: &str| row[key].as_str().unwrap_or_default();
        let state = match word("state") {
            "added" => " added until siwd restarts",
            "removed" => " removed until siwd restarts",
            _ => "",
        };
        let _ = writeln!(out, "{} dev {}{state}", word("address"), word("device"));
    }
    Ok(out)
}

/// Executes `siwctl neigh`.
pub fn change_neighbours(
    daemon: &siw::Context,
    command: &NeighbourCommand,
) -> anyhow::Result<String> {
    let (device, change) = match command {
        NeighbourCommand::Add {
            address,
            lladdr,
            device,
        } => (device, format!("add {address} lladdr {lladdr}")),
        NeighbourCommand::Del { address, device } => (device, format!("del {address}")),
        NeighbourCommand::Flush { device } => (device, "flush".to_owned()),
    };
    daemon.change_neighbours(device.find(daemon)?, &change)?;
    Ok(String::new())
}
