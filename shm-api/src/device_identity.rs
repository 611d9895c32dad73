//! Verbs identity of a device, derived from siwd's configuration. The drop-in libibverbs answers
//! queries from it, and siwd writes it into files (`dataplane/sysfs/src/lib.rs`), so both agree.

use crate::persona::Persona;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

/// A GID in wire order.
pub type RawGid = [u8; 16];

/// The GUID of a node: the EUI-64 of its Ethernet address, in wire order.
#[must_use]
pub const fn node_guid(mac: [u8; 6]) -> [u8; 8] {
    let [first, second, third, fourth, fifth, sixth] = mac;
    [first ^ 2, second, third, 0xff, 0xfe, fourth, fifth, sixth]
}

/// GID of an IP address; IPv4 addresses become IPv4-mapped IPv6 addresses, as with RoCE v2.
#[must_use]
pub const fn gid_of_ip(ip: IpAddr) -> RawGid {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The IP address of a GID, unless the GID is a Linux-style Ethernet address.
#[must_use]
pub fn ip_of_gid(raw: RawGid) -> Option<IpAddr> {
    let is_ethernet = raw[6..].iter().all(|octet| *octet == 0);
    (!is_ethernet).then(|| Ipv6Addr::from(raw).to_canonical())
}

/// The GID that Linux assigns to iWARP devices: the Ethernet address.
#[must_use]
pub fn gid_of_mac(mac: [u8; 6]) -> RawGid {
    let mut raw = [0; 16];
    raw[..6].copy_from_slice(&mac);
    raw
}

/// GIDs of a device by index: at first those of its IP addresses, followed by that of its Ethernet
/// address. As under Linux, an entry keeps its index as long as it exists and leaves a hole, which the
/// next new address fills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidTable(Vec<Option<RawGid>>);

impl GidTable {
    /// The table of a device that starts.
    pub fn new(mac: [u8; 6], ips: impl IntoIterator<Item = IpAddr>) -> GidTable {
        let of_ips = ips.into_iter().map(gid_of_ip);
        let all = of_ips.chain([gid_of_mac(mac)]);
        GidTable(all.map(Some).collect())
    }

    /// Follows a change of the device's IP addresses.
    pub fn set_addresses(&mut self, ips: impl IntoIterator<Item = IpAddr>) {
        let wanted: Vec<RawGid> = ips.into_iter().map(gid_of_ip).collect();
        for entry in &mut self.0 {
            let is_removed = |raw: &RawGid| ip_of_gid(*raw).is_some() && !wanted.contains(raw);
            if entry.as_ref().is_some_and(is_removed) {
                *entry = None;
            }
        }
        for raw in wanted {
            if self.index_of(raw).is_some() {
                continue;
            }
            match self.0.iter_mut().find(|entry| entry.is_none()) {
                Some(hole) => *hole = Some(raw),
                None => self.0.push(Some(raw)),
            }
        }
        while self.0.last().is_some_and(Option::is_none) {
            self.0.pop();
        }
    }

    /// Puts a GID at an index, for a table that is received entry by entry; see also [`Self::empty`].
    pub fn place(&mut self, index: u8, raw: RawGid) {
        let index = usize::from(index);
        if self.0.len() <= index {
            self.0.resize(index + 1, None);
        }
        self.0[index] = Some(raw);
    }

    /// A table without entries.
    #[must_use]
    pub const fn empty() -> GidTable {
        GidTable(Vec::new())
    }

    /// The entries by index; `None` is a hole.
    #[must_use]
    pub fn entries(&self) -> &[Option<RawGid>] {
        &self.0
    }

    /// The index of a GID.
    #[must_use]
    pub fn index_of(&self, raw: RawGid) -> Option<usize> {
        self.0.iter().position(|entry| *entry == Some(raw))
    }
}

/// Link speed in InfiniBand terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkRate {
    /// `active_speed`: the speed of one lane.
    pub speed: u8,
    /// `active_width`: 1 for one lane, 2 for four.
    pub width: u8,
    /// Name of this lane speed.
    pub name: &'static str,
    /// Mb/s of all lanes together.
    pub mbps: u32,
}

/// All reported rates, fastest first.
const LINK_RATES: [LinkRate; 9] = {
    const fn rate(mbps: u32, speed: u8, width: u8, name: &'static str) -> LinkRate {
        LinkRate {
            speed,
            width,
            name,
            mbps,
        }
    }
    [
        rate(400_000, 128, 2, "NDR"),
        rate(200_000, 64, 2, "HDR"),
        rate(100_000, 32, 2, "EDR"),
        rate(50_000, 64, 1, "HDR"),
        rate(40_000, 4, 2, "QDR"),
        rate(25_000, 32, 1, "EDR"),
        rate(10_000, 4, 1, "QDR"),
        rate(5_000, 2, 1, "DDR"),
        rate(2_500, 1, 1, "SDR"),
    ]
};

/// The rate of a link, rounded down to a reported rate; at least the slowest reported rate, which also
/// stands for an unknown speed (0), as in the kernel (`ib_get_eth_speed`): InfiniBand has no value for it.
#[must_use]
pub fn link_rate(mbps: u32) -> LinkRate {
    let found = LINK_RATES.iter().find(|rate| rate.mbps <= mbps);
    *found.unwrap_or(&LINK_RATES[LINK_RATES.len() - 1])
}

impl LinkRate {
    /// Formats the rate like the kernel: `40 Gb/sec (4X QDR)`.
    #[must_use]
    pub fn to_text(self) -> String {
        let lanes = if self.width == 1 { 1 } else { 4 };
        let gigabits = f64::from(self.mbps) / 1000.0;
        format!("{gigabits} Gb/sec ({lanes}X {})", self.name)
    }
}

/// The directory that siwd writes next to its socket, with files like those in /sys and
/// /dev/infiniband.
#[must_use]
pub fn sysfs_tree_of(socket: &Path) -> PathBuf {
    let mut name = OsString::from(socket);
    name.push(".sysfs");
    name.into()
}

/// The folder below [`sysfs_tree_of`] with the same files under a persona that a program wants for all devices.
#[must_use]
pub fn persona_tree_of(tree: &Path, persona: Persona) -> PathBuf {
    tree.join("personas").join(persona.name())
}

/// Network interface number that represents a device, by the device's index; outside the range that
/// the kernel reaches.
#[must_use]
pub const fn interface_index(device: u32) -> u32 {
    const FIRST: u32 = 0x5157_0000;
    FIRST + device
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_are_the_addresses_and_then_the_mac() {
        let mac = [2, 0, 0, 1, 2, 3];
        let ips: [IpAddr; 2] = ["10.77.0.1".parse().unwrap(), "fd77::1".parse().unwrap()];
        let table = GidTable::new(mac, ips);
        let gids: Vec<RawGid> = table.entries().iter().copied().flatten().collect();
        assert_eq!(gids.len(), 3);
        assert_eq!(gids[0][10..], [0xff, 0xff, 10, 77, 0, 1]);
        assert_eq!(ip_of_gid(gids[0]), Some(ips[0]));
        assert_eq!(ip_of_gid(gids[1]), Some(ips[1]));
        assert_eq!(ip_of_gid(gids[2]), None);
        assert_eq!(node_guid(mac), [0, 0, 0, 0xff, 0xfe, 1, 2, 3]);
    }

    #[test]
    fn a_gid_keeps_its_index_and_leaves_a_hole() {
        let mac = [2, 0, 0, 1, 2, 3];
        let ips = ["10.77.0.1", "fd77::1", "10.77.0.9", "10.77.0.8"];
        let [first, second, third, fourth]: [IpAddr; 4] = ips.map(|ip| ip.parse().unwrap());
        let mut table = GidTable::new(mac, [first, second]);
        table.set_addresses([first, second, third]);
        let index = |table: &GidTable, ip| table.index_of(gid_of_ip(ip));
        assert_eq!(index(&table, third), Some(3));
        table.set_addresses([second, third]);
        assert_eq!(table.entries()[0], None);
        assert_eq!(index(&table, second), Some(1));
        assert_eq!(table.index_of(gid_of_mac(mac)), Some(2));
        table.set_addresses([second, third, fourth]);
        assert_eq!(index(&table, fourth), Some(0));
        table.set_addresses([second, fourth]);
        assert_eq!(table.entries().len(), 3);
        let mut received = GidTable::empty();
        for (index, raw) in table.entries().iter().enumerate().rev() {
            received.place(index as u8, raw.unwrap());
        }
        assert_eq!(received, table);
    }

    #[test]
    fn links_have_the_rate_just_below_their_speed() {
        assert_eq!(link_rate(99_999).to_text(), "50 Gb/sec (1X HDR)");
        assert_eq!(link_rate(100_000).to_text(), "100 Gb/sec (4X EDR)");
        assert_eq!(link_rate(0).to_text(), "2.5 Gb/sec (1X SDR)");
    }
}
