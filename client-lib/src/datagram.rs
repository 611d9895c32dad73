//! Unreliable datagrams (UD) over RoCEv2: address handles, and queue pairs without a connection.

use crate::context::ClientInner;
use crate::{Context, Error, Qp};
use siw_shm::control::{
    Addr, AttachGroup, CreateAh, DestroyAh, DetachGroup, FEATURE_DATAGRAMS, FEATURE_MULTICAST,
    StartDatagrams,
};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

pub use siw_shm::control::{CONTROLLED_QKEY, GRH_LEN};

/// Destination of datagrams (`struct ibv_ah_attr`).
#[derive(Debug, Clone, Copy)]
pub struct AhAttr {
    /// Index of the device that sends.
    pub device: u32,
    /// Source address, one of the device's; None lets the daemon choose.
    pub local: Option<IpAddr>,
    /// Destination: a host or a multicast group.
    pub remote: IpAddr,
    /// TTL or hop limit; 0 for 64.
    pub hop_limit: u8,
    /// DSCP and ECN of the IP header.
    pub traffic_class: u8,
    /// Flow label of IPv6, 20 bits.
    pub flow_label: u32,
    /// Maximum time for the neighbour's answer; None for one second.
    pub timeout: Option<Duration>,
}

impl AhAttr {
    /// A destination that a device reaches, with the defaults of the other fields.
    pub fn new(device: u32, remote: IpAddr) -> AhAttr {
        AhAttr {
            device,
            local: None,
            remote,
            hop_limit: 0,
            traffic_class: 0,
            flow_label: 0,
            timeout: None,
        }
    }
}

/// Address handle (ibv_create_ah(3)). Clones are the same handle; dropping the last one destroys it, after
/// which requests that name it fail.
#[derive(Clone)]
pub struct Ah(Arc<AhInner>);

struct AhInner {
    client: Arc<ClientInner>,
    number: u32,
}

impl Drop for AhInner {
    fn drop(&mut self) {
        if self.client.check_process().is_ok() {
            let (ah, reserved) = (self.number, 0);
            self.client.free_object(&DestroyAh { ah, reserved });
        }
    }
}

impl Ah {
    /// Number for [`SendWr::with_destination`](crate::SendWr::with_destination), valid for the queue pairs
    /// of its context.
    pub fn number(&self) -> u32 {
        self.0.number
    }
}

/// Queue pair number of datagrams to a multicast group.
pub const MULTICAST_QPN: u32 = 0xff_ffff;

/// Fails if the daemon is older than multicast.
fn check_multicast(client: &ClientInner) -> Result<(), Error> {
    if client.has_feature(FEATURE_MULTICAST) {
        return Ok(());
    }
    Err(Error::Refused {
        errno: libc::EOPNOTSUPP,
        reason: "this siwd has no multicast: update it".into(),
    })
}

/// Fails if the daemon is older than datagrams.
fn check_feature(client: &ClientInner) -> Result<(), Error> {
    if client.has_feature(FEATURE_DATAGRAMS) {
        return Ok(());
    }
    Err(Error::Refused {
        errno: libc::EOPNOTSUPP,
        reason: "this siwd has no datagrams (UD): update it".into(),
    })
}

impl Context {
    /// Returns whether the daemon has datagrams.
    pub fn has_datagrams(&self) -> bool {
        self.0.has_feature(FEATURE_DATAGRAMS)
    }

    /// Returns whether queue pairs of datagrams can be members of multicast groups.
    pub fn has_multicast(&self) -> bool {
        self.0.has_feature(FEATURE_MULTICAST)
    }

    /// Creates an address handle. Waits until the next host on the way has answered.
    ///
    /// # Errors
    /// [`Error::Refused`] with EHOSTUNREACH (no route), ETIMEDOUT (no answer), EADDRNOTAVAIL (the device
    /// does not have the source address), EADDRINUSE (the kernel has it, too).
    pub fn create_ah(&self, attr: &AhAttr) -> Result<Ah, Error> {
        let client = &self.0;
        check_feature(client)?;
        let millis = attr.timeout.map_or(0, |timeout| timeout.as_millis().max(1));
        let (reply, _) = client.call_daemon(&CreateAh {
            device: attr.device,
            hop_limit: attr.hop_limit,
            traffic_class: attr.traffic_class,
            reserved: 0,
            flow_label: attr.flow_label,
            timeout_ms: u32::try_from(millis).unwrap_or(u32::MAX),
            local: attr.local.map_or(Addr::NONE, Addr::from),
            remote: attr.remote.into(),
        })?;
        Ok(Ah(Arc::new(AhInner {
            client: client.clone(),
            number: reply.id,
        })))
    }
}

impl Qp {
    /// Makes a queue pair without a connection one of datagrams, in RTS: requests with
    /// [`SendWr::with_destination`](crate::SendWr::with_destination) are sent to any host, and datagrams
    /// with this Q_Key are received from any host, behind [`GRH_LEN`] bytes in the receive buffer. A
    /// repetition changes the Q_Key. [`Qp::reset`] ends it.
    ///
    /// # Errors
    /// [`Error::Refused`] with EPERM for a [controlled](CONTROLLED_QKEY) Q_Key without an operator's
    /// rights, EISCONN if it is connected, EINVAL in the error state.
    pub fn start_datagrams(&self, device: u32, qkey: u32) -> Result<(), Error> {
        let client = self.pd().ctx();
        check_feature(client)?;
        client.call_daemon(&StartDatagrams {
            qp_num: self.qp_num(),
            device,
            qkey,
            reserved: 0,
        })?;
        Ok(())
    }

    /// Makes a queue pair of datagrams a member of a multicast group: it receives the datagrams sent to the
    /// group, also from this host and itself. They are sent to an address handle of the group, with
    /// [`MULTICAST_QPN`] as the queue pair number. [`Qp::reset`] and the end of the queue pair end it.
    ///
    /// # Errors
    /// [`Error::Refused`] with EINVAL (no group, no queue pair of datagrams), EOPNOTSUPP (the device uses
    /// AF_XDP), EADDRNOTAVAIL (the device has no address of the group's family), ENOMEM (256 memberships of a client, 64
    /// groups of a device).
    pub fn attach_group(&self, group: IpAddr) -> Result<(), Error> {
        let client = self.pd().ctx();
        check_multicast(client)?;
        client.call_daemon(&AttachGroup {
            qp_num: self.qp_num(),
            reserved: 0,
            group: group.into(),
        })?;
        Ok(())
    }

    /// Ends a membership.
    ///
    /// # Errors
    /// [`Error::Refused`] with EINVAL if the queue pair is not a member.
    pub fn detach_group(&self, group: IpAddr) -> Result<(), Error> {
        let client = self.pd().ctx();
        check_multicast(client)?;
        client.call_daemon(&DetachGroup {
            qp_num: self.qp_num(),
            reserved: 0,
            group: group.into(),
        })?;
        Ok(())
    }
}
