//! A key-value server on tokio with one-sided access: a shared receive queue takes the requests of all
//! clients, values are in registered memory, and a client fetches and stores them by RDMA READ and
//! WRITE. Prints "ok".
//!
//! ```text
//! LOOKUP   client sends the key, server answers with the description of the value's memory
//! GET      client reads that memory, without the server's processor
//! PUT      client writes it
//! ```
//! `cargo run --features tokio --example tokio_key_value [SOCKET]`, with siwd running.

#[path = "common/devices.rs"]
mod devices;

use devices::{Devices, open_context};
use siw::tokio::{AsyncCq, Listener, connect};
use siw::{
    Access, ConnectOptions, Context, Error, ListenOptions, Mr, Qp, QpInit, RecvWr, RemoteSlice,
    SendData, SendWr, Srq, SrqInit, Wc, WcOpcode, WcStatus,
};
use std::collections::HashMap;
use std::net::SocketAddr;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

const CLIENTS: usize = 3;
const KEYS: usize = 20;
const VALUE_LEN: usize = 4096;
const REQUEST_LEN: usize = 64;
/// Receive requests that all clients share.
const REQUESTS: usize = 32;
const PEERS_MAY: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_WRITE);

/// Server: one completion queue and one shared receive queue for all clients.
struct Server {
    cq: AsyncCq,
    srq: Srq,
    requests: Mr,
    values: Mr,
    /// Place of each key in `values`.
    places: HashMap<Vec<u8>, usize>,
    clients: HashMap<u32, Qp>,
    /// Numbers of queue pairs whose connection has ended.
    gone: UnboundedReceiver<u32>,
}

impl Server {
    fn post_receive(&self, slot: usize) -> Result<(), Error> {
        let sges = [self
            .requests
            .slice(slot * REQUEST_LEN..(slot + 1) * REQUEST_LEN)?];
        Ok(self.srq.post_recv(&[RecvWr {
            wr_id: slot as u64,
            sges: &sges,
        }])?)
    }

    /// Memory of a key; a new key gets the next free place.
    fn look_up(&mut self, key: &[u8]) -> Result<RemoteSlice, Error> {
        let next = self.places.len();
        let place = *self.places.entry(key.to_vec()).or_insert(next);
        let start = (place * VALUE_LEN) as u64;
        self.values.remote().slice(start..start + VALUE_LEN as u64)
    }

    fn answer(&mut self, completion: &Wc) -> Result<(), Error> {
        let slot = completion.wr_id as usize;
        let mut key = vec![0; completion.byte_len as usize];
        self.requests.read(slot * REQUEST_LEN, &mut key)?;
        self.post_receive(slot)?;
        let answer = self.look_up(&key)?.to_bytes();
        if let Some(qp) = self.clients.get(&completion.qp_num) {
            // Short data travels inside the work request.
            qp.post_send(&[SendWr::send(0, SendData::Inline(&answer))])?;
        }
        Ok(())
    }

    /// Serves until all clients have gone.
    async fn run(mut self) -> Result<(), Error> {
        while !self.clients.is_empty() {
            let mut completions = [Wc::default(); 16];
            let count = tokio::select! {
                count = self.cq.wait(&mut completions) => count?,
                Some(qp_num) = self.gone.recv() => {
                    self.clients.remove(&qp_num);
                    continue;
                }
            };
            for completion in &completions[..count] {
                let is_request = completion.opcode == WcOpcode::RECV;
                if is_request && completion.status == WcStatus::SUCCESS {
                    self.answer(completion)?;
                }
            }
        }
        Ok(())
    }
}

/// Client: one request at a time.
struct Client {
    cq: AsyncCq,
    qp: Qp,
    answer: Mr,
    buffer: Mr,
}

impl Client {
    /// Awaits successful completions of these kinds, in any order.
    async fn wait_for(&mut self, mut kinds: Vec<WcOpcode>) -> Result<(), Error> {
        while !kinds.is_empty() {
            let mut completions = [Wc::default()];
            self.cq.wait(&mut completions).await?;
            let Wc { status, opcode, .. } = completions[0];
            assert_eq!(status, WcStatus::SUCCESS, "{}", status.as_str());
            kinds.retain(|kind| *kind != opcode);
        }
        Ok(())
    }

    async fn look_up(&mut self, key: &[u8]) -> Result<RemoteSlice, Error> {
        let sges = [self.answer.slice(0..RemoteSlice::BYTES)?];
        self.qp.post_recv(&[RecvWr {
            wr_id: 0,
            sges: &sges,
        }])?;
        self.qp
            .post_send(&[SendWr::send(1, SendData::Inline(key))])?;
        self.wait_for(vec![WcOpcode::SEND, WcOpcode::RECV]).await?;
        let mut bytes = [0; RemoteSlice::BYTES];
        self.answer.read(0, &mut bytes)?;
        RemoteSlice::from_bytes(&bytes)
    }

    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), Error> {
        let remote = self.look_up(key).await?;
        self.buffer.write(0, value)?;
        let sges = [self.buffer.slice(0..value.len())?];
        self.qp
            .post_send(&[remote.write(2, SendData::Sges(&sges))?])?;
        self.wait_for(vec![WcOpcode::RDMA_WRITE]).await
    }

    async fn get(&mut self, key: &[u8]) -> Result<Vec<u8>, Error> {
        let remote = self.look_up(key).await?;
        let sges = [self.buffer.slice(0..VALUE_LEN)?];
        self.qp.post_send(&[remote.read(3, &sges)?])?;
        self.wait_for(vec![WcOpcode::RDMA_READ]).await?;
        let mut value = vec![0; VALUE_LEN];
        self.buffer.read(0, &mut value)?;
        Ok(value)
    }
}

fn value_of(number: usize, key: usize) -> Vec<u8> {
    (0..VALUE_LEN)
        .map(|i| (i * 31 + number * 7 + key) as u8)
        .collect()
}

async fn run_client(
    context: Context,
    device: u32,
    to: SocketAddr,
    number: usize,
) -> Result<(), Error> {
    let cq = AsyncCq::new(&context, 64).await?;
    let pd = context.alloc_pd()?;
    let qp = pd.create_qp(cq.cq(), cq.cq(), &QpInit::default())?;
    let mut client = Client {
        answer: pd.alloc_mr(RemoteSlice::BYTES, Access::LOCAL_WRITE)?,
        buffer: pd.alloc_mr(VALUE_LEN, Access::LOCAL_WRITE)?,
        cq,
        qp,
    };
    let options = ConnectOptions {
        device: Some(device),
        ..ConnectOptions::default()
    };
    let connection = connect(&client.qp, to, &options).await?;
    let name = |key| format!("key {key} of {number}").into_bytes();
    for key in 0..KEYS {
        client.put(&name(key), &value_of(number, key)).await?;
    }
    for key in (0..KEYS).rev() {
        assert_eq!(client.get(&name(key)).await?, value_of(number, key));
    }
    connection.close().await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let context = open_context()?;
    let devices = Devices::find(&context)?;
    let (_, address) = devices.server;

    let (tell_gone, gone) = unbounded_channel();
    let cq = AsyncCq::new(&context, 256).await?;
    let pd = context.alloc_pd()?;
    let mut server = Server {
        srq: pd.create_srq(&SrqInit {
            max_wr: REQUESTS as u32,
            ..SrqInit::default()
        })?,
        requests: pd.alloc_mr(REQUESTS * REQUEST_LEN, Access::LOCAL_WRITE)?,
        values: pd.alloc_mr(CLIENTS * KEYS * VALUE_LEN, PEERS_MAY)?,
        cq,
        places: HashMap::new(),
        clients: HashMap::new(),
        gone,
    };
    for slot in 0..REQUESTS {
        server.post_receive(slot)?;
    }
    let mut listener =
        Listener::bind(&context, (address, 0).into(), &ListenOptions::default()).await?;
    let mut tasks = Vec::new();
    for number in 0..CLIENTS {
        let client = run_client(
            context.clone(),
            devices.client,
            listener.local_addr(),
            number,
        );
        tasks.push(tokio::spawn(client));
        let incoming = listener.accept().await?;
        let cq = server.cq.cq();
        let qp = pd.create_qp_with_srq(cq, cq, &server.srq, &QpInit::default())?;
        let qp_num = qp.qp_num();
        let mut connection = incoming.accept(&qp, &ConnectOptions::default()).await?;
        server.clients.insert(qp_num, qp);
        let tell_gone = tell_gone.clone();
        tasks.push(tokio::spawn(async move {
            connection.disconnected().await?;
            // The server has ended if nobody listens.
            let _ = tell_gone.send(qp_num);
            Ok(())
        }));
    }
    tasks.push(tokio::spawn(server.run()));
    for task in tasks {
        task.await??;
    }
    println!("ok");
    Ok(())
}
