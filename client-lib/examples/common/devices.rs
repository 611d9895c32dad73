//! The daemon and the devices that the examples use.

use siw::Context;
use std::error::Error;
use std::net::IpAddr;
use std::path::Path;

/// Connects to the daemon at the socket that is the first argument of the program, or at the
/// default one.
pub fn open_context() -> Result<Context, siw::Error> {
    let socket = std::env::args_os().nth(1);
    Context::open(socket.as_deref().map(Path::new))
}

/// The devices of an example.
pub struct Devices {
    /// Index of the device on which the server listens, and its address.
    pub server: (u32, IpAddr),
    /// Index of the device from which the client connects.
    pub client: u32,
}

impl Devices {
    /// The first two devices of the daemon, or its only one for both ends.
    pub fn find(context: &Context) -> Result<Devices, Box<dyn Error>> {
        let devices = context.query_devices()?;
        let server = devices.first().ok_or("siwd has no device")?;
        let address = *server.ips.first().ok_or("the device has no address")?;
        Ok(Devices {
            server: (server.index, address),
            client: devices.get(1).unwrap_or(server).index,
        })
    }
}
