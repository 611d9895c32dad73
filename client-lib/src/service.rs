//! Datagram services of rdma_cm (RDMA_PS_UDP): a peer asks a listener on a binding with
//! [`BindOptions::datagrams`](crate::BindOptions::datagrams) for the queue pair and the Q_Key to which it then
//! sends datagrams. There is no connection.

use crate::cm::{CmChannel, ConnectionInfo};
use crate::context::ClientInner;
use crate::{Context, Error, Failed, Qp, ResolvedAddress};
use siw_shm::control::{
    AnswerFindService, EndFindService, FEATURE_SERVICES, FindService, MigrateCm, PrivateData,
    SERVICE_REPLY_DATA_MAX, SERVICE_REQUEST_DATA_MAX,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Q_Key of datagram services whose program names none (`RDMA_UDP_QKEY`).
pub const SERVICE_QKEY: u32 = 0x0123_4567;

/// Fails if the daemon is older than datagram services.
pub(crate) fn check_feature(client: &ClientInner) -> Result<(), Error> {
    if client.has_feature(FEATURE_SERVICES) {
        return Ok(());
    }
    Err(Error::Refused {
        errno: libc::EOPNOTSUPP,
        reason: "this siwd has no datagram services (RDMA_PS_UDP): update it".into(),
    })
}

fn private_data(data: &[u8], max: usize) -> Result<PrivateData, Error> {
    let data = PrivateData::new(data).filter(|_| data.len() <= max);
    data.ok_or(Error::Invalid(
        "more private data than a datagram service may get (180 bytes) or answer (136 bytes)",
    ))
}

impl Context {
    /// Returns whether the daemon has datagram services.
    pub fn has_services(&self) -> bool {
        self.0.has_feature(FEATURE_SERVICES)
    }
}

/// A search for a datagram service, ended when dropped. Its outcome is one event with the cookie:
/// [`RdmaCmEvent::ServiceReply`](crate::RdmaCmEvent::ServiceReply).
pub struct ServiceSearch {
    ctx: Arc<ClientInner>,
    number: u32,
}

impl ServiceSearch {
    /// Asks `dst` for its queue pair, from an address of a device, as
    /// [`Context::resolve_address`](crate::Context::resolve_address) found it. `private_data`: at most 180
    /// bytes. `timeout`: maximum time for the answer, 68.7 s if None.
    ///
    /// # Errors
    /// [`Error::Refused`] with EADDRNOTAVAIL (the device does not have the source address), EADDRINUSE (the
    /// kernel has it, too), ENOBUFS (4096 searches are in progress).
    pub fn start(
        channel: &CmChannel,
        from: &ResolvedAddress,
        dst: SocketAddr,
        data: &[u8],
        timeout: Option<Duration>,
        cookie: u64,
    ) -> Result<ServiceSearch, Error> {
        let ctx = channel.context();
        check_feature(ctx)?;
        let millis = timeout.map_or(0, |timeout| timeout.as_millis().max(1));
        let (reply, _) = ctx.call_daemon(&FindService {
            device: from.device,
            cm_channel: channel.id(),
            timeout_ms: u32::try_from(millis).unwrap_or(u32::MAX),
            reserved: 0,
            cookie,
            dst: dst.into(),
            src: from.local.into(),
            private_data: private_data(data, SERVICE_REQUEST_DATA_MAX)?,
            reserved2: 0,
        })?;
        Ok(ServiceSearch {
            ctx: ctx.clone(),
            number: reply.id,
        })
    }

    /// Moves its event to another channel; afterwards the old channel gets none.
    pub fn migrate(&self, channel: &CmChannel) -> Result<(), Error> {
        self.ctx
            .check_same(channel.ctx(), "connection event channel")?;
        self.ctx.call_daemon(&MigrateCm {
            cm_channel: channel.id(),
            qp_num: 0,
            listener: 0,
            request: 0,
            search: self.number,
        })?;
        Ok(())
    }

    /// Ends it and waits for the daemon: no event follows.
    pub fn close(self) -> Result<(), Error> {
        let context = self.ctx.clone();
        drop(self);
        context.confirm_posted()
    }

    /// Gives up ownership after its event.
    pub fn forget(mut self) {
        self.number = 0;
    }
}

impl Drop for ServiceSearch {
    fn drop(&mut self) {
        if self.number != 0 {
            self.ctx.free_object(&EndFindService {
                search: self.number,
                reserved: 0,
            });
        }
    }
}

/// Outcome of a [`ServiceSearch`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceReply {
    /// Addresses, and private data of the service. `errno` is 0 if the service has named its queue pair.
    pub info: ConnectionInfo,
    /// Device index.
    pub device: u32,
    /// Status of a refusal: 1 no service at that port, 2 refused by the program, others as in the
    /// InfiniBand specification; 0 otherwise.
    pub sidr_status: u8,
    /// Queue pair of the service.
    pub qp_num: u32,
    /// Its Q_Key.
    pub qkey: u32,
}

/// Request of a peer to a datagram service. Refused when dropped without an answer.
pub struct ServiceRequest {
    ctx: Arc<ClientInner>,
    number: u32,
    device: u32,
    /// Boxed: a request is also part of errors ([`Failed`]).
    info: Box<ConnectionInfo>,
    open: bool,
}

impl std::fmt::Debug for ServiceRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServiceRequest")
            .field("number", &self.number)
            .field("info", &self.info)
            .finish()
    }
}

impl ServiceRequest {
    pub(crate) fn new(
        ctx: Arc<ClientInner>,
        number: u32,
        device: u32,
        info: ConnectionInfo,
    ) -> ServiceRequest {
        ServiceRequest {
            ctx,
            number,
            device,
            info: Box::new(info),
            open: true,
        }
    }

    /// Device index.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// The listener's cookie, addresses, and 180 bytes of private data.
    pub fn info(&self) -> &ConnectionInfo {
        &self.info
    }

    /// Tells the peer the queue pair and the Q_Key. No event follows.
    ///
    /// # Errors
    /// The request comes back: it can be accepted with other data (at most 136 bytes), or refused.
    pub fn accept(self, qp: &Qp, qkey: u32, data: &[u8]) -> Result<(), Failed<ServiceRequest>> {
        let same = self.ctx.check_same(qp.pd().ctx(), "queue pair");
        let answered = same.and_then(|()| self.answer(true, (qp.qp_num(), qkey), data));
        self.end_answered(answered)
    }

    /// Refuses the request.
    ///
    /// # Errors
    /// The request comes back: it can be refused with shorter private data, or accepted.
    pub fn reject(self, data: &[u8]) -> Result<(), Failed<ServiceRequest>> {
        let answered = self.answer(false, (0, 0), data);
        self.end_answered(answered)
    }

    fn answer(&self, accepts: bool, (qp_num, qkey): (u32, u32), data: &[u8]) -> Result<(), Error> {
        self.ctx.call_daemon(&AnswerFindService {
            request: self.number,
            accepts: accepts.into(),
            qp_num,
            qkey,
            private_data: private_data(data, SERVICE_REPLY_DATA_MAX)?,
        })?;
        Ok(())
    }

    fn end_answered(mut self, answered: Result<(), Error>) -> Result<(), Failed<ServiceRequest>> {
        match answered {
            Ok(()) => {
                self.open = false;
                Ok(())
            }
            Err(error) => Err(Failed {
                object: self,
                error,
            }),
        }
    }
}

impl Drop for ServiceRequest {
    fn drop(&mut self) {
        if self.open
            && let Some(private_data) = PrivateData::new(&[])
        {
            self.ctx.free_object(&AnswerFindService {
                request: self.number,
                accepts: 0,
                qp_num: 0,
                qkey: 0,
                private_data,
            });
        }
    }
}
