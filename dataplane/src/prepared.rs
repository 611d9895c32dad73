//! Start-up plan derived from the configuration, and the check whether this host fulfils it.
//!
//! [`crate::daemon::run_daemon`] and `siw-stream` start from it; `siwd --check` checks it and stops.
//! Only [`Prepared::claim_host`] and [`Prepared::start_dpdk`] change the host. Whatever a start refuses
//! is refused by [`Prepared::check_host`], [`Prepared::check_claims`] or [`Prepared::rehearse`], except
//! the properties of a NIC, which show only when it is taken over.

use std::path::PathBuf;
use std::sync::Arc;

use dpdk::{DriverTraits, Eal, EalConfig, IovaMode, Mempool, PciDevice};
use siw_host::netlink::RouteSocket;
use siw_ports::XdpInterface;

use crate::capture::check_writable;
use crate::config::{Config, DeviceConfig, EalLog, HugepagePolicy, IovaSetting, LinkSource};
use crate::control::client::socket::BoundSocket;
use crate::control::operator::operators::Operators;
use crate::device;
use crate::host::{self, HostClaim, HostError, LockUse};
use crate::resume_latency::{self, CORES_FOLDER, ResumeLatencyLimits};
use crate::start_error::StartError;
use crate::vhost_socket::{self, SocketState};

/// Memory in MiB that DPDK needs in addition to the packet buffers.
const EAL_OVERHEAD_MB: u32 = 32;
/// Maximum bytes that DPDK adds to each packet buffer.
const BUFFER_OVERHEAD: u64 = 256;
/// Bytes of an entry in the ring of free packet buffers, whose length is a power of two.
const POOL_ENTRY: u64 = 16;
/// Bytes of a normal page.
const PAGE: u64 = 4096;
/// Memory in MiB that [`Prepared::rehearse`] takes of the hugepages.
const REHEARSAL_MB: u32 = 8;
const REHEARSAL_BUFFERS: u32 = 64;
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
}

/// DPDK after its start. The pool is freed before the environment.
#[derive(Clone)]
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
    cores: Vec<HostClaim>,
    /// The claims of each device, in their order.
    pub devices: Vec<DeviceClaims>,
}

/// Locks of a device's NIC, interface or socket. Devices of different VLANs can share an interface.
pub type DeviceClaims = Vec<Arc<HostClaim>>;

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
            config,
        }
    }

    /// Compares this host with the resources that the configuration names, and changes nothing.
    pub fn check_host(&self) -> HostReport {
        let mut report = HostReport::default();
        report.add(host::check_cores(&self.cores));
        if self.config.workers.resume_latency_us.is_some() {
            report.add(resume_latency::check_access(
                CORES_FOLDER.as_ref(),
                &self.cores,
            ));
        }
        self.check_memory(&mut report);
        report.warnings.extend(host::swap_warning());
        report.add(host::check_file_limit(self.cores.len(), self.devices.len()));
        for config in &self.devices {
            self.check_device(config, &mut report);
        }
        report.add(look_up_operators(&self.config));
        if let Some(group) = &self.config.control.group {
            let found = host::find_group(group.get_ref());
            report.add(found.map_err(|reason| StartError::Socket {
                path: self.config.control.socket.display().to_string(),
                reason,
            }));
        }
        report
    }

    /// Checks the NIC or interface of a device.
    pub fn check_device(&self, config: &DeviceConfig, report: &mut HostReport) {
        let name = &config.name.get_ref().0;
        let in_device = |why: String| StartError::Device(format!("device {name}: {why}"));
        let nic = self.check_nic(config, &mut report.warnings);
        report.add(nic.map_err(in_device));
        let interface = check_interface(config);
        if let Ok(Some(interface)) = &interface {
            let advice = [advise_link(interface), advise_offloads(config, interface)];
            let advice = advice.into_iter().flatten();
            report
                .warnings
                .extend(advice.map(|text| format!("device {name}: {text}")));
        }
        report.add(interface.map_err(in_device));
        if let Some(interface) = &config.host_interface {
            let tap = siw_host::check_tap(&interface.get_ref().0);
            report.add(tap.map_err(|error| in_device(error.to_string())));
        }
    }

    /// Checks what a start changes or claims: the control socket, the capture file, and the locks of
    /// cores, NICs and interfaces. Changes nothing.
    pub fn check_claims(&self) -> HostReport {
        let mut report = HostReport::default();
        report.add(BoundSocket::check(&self.config.control));
        if let Some(capture) = &self.config.capture {
            report.add(check_writable(capture));
        }
        report.add(self.lock_cores(self.cores.len(), LockUse::Check));
        report.add(claim_devices(&self.devices, LockUse::Check));
        report
    }

    /// Starts DPDK as [`Prepared::start_dpdk`] does, and opens the devices as far as this has no
    /// effect on the machine. The process should end afterwards.
    ///
    /// # Errors
    /// A start would fail for this reason.
    pub fn rehearse(&self) -> Result<(), StartError> {
        let hugepages = self.decide_hugepages();
        // Creates devices.
        let is_device = |arg: &&String| arg.starts_with("--vd");
        let args = self.config.dpdk.eal_args.get_ref().iter();
        let eal = Eal::init(EalConfig {
            no_pci: true,
            pci_allow: Vec::new(),
            telemetry: false,
            extra_args: args.filter(|arg| !is_device(arg)).cloned().collect(),
            // Hugepages are counted, not taken from those who run.
            memory_mb: match hugepages {
                true => REHEARSAL_MB,
                false => self.memory_mb(false),
            },
            ..self.eal_config(hugepages)
        })?;
        let buffers = match hugepages {
            true => REHEARSAL_BUFFERS.min(self.config.dpdk.buffers),
            false => self.config.dpdk.buffers,
        };
        let pool = Mempool::new(&eal, "siwd", buffers, 0, self.buffer_room, None)?;
        device::rehearse_devices(&eal, &self.devices, &pool, self.cores.len())
            .map_err(StartError::Device)
    }

    /// Checks that the packet buffers fit into memory.
    fn check_memory(&self, report: &mut HostReport) {
        let policy = self.config.dpdk.hugepages;
        if policy == HugepagePolicy::Require {
            report.add(dpdk::check_free_hugepages(self.memory_mb(true)));
            return;
        }
        let shortage = self.hugepage_shortage();
        if policy == HugepagePolicy::Auto && shortage.is_none() {
            return;
        }
        if policy == HugepagePolicy::Auto {
            report.warnings.extend(shortage);
        }
        let needed_mb = u64::from(self.memory_mb(false));
        if let Some(available_mb) = host::available_memory_mb()
            && needed_mb > available_mb
        {
            let lack = HostError::TooLittleMemory {
                needed_mb,
                available_mb,
            };
            report.errors.push(lack.into());
        }
    }

    /// Checks that the NIC of a device exists and that DPDK can use it; warns if a worker is on
    /// another NUMA node.
    fn check_nic(&self, config: &DeviceConfig, warnings: &mut Vec<String>) -> Result<(), String> {
        let Some(address) = &config.pci else {
            return Ok(());
        };
        let address = &address.0;
        let Some(nic) = PciDevice::at_address(address) else {
            return Err(format!(
                "there is no PCI device {address}: `siwd devices` lists the existing ones"
            ));
        };
        if let Some(command) = nic.command_to_bind() {
            let driver = nic.driver.as_deref().unwrap_or("no driver");
            return Err(format!(
                "{address} is bound to {driver}, not to a user-space driver: {command}"
            ));
        }
        if self.config.dpdk.iova == IovaSetting::Va && nic.needs_physical_addresses() {
            return Err(format!(
                "{address} has no IOMMU, which iova = \"va\" in [dpdk] needs: use \"auto\", or turn the IOMMU on"
            ));
        }
        for core in &self.cores {
            let node = host::numa_node_of_core(*core);
            if let (Some(node), Some(of_nic)) = (node, nic.numa_node)
                && node != of_nic
            {
                warnings.push(format!(
                    "{address} is on NUMA node {of_nic}, core {core} on node {node}: each frame crosses between them; \
                     name cores of node {of_nic} in [workers] (lscpu -e lists them)"
                ));
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
        let claimed = self.lock_cores(workers, LockUse::Hold)?;
        let devices = claim_devices(&self.devices, LockUse::Hold)?;
        let limit = self.config.workers.resume_latency_us;
        let limits = limit
            .map(|limit| ResumeLatencyLimits::set(CORES_FOLDER.as_ref(), cores, limit))
            .transpose()?;
        Ok(ClaimedHost {
            limits,
            cores: claimed,
            devices,
        })
    }

    /// Takes the locks of the first `workers` cores.
    fn lock_cores(&self, workers: usize, purpose: LockUse) -> Result<Vec<HostClaim>, StartError> {
        let cores = self.cores.get(..workers).unwrap_or(&self.cores);
        let idle = self.config.workers.idle;
        Ok(host::claim_cores(
            &host::lock_folder(),
            cores,
            idle,
            purpose,
        )?)
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
        let uses_hugepages = self.config.dpdk.hugepages != HugepagePolicy::Never;
        // Two daemons that start together do not count the same pages.
        let lock = uses_hugepages.then(|| host::lock_hugepages(&host::lock_folder()));
        let hugepages = self.decide_hugepages();
        let eal = Eal::init(self.eal_config(hugepages))?;
        let (buffers, room) = (self.config.dpdk.buffers, self.buffer_room);
        let pool = Mempool::new(&eal, pool_name, buffers, cache, room, None)?;
        drop(lock);
        Ok(StartedDpdk {
            pool,
            eal,
            hugepages,
        })
    }

    fn eal_config(&self, hugepages: bool) -> EalConfig {
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
        EalConfig {
            hugepages,
            memory_mb: self.memory_mb(hugepages),
            no_pci: bus_devices.is_empty(),
            iova: self.decide_iova(),
            pci_allow: bus_devices,
            extra_args: self.config.dpdk.eal_args.get_ref().clone(),
            log_level: log_level.into(),
            telemetry: self.config.dpdk.telemetry,
            main_core: self.cores.first().copied().unwrap_or(0),
            ..EalConfig::default()
        }
    }

    /// Memory in MiB that DPDK is given. Without hugepages a packet buffer does not cross a page.
    pub fn memory_mb(&self, hugepages: bool) -> u32 {
        let buffer = u64::from(self.buffer_room) + u64::from(dpdk::HEADROOM) + BUFFER_OVERHEAD;
        let buffers = u64::from(self.config.dpdk.buffers);
        let bytes = match (hugepages, PAGE / buffer) {
            (true, _) => buffers * buffer,
            (false, 0) => buffers * buffer.next_multiple_of(PAGE),
            (false, in_page) => buffers.div_ceil(in_page) * PAGE,
        } + buffers * POOL_ENTRY;
        u32::try_from(bytes >> 20)
            .unwrap_or(u32::MAX)
            .saturating_add(EAL_OVERHEAD_MB)
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

    /// Decides whether hugepages are used.
    fn decide_hugepages(&self) -> bool {
        match self.config.dpdk.hugepages {
            HugepagePolicy::Never => false,
            HugepagePolicy::Require => true,
            HugepagePolicy::Auto => self.hugepage_shortage().is_none(),
        }
    }

    /// The warning about too few free hugepages; `None` if enough are free.
    fn hugepage_shortage(&self) -> Option<String> {
        let wanted_mb = self.memory_mb(true);
        let free = host::free_hugepage_bytes();
        (free < u64::from(wanted_mb) << 20).then(|| {
            format!(
                "{wanted_mb} MiB of hugepages are wanted, {} MiB are free: using normal pages, which is slower; \
                 reserve them with: echo {} > /proc/sys/vm/nr_hugepages",
                free >> 20,
                wanted_mb.div_ceil(2) + 64,
            )
        })
    }
}

/// Outcome of a check: obstacles of a start, and what a start would warn about.
#[derive(Debug, Default)]
pub struct HostReport {
    /// A start fails with the first of them.
    pub errors: Vec<StartError>,
    /// Texts for an administrator.
    pub warnings: Vec<String>,
}

impl HostReport {
    fn add<T, E: Into<StartError>>(&mut self, outcome: Result<T, E>) {
        self.errors.extend(outcome.err().map(Into::into));
    }

    /// Logs the warnings.
    ///
    /// # Errors
    /// The first obstacle.
    pub fn into_result(self) -> Result<(), StartError> {
        for warning in &self.warnings {
            tracing::warn!("{warning}");
        }
        self.errors.into_iter().next().map_or(Ok(()), Err)
    }
}

fn claim_devices(
    devices: &[DeviceConfig],
    purpose: LockUse,
) -> Result<Vec<DeviceClaims>, StartError> {
    let mut claims: Vec<DeviceClaims> = Vec::new();
    for device in devices {
        claims.push(claim_device(device, &claims, purpose)?);
    }
    Ok(claims)
}

/// Takes the locks of a device's NIC, interface or vhost socket, except those that this process has for
/// `others` already.
///
/// # Errors
/// Another process has one of them.
pub fn claim_device(
    config: &DeviceConfig,
    others: &[DeviceClaims],
    purpose: LockUse,
) -> Result<DeviceClaims, StartError> {
    let folder = host::lock_folder();
    let nic = config.pci.as_ref();
    let nic = nic.and_then(|address| PciDevice::at_address(&address.0));
    let mut claims = DeviceClaims::new();
    if let Some(nic) = nic {
        claims.push(host::claim_nic(&folder, &nic.address, purpose)?.into());
    }
    if let Some(interface) = own_interface(config) {
        let path = host::interface_lock(&folder, &interface);
        let mut held = others.iter().flatten();
        claims.push(match held.find(|claim| claim.is_at(&path)) {
            Some(shared) => shared.clone(),
            None => host::claim_interface(&folder, &interface, purpose)?.into(),
        });
    }
    if let Some(socket) = own_vhost_socket(config) {
        claims.push(host::claim_vhost_socket(&folder, &socket, purpose)?.into());
        match vhost_socket::look_at(&socket).map_err(HostError::ServedSocket)? {
            SocketState::Free | SocketState::Stale => {}
            SocketState::Served(pid) => {
                let why = vhost_socket::refuse(&socket, pid);
                return Err(HostError::ServedSocket(why).into());
            }
        }
    }
    Ok(claims)
}

/// The socket that a vhost device creates.
fn own_vhost_socket(config: &DeviceConfig) -> Option<PathBuf> {
    match config.link_source() {
        LinkSource::Vdev(devargs) => DriverTraits::own_socket_of(&devargs).map(PathBuf::from),
        _ => None,
    }
}

/// The interface of the kernel that a device uses or creates. A tap lets a second daemon attach to it.
fn own_interface(config: &DeviceConfig) -> Option<String> {
    match config.link_source() {
        LinkSource::Vdev(devargs) => DriverTraits::interface_of(&devargs).map(str::to_owned),
        _ => config.existing_interface(),
    }
}

/// Text about an interface that is down; `None` if it is up.
fn advise_link(interface: &XdpInterface) -> Option<String> {
    (!interface.is_up).then(|| {
        format!(
            "the interface `{}` is down, and no frame passes: ip link set {} up",
            interface.name, interface.name
        )
    })
}

/// Text about offloads of the kernel that would make the device drop frames of this machine; `None` if
/// there are none, or if they cannot be seen because the sender is in another network namespace.
fn advise_offloads(config: &DeviceConfig, interface: &XdpInterface) -> Option<String> {
    let peer = RouteSocket::open().and_then(|mut socket| socket.veth_peer_of(interface.index));
    let peer = peer.ok().flatten();
    if let Some(peer) = peer.and_then(|peer| XdpInterface::find_by_index(peer).ok())
        && let Ok(offloads) = peer.read_offloads()
        && (offloads.leaves_checksums || offloads.leaves_segmentation)
    {
        return Some(format!(
            "the other end of `{}`, `{}`, leaves checksums or segmentation to an offload, and siwd drops \
             such frames: ethtool -K {} tx off tso off gso off",
            interface.name, peer.name, peer.name
        ));
    }
    // AF_XDP takes frames before the kernel merges them.
    let is_merged = !matches!(config.link_source(), LinkSource::Xdp(_))
        && interface
            .read_offloads()
            .is_ok_and(|offloads| offloads.merges_segments);
    is_merged.then(|| {
        format!(
            "the kernel merges frames of `{}` (GRO), and siwd drops those that are longer than the MTU: \
             ethtool -K {} gro off lro off",
            interface.name, interface.name
        )
    })
}

/// Checks that the interface of a device exists and can carry its frames, and that a virtual device
/// has what it needs. Returns the interface, if the device uses one.
fn check_interface(config: &DeviceConfig) -> Result<Option<XdpInterface>, String> {
    if let LinkSource::Vdev(devargs) = config.link_source() {
        DriverTraits::check_requirements(&devargs)?;
    }
    let Some(name) = config.existing_interface() else {
        return Ok(None);
    };
    let interface = XdpInterface::find_by_name(&name).map_err(|error| error.to_string())?;
    let mtu = *config.mtu.get_ref();
    if matches!(config.link_source(), LinkSource::Xdp(_)) {
        interface
            .check_usable(config.vlan.is_some())
            .map_err(|error| error.to_string())?;
    }
    if u32::from(mtu) > interface.mtu {
        return Err(format!(
            "mtu {mtu}, but the interface `{name}` has {}: set mtu to that, or ip link set {name} mtu {mtu}",
            interface.mtu
        ));
    }
    Ok(Some(interface))
}

/// Looks up the users that may see the counters of all clients.
///
/// # Errors
/// The group does not exist.
pub fn look_up_operators(config: &Config) -> Result<Operators, StartError> {
    let group = config.control.operators.as_ref();
    let name = group.map(|group| group.get_ref().as_str());
    Operators::look_up(name).map_err(|reason| StartError::Socket {
        path: config.control.socket.display().to_string(),
        reason: format!("operators: {reason}"),
    })
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
        assert!(few.memory_mb(true) > EAL_OVERHEAD_MB && many.memory_mb(true) > 64 * 2);
        assert_eq!(few.buffer_room, 2048);
        assert_eq!(few.device_names(), ["siw0", "siw1"]);
        assert_eq!(few.cores.len(), 1);
        few.check_host().into_result().unwrap();
        // One buffer of 2 KiB a page, beside the ring of free buffers.
        assert!(many.memory_mb(false) >= (65_536 * 4096) >> 20);
    }

    #[test]
    fn the_host_check_names_what_is_missing() {
        let cores = "[workers]\ncores = [100000]\n[dpdk]\nhugepages = \"never\"";
        let error = prepared(cores)
            .check_host()
            .into_result()
            .unwrap_err()
            .to_string();
        assert!(error.contains("core 100000"), "{error}");
        let group = "[control]\ngroup = \"no-such-group\"\n[dpdk]\nhugepages = \"never\"";
        let error = prepared(group)
            .check_host()
            .into_result()
            .unwrap_err()
            .to_string();
        assert!(error.contains("groupadd no-such-group"), "{error}");
        let memory = "[dpdk]\nhugepages = \"require\"\nbuffers = 4000000000";
        let error = prepared(memory)
            .check_host()
            .into_result()
            .unwrap_err()
            .to_string();
        assert!(error.contains("not enough hugepages"), "{error}");
    }
}
