//! Common code of the examples: two queue pairs, one on each of the first two devices of a daemon,
//! connected to each other. Both ends are in one process, so that an example is one program; in two
//! processes, or on two hosts, each would do its own half.

mod devices;

pub use devices::{Devices, open_context};

use siw::{
    Access, CmChannel, CmEvent, CmListener, ConnectOptions, Context, Cq, Mr, Qp, QpInit, Wc,
    WcStatus,
};
use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

/// Longest wait for an event or a completion.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// Access rights of the examples' memory.
pub const ALL_ACCESS: Access = Access::LOCAL_WRITE.union(Access::REMOTE);

/// One end of a connection: a queue pair, its completion queue, and memory that both ends use.
pub struct Endpoint {
    pub cq: Cq,
    pub qp: Qp,
    pub memory: Mr,
}

impl Endpoint {
    /// Creates an end whose queue pair is not connected yet, with `len` bytes of memory.
    pub fn new(context: &Context, len: usize) -> Result<Endpoint, siw::Error> {
        let pd = context.alloc_pd()?;
        let cq = Cq::new(context, 64, None)?;
        let qp = pd.create_qp(&cq, &cq, &QpInit::default())?;
        let memory = pd.alloc_mr(len, ALL_ACCESS)?;
        Ok(Endpoint { cq, qp, memory })
    }
}

/// Connects `client`, on the second device, to `server`, which listens on the first one. The
/// channels later deliver the end of the connection: keep them while the connection is used.
pub fn connect(
    context: &Context,
    client: &Qp,
    server: &Qp,
) -> Result<(CmChannel, CmChannel), Box<dyn Error>> {
    let devices = Devices::find(context)?;
    let (server_device, address) = devices.server;
    let server_channel = CmChannel::new(context)?;
    let client_channel = CmChannel::new(context)?;
    // Port 0: the daemon chooses one.
    let address = SocketAddr::new(address, 0);
    let listener = CmListener::new(&server_channel, Some(server_device), address, 1, 0)?;
    let options = ConnectOptions {
        device: Some(devices.client),
        ..ConnectOptions::default()
    };
    client.connect(&client_channel, listener.local_addr(), &options)?;

    match server_channel.get_event(Some(TIMEOUT))? {
        CmEvent::ConnectRequest(request) => {
            request.accept(server, None, &ConnectOptions::default())?;
        }
        other => return Err(format!("no connection request, but {other:?}").into()),
    }
    for channel in [&server_channel, &client_channel] {
        match channel.get_event(Some(TIMEOUT))? {
            CmEvent::Established(_) => {}
            other => return Err(format!("not connected: {other:?}").into()),
        }
    }
    Ok((server_channel, client_channel))
}

/// Waits for one completion of `cq`, which has to be a success.
pub fn wait_success(cq: &Cq) -> Result<Wc, Box<dyn Error>> {
    let mut completions = [Wc::default()];
    cq.wait(&mut completions, Some(TIMEOUT))?;
    let [completion] = completions;
    match completion.status {
        WcStatus::SUCCESS => Ok(completion),
        status => Err(format!("work request {}: {}", completion.wr_id, status.as_str()).into()),
    }
}
