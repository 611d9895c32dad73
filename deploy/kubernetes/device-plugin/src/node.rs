//! The devices of this node, from the CDI specification, and whether siwd serves them.

use anyhow::{Context as _, anyhow};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde_json::Value;
use std::path::{Path, PathBuf};

use crate::api::{CdiDevice, Device, HEALTHY, UNHEALTHY};

/// Device of the specification that stands for all of them.
const ALL: &str = "all";

/// Places of siwd's files on the node.
#[derive(Debug, Clone)]
pub struct Node {
    /// CDI specification written by `siwctl cdi`.
    pub spec: PathBuf,
    /// Control socket of siwd.
    pub socket: PathBuf,
    /// Number of pods that may share a device.
    pub shares: u32,
}

/// Vendor and class of the devices, and their names.
struct Spec {
    kind: String,
    names: Vec<String>,
}

fn parse_spec(text: &str) -> anyhow::Result<Spec> {
    let spec: Value = serde_json::from_str(text)?;
    let kind = spec["kind"]
        .as_str()
        .ok_or_else(|| anyhow!("it has no kind"))?;
    let devices = spec["devices"]
        .as_array()
        .ok_or_else(|| anyhow!("it has no devices"))?;
    let names = devices.iter().filter_map(|device| device["name"].as_str());
    Ok(Spec {
        kind: kind.to_owned(),
        names: names
            .filter(|name| *name != ALL)
            .map(str::to_owned)
            .collect(),
    })
}

fn read_spec(path: &Path) -> anyhow::Result<Spec> {
    let name = path.display();
    let text = std::fs::read_to_string(path).with_context(|| {
        format!("cannot read {name}; write it with `siwctl cdi >{name}` while siwd runs")
    })?;
    parse_spec(&text).with_context(|| format!("{name} is not a CDI specification of siwd"))
}

impl Node {
    /// Whether siwd accepts connections.
    fn is_served(&self) -> bool {
        let Ok(address) = SocketAddrUnix::new(&self.socket) else {
            return false;
        };
        let kind = SocketType::SEQPACKET;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let connected = socket_with(AddressFamily::UNIX, kind, flags, None)
            .and_then(|made| connect(&made, &address));
        // AGAIN: it runs, and has yet to accept others.
        matches!(connected, Ok(()) | Err(Errno::AGAIN))
    }

    /// The units of the resource, with their health. Without a specification there are none.
    pub fn devices(&self) -> Vec<Device> {
        let spec = match read_spec(&self.spec) {
            Ok(spec) => spec,
            Err(error) => {
                eprintln!("siw-device-plugin: {error:#}");
                return Vec::new();
            }
        };
        let health = if self.is_served() { HEALTHY } else { UNHEALTHY };
        let names = spec.names.iter();
        names
            .flat_map(|name| (0..self.shares).map(move |share| format!("{name}-{share}")))
            .map(|id| Device {
                id,
                health: health.to_owned(),
            })
            .collect()
    }

    /// The CDI devices of some units, each once.
    ///
    /// # Errors
    /// A unit is not one of [`Self::devices`].
    pub fn cdi_devices(&self, ids: &[String]) -> anyhow::Result<Vec<CdiDevice>> {
        let spec = read_spec(&self.spec)?;
        let mut names = Vec::new();
        for id in ids {
            let known = id
                .rsplit_once('-')
                .filter(|(name, share)| {
                    spec.names.iter().any(|known| known == name)
                        && share.parse().is_ok_and(|share: u32| share < self.shares)
                })
                .ok_or_else(|| anyhow!("{id:?} is not a device of {}", self.spec.display()))?;
            let name = format!("{}={}", spec.kind, known.0);
            if !names.contains(&name) {
                names.push(name);
            }
        }
        Ok(names.into_iter().map(|name| CdiDevice { name }).collect())
    }
}
