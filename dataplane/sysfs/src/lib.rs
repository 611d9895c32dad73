//! Files like those of /sys/class/infiniband and /dev/infiniband, in a folder next to the control
//! socket, from which programs read the attributes of a device. The drop-in libibverbs names the
//! folder to programs, and the library that `siwrun` preloads redirects hard-wired paths to it.
//!
//! ```text
//! SOCKET.sysfs/devices/siwd/siw0.5:00.0/infiniband/siw0/ports/1/...
//!                                      /infiniband_verbs/uverbs0/...
//!                                      /net/siw0/...
//!             /class/infiniband/siw0 -> ../../devices/siwd/siw0.5:00.0/infiniband/siw0
//!             /class/infiniband_verbs/uverbs0 -> ...
//!             /dev/infiniband/uverbs0 -> /dev/null
//!             /personas/roce/...
//! ```
//!
//! Below `personas` are trees of the same form, one for each persona that a program may want for all devices
//! (`siwrun --persona`); the files above have the persona of the device's configuration. Files that change with
//! the link, and counters, are links to those above.
//!
//! The daemon gives plain values ([`Device`], [`PortCounters`]); nothing here knows its workers or its control
//! thread. File systems can be slow: [`DeviceWriter`] and [`CounterWriter`] are for other threads.
//!
//! Programs find a device by the links of `class`, which are made last: they see all of its files, with the
//! counters. Its folder ends in a number of its own, so counters of an earlier device of the name cannot get
//! into it.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

use std::fs::{DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv6Addr};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use siw_shm::control::messages::MAX_ADDRESSES;
use siw_shm::device_identity::{
    GidTable, interface_index, ip_of_gid, link_rate, node_guid, persona_tree_of, sysfs_tree_of,
};
use siw_shm::persona::Persona;

/// Longest GID table: new addresses fill holes first.
const MOST_GIDS: usize = MAX_ADDRESSES + 1;
/// Unit of `port_rcv_data` and `port_xmit_data`.
const OCTETS_PER_UNIT: u64 = 4;
/// Version of the kernel's verbs interface that the classes represent.
const VERBS_ABI: &str = "6";

/// Attributes of a device.
#[derive(Debug, Clone)]
pub struct Device {
    /// Name, such as `siw0`.
    pub name: String,
    /// Index in the daemon's list of devices.
    pub index: usize,
    /// Number that no other device of the daemon has, not even an earlier one of the same name and index.
    pub instance: u64,
    /// Name of its driver.
    pub driver: String,
    /// Ethernet address.
    pub mac: [u8; 6],
    /// Kind of device in the tree for all programs.
    pub persona: Persona,
    /// IP addresses.
    pub addresses: Vec<IpAddr>,
    /// GIDs of these addresses and of the Ethernet address.
    pub gids: GidTable,
    /// Largest IP packet, in bytes.
    pub mtu: u16,
    /// The link is up.
    pub link_up: bool,
    /// Link speed in Mb/s; 0 if unknown.
    pub link_mbps: u32,
    /// Number of times that the link went down.
    pub link_downs: u64,
}

/// The tree of a running daemon, removed when this is dropped.
pub struct SysfsTree {
    root: PathBuf,
    has_counters: bool,
}

/// The folder of a device, or of a part of it.
struct Folder(PathBuf);

impl Folder {
    /// Creates the folder, readable for all regardless of the umask.
    fn make(path: PathBuf) -> io::Result<Folder> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&path)?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o755))?;
        Ok(Folder(path))
    }

    /// Creates a folder in this one, and the folders in between.
    fn folder(&self, name: &str) -> io::Result<Folder> {
        let mut path = self.0.clone();
        for part in name.split('/') {
            path = Folder::make(path.join(part))?.0;
        }
        Ok(Folder(path))
    }

    /// Writes a line of text, readable for all. A reader sees the old line or the new one.
    fn write_line(&self, name: &str, text: &str) -> io::Result<()> {
        let temporary = self.0.join(format!(".{name}.new"));
        write_readable(&temporary, &self.0.join(name), text)
    }

    fn write_lines(&self, lines: &[(&str, &str)]) -> io::Result<()> {
        lines
            .iter()
            .try_for_each(|(name, text)| self.write_line(name, text))
    }

    fn link(&self, name: &str, target: &str) -> io::Result<()> {
        symlink(target, self.0.join(name))
    }
}

/// Writes a line of text to `temporary`, readable for all, and renames it to `path`.
fn write_readable(temporary: &Path, path: &Path, text: &str) -> io::Result<()> {
    std::fs::write(temporary, format!("{text}\n"))?;
    std::fs::set_permissions(temporary, Permissions::from_mode(0o444))?;
    std::fs::rename(temporary, path)
}

/// Four groups of four hexadecimal digits.
fn guid_text(guid: [u8; 8]) -> String {
    let groups: Vec<String> = guid
        .chunks(2)
        .map(|pair| pair.iter().map(|octet| format!("{octet:02x}")).collect())
        .collect();
    groups.join(":")
}

/// Eight groups of four hexadecimal digits.
fn gid_text(raw: [u8; 16]) -> String {
    let groups = Ipv6Addr::from(raw).segments();
    groups.map(|group| format!("{group:04x}")).join(":")
}

fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|octet| format!("{octet:02x}")).join(":")
}

/// One of the trees with the files of all devices.
#[derive(Clone, Copy)]
enum Tree {
    /// Devices have the personas of the configuration.
    Main,
    /// All devices have this persona.
    OfPersona(Persona),
}

impl Tree {
    /// All trees; the main one is first, because the others link to its files.
    fn all() -> impl Iterator<Item = Tree> {
        let others = Persona::ALL.into_iter().map(Tree::OfPersona);
        [Tree::Main].into_iter().chain(others)
    }

    /// Its folder; `main` is that of the main tree.
    fn root(self, main: &Path) -> PathBuf {
        match self {
            Tree::Main => main.to_owned(),
            Tree::OfPersona(persona) => persona_tree_of(main, persona),
        }
    }

    /// The persona of a device in it.
    fn persona_of(self, device: &Device) -> Persona {
        match self {
            Tree::Main => device.persona,
            Tree::OfPersona(persona) => persona,
        }
    }
}

/// The folder of a device, below the tree's. Programs compare these paths to find the ports of one card: NCCL
/// replaces the last character and two before it, which are zeros here as in the addresses of PCI functions.
fn device_folder(name: &str, instance: u64) -> String {
    format!("devices/siwd/{name}.{instance}:00.0")
}

/// The folder of a device's port.
fn port_folder(root: &Path, name: &str, instance: u64) -> PathBuf {
    let device = root.join(device_folder(name, instance));
    device.join(format!("infiniband/{name}/ports/1"))
}

/// Writes the attributes that change with the link.
fn write_link(port: &Folder, device: &Device) -> io::Result<()> {
    let (state, phys_state) = match device.link_up {
        true => ("4: ACTIVE", "5: LinkUp"),
        false => ("1: DOWN", "3: Disabled"),
    };
    port.write_lines(&[
        ("state", state),
        ("phys_state", phys_state),
        ("rate", &link_rate(device.link_mbps).to_text()),
    ])
}

/// Files of a port that change with the link, and folders of its counters.
const CHANGING_FILES: [&str; 3] = ["state", "phys_state", "rate"];
const COUNTER_FOLDERS: [&str; 2] = ["counters", "hw_counters"];

/// Links from the port of a persona's tree to files of the main tree.
fn link_changing_files(port: &Folder, device: &Device, has_counters: bool) -> io::Result<()> {
    let target = port_folder(Path::new(""), &device.name, device.instance);
    // The trees of personas are two folders below the main one.
    let steps = target.components().count() + 2;
    let target = Path::new(&"../".repeat(steps)).join(target);
    let counters = COUNTER_FOLDERS.iter().filter(|_| has_counters);
    for name in CHANGING_FILES.iter().chain(counters) {
        port.link(name, &target.join(name).to_string_lossy())?;
    }
    Ok(())
}

fn write_port(port: &Folder, device: &Device, persona: Persona) -> io::Result<()> {
    port.write_lines(&[
        ("link_layer", persona.link_layer().text()),
        ("lid_mask_count", "0"),
        ("sm_sl", "0"),
        (
            "cap_mask",
            &format!("{:#010x}", persona.port_capabilities()),
        ),
    ])?;
    // iWARP has no partitions: only the default one is shown.
    port.folder("pkeys")?.write_line("0", "0xffff")?;
    write_addresses(port, device, persona)
}

/// Writes LID and GIDs of a port, and removes GIDs beyond its table. A hole has a GID of zeros, as under
/// Linux, and neither type nor interface.
fn write_addresses(port: &Folder, device: &Device, persona: Persona) -> io::Result<()> {
    let lid = persona.lid(device.addresses.iter().copied());
    let lid = format!("{lid:#x}");
    port.write_lines(&[("lid", &lid), ("sm_lid", &lid)])?;
    let (gids, types, interfaces) = (
        port.folder("gids")?,
        port.folder("gid_attrs/types")?,
        port.folder("gid_attrs/ndevs")?,
    );
    let entries = device.gids.entries();
    for (index, entry) in entries.iter().enumerate() {
        let index = index.to_string();
        let shown = entry.filter(|raw| persona.shows_gid(*raw, device.mac));
        let Some(raw) = shown else {
            for folder in [&types, &interfaces] {
                ignore_missing(std::fs::remove_file(folder.0.join(&index)))?;
            }
            gids.write_line(&index, &gid_text([0; 16]))?;
            continue;
        };
        let kind = match ip_of_gid(raw) {
            Some(_) if persona.has_roce_gids() => "RoCE v2",
            _ => "IB/RoCE v1",
        };
        gids.write_line(&index, &gid_text(raw))?;
        types.write_line(&index, kind)?;
        if persona.has_roce_gids() {
            interfaces.write_line(&index, &device.name)?;
        }
    }
    for folder in [&gids, &types, &interfaces] {
        for index in entries.len()..MOST_GIDS {
            ignore_missing(std::fs::remove_file(folder.0.join(index.to_string())))?;
        }
    }
    Ok(())
}

/// Writes the files of a device, and then links to them, in all trees.
fn write_device(main: &Folder, device: &Device, has_counters: bool) -> io::Result<()> {
    for tree in Tree::all() {
        let root = Folder::make(tree.root(&main.0))?;
        write_device_in(&root, tree, device, has_counters)?;
    }
    Ok(())
}

fn write_device_in(
    root: &Folder,
    tree: Tree,
    device: &Device,
    has_counters: bool,
) -> io::Result<()> {
    let persona = tree.persona_of(device);
    let name = device.name.as_str();
    let uverbs = format!("uverbs{}", device.index);
    let folder = device_folder(name, device.instance);
    let parent = root.folder(&folder)?;
    // The vendor is that of the Ethernet address, as in ibv_query_device(3).
    let [first, second, third, ..] = device.mac;
    parent.write_lines(&[
        ("numa_node", "-1"),
        ("vendor", &format!("0x{first:02x}{second:02x}{third:02x}")),
        ("device", "0x0000"),
        ("uevent", "DRIVER=siwd"),
    ])?;

    let rdma = parent.folder(&format!("infiniband/{name}"))?;
    let guid = guid_text(node_guid(device.mac));
    rdma.write_lines(&[
        ("node_guid", &guid),
        ("sys_image_guid", &guid),
        ("fw_ver", env!("CARGO_PKG_VERSION")),
        ("hca_type", "siwd"),
        ("board_id", &format!("siwd-{}", device.driver)),
        ("node_type", persona.node_type_text()),
        ("node_desc", &format!("siwd {name}")),
    ])?;
    rdma.link("device", "../..")?;
    let port = rdma.folder("ports/1")?;
    write_port(&port, device, persona)?;
    match tree {
        Tree::Main => {
            write_link(&port, device)?;
            if has_counters {
                write_first_counters(&port, &parent, device)?;
            }
        }
        Tree::OfPersona(_) => link_changing_files(&port, device, has_counters)?,
    }

    let verbs = parent.folder(&format!("infiniband_verbs/{uverbs}"))?;
    verbs.write_lines(&[("ibdev", name), ("abi_version", "1")])?;
    verbs.link("device", "../..")?;

    let net = parent.folder(&format!("net/{name}"))?;
    net.write_lines(&[
        ("address", &mac_text(device.mac)),
        ("addr_len", "6"),
        ("mtu", &device.mtu.to_string()),
        ("ifindex", &interface_index(device.index as u32).to_string()),
        // ARPHRD_ETHER.
        ("type", "1"),
        ("dev_id", "0x0"),
        ("dev_port", "0"),
    ])?;
    net.link("device", "../..")?;

    // A character device that anyone may open; programs require nothing else of it.
    root.folder("dev/infiniband")?.link(&uverbs, "/dev/null")?;
    root.folder("class/infiniband")?
        .link(name, &format!("../../{folder}/infiniband/{name}"))?;
    root.folder("class/infiniband_verbs")?.link(
        &uverbs,
        &format!("../../{folder}/infiniband_verbs/{uverbs}"),
    )
}

/// Writes the counters of a new device, whose workers have counted nothing yet.
fn write_first_counters(port: &Folder, parent: &Folder, device: &Device) -> io::Result<()> {
    for name in COUNTER_FOLDERS {
        port.folder(name)?;
    }
    let counters = PortCounters {
        link_downs: device.link_downs,
        ..PortCounters::default()
    };
    counters.write(&port.0, &parent.0.join(".counter.new"))
}

fn write_tree(root: &Folder, devices: &[Device], has_counters: bool) -> io::Result<()> {
    root.folder("personas")?;
    for tree in Tree::all() {
        let root = Folder::make(tree.root(&root.0))?;
        let verbs = root.folder("class/infiniband_verbs")?;
        verbs.write_line("abi_version", VERBS_ABI)?;
        root.folder("dev/infiniband")?
            .link("rdma_cm", "/dev/null")?;
    }
    devices
        .iter()
        .try_for_each(|device| write_device(root, device, has_counters))
}

fn remove(path: &Path) -> io::Result<()> {
    ignore_missing(std::fs::remove_dir_all(path))
}

/// Removes the files of a device from all trees, the links to them first.
fn remove_device(main: &Path, device: &Device) -> io::Result<()> {
    let mut roots = Tree::all().map(|tree| tree.root(main));
    roots.try_for_each(|root| remove_device_in(&root, device))
}

fn remove_device_in(root: &Path, device: &Device) -> io::Result<()> {
    let (name, index) = (&device.name, device.index);
    for link in [
        format!("class/infiniband/{name}"),
        format!("class/infiniband_verbs/uverbs{index}"),
        format!("dev/infiniband/uverbs{index}"),
    ] {
        ignore_missing(std::fs::remove_file(root.join(link)))?;
    }
    // Elsewhere, nothing is written into the folder while its files are removed.
    let aside = root.join(format!(".removed.{}", device.instance));
    let folder = root.join(device_folder(name, device.instance));
    ignore_missing(std::fs::rename(folder, &aside))?;
    remove(&aside)
}

/// Outcome of a removal; a missing file is as good as a removed one.
fn ignore_missing(outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl SysfsTree {
    /// Writes the tree of these devices for a socket, with files of their counters if `has_counters`, and
    /// replaces one that a killed daemon left.
    ///
    /// # Errors
    /// The tree cannot be written; nothing is left of it.
    pub fn write(socket: &Path, devices: &[Device], has_counters: bool) -> io::Result<SysfsTree> {
        let root = sysfs_tree_of(socket);
        let mut unfinished = root.clone().into_os_string();
        unfinished.push(".new");
        let unfinished = PathBuf::from(unfinished);
        // Both belong to this daemon alone, which holds the socket's lock.
        remove(&unfinished)?;
        remove(&root)?;
        let written = Folder::make(unfinished.clone())
            .and_then(|folder| write_tree(&folder, devices, has_counters))
            .and_then(|()| std::fs::rename(&unfinished, &root));
        if let Err(error) = written {
            let _ = remove(&unfinished);
            return Err(error);
        }
        Ok(SysfsTree { root, has_counters })
    }

    /// A writer of the files of further devices.
    pub fn device_writer(&self) -> DeviceWriter {
        DeviceWriter {
            root: self.root.clone(),
            has_counters: self.has_counters,
        }
    }

    /// Removes the files of a device.
    pub fn remove_device(&self, device: &Device) {
        if let Err(error) = remove_device(&self.root, device) {
            tracing::warn!(device = %device.name, "{}: {error}", self.root.display());
        }
    }

    /// A writer of the counters of all devices.
    pub fn counter_writer(&self) -> CounterWriter {
        CounterWriter {
            root: self.root.clone(),
        }
    }

    /// Writes LID and GIDs of a device's port again.
    pub fn update_addresses(&self, device: &Device) {
        for tree in Tree::all() {
            let root = tree.root(&self.root);
            let port = Folder(port_folder(&root, &device.name, device.instance));
            if let Err(error) = write_addresses(&port, device, tree.persona_of(device)) {
                tracing::warn!(device = %device.name, "{}: {error}", port.0.display());
            }
        }
    }

    /// Writes the state of a device's port again.
    pub fn update_link(&self, device: &Device) {
        let port = Folder(port_folder(&self.root, &device.name, device.instance));
        if let Err(error) = write_link(&port, device) {
            tracing::warn!(device = %device.name, "{}: {error}", port.0.display());
        }
    }
}

/// Writes the files of devices that are added to a running daemon.
#[derive(Clone)]
pub struct DeviceWriter {
    root: PathBuf,
    has_counters: bool,
}

impl DeviceWriter {
    /// Writes the files of a device.
    ///
    /// # Errors
    /// A file cannot be written; nothing is left of them.
    pub fn add_device(&self, device: &Device) -> io::Result<()> {
        // Links that could not be removed with an earlier device.
        remove_device(&self.root, device)?;
        let root = Folder(self.root.clone());
        let written = write_device(&root, device, self.has_counters);
        if written.is_err() {
            let _ = remove_device(&self.root, device);
        }
        written
    }
}

/// Counters of a port since its start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Octets received in TCP segments.
    pub octets_received: u64,
    /// Octets sent in TCP segments.
    pub octets_sent: u64,
    /// TCP segments received.
    pub segments_received: u64,
    /// TCP segments sent.
    pub segments_sent: u64,
    /// Frames received with errors.
    pub receive_errors: u64,
    /// Frames that were not sent.
    pub send_discards: u64,
    /// Frames received.
    pub frames_received: u64,
    /// Frames sent.
    pub frames_sent: u64,
    /// Those of the frames received that were multicast or broadcast.
    pub group_frames_received: u64,
    /// Those of the frames sent that were multicast or broadcast.
    pub group_frames_sent: u64,
    /// Number of times that the link went down.
    pub link_downs: u64,
    /// `TcpOutSegs` of RFC 4022: without retransmissions.
    pub tcp_out_segs: u64,
    /// `TcpRetransSegs` of RFC 4022.
    pub tcp_retrans_segs: u64,
}

/// Counters of the port of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceCounters {
    /// Name of the device.
    pub name: String,
    /// [`Device::instance`]
    pub instance: u64,
    /// Its counters.
    pub counters: PortCounters,
}

impl PortCounters {
    /// The files below the port's folder, with their values.
    ///
    /// The names in `counters` are those of every RDMA driver of Linux, where `port_rcv_data` and
    /// `port_xmit_data` count units of four octets
    /// (Documentation/ABI/stable/sysfs-class-infiniband), and the counters of unicast and multicast count
    /// frames; multicast includes broadcast. In `hw_counters`, `rcvd_pkts`, `sent_pkts` and `link_downed`
    /// are names of rxe, the others of irdma.
    fn files(&self) -> [(&'static str, u64); 17] {
        let unicast_received = self
            .frames_received
            .saturating_sub(self.group_frames_received);
        let unicast_sent = self.frames_sent.saturating_sub(self.group_frames_sent);
        [
            (
                "counters/port_rcv_data",
                self.octets_received / OCTETS_PER_UNIT,
            ),
            (
                "counters/port_xmit_data",
                self.octets_sent / OCTETS_PER_UNIT,
            ),
            ("counters/port_rcv_packets", self.segments_received),
            ("counters/port_xmit_packets", self.segments_sent),
            ("counters/port_rcv_errors", self.receive_errors),
            ("counters/port_xmit_discards", self.send_discards),
            ("counters/unicast_rcv_packets", unicast_received),
            ("counters/multicast_rcv_packets", self.group_frames_received),
            ("counters/unicast_xmit_packets", unicast_sent),
            ("counters/multicast_xmit_packets", self.group_frames_sent),
            ("counters/link_downed", self.link_downs),
            ("hw_counters/link_downed", self.link_downs),
            ("hw_counters/rcvd_pkts", self.frames_received),
            ("hw_counters/sent_pkts", self.frames_sent),
            ("hw_counters/tcpInSegs", self.segments_received),
            ("hw_counters/tcpOutSegs", self.tcp_out_segs),
            ("hw_counters/tcpRetransSegs", self.tcp_retrans_segs),
        ]
    }

    /// Writes them into the folders of a port, each to `unfinished` first: programs read all files of a
    /// folder of counters.
    fn write(&self, port: &Path, unfinished: &Path) -> io::Result<()> {
        self.files().iter().try_for_each(|(name, value)| {
            write_readable(unfinished, &port.join(name), &value.to_string())
        })
    }
}

/// Writes the counters of devices into the tree.
pub struct CounterWriter {
    root: PathBuf,
}

impl CounterWriter {
    /// Writes the counters. A reader sees the old value or the new one of each file.
    pub fn write(&self, ports: &[DeviceCounters]) {
        for port in ports {
            let folder = port_folder(&self.root, &port.name, port.instance);
            // The folder is missing if the device has been removed meanwhile.
            let written = port
                .counters
                .write(&folder, &self.root.join(".counter.new"));
            let written = ignore_missing(written);
            if let Err(error) = written {
                tracing::warn!(device = %port.name, "counters cannot be written: {error}");
            }
        }
    }
}

impl Drop for SysfsTree {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.root) {
            tracing::warn!("{} could not be removed: {error}", self.root.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, index: usize) -> Device {
        let (mac, address) = ([2, 0, 0, 0, 0, 1], "10.77.0.1".parse().unwrap());
        Device {
            name: name.into(),
            index,
            instance: 5,
            driver: "net_ring".into(),
            mac,
            persona: Persona::Iwarp,
            addresses: vec![address],
            gids: GidTable::new(mac, [address]),
            mtu: 1500,
            link_up: true,
            link_mbps: 10_000,
            link_downs: 0,
        }
    }

    #[test]
    fn the_files_follow_the_devices_and_go_with_the_tree() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("siwd.sock");
        let tree = SysfsTree::write(&socket, &[device("siw0", 0)], true).unwrap();
        let root = sysfs_tree_of(&socket);
        let read = |name: &str, file: &str| {
            let port = root.join(format!("class/infiniband/{name}/ports/1"));
            std::fs::read_to_string(port.join(file)).map(|text| text.trim().to_owned())
        };
        assert_eq!(read("siw0", "state").unwrap(), "4: ACTIVE");
        let mut down = device("siw0", 0);
        down.link_up = false;
        tree.update_link(&down);
        assert_eq!(read("siw0", "state").unwrap(), "1: DOWN");

        let second = device("siw1", 1);
        tree.device_writer().add_device(&second).unwrap();
        let counters = PortCounters {
            octets_received: 4000,
            frames_sent: 9,
            group_frames_sent: 2,
            ..PortCounters::default()
        };
        let (name, instance) = (second.name.clone(), second.instance);
        tree.counter_writer().write(&[DeviceCounters {
            name,
            instance,
            counters,
        }]);
        assert_eq!(read("siw1", "counters/port_rcv_data").unwrap(), "1000");
        assert_eq!(read("siw1", "counters/unicast_xmit_packets").unwrap(), "7");
        assert_eq!(read("siw0", "counters/port_rcv_data").unwrap(), "0");
        tree.remove_device(&second);
        assert!(read("siw1", "state").is_err());
        drop(tree);
        assert!(!root.exists());
    }
}
