//! RDMA READ: the client fetches memory of the server, which takes no part in it. Prints "ok".
//!
//! `cargo run --example read [SOCKET]`, with siwd running.

mod common;

use common::{Endpoint, connect, open_context, wait_success};
use siw::RemoteSlice;
use std::error::Error;

const LEN: usize = 64 << 10;

fn main() -> Result<(), Box<dyn Error>> {
    let context = open_context()?;
    let client = Endpoint::new(&context, LEN)?;
    let server = Endpoint::new(&context, LEN)?;
    let _channels = connect(&context, &client.qp, &server.qp)?;

    let pattern: Vec<u8> = (0..LEN).map(|i| (i * 31) as u8).collect();
    server.memory.write(0, &pattern)?;

    // The description usually travels in a SEND or in the private data of the connection. A peer
    // that has it may read while the region is registered with REMOTE_READ.
    let described = server.memory.remote().to_bytes();
    let remote = RemoteSlice::from_bytes(&described)?;
    let sink = [client.memory.slice(0..LEN)?];
    client.qp.post_send(&[remote.read(1, &sink)?])?;
    wait_success(&client.cq)?;

    let mut data = vec![0; LEN];
    client.memory.read(0, &mut data)?;
    assert_eq!(data, pattern);
    println!("ok");
    Ok(())
}
