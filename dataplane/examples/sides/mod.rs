//! Two ends of a connection in one process, shared by the examples of this folder.

use std::error::Error;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use siw::{
    Access, CmChannel, CmEvent, CmListener, CompletionChannel, ConnectOptions, Context, Cq, Mr, Qp,
    QpInit,
};

/// Result of an example: any error ends it.
pub type Outcome<T> = Result<T, Box<dyn Error>>;

/// Time limit for waits. Generous, because the examples run under emulation on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Two client contexts of the daemon, and the devices they use.
pub struct Contexts {
    pub from: Context,
    pub to: Context,
    /// Index of the device from which connections are made.
    pub device: u32,
    /// Destination address of the connections, with port 0.
    pub target: SocketAddr,
}

impl Contexts {
    /// Opens two clients of the daemon at `socket`; connections go from `device` to `target`.
    pub fn open(socket: &str, device: &str, target: &str) -> Outcome<Contexts> {
        let from = Context::open(Some(Path::new(socket)))?;
        let device = from.device_by_name(device)?.index;
        Ok(Contexts {
            to: Context::open(Some(Path::new(socket)))?,
            from,
            device,
            target: format!("{target}:0").parse()?,
        })
    }

    /// Options of a connect from the device.
    pub fn options(&self) -> ConnectOptions<'_> {
        ConnectOptions {
            device: Some(self.device),
            ..ConnectOptions::default()
        }
    }
}

/// One side of a connection.
pub struct Side {
    pub qp: Qp,
    pub cq: Cq,
    pub memory: Mr,
    pub cm: CmChannel,
}

impl Side {
    /// Creates a queue pair, and `bytes` of memory that the peer may access.
    pub fn new(context: &Context, bytes: usize) -> Outcome<Side> {
        let pd = context.alloc_pd()?;
        let completions = CompletionChannel::new(context)?;
        let cq = Cq::new(context, 256, Some((&completions, 0)))?;
        let qp = pd.create_qp(&cq, &cq, &QpInit::default())?;
        let memory = pd.alloc_mr(bytes, Access(7))?;
        let cm = CmChannel::new(context)?;
        Ok(Side { qp, cq, memory, cm })
    }
}

/// Connects two sides. Returns the address that the target listened on.
pub fn connect_sides(from: &Side, to: &Side, contexts: &Contexts) -> Outcome<SocketAddr> {
    let listener = CmListener::new(&to.cm, None, contexts.target, 8, 0)?;
    let address = listener.local_addr();
    from.qp.connect(&from.cm, address, &contexts.options())?;
    match to.cm.get_event(Some(PATIENCE))? {
        CmEvent::ConnectRequest(request) => {
            request.accept(&to.qp, None, &ConnectOptions::default())?;
        }
        other => return Err(format!("instead of a connection request: {other:?}").into()),
    }
    for side in [to, from] {
        match side.cm.get_event(Some(PATIENCE))? {
            CmEvent::Established(_) => {}
            other => return Err(format!("instead of a connection: {other:?}").into()),
        }
    }
    Ok(address)
}
