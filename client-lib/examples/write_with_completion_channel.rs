//! RDMA WRITE with immediate data, and a completion channel: the server sleeps until the data has
//! arrived instead of polling for it. Prints "ok".
//!
//! `cargo run --example write_with_completion_channel [SOCKET]`, with siwd running.

mod common;

use common::{ALL_ACCESS, Endpoint, TIMEOUT, connect, open_context, wait_success};
use siw::{CompletionChannel, Cq, QpInit, RecvWr, SendData, SendWr, Wc, WcFlags, WcOpcode};
use std::error::Error;

const LEN: usize = 8192;
/// Value that identifies the data to the server.
const IMMEDIATE: u32 = 42;
/// Identifies the completion queue on its channel.
const COOKIE: u64 = 7;

fn main() -> Result<(), Box<dyn Error>> {
    let context = open_context()?;
    let client = Endpoint::new(&context, LEN)?;

    // The server's completion queue raises its events on a channel. `channel` has a file descriptor
    // (`AsFd`), so that a program can wait for it together with other descriptors.
    let channel = CompletionChannel::new(&context)?;
    let pd = context.alloc_pd()?;
    let cq = Cq::new(&context, 16, Some((&channel, COOKIE)))?;
    let qp = pd.create_qp(&cq, &cq, &QpInit::default())?;
    let memory = pd.alloc_mr(LEN, ALL_ACCESS)?;

    // The immediate data completes a receive request, which needs no memory of its own.
    qp.post_recv(&[RecvWr {
        wr_id: 1,
        sges: &[],
    }])?;
    let _channels = connect(&context, &client.qp, &qp)?;

    // Arm first, then poll once more: a completion from before the arming raises no event.
    let mut completions = [Wc::default()];
    cq.req_notify(false)?;
    assert_eq!(cq.poll(&mut completions)?, 0, "nothing was sent yet");

    client.memory.write(0, &[0x5a; LEN])?;
    let source = [client.memory.sge(0, LEN)];
    let data = SendData::Sges(&source);
    let write = SendWr::write_with_imm(2, data, memory.addr(), memory.rkey(), IMMEDIATE);
    client.qp.post_send(&[write])?;
    // The WRITE is complete: the client may reuse its memory.
    wait_success(&client.cq)?;

    // Blocks until the queue has a completion.
    assert_eq!(channel.get_event(Some(TIMEOUT))?, COOKIE);
    assert_eq!(cq.poll(&mut completions)?, 1);
    let [received] = completions;
    assert_eq!(received.opcode, WcOpcode::RECV_RDMA_WITH_IMM);
    assert!(received.flags.contains(WcFlags::WITH_IMM));
    assert_eq!(received.imm, IMMEDIATE);

    let mut placed = [0; LEN];
    memory.read(0, &mut placed)?;
    assert_eq!(placed, [0x5a; LEN]);
    println!("ok");
    Ok(())
}
