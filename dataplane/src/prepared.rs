//! Start-up plan derived from the configuration, and the check whether this host fulfils it.
//!
//! [`crate::daemon::run_daemon`] and `siw-stream` start from it; `siwd --check` checks it and stops.
//! Only [`Prepared::claim_host`] and [`Prepared::start_dpdk`] change the host.

use dpdk::{Eal, EalConfig, IovaMode, Mempool, PciDevice, XdpInterface};

use crate::config::{Config, DeviceConfig, EalLog, HugepagePolicy, IovaSetting, LinkSource};
use crate::daemon::StartError;
use crate::device;
use crate::host::{self, HostClaim};
use crate::host_path;
use crate::resume_latency::{self, CORES_FOLDER, ResumeLatencyLimits};

/// Memory in MiB that DPDK needs in addition to the packet buffers.
const EAL_OVERHEAD_MB: u32 = 32;
/// Maximum bytes that DPDK adds to each packet buffer.
const BUFFER_OVERHEAD: u64 = 256;
/// Maximum number of memory keys of the daemon, regardless of the configured limits.
const MAX_KEY_SLOTS: u64 = 4 << 20;

/// A configuration and the values derived from it for this host.
pub struct Prepared {
    /// The configuration itself.
    pub config: Config,
    /// The devices of the configuration.
    pub devices: Vec<DeviceConfig>,
    /// The cores that workers are pinned to, one worker each.
    pub cores: Vec<usize>,
    /// Bytes that a packet buffer has to hold.
    pub buffer_room: u16,
    /// Memory that DPDK is given, in MiB.
    pub memory_mb: u32,
}

/// DPDK after its start. The pool is freed before the environment.
pub struct StartedDpdk {
    /// The packet buffers of all ports.
    pub pool: Mempool,
    /// The environment.
    pub eal: Eal,
    /// Set if hugepages back its memory.
    pub hugepages: bool,
}

/// Host resources that a daemon holds until this is dropped.
pub struct ClaimedHost {
    #[allow(dead_code, reason = "held for its effect")]
    limits: Option<ResumeLatencyLimits>,
    #[allow(dead_code, reason = "held for their locks")]
    locks: Vec<HostClaim>,
}

impl Prepared {
    /// Derives the plan from the configuration; reads only this process's affinity from the host.
    pub fn new(config: Config) -> Prepared {
        let devices: Vec<_> = config
            .devices
            .iter()
            .map(|device| device.get_ref().clone())
            .collect();
        let buffer_room = devices.iter().map(device::buffer_room).max();
        let buffer_room = buffer_room.unwrap_or(2048);
        let buffer = u64::from(buffer_room) + u64::from(dpdk::HEADROOM) + BUFFER_OVERHEAD;
        let buffers_mb = u64::from(config.dpdk.buffers) * buffer / (1 << 20);
        let configured = config.workers.cores.get_ref();
        let cores = if configured.is_empty() {
            host::allowed_cores().last().copied().into_iter().collect()
        } else {
            configured.clone()
        };
        Prepared {
            devices,
            cores,
            buffer_room,
            memory_mb: buffers_mb as u32 + EAL_OVERHEAD_MB,
            config,
        }
    }

    /// Checks that this host has the resources that the configuration names, and changes nothing.
    ///
    /// # Errors
    /// A resource is missing; the error names the command that provides it.
    pub fn check_host(&self) -> Result<(), StartError> {
        host::check_cores(&self.cores)?;
        if self.config.workers.resume_latency_us.is_some() {
            resume_latency::check_access(CORES_FOLDER.as_ref(), &self.cores)?;
        }
        if self.config.dpdk.hugepages == HugepagePolicy::Require {
            dpdk::check_free_hugepages(self.memory_mb)?;
        }
        self.check_nics()?;
        self.check_interfaces()?;
        self.check_host_interfaces()?;
        if let Some(group) = &self.config.control.group {
            host::find_group(group.get_ref()).map_err(|reason| StartError::Socket {
                path: self.config.control.socket.display().to_string(),
                reason,
            })?;
        }
        Ok(())
    }

    /// Checks that the interfaces of shared devices can be created.
    fn check_host_interfaces(&self) -> Result<(), StartError> {
        for config in &self.devices {
            if let Some(interface) = &config.host_interface {
                host_path::check_tap(&interface.get_ref().0).map_err(|error| {
                    StartError::Device(format!("device {}: {error}", config.name.get_ref().0))
                })?;
            }
        }
        Ok(())
    }

    /// Checks that each NIC of the configuration exists and that DPDK can use it; warns if a worker is
    /// on another NUMA node.
    fn check_nics(&self) -> Result<(), StartError> {
        for config in &self.devices {
            let Some(address) = &config.pci else { continue };
            let fail = |why: String| {
                StartError::Device(format!("device {}: {why}", config.name.get_ref().0))
            };
            let address = &address.0;
            let Some(nic) = PciDevice::at_address(address) else {
                return Err(fail(format!(
                    "there is no PCI device {address}: `siwd devices` lists the existing ones"
                )));
            };
            if let Some(command) = nic.command_to_bind() {
                let driver = nic.driver.as_deref().unwrap_or("no driver");
                return Err(fail(format!(
                    "{address} is bound to {driver}, not to a user-space driver: {command}"
                )));
            }
            if self.config.dpdk.iova == IovaSetting::Va && nic.needs_physical_addresses() {
                return Err(fail(format!(
                    "{address} has no IOMMU, which iova = \"va\" in [dpdk] needs: use \"auto\", or turn the IOMMU on"
                )));
            }
            for core in &self.cores {
                let node = host::numa_node_of_core(*core);
                if let (Some(node), Some(of_nic)) = (node, nic.numa_node)
                    && node != of_nic
                {
                    tracing::warn!(
                        "{address} is on NUMA node {of_nic}, core {core} on node {node}: each frame crosses between them; \
                         name cores of node {of_nic} in [workers] (lscpu -e lists them)"
                    );
                }
            }
        }
        Ok(())
    }

    /// Checks that the interfaces of AF_XDP exist and can carry their devices' frames.
    fn check_interfaces(&self) -> Result<(), StartError> {
        for config in &self.devices {
            let LinkSource::Xdp(name) = config.link_source() else {
                continue;
            };
            let fail = |why: String| {
                StartError::Device(format!("device {}: {why}", config.name.get_ref().0))
            };
            let interface =
                XdpInterface::find_by_name(&name).map_err(|error| fail(error.to_string()))?;
            interface
                .check_usable(config.vlan.is_some())
                .map_err(|error| fail(error.to_string()))?;
            let mtu = *config.mtu.get_ref();
            if u32::from(mtu) > interface.mtu {
                return Err(fail(format!(
                    "mtu {mtu}, but the interface `{name}` has {}: set mtu to that, or ip link set {name} mtu {mtu}",
                    interface.mtu
                )));
            }
        }
        Ok(())
    }

    /// Claims the NICs and the cores of the first `workers` workers, so that no other daemon polls on
    /// these cores, and limits the cores' idle states.
    ///
    /// # Errors
    /// A core does not exist, another process has it or a NIC, or its idle states cannot be limited.
    pub fn claim_host(&self, workers: usize) -> Result<ClaimedHost, StartError> {
        let cores = self.cores.get(..workers).unwrap_or(&self.cores);
        let folder = host::lock_folder();
        let mut locks = host::claim_cores(&folder, cores, self.config.workers.idle)?;
        for nic in self.pci_devices() {
            locks.push(host::claim_nic(&folder, &nic.address)?);
        }
        let limit = self.config.workers.resume_latency_us;
        let limits = limit
            .map(|limit| ResumeLatencyLimits::set(CORES_FOLDER.as_ref(), cores, limit))
            .transpose()?;
        Ok(ClaimedHost { limits, locks })
    }

    /// The configured names of the devices.
    pub fn device_names(&self) -> Vec<String> {
        let name = |device: &DeviceConfig| device.name.get_ref().0.clone();
        self.devices.iter().map(name).collect()
    }

    /// Number of memory regions and windows that all clients together may register.
    pub fn key_slots(&self) -> usize {
        let limits = &self.config.limits;
        let most =
            u64::from(limits.memory_regions_per_client).saturating_mul(u64::from(limits.clients));
        most.min(MAX_KEY_SLOTS) as usize
    }

    /// Starts DPDK with hugepages, or without if the configuration allows it, and creates the pool of
    /// packet buffers, with `cache` of them kept for each thread.
    ///
    /// # Errors
    /// DPDK cannot be started: hugepages are missing, or it was started already.
    pub fn start_dpdk(&self, pool_name: &str, cache: u32) -> Result<StartedDpdk, StartError> {
        let hugepages = self.decide_hugepages();
        let bus_devices: Vec<String> = self
            .devices
            .iter()
            .filter_map(DeviceConfig::bus_device)
            .collect();
        let log_level = match self.config.dpdk.log {
            EalLog::Error => "error",
            EalLog::Warning => "warning",
            EalLog::Notice => "notice",
            EalLog::Info => "info",
            EalLog::Debug => "debug",
        };
        let eal = Eal::init(EalConfig {
            hugepages,
            memory_mb: self.memory_mb,
            no_pci: bus_devices.is_empty(),
            iova: self.decide_iova(),
            pci_allow: bus_devices,
            extra_args: self.config.dpdk.eal_args.get_ref().clone(),
            log_level: log_level.into(),
            main_core: self.cores.first().copied().unwrap_or(0),
            ..EalConfig::default()
        })?;
        let (buffers, room) = (self.config.dpdk.buffers, self.buffer_room);
        let pool = Mempool::new(&eal, pool_name, buffers, cache, room, None)?;
        Ok(StartedDpdk {
            pool,
            eal,
            hugepages,
        })
    }

    /// Decides whether devices read memory by virtual or physical addresses.
    fn decide_iova(&self) -> IovaMode {
        let is_physical = match self.config.dpdk.iova {
            IovaSetting::Va => false,
            IovaSetting::Pa => true,
            IovaSetting::Auto => {
                let bare = self.pci_devices().find(PciDevice::needs_physical_addresses);
                if let Some(device) = &bare {
                    tracing::info!(
                        "{} has no IOMMU: NICs read physical addresses, and whoever controls a NIC reads all memory",
                        device.address
                    );
                }
                bare.is_some()
            }
        };
        if is_physical {
            IovaMode::Physical
        } else {
            IovaMode::Virtual
        }
    }

    /// The NICs of the configuration that exist.
    pub fn pci_devices(&self) -> impl Iterator<Item = PciDevice> {
        let addresses = self.devices.iter().filter_map(|device| device.pci.as_ref());
        addresses.filter_map(|address| PciDevice::at_address(&address.0))
    }

    /// Decides whether hugepages are used; warns if they are wanted and too few are free.
    fn decide_hugepages(&self) -> bool {
        match self.config.dpdk.hugepages {
            HugepagePolicy::Never => false,
            HugepagePolicy::Require => true,
            HugepagePolicy::Auto => {
                let free = host::free_hugepage_bytes();
                let enough = free >= u64::from(self.memory_mb) << 20;
                if !enough {
                    tracing::warn!(
                        "{} MiB of hugepages are wanted, {} MiB are free: using normal pages, which is slower; \
                         reserve them with: echo {} > /proc/sys/vm/nr_hugepages",
                        self.memory_mb,
                        free >> 20,
                        self.memory_mb.div_ceil(2) + 64,
                    );
                }
                enough
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared(extra: &str) -> Prepared {
        let devices = include_str!("../../config/loopback.toml")
            .split("[[device]]")
            .skip(1)
            .map(|device| format!("[[device]]{device}"))
            .collect::<String>();
        let text = format!("{extra}\n{}", devices.replace("mtu = 33024", "mtu = 1500"));
        Prepared::new(Config::parse_text("x.toml".as_ref(), &text).unwrap())
    }

    #[test]
    fn memory_follows_the_buffers() {
        let few = prepared("[dpdk]\nbuffers = 1024\nhugepages = \"never\"");
        let many = prepared("[dpdk]\nbuffers = 65536\nhugepages = \"never\"");
        assert!(few.memory_mb > EAL_OVERHEAD_MB && many.memory_mb > 64 * 2);
        assert_eq!(few.buffer_room, 2048);
        assert_eq!(few.device_names(), ["siw0", "siw1"]);
        assert_eq!(few.cores.len(), 1);
        few.check_host().unwrap();
    }

    #[test]
    fn the_host_check_names_what_is_missing() {
        let cores = "[workers]\ncores = [100000]\n[dpdk]\nhugepages = \"never\"";
        let error = prepared(cores).check_host().unwrap_err().to_string();
        assert!(error.contains("core 100000"), "{error}");
        let group = "[control]\ngroup = \"no-such-group\"\n[dpdk]\nhugepages = \"never\"";
        let error = prepared(group).check_host().unwrap_err().to_string();
        assert!(error.contains("groupadd no-such-group"), "{error}");
        let memory = "[dpdk]\nhugepages = \"require\"\nbuffers = 4000000000";
        let error = prepared(memory).check_host().unwrap_err().to_string();
        assert!(error.contains("not enough hugepages"), "{error}");
    }
}
