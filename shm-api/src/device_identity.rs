//! What verbs shows of a device, derived from what siwd knows of it. The drop-in libibverbs answers
//! queries by it, and siwd writes it into files (`dataplane/src/sysfs_tree.rs`); both have to agree.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

/// A GID, as on the wire.
pub type RawGid = [u8; 16];

/// The GUID of a node: the EUI-64 of its Ethernet address, in the order of the wire.
#[must_use]
pub const fn node_guid(mac: [u8; 6]) -> [u8; 8] {
    let [first, second, third, fourth, fifth, sixth] = mac;
    [first ^ 2, second, third, 0xff, 0xfe, fourth, fifth, sixth]
}

/// IPv4 addresses as IPv4-mapped IPv6 addresses, as with RoCE v2.
#[must_use]
pub const fn gid_of_ip(ip: IpAddr) -> RawGid {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The address that a GID stands for, if it is no Ethernet address of Linux's kind.
#[must_use]
pub fn ip_of_gid(raw: RawGid) -> Option<IpAddr> {
    let is_ethernet = raw[6..].iter().all(|octet| *octet == 0);
    (!is_ethernet).then(|| Ipv6Addr::from(raw).to_canonical())
}

/// All GIDs of a device, by index: its IP addresses, and last the GID that Linux gives to iWARP
/// devices, which is the Ethernet address.
pub fn gid_table(mac: [u8; 6], ips: impl IntoIterator<Item = IpAddr>) -> Vec<RawGid> {
    let mut ethernet = [0; 16];
    ethernet[..6].copy_from_slice(&mac);
    let mut gids: Vec<RawGid> = ips.into_iter().map(gid_of_ip).collect();
    gids.push(ethernet);
    gids
}

/// The speed of a link in the terms of InfiniBand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkRate {
    /// `active_speed`, of one lane.
    pub speed: u8,
    /// `active_width`: 1 is one lane, 2 are four.
    pub width: u8,
    /// What a lane of this speed is called.
    pub name: &'static str,
    /// Mb/s of all lanes.
    pub mbps: u32,
}

/// Every rate that is shown, the fastest first.
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

/// The rate of a link, or that just below; of slower links, the slowest.
#[must_use]
pub fn link_rate(mbps: u32) -> LinkRate {
    let found = LINK_RATES.iter().find(|rate| rate.mbps <= mbps);
    *found.unwrap_or(&LINK_RATES[LINK_RATES.len() - 1])
}

impl LinkRate {
    /// As the kernel writes it: `40 Gb/sec (4X QDR)`.
    #[must_use]
    pub fn to_text(self) -> String {
        let lanes = if self.width == 1 { 1 } else { 4 };
        let gigabits = f64::from(self.mbps) / 1000.0;
        format!("{gigabits} Gb/sec ({lanes}X {})", self.name)
    }
}

/// The folder with files like those of /sys and /dev/infiniband that siwd writes beside its socket.
#[must_use]
pub fn sysfs_tree_of(socket: &Path) -> PathBuf {
    let mut name = OsString::from(socket);
    name.push(".sysfs");
    name.into()
}

/// The number of the network interface that stands for a device, by the device's index: one that the
/// kernel does not reach.
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
        let gids = gid_table(mac, ips);
        assert_eq!(gids.len(), 3);
        assert_eq!(gids[0][10..], [0xff, 0xff, 10, 77, 0, 1]);
        assert_eq!(ip_of_gid(gids[0]), Some(ips[0]));
        assert_eq!(ip_of_gid(gids[1]), Some(ips[1]));
        assert_eq!(ip_of_gid(gids[2]), None);
        assert_eq!(node_guid(mac), [0, 0, 0, 0xff, 0xfe, 1, 2, 3]);
    }

    #[test]
    fn links_have_the_rate_just_below_their_speed() {
        assert_eq!(link_rate(99_999).to_text(), "50 Gb/sec (1X HDR)");
        assert_eq!(link_rate(100_000).to_text(), "100 Gb/sec (4X EDR)");
        assert_eq!(link_rate(0).to_text(), "2.5 Gb/sec (1X SDR)");
    }
}
