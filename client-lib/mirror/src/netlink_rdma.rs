//! Answers of NETLINK_RDMA, which rdma(8) asks for devices: from the files that siwd writes, since the
//! kernel does not know siwd's devices, and often has no such netlink. Numbers are those of
//! `<rdma/rdma_netlink.h>`.

use crate::netlink_messages::{Messages, Request};
use crate::next::verbs;
use std::ffi::{CStr, OsStr, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// RDMA_NL_NLDEV, in the upper bits of a message's kind.
const NLDEV: u16 = 5 << 10;
const GET: u16 = NLDEV | 1;
const PORT_GET: u16 = NLDEV | 5;
const SYS_GET: u16 = NLDEV | 6;

const DEV_INDEX: u16 = 1;
const DEV_NAME: u16 = 2;
const PORT_INDEX: u16 = 3;
const FW_VERSION: u16 = 5;
const NODE_GUID: u16 = 6;
const SYS_IMAGE_GUID: u16 = 7;
const LID: u16 = 9;
const SM_LID: u16 = 10;
const LMC: u16 = 11;
const PORT_STATE: u16 = 12;
const PORT_PHYS_STATE: u16 = 13;
const DEV_NODE_TYPE: u16 = 14;
const NDEV_INDEX: u16 = 50;
const NDEV_NAME: u16 = 51;
const NETNS_MODE: u16 = 66;
const DEV_PROTOCOL: u16 = 67;

/// Every device has one port.
const PORT: u32 = 1;

/// A device, as its files describe it.
struct RdmaDevice {
    /// That of its uverbs file.
    index: u32,
    name: String,
    /// The folder of its parent.
    parent: PathBuf,
}

fn devices() -> Vec<RdmaDevice> {
    // SAFETY: no arguments; NULL or a C string that is never freed.
    let tree = unsafe {
        let tree = verbs::sysfs_tree();
        if tree.is_null() {
            return Vec::new();
        }
        Path::new(OsStr::from_bytes(CStr::from_ptr(tree).to_bytes()))
    };
    let Ok(entries) = tree.join("class/infiniband_verbs").read_dir() else {
        return Vec::new();
    };
    let mut all: Vec<RdmaDevice> = entries
        .flatten()
        .filter_map(|entry| {
            let index = entry.file_name().to_str()?.strip_prefix("uverbs")?.parse();
            Some(RdmaDevice {
                index: index.ok()?,
                name: read(&entry.path().join("ibdev"))?,
                parent: entry.path().join("device"),
            })
        })
        .collect();
    all.sort_by_key(|device| device.index);
    all
}

/// The text of a file, without the end of its line.
fn read(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim_end().to_owned())
}

/// The number at the beginning of a text, decimal or with "0x".
fn number(text: &str) -> Option<u32> {
    if let Some(digits) = text.strip_prefix("0x") {
        return u32::from_str_radix(digits, 16).ok();
    }
    let end = text.find(|digit: char| !digit.is_ascii_digit());
    text[..end.unwrap_or(text.len())].parse().ok()
}

impl RdmaDevice {
    fn text(&self, file: &str) -> Option<String> {
        read(&self.parent.join("infiniband").join(&self.name).join(file))
    }

    fn number(&self, file: &str) -> u32 {
        self.text(file).and_then(|text| number(&text)).unwrap_or(0)
    }

    fn guid(&self, file: &str) -> u64 {
        let digits = self.text(file).unwrap_or_default().replace(':', "");
        u64::from_str_radix(&digits, 16).unwrap_or(0)
    }

    /// The name of its protocol; `None` with the persona `unspecified`.
    fn protocol(&self) -> Option<&'static [u8]> {
        const CHANNEL_ADAPTER: u32 = 1;
        const RNIC: u32 = 4;
        match self.number("node_type") {
            RNIC => Some(b"iw"),
            CHANNEL_ADAPTER if self.is_infiniband() => Some(b"ib"),
            CHANNEL_ADAPTER => Some(b"roce"),
            _ => None,
        }
    }

    fn is_infiniband(&self) -> bool {
        self.text("ports/1/link_layer").as_deref() == Some("InfiniBand")
    }

    /// Appends the answer of RDMA_NLDEV_CMD_GET.
    fn describe(&self, answers: &mut Messages, flags: c_int, sequence: u32) {
        let mut message = answers.add(GET, flags, sequence, &[]);
        message
            .add_number(DEV_INDEX, self.index)
            .add_text(DEV_NAME, self.name.as_bytes())
            .add_number(PORT_INDEX, PORT)
            .add(NODE_GUID, &self.guid("node_guid").to_ne_bytes())
            .add(SYS_IMAGE_GUID, &self.guid("sys_image_guid").to_ne_bytes())
            .add(DEV_NODE_TYPE, &[self.number("node_type") as u8]);
        if let Some(version) = self.text("fw_ver") {
            message.add_text(FW_VERSION, version.as_bytes());
        }
        if let Some(protocol) = self.protocol() {
            message.add_text(DEV_PROTOCOL, protocol);
        }
    }

    /// Appends the answer of RDMA_NLDEV_CMD_PORT_GET for its port.
    fn describe_port(&self, answers: &mut Messages, flags: c_int, sequence: u32) {
        let mut message = answers.add(PORT_GET, flags, sequence, &[]);
        message
            .add_number(DEV_INDEX, self.index)
            .add_text(DEV_NAME, self.name.as_bytes())
            .add_number(PORT_INDEX, PORT)
            .add(PORT_STATE, &[self.number("ports/1/state") as u8])
            .add(PORT_PHYS_STATE, &[self.number("ports/1/phys_state") as u8]);
        if self.is_infiniband() {
            message
                .add_number(LID, self.number("ports/1/lid"))
                .add_number(SM_LID, self.number("ports/1/sm_lid"))
                .add(LMC, &[self.number("ports/1/lid_mask_count") as u8]);
        }
        let interface = self.parent.join("net").join(&self.name);
        let index = read(&interface.join("ifindex"));
        if let Some(index) = index.and_then(|text| number(&text)) {
            message
                .add_number(NDEV_INDEX, index)
                .add_text(NDEV_NAME, self.name.as_bytes());
        }
    }
}

/// Appends the answers to a request: as the kernel's, a dump ends with NLMSG_DONE, and another request with
/// NLMSG_ERROR if it fails or has NLM_F_ACK.
pub fn answer(request: &Request<'_>, answers: &mut Messages) {
    let describe = match request.kind {
        GET => RdmaDevice::describe,
        PORT_GET => RdmaDevice::describe_port,
        SYS_GET if !request.is_dump() => {
            let shared_by_namespaces = [1];
            answers
                .add(SYS_GET, 0, request.sequence, &[])
                .add(NETNS_MODE, &shared_by_namespaces);
            return acknowledge(request, answers);
        }
        _ => return answers.add_error(request, libc::EOPNOTSUPP),
    };
    let wanted = request.number(DEV_INDEX);
    let found = devices();
    let mut found = found
        .iter()
        .filter(|device| wanted.is_none_or(|index| device.index == index));
    if request.is_dump() {
        for device in found {
            describe(device, answers, libc::NLM_F_MULTI, request.sequence);
        }
        return answers.add_done(request.sequence);
    }
    let is_port = |port| port == PORT || request.kind != PORT_GET;
    match (wanted, found.next()) {
        (None, _) => answers.add_error(request, libc::EINVAL),
        (Some(_), Some(device)) if is_port(request.number(PORT_INDEX).unwrap_or(0)) => {
            describe(device, answers, 0, request.sequence);
            acknowledge(request, answers);
        }
        (Some(_), Some(_)) => answers.add_error(request, libc::EINVAL),
        (Some(_), None) => answers.add_error(request, libc::ENODEV),
    }
}

fn acknowledge(request: &Request<'_>, answers: &mut Messages) {
    if request.flags & libc::NLM_F_ACK != 0 {
        answers.add_error(request, 0);
    }
}
