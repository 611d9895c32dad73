//! A connection request comes back when it cannot be accepted: the server then accepts it with other
//! options. Prints "ok".
//!
//! `cargo run --features tokio --example tokio_accept [SOCKET]`, with siwd running.

#[path = "common/devices.rs"]
mod devices;

use devices::{Devices, open_context};
use siw::tokio::{AsyncCq, Listener, connect};
use siw::{ConnectOptions, ListenOptions, QpInit};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let context = open_context()?;
    let devices = Devices::find(&context)?;
    let (_, address) = devices.server;
    let mut listener =
        Listener::bind(&context, (address, 0).into(), &ListenOptions::default()).await?;

    let cq = AsyncCq::new(&context, 16).await?;
    let pd = context.alloc_pd()?;
    let client = pd.create_qp(cq.cq(), cq.cq(), &QpInit::default())?;
    let server = pd.create_qp(cq.cq(), cq.cq(), &QpInit::default())?;
    let options = ConnectOptions {
        device: Some(devices.client),
        ..ConnectOptions::default()
    };
    let to = listener.local_addr();
    let connecting = tokio::spawn(async move { connect(&client, to, &options).await });

    let incoming = listener.accept().await?;
    let too_long = [0; 513];
    let refused = ConnectOptions {
        private_data: &too_long,
        ..ConnectOptions::default()
    };
    let failed = match incoming.accept(&server, &refused).await {
        Ok(_) => return Err("private data of 513 bytes was sent".into()),
        Err(failed) => failed,
    };
    let incoming = failed.object.ok_or("the request did not come back")?;

    let accepted = ConnectOptions {
        private_data: b"welcome",
        ..ConnectOptions::default()
    };
    let _server = incoming.accept(&server, &accepted).await?;
    let connection = connecting.await??;
    assert_eq!(connection.info().private_data, b"welcome");
    println!("ok");
    Ok(())
}
