//! FetchAdd and CmpSwap (RFC 7306) on words of the server's memory: a counter, and a lock that the
//! first of two attempts gets. Prints "ok".
//!
//! `cargo run --example atomics [SOCKET]`, with siwd running.

mod common;

use common::{Endpoint, connect, open_context, wait_success};
use siw::SendWr;
use std::error::Error;

const WORD: usize = size_of::<u64>();
/// Offsets in the server's memory.
const COUNTER: usize = 0;
const LOCK: usize = WORD;
const UNLOCKED: u64 = 0;
const OWNER: u64 = 11;

/// Posts an atomic whose old value is placed at the start of the client's memory, and returns that
/// value.
fn run_atomic(client: &Endpoint, request: SendWr<'_>) -> Result<u64, Box<dyn Error>> {
    client.qp.post_send(&[request])?;
    wait_success(&client.cq)?;
    let mut old = [0; WORD];
    client.memory.read(0, &mut old)?;
    Ok(u64::from_ne_bytes(old))
}

fn main() -> Result<(), Box<dyn Error>> {
    let context = open_context()?;
    let client = Endpoint::new(&context, 4096)?;
    let server = Endpoint::new(&context, 4096)?;
    let _channels = connect(&context, &client.qp, &server.qp)?;
    server.memory.write(COUNTER, &100u64.to_ne_bytes())?;

    // The word is addressed like any remote memory; it has to be 8-byte aligned, in a region
    // registered with REMOTE_ATOMIC.
    let remote = server.memory.remote();
    let word_at = |offset: usize| remote.slice(offset as u64..(offset + WORD) as u64);
    let sink = client.memory.slice(0..WORD)?;

    let add = word_at(COUNTER)?.fetch_add(1, sink, 5)?;
    assert_eq!(run_atomic(&client, add)?, 100);
    assert_eq!(run_atomic(&client, add)?, 105);

    // The attempt that finds UNLOCKED gets the lock; other attempts leave the memory unchanged.
    let lock = word_at(LOCK)?.cmp_swap(2, sink, UNLOCKED, OWNER)?;
    assert_eq!(run_atomic(&client, lock)?, UNLOCKED);
    assert_eq!(run_atomic(&client, lock)?, OWNER);

    let mut counter = [0; WORD];
    server.memory.read(COUNTER, &mut counter)?;
    assert_eq!(u64::from_ne_bytes(counter), 110);
    println!("ok");
    Ok(())
}
