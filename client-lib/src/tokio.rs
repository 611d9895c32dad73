//! Completions and connections that tokio awaits (feature `tokio`).
//!
//! [`AsyncCq`] awaits completions, [`connect`] and [`Listener::accept`] make connections,
//! [`Connection::close`] ends them. Work requests are posted as always: [`Qp::post_send`] never waits.
//!
//! All futures may be dropped before they are done. No event or completion is lost then, but a call to
//! the daemon that has begun goes on: it runs on one of tokio's threads for blocking calls. A dropped
//! [`Incoming::accept`] may have accepted the request, and a dropped [`Connection::close`] disconnects;
//! dropping the queue pair ends its connection. The end of the runtime waits for these calls, at most
//! [`crate::CALL_TIMEOUT`]. Destructors do not wait for the daemon; see [`crate::AppMr`] for the one
//! that does.

use crate::context::ClientInner;
use crate::{
    CmChannel, CmEvent, CmListener, CompletionChannel, ConnectOptions, ConnectionInfo,
    ConnectionRequest, Context, Cq, Error, Failed, ListenOptions, Qp, Wc,
};
use rustix::fd::{AsRawFd, OwnedFd};
use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Runs a call to the daemon on a thread for blocking calls.
async fn call_blocking<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    match tokio::task::spawn_blocking(call).await {
        Ok(result) => result,
        Err(error) => Err(Error::Io(std::io::Error::other(error))),
    }
}

/// A channel of events, and the connection to the daemon that sends them.
#[derive(Debug)]
struct Events<C: AsRawFd> {
    channel: AsyncFd<C>,
    daemon: AsyncFd<OwnedFd>,
}

impl<C: AsRawFd> Events<C> {
    fn new(client: &ClientInner, channel: C) -> Result<Events<C>, Error> {
        Ok(Events {
            daemon: watch(client.dup_connection()?)?,
            channel: watch(channel)?,
        })
    }

    /// Waits until the channel or the connection to the daemon is readable.
    async fn readable(&mut self, client: &ClientInner) -> Result<(), Error> {
        poll_fn(|cx| {
            if let Poll::Ready(ready) = self.channel.poll_read_ready(cx) {
                return Poll::Ready(ready.map(|mut ready| ready.clear_ready()));
            }
            // Also readable with replies to calls of other threads.
            while let Poll::Ready(ready) = self.daemon.poll_read_ready(cx) {
                ready?.clear_ready();
                if !client.check_alive() {
                    return Poll::Ready(Ok(()));
                }
            }
            Poll::Pending
        })
        .await?;
        Ok(())
    }

    /// Waits until `take` finds an event, or the daemon has ended.
    async fn next<T>(
        &mut self,
        client: &ClientInner,
        mut take: impl FnMut(&C) -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        loop {
            // Events that come after the look below make the descriptor readable again: readiness
            // is cleared before.
            let is_alive = client.known_alive();
            if let Some(event) = take(self.channel.get_ref())? {
                return Ok(event);
            }
            if !is_alive {
                return Err(Error::DaemonGone);
            }
            self.readable(client).await?;
        }
    }
}

/// Registers a descriptor with the runtime.
#[allow(
    deprecated,
    reason = "deprecated because of types that do not keep their descriptor open; these do"
)]
fn watch<T: AsRawFd>(object: T) -> std::io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(object, Interest::READABLE)
}

/// A completion queue whose completions are awaited.
#[derive(Debug)]
pub struct AsyncCq {
    cq: Cq,
    client: Arc<ClientInner>,
    events: Events<Arc<CompletionChannel>>,
}

impl AsyncCq {
    /// Creates a queue of at least `cqe` entries, with a channel of its own.
    pub async fn new(context: &Context, cqe: u32) -> Result<AsyncCq, Error> {
        let client = context.0.clone();
        let context = context.clone();
        let (cq, channel) = call_blocking(move || {
            let channel = CompletionChannel::new(&context)?;
            Ok((Cq::new(&context, cqe, Some((&channel, 0)))?, channel))
        })
        .await?;
        let events = Events::new(&client, channel)?;
        Ok(AsyncCq { cq, client, events })
    }

    /// The queue, for [`crate::Pd::create_qp`].
    pub fn cq(&self) -> &Cq {
        &self.cq
    }

    /// Awaits completions: at least one, at most `completions.len()`. None is lost if the future is
    /// dropped.
    ///
    /// # Errors
    /// [`Error::DaemonGone`] after the last completion, [`Error::CqOverflow`].
    pub async fn wait(&mut self, completions: &mut [Wc]) -> Result<usize, Error> {
        if completions.is_empty() {
            return Ok(0);
        }
        let cq = &self.cq;
        let taken = cq.poll(completions)?;
        if taken > 0 {
            return Ok(taken);
        }
        let mut armed = false;
        let mut arm = |channel: &CompletionChannel| -> Result<(), Error> {
            // An event disarms the queue.
            while channel.try_get_event()?.is_some() {
                armed = false;
            }
            if !armed {
                cq.req_notify(false)?;
                armed = true;
            }
            Ok(())
        };
        self.events
            .next(&self.client, |channel| {
                // The channel ends before the last completions are taken.
                let arming = arm(channel);
                let taken = cq.poll(completions)?;
                if taken > 0 {
                    return Ok(Some(taken));
                }
                match arming.and_then(|()| cq.check_health()) {
                    Ok(()) => Ok(None),
                    Err(error) => cq.poll_last(completions, error).map(Some),
                }
            })
            .await
    }
}

/// Events of connections and listeners, awaited.
#[derive(Debug)]
pub struct AsyncCmChannel {
    client: Arc<ClientInner>,
    events: Events<CmChannel>,
}

impl AsyncCmChannel {
    /// Awaits the events of a channel.
    pub fn new(context: &Context, channel: CmChannel) -> Result<AsyncCmChannel, Error> {
        context.0.check_same(channel.ctx(), "channel")?;
        AsyncCmChannel::from_inner(&context.0, channel)
    }

    fn from_inner(client: &Arc<ClientInner>, channel: CmChannel) -> Result<AsyncCmChannel, Error> {
        let events = Events::new(client, channel)?;
        let client = client.clone();
        Ok(AsyncCmChannel { client, events })
    }

    /// Awaits the next event. None is lost if the future is dropped.
    pub async fn next_event(&mut self) -> Result<CmEvent, Error> {
        self.events
            .next(&self.client, CmChannel::try_get_event)
            .await
    }
}

/// An established connection of a queue pair.
#[derive(Debug)]
pub struct Connection {
    qp: Qp,
    channel: AsyncCmChannel,
    info: ConnectionInfo,
}

impl Connection {
    /// Negotiated parameters, addresses, and private data of the peer.
    pub fn info(&self) -> &ConnectionInfo {
        &self.info
    }

    /// Awaits the end of the connection; `errno` of the result is 0 after a graceful close.
    pub async fn disconnected(&mut self) -> Result<ConnectionInfo, Error> {
        loop {
            if let CmEvent::Disconnected(info) = self.channel.next_event().await? {
                return Ok(info);
            }
        }
    }

    /// Closes gracefully, and awaits the end of the connection.
    pub async fn close(mut self) -> Result<ConnectionInfo, Error> {
        let qp = self.qp.clone();
        call_blocking(move || qp.disconnect()).await?;
        self.disconnected().await
    }
}

/// Connects a queue pair.
///
/// # Errors
/// [`Error::Connect`] with the reason. If the future is dropped, the attempt goes on until the queue
/// pair is dropped or reset.
pub async fn connect(
    qp: &Qp,
    to: SocketAddr,
    options: &ConnectOptions<'_>,
) -> Result<Connection, Error> {
    let client = qp.pd().ctx().clone();
    let private_data = options.private_data.to_vec();
    let options = ConnectOptions {
        private_data: &[],
        ..*options
    };
    let connecting = qp.clone();
    let channel = call_blocking(move || {
        let channel = CmChannel::create(connecting.pd().ctx(), 0)?;
        let options = ConnectOptions {
            private_data: &private_data,
            ..options
        };
        connecting.connect(&channel, to, &options)?;
        Ok(channel)
    })
    .await?;
    establish(&client, qp.clone(), channel, Some(to)).await
}

/// Awaits the outcome of connecting or accepting.
async fn establish(
    client: &Arc<ClientInner>,
    qp: Qp,
    channel: CmChannel,
    peer: Option<SocketAddr>,
) -> Result<Connection, Error> {
    let mut channel = AsyncCmChannel::from_inner(client, channel)?;
    let info = channel.next_event().await?.into_established(peer)?;
    Ok(Connection { qp, channel, info })
}

/// Accepts connections until dropped.
#[derive(Debug)]
pub struct Listener {
    listener: CmListener,
    channel: AsyncCmChannel,
}

impl Listener {
    /// Listens on `addr`; for port 0 the daemon chooses a port.
    pub async fn bind(
        context: &Context,
        addr: SocketAddr,
        options: &ListenOptions,
    ) -> Result<Listener, Error> {
        let (client, options) = (context.clone(), *options);
        let (listener, channel) = call_blocking(move || {
            let channel = CmChannel::new(&client)?;
            let listener = CmListener::new_with_options(&channel, addr, &options)?;
            Ok((listener, channel))
        })
        .await?;
        Ok(Listener {
            channel: AsyncCmChannel::new(context, channel)?,
            listener,
        })
    }

    /// Listening address, with the port in use.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// Awaits a connection request. Post receive requests to its queue pair before accepting it: the
    /// peer may send at once.
    pub async fn accept(&mut self) -> Result<Incoming, Error> {
        loop {
            if let CmEvent::ConnectRequest(request) = self.channel.next_event().await? {
                return Ok(Incoming {
                    client: self.channel.client.clone(),
                    request,
                });
            }
        }
    }
}

/// A connection request of a peer. Rejected when dropped without an answer.
#[derive(Debug)]
pub struct Incoming {
    client: Arc<ClientInner>,
    request: ConnectionRequest,
}

impl Incoming {
    /// The listener's cookie, addresses, private data, the peer's ird and ord.
    pub fn info(&self) -> &ConnectionInfo {
        self.request.connection_info()
    }

    /// Accepts it with a queue pair, and awaits the connection.
    ///
    /// # Errors
    /// If the request could not be accepted, it comes back: it can be accepted with other options or
    /// another queue pair, or rejected. None comes back if the connection failed afterwards. `?`
    /// converts the error and rejects the request.
    pub async fn accept(
        self,
        qp: &Qp,
        options: &ConnectOptions<'_>,
    ) -> Result<Connection, Failed<Option<Incoming>>> {
        let Incoming { client, request } = self;
        let private_data = options.private_data.to_vec();
        let options = ConnectOptions {
            private_data: &[],
            ..*options
        };
        let accepting = qp.clone();
        let accepted = call_blocking(move || {
            let options = ConnectOptions {
                private_data: &private_data,
                ..options
            };
            Ok(match CmChannel::create(accepting.pd().ctx(), 0) {
                Ok(channel) => {
                    let accepted = request.accept(&accepting, Some(&channel), &options);
                    accepted.map(|()| channel)
                }
                Err(error) => Err(Failed {
                    object: request,
                    error,
                }),
            })
        })
        .await;
        let lost = |error| Failed {
            object: None,
            error,
        };
        let channel = match accepted.map_err(lost)? {
            Ok(channel) => channel,
            Err(Failed {
                object: request,
                error,
            }) => {
                let object = Some(Incoming { client, request });
                return Err(Failed { object, error });
            }
        };
        let connection = establish(&client, qp.clone(), channel, None).await;
        connection.map_err(lost)
    }

    /// Rejects it, with private data.
    ///
    /// # Errors
    /// The request comes back, as from [`Self::accept`]; None if the runtime shuts down.
    pub async fn reject(self, private_data: &[u8]) -> Result<(), Failed<Option<Incoming>>> {
        let Incoming { client, request } = self;
        let private_data = private_data.to_vec();
        let rejected = call_blocking(move || Ok(request.reject(&private_data))).await;
        let rejected = rejected.map_err(|error| Failed {
            object: None,
            error,
        })?;
        rejected.map_err(|failed| Failed {
            object: Some(Incoming {
                client,
                request: failed.object,
            }),
            error: failed.error,
        })
    }
}
