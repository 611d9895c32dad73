//! RDMA READ: the client fetches memory of the server, which takes no part in it. Prints "ok".
//!
//! `cargo run --example read [SOCKET]`, with siwd running.

mod common;

use common::{Endpoint, connect, open_context, wait_success};
use siw::SendWr;
use std::error::Error;

const LEN: usize = 64 << 10;

fn main() -> Result<(), Box<dyn Error>> {
    let context = open_context()?;
    let client = Endpoint::new(&context, LEN)?;
    let server = Endpoint::new(&context, LEN)?;
    let _channels = connect(&context, &client.qp, &server.qp)?;

    let pattern: Vec<u8> = (0..LEN).map(|i| (i * 31) as u8).collect();
    server.memory.write(0, &pattern)?;

    // Address and rkey usually travel in a SEND or in the private data of the connection. A peer
    // that has them may read while the region is registered with REMOTE_READ.
    let (remote_addr, rkey) = (server.memory.addr(), server.memory.rkey());
    let sink = [client.memory.sge(0, LEN)];
    client
        .qp
        .post_send(&[SendWr::read(1, &sink, remote_addr, rkey)])?;
    wait_success(&client.cq)?;

    let mut data = vec![0; LEN];
    client.memory.read(0, &mut data)?;
    assert_eq!(data, pattern);
    println!("ok");
    Ok(())
}
