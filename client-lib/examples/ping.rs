//! SEND and RECEIVE: the client sends a text, the server sends it back. Prints "ok".
//!
//! `cargo run --example ping [SOCKET]`, with siwd running (`config/loopback.toml` has two devices).

mod common;

use common::{Endpoint, connect, open_context, wait_success};
use siw::{RecvWr, SendData, SendWr};
use std::error::Error;

const TEXT: &[u8] = b"ping";
/// Chosen by the application; returned in completions.
const RECEIVE_ID: u64 = 1;
const SEND_ID: u64 = 2;

fn main() -> Result<(), Box<dyn Error>> {
    let context = open_context()?;
    let client = Endpoint::new(&context, 4096)?;
    let server = Endpoint::new(&context, 4096)?;

    // A SEND needs a posted receive request at the other end: post them before connecting.
    for end in [&client, &server] {
        let request = RecvWr {
            wr_id: RECEIVE_ID,
            sges: &[end.memory.slice(0..TEXT.len())?],
        };
        end.qp.post_recv(&[request])?;
    }
    let _channels = connect(&context, &client.qp, &server.qp)?;

    // Short data may travel inside the work request; its memory is then not read after posting.
    client
        .qp
        .post_send(&[SendWr::send(SEND_ID, SendData::Inline(TEXT))])?;
    wait_success(&client.cq)?;

    let received = wait_success(&server.cq)?;
    assert_eq!(received.wr_id, RECEIVE_ID);
    // The answer is sent from the memory that received the message.
    let sges = [server.memory.slice(0..received.byte_len as usize)?];
    server
        .qp
        .post_send(&[SendWr::send(SEND_ID, SendData::Sges(&sges))])?;
    wait_success(&server.cq)?;

    wait_success(&client.cq)?;
    let mut answer = [0; TEXT.len()];
    client.memory.read(0, &mut answer)?;
    assert_eq!(answer, TEXT);
    println!("ok");
    Ok(())
}
