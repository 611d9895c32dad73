//! The XDP program on an interface, with its maps: attached as long as [`XdpSteering`] lives.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::bpf::{Map, MapShape, MapType, attach_program, load_program, test_program};
use crate::program::{
    CLAIM_KEY_BYTES, ClaimKind, FRAGMENT_KEY_BYTES, ProgramConfig, VALUE_BYTES, assemble_program,
    claim_key,
};
use crate::{Error, Result, XdpInterface};

/// Capacity of the map of claims: every port of one address, and as much again.
const MAX_CLAIMS: u32 = 1 << 17;
/// Maximum number of fragmented packets tracked at a time.
const MAX_FRAGMENTED: u32 = 1024;

/// `XDP_FLAGS_SKB_MODE` and `XDP_FLAGS_DRV_MODE` of linux/if_link.h
const GENERIC_MODE: u32 = 1 << 1;
const NATIVE_MODE: u32 = 1 << 2;

/// An address or a port whose frames are siwd's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Claim {
    /// The address that frames are sent to.
    pub address: IpAddr,
    /// The TCP port; 0 with [`ClaimKind::Addresses`].
    pub port: u16,
}

/// Where the kernel runs the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachMode {
    /// In the NIC's driver.
    Native,
    /// Behind the driver, for drivers without XDP: slower.
    Generic,
}

/// Result of the program for a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The frame goes to the kernel.
    Pass,
    /// The frame is claimed, and goes to the socket of its queue.
    Redirect,
    /// The frame is claimed, and no socket takes it.
    Drop,
    /// A result that this program never returns.
    Other(u32),
}

/// A loaded program with its maps.
#[derive(Debug)]
pub struct XdpSteering {
    program: OwnedFd,
    claims: Map,
    sockets: Map,
    /// Kept open for the program, which uses it.
    _fragments: Map,
    claimed: BTreeSet<Claim>,
    /// The kernel detaches the program when this is closed, also at the end of the process.
    link: Option<OwnedFd>,
}

impl XdpSteering {
    /// Loads the program without attaching it. `vlan`: the tag of claimed frames, if they have one.
    /// `queues`: the number of receive queues of the interface.
    ///
    /// # Errors
    /// A capability is missing, or the kernel refuses the program.
    pub fn load(kind: ClaimKind, vlan: Option<u16>, queues: u32) -> Result<XdpSteering> {
        let claims = Map::create_map(&MapShape {
            kind: MapType::Hash,
            key_bytes: CLAIM_KEY_BYTES,
            value_bytes: VALUE_BYTES,
            entries: MAX_CLAIMS,
            name: "siwd_claims",
        })?;
        let sockets = Map::create_map(&MapShape {
            kind: MapType::Sockets,
            key_bytes: size_of::<u32>(),
            value_bytes: size_of::<u32>(),
            entries: queues,
            name: "siwd_sockets",
        })?;
        let fragments = Map::create_map(&MapShape {
            kind: MapType::RecentHash,
            key_bytes: FRAGMENT_KEY_BYTES,
            value_bytes: VALUE_BYTES,
            entries: MAX_FRAGMENTED,
            name: "siwd_fragments",
        })?;
        let instructions = assemble_program(&ProgramConfig {
            kind,
            vlan,
            claims: claims.raw_fd(),
            sockets: sockets.raw_fd(),
            fragments: fragments.raw_fd(),
        })?;
        Ok(XdpSteering {
            program: load_program("siwd_steering", &instructions)?,
            claims,
            sockets,
            _fragments: fragments,
            claimed: BTreeSet::new(),
            link: None,
        })
    }

    /// Directs frames to this address and port to siwd from now on.
    ///
    /// # Errors
    /// The map is full.
    pub fn add_claim(&mut self, claim: Claim) -> Result<()> {
        self.claims
            .update_element(&claim_key(claim.address, claim.port), &1u32.to_ne_bytes())?;
        self.claimed.insert(claim);
        Ok(())
    }

    /// Directs these frames to the kernel again.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove_claim(&mut self, claim: Claim) -> Result<()> {
        self.claims
            .delete_element(&claim_key(claim.address, claim.port))?;
        self.claimed.remove(&claim);
        Ok(())
    }

    /// All claims.
    pub fn claims(&self) -> impl Iterator<Item = Claim> + '_ {
        self.claimed.iter().copied()
    }

    /// Directs claimed frames that arrive at this receive queue to the socket, which must be bound to
    /// it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn add_socket(&self, queue: u32, socket: BorrowedFd<'_>) -> Result<()> {
        let value = socket.as_raw_fd().to_ne_bytes();
        self.sockets.update_element(&queue.to_ne_bytes(), &value)
    }

    /// Attaches the program to the interface: in its driver if the driver has XDP.
    ///
    /// # Errors
    /// The interface has a program already, or a capability is missing.
    pub fn attach(&mut self, interface: &XdpInterface) -> Result<AttachMode> {
        let native = attach_program(&self.program, interface.index, NATIVE_MODE);
        let (outcome, mode) = match native {
            // The driver has no XDP, or does not support it with this MTU or these settings.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ERANGE | libc::E2BIG)
                ) =>
            {
                let generic = attach_program(&self.program, interface.index, GENERIC_MODE);
                (generic, AttachMode::Generic)
            }
            outcome => (outcome, AttachMode::Native),
        };
        let link = outcome.map_err(|source| match source.raw_os_error() {
            // Attached since the interface was looked up.
            Some(libc::EBUSY | libc::EEXIST) => {
                interface
                    .attached_error()
                    .unwrap_or_else(|| Error::ProgramAttached {
                        interface: interface.name.clone(),
                        program: String::new(),
                    })
            }
            Some(libc::EPERM | libc::EACCES) => Error::Permission {
                what: "attaching the XDP program",
            },
            _ => Error::Call {
                what: format!("attaching the XDP program to `{}`", interface.name),
                source,
            },
        })?;
        self.link = Some(link);
        Ok(mode)
    }

    /// Returns the program's verdict on a frame that arrives at queue 0.
    ///
    /// # Errors
    /// The kernel refuses the test, for example of a frame shorter than an Ethernet header.
    pub fn judge_frame(&self, frame: &[u8]) -> Result<Verdict> {
        Ok(match test_program(&self.program, frame)? {
            1 => Verdict::Drop,
            2 => Verdict::Pass,
            4 => Verdict::Redirect,
            other => Verdict::Other(other),
        })
    }
}
