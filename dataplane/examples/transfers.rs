//! Transfers data between two devices of a running siwd and checks each byte: WRITE, READ and SEND
//! from 1 byte up to a given size, first one message at a time, then several in flight; then many
//! small messages and many connections. Each message must complete within a second of its arrival,
//! without any later traffic. Prints one summary line, or the error.
//!
//! `transfers SOCKET FROM-DEVICE TO-ADDRESS LARGEST-SIZE SMALL-MESSAGES CONNECTIONS`, for the PCI
//! lab.

mod sides;

use std::time::{Duration, Instant};

use siw::{RecvWr, SendData, SendWr, Wc, WcStatus};

use sides::{Contexts, Outcome, PATIENCE, Side, connect_sides};

/// Time limit from the arrival of a message to its completion.
const COMPLETION_LIMIT: Duration = Duration::from_secs(1);
/// Messages in flight at once in the second pass.
const DEPTH: usize = 16;
/// Most bytes in flight at each size in the second pass.
const BYTES_AT_ONCE: usize = 4 << 20;

impl Side {
    /// Waits for the next completion, which must be a success.
    fn wait_success(&self, what: &str) -> Outcome<Wc> {
        let mut wc = [Wc::default()];
        if self.cq.wait(&mut wc, Some(PATIENCE))? == 0 {
            return Err(format!("{what}: no completion within {PATIENCE:?}").into());
        }
        if wc[0].status != WcStatus::SUCCESS {
            return Err(format!("{what}: {:?}", wc[0].status).into());
        }
        Ok(wc[0])
    }

    fn has_byte(&self, at: usize, value: u8) -> Outcome<bool> {
        let mut byte = [0];
        self.memory.read(at, &mut byte)?;
        Ok(byte[0] == value)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Write,
    Read,
    Send,
}

/// Test data that differs for each message and at each position.
fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|index| (index.wrapping_mul(31) ^ (index >> 8) ^ seed.wrapping_mul(97)) as u8)
        .collect()
}

fn post_message(
    operation: Operation,
    from: &Side,
    to: &Side,
    at: usize,
    len: usize,
) -> Outcome<()> {
    let sges = [from.memory.sge(at, len)];
    let (remote, rkey) = (to.memory.addr() + at as u64, to.memory.rkey());
    let id = at as u64;
    let request = match operation {
        Operation::Write => SendWr::write(id, SendData::Sges(&sges), remote, rkey),
        Operation::Read => SendWr::read(id, &sges, remote, rkey),
        Operation::Send => SendWr::send(id, SendData::Sges(&sges)),
    };
    if operation == Operation::Send {
        let receive = [to.memory.sge(at, len)];
        to.qp.post_recv(&[RecvWr {
            wr_id: id,
            sges: &receive,
        }])?;
    }
    from.qp.post_send(&[request])?;
    Ok(())
}

/// Moves `depth` messages of `len` bytes at once. Returns the longest time from the arrival of the
/// last one to its completion.
fn move_messages(
    operation: Operation,
    from: &Side,
    to: &Side,
    len: usize,
    depth: usize,
    seed: usize,
) -> Outcome<Duration> {
    let what = format!("{operation:?} of {len} bytes, {depth} at once");
    let (source, sink) = match operation {
        Operation::Read => (to, from),
        _ => (from, to),
    };
    let expected = pattern(seed, len * depth);
    source.memory.write(0, &expected)?;
    let last = len * depth - 1;
    sink.memory.write(0, &vec![!expected[last]; len * depth])?;
    for index in 0..depth {
        post_message(operation, from, to, index * len, len)?;
    }
    let give_up = Instant::now() + PATIENCE;
    while operation == Operation::Write && !sink.has_byte(last, expected[last])? {
        if Instant::now() > give_up {
            return Err(format!("{what}: the data does not arrive").into());
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    if operation == Operation::Send {
        for _ in 0..depth {
            to.wait_success(&format!("{what}, receiver"))?;
        }
    }
    let arrived = Instant::now();
    for _ in 0..depth {
        from.wait_success(&what)?;
    }
    let delay = arrived.elapsed();
    if operation != Operation::Read && delay > COMPLETION_LIMIT {
        return Err(format!("{what}: completed {delay:?} after its arrival").into());
    }
    let mut received = vec![0; len * depth];
    sink.memory.read(0, &mut received)?;
    if let Some(at) = (0..received.len()).find(|at| received[*at] != expected[*at]) {
        return Err(format!("{what}: byte {at} is wrong").into());
    }
    Ok(if operation == Operation::Read {
        Duration::ZERO
    } else {
        delay
    })
}

fn run(arguments: &[String]) -> Outcome<()> {
    let [socket, device, target, largest, small, connections] = arguments else {
        return Err("usage: transfers SOCKET FROM-DEVICE TO-ADDRESS LARGEST-SIZE SMALL-MESSAGES CONNECTIONS".into());
    };
    let contexts = Contexts::open(socket, device, target)?;
    let (largest, small): (usize, usize) = (largest.parse()?, small.parse()?);
    let connections: usize = connections.parse()?;
    let memory = largest.max(BYTES_AT_ONCE.min(largest * DEPTH));
    let from = Side::new(&contexts.from, memory)?;
    let to = Side::new(&contexts.to, memory)?;
    connect_sides(&from, &to, &contexts)?;

    let mut slowest = Duration::ZERO;
    let mut messages = 0;
    let sizes = [1, 64, 1000, 4096, 65_536, 1 << 20, 16 << 20];
    for len in sizes.into_iter().filter(|len| *len <= largest) {
        for operation in [Operation::Write, Operation::Read, Operation::Send] {
            for depth in [1, (memory / len).min(DEPTH)] {
                messages += depth;
                let delay = move_messages(operation, &from, &to, len, depth, messages)?;
                slowest = slowest.max(delay);
            }
        }
    }
    for round in 0..small.div_ceil(DEPTH) {
        move_messages(Operation::Send, &from, &to, 64, DEPTH, round)?;
        messages += DEPTH;
    }
    let mut sides = Vec::new();
    for _ in 0..connections {
        let (one, other) = (
            Side::new(&contexts.from, 4096)?,
            Side::new(&contexts.to, 4096)?,
        );
        connect_sides(&one, &other, &contexts)?;
        sides.push((one, other));
    }
    for (index, (one, other)) in sides.iter().enumerate() {
        move_messages(Operation::Write, one, other, 2000, 1, index)?;
    }
    println!(
        "ok: {messages} messages up to {largest} bytes, {connections} connections, slowest completion {} us after arrival",
        slowest.as_micros()
    );
    Ok(())
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Err(error) = run(&arguments) {
        eprintln!("transfers: {error}");
        std::process::exit(1);
    }
}
