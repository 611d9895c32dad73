//! An echo server on tokio: accepts connections, and sends each message back. Several clients in the
//! same program check the answers. Prints "ok".
//!
//! `cargo run --features tokio --example tokio_echo [SOCKET]`, with siwd running
//! (`config/loopback.toml` has two devices).

#[path = "common/devices.rs"]
mod devices;

use devices::{Devices, open_context};
use siw::tokio::{AsyncCq, Connection, Incoming, Listener, connect};
use siw::{
    Access, ConnectOptions, Context, Error, ListenOptions, Mr, Qp, QpInit, RecvWr, SendData,
    SendWr, Wc, WcOpcode, WcStatus,
};
use std::net::SocketAddr;

const CLIENTS: usize = 3;
const ROUNDS: usize = 100;
const LEN: usize = 64;
/// Receive requests posted at each end.
const SLOTS: usize = 8;

/// One end of a connection.
struct End {
    cq: AsyncCq,
    qp: Qp,
    /// `SLOTS` buffers for receiving, then one for sending.
    memory: Mr,
}

impl End {
    async fn new(context: &Context) -> Result<End, Error> {
        let cq = AsyncCq::new(context, 64).await?;
        let pd = context.alloc_pd()?;
        let qp = pd.create_qp(cq.cq(), cq.cq(), &QpInit::default())?;
        let memory = pd.alloc_mr((SLOTS + 1) * LEN, Access::LOCAL_WRITE)?;
        let end = End { cq, qp, memory };
        for slot in 0..SLOTS {
            end.post_receive(slot)?;
        }
        Ok(end)
    }

    fn post_receive(&self, slot: usize) -> Result<(), Error> {
        let sges = [self.memory.slice(slot * LEN..(slot + 1) * LEN)?];
        Ok(self.qp.post_recv(&[RecvWr {
            wr_id: slot as u64,
            sges: &sges,
        }])?)
    }

    /// Sends a message without waiting for its completion.
    fn send(&self, text: &[u8]) -> Result<(), Error> {
        let at = SLOTS * LEN;
        self.memory.write(at, text)?;
        let sges = [self.memory.slice(at..at + text.len())?];
        Ok(self
            .qp
            .post_send(&[SendWr::send(0, SendData::Sges(&sges))])?)
    }

    /// Awaits the next message; None when the connection has ended.
    async fn receive(&mut self) -> Result<Option<Vec<u8>>, Error> {
        loop {
            let mut completions = [Wc::default()];
            self.cq.wait(&mut completions).await?;
            let completion = completions[0];
            if completion.status != WcStatus::SUCCESS {
                return Ok(None);
            }
            if completion.opcode != WcOpcode::RECV {
                continue;
            }
            let slot = completion.wr_id as usize;
            let mut text = vec![0; completion.byte_len as usize];
            self.memory.read(slot * LEN, &mut text)?;
            self.post_receive(slot)?;
            return Ok(Some(text));
        }
    }
}

async fn serve(context: Context, incoming: Incoming) -> Result<(), Error> {
    let mut end = End::new(&context).await?;
    let connection = incoming.accept(&end.qp, &ConnectOptions::default()).await?;
    while let Some(text) = end.receive().await? {
        end.send(&text)?;
    }
    drop(connection);
    Ok(())
}

async fn run_client(
    context: Context,
    device: u32,
    to: SocketAddr,
    number: usize,
) -> Result<(), Error> {
    let mut end = End::new(&context).await?;
    let options = ConnectOptions {
        device: Some(device),
        ..ConnectOptions::default()
    };
    let connection: Connection = connect(&end.qp, to, &options).await?;
    for round in 0..ROUNDS {
        let text = format!("client {number}, round {round}");
        end.send(text.as_bytes())?;
        let answer = end.receive().await?;
        assert_eq!(answer.as_deref(), Some(text.as_bytes()));
    }
    let ended = connection.close().await?;
    assert_eq!(ended.errno, 0, "{}", ended.reason);
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let context = open_context()?;
    let devices = Devices::find(&context)?;
    let (_, address) = devices.server;

    let mut listener =
        Listener::bind(&context, (address, 0).into(), &ListenOptions::default()).await?;
    let to = listener.local_addr();
    let mut tasks = Vec::new();
    for number in 0..CLIENTS {
        let client = run_client(context.clone(), devices.client, to, number);
        tasks.push(tokio::spawn(client));
        tasks.push(tokio::spawn(serve(
            context.clone(),
            listener.accept().await?,
        )));
    }
    for task in tasks {
        task.await??;
    }
    println!("ok");
    Ok(())
}
