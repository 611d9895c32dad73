//! A shared receive queue: one pool of receive requests serves the queue pairs of several clients.
//! Prints "ok".
//!
//! `cargo run --example srq_server [SOCKET]`, with siwd running.

mod common;

use common::{ALL_ACCESS, Endpoint, connect, open_context, wait_success};
use siw::{Cq, QpInit, RecvWr, SendData, SendWr, SrqInit};
use std::error::Error;

const CLIENTS: usize = 3;
const BUFFER_LEN: usize = 64;
const BUFFERS: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let context = open_context()?;
    let pd = context.alloc_pd()?;
    let cq = Cq::new(&context, 64, None)?;
    let memory = pd.alloc_mr(BUFFERS * BUFFER_LEN, ALL_ACCESS)?;
    let srq = pd.create_srq(&SrqInit {
        max_wr: BUFFERS as u32,
        max_sge: 1,
        ..SrqInit::default()
    })?;

    // One receive request for each buffer; `wr_id` is the buffer's number.
    for buffer in 0..BUFFERS {
        srq.post_recv(&[RecvWr {
            wr_id: buffer as u64,
            sges: &[memory.slice(buffer * BUFFER_LEN..(buffer + 1) * BUFFER_LEN)?],
        }])?;
    }

    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let client = Endpoint::new(&context, BUFFER_LEN)?;
        let server_qp = pd.create_qp_with_srq(&cq, &cq, &srq, &QpInit::default())?;
        let channels = connect(&context, &client.qp, &server_qp)?;
        clients.push((client, server_qp, channels));
    }

    for (number, (client, _, _)) in clients.iter().enumerate() {
        let text = format!("from client {number}");
        client.memory.write(0, text.as_bytes())?;
        let sges = [client.memory.slice(0..text.len())?];
        let message = SendWr::send(1, SendData::Sges(&sges));
        client.qp.post_send(&[message])?;
        wait_success(&client.cq)?;
    }

    // Requests are taken in posting order, for messages of any queue pair; `qp_num` of the
    // completion identifies the queue pair.
    for _ in 0..CLIENTS {
        let completion = wait_success(&cq)?;
        let number = clients
            .iter()
            .position(|(_, qp, _)| qp.qp_num() == completion.qp_num)
            .ok_or("a completion of an unknown queue pair")?;
        let buffer = completion.wr_id as usize * BUFFER_LEN;
        let mut text = vec![0; completion.byte_len as usize];
        memory.read(buffer, &mut text)?;
        assert_eq!(text, format!("from client {number}").into_bytes());
        // Repost the buffer.
        srq.post_recv(&[RecvWr {
            wr_id: completion.wr_id,
            sges: &[memory.sge(buffer, BUFFER_LEN)],
        }])?;
    }
    assert_eq!(srq.query()?.posted, BUFFERS as u32);
    println!("ok");
    Ok(())
}
