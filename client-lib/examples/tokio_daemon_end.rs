//! What a program sees when siwd ends: the completions of its posted requests, and then an error. A siwd
//! that was killed has flushed nothing; the program then asks for these completions.
//! Prints "waiting" when its requests are posted, and "ok" after siwd has ended as it should.
//!
//! `cargo run --features tokio --example tokio_daemon_end [SOCKET]`, with siwd running; then end siwd.

#[path = "common/devices.rs"]
mod devices;

use devices::{Devices, open_context};
use siw::tokio::{AsyncCq, Listener, connect};
use siw::{ConnectOptions, Error, ListenOptions, QpInit, RecvWr, Wc, WcStatus};

/// Receive requests for which nothing comes.
const POSTED: usize = 8;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let context = open_context()?;
    let devices = Devices::find(&context)?;
    let (_, address) = devices.server;
    let mut listener =
        Listener::bind(&context, (address, 0).into(), &ListenOptions::default()).await?;
    let mut cq = AsyncCq::new(&context, 2 * POSTED as u32).await?;
    let pd = context.alloc_pd()?;
    let client = pd.create_qp(cq.cq(), cq.cq(), &QpInit::default())?;
    let server = pd.create_qp(cq.cq(), cq.cq(), &QpInit::default())?;
    for number in 0..POSTED as u64 {
        let request = RecvWr {
            wr_id: number,
            sges: &[],
        };
        server.post_recv(&[request])?;
    }
    let options = ConnectOptions {
        device: Some(devices.client),
        ..ConnectOptions::default()
    };
    let to = listener.local_addr();
    let connecting = tokio::spawn(async move { connect(&client, to, &options).await });
    let incoming = listener.accept().await?;
    let accepted = incoming.accept(&server, &ConnectOptions::default()).await;
    let _server = accepted.map_err(|failed| failed.error)?;
    let _client = connecting.await??;
    println!("waiting");

    let mut completions = [Wc::default(); 3];
    let mut numbers = Vec::new();
    let end = loop {
        match cq.wait(&mut completions).await {
            Ok(count) => {
                for completion in &completions[..count] {
                    assert_eq!(completion.status, WcStatus::WR_FLUSH_ERR);
                    numbers.push(completion.wr_id);
                }
            }
            Err(Error::DaemonGone) if cq.cq().flush_lost_requests() => {}
            Err(error) => break error,
        }
    };
    assert_eq!(numbers, (0..POSTED as u64).collect::<Vec<_>>());
    assert!(matches!(end, Error::DaemonGone), "{end}");
    println!("ok");
    Ok(())
}
