//! Round trips of 64 bytes over the kernel's TCP with both ends spinning: the lowest latency that a
//! program achieves with sockets.

use crate::measurement::new_histogram;
use anyhow::{anyhow, bail};
use hdrhistogram::Histogram;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Time without arriving data after which the other end counts as disconnected.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves one connection until it is closed.
pub fn answer_round_trips(address: SocketAddr, size: usize) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address).map_err(|error| anyhow!("{address}: {error}"))?;
    let (mut stream, _) = listener.accept()?;
    prepare(&stream)?;
    let mut message = vec![0; size];
    while read_spinning(&mut stream, &mut message)? {
        write_spinning(&mut stream, &message)?;
    }
    Ok(())
}

/// Measures round trips of `size` bytes for `time`, in nanoseconds.
pub fn measure_round_trips(
    address: SocketAddr,
    size: usize,
    time: Duration,
) -> anyhow::Result<Histogram<u64>> {
    let mut stream = TcpStream::connect(address).map_err(|error| anyhow!("{address}: {error}"))?;
    prepare(&stream)?;
    let mut latency = new_histogram()?;
    let mut message = vec![0x5a; size];
    let begin = Instant::now();
    let warm = begin + time / 4;
    let end = warm + time;
    let mut last = begin;
    while last < end {
        write_spinning(&mut stream, &message)?;
        if !read_spinning(&mut stream, &mut message)? {
            bail!("the other end closed the connection");
        }
        let now = Instant::now();
        if last >= warm {
            latency.saturating_record((now - last).as_nanos() as u64);
        }
        last = now;
    }
    Ok(latency)
}

fn prepare(stream: &TcpStream) -> anyhow::Result<()> {
    stream
        .set_nodelay(true)
        .and_then(|()| stream.set_nonblocking(true))
        .map_err(anyhow::Error::new)
}

/// Fills `buffer`. False if the other end closed.
fn read_spinning(stream: &mut TcpStream, buffer: &mut [u8]) -> anyhow::Result<bool> {
    let mut filled = 0;
    let mut polls = 0u32;
    let mut since = None;
    while filled < buffer.len() {
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => return Ok(false),
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                polls += 1;
                if polls.is_multiple_of(4096)
                    && since.get_or_insert_with(Instant::now).elapsed() > STALL_TIMEOUT
                {
                    bail!("nothing arrived for 10 s");
                }
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

fn write_spinning(stream: &mut TcpStream, mut bytes: &[u8]) -> anyhow::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_are_counted_until_the_time_is_over() {
        let probe = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = probe.local_addr().unwrap();
        drop(probe);
        std::thread::scope(|scope| {
            let answering = scope.spawn(|| answer_round_trips(address, 64));
            let latency = loop {
                match measure_round_trips(address, 64, Duration::from_millis(40)) {
                    Err(error) if error.to_string().contains("refused") => std::thread::yield_now(),
                    result => break result.unwrap(),
                }
            };
            assert!(!latency.is_empty());
            answering.join().unwrap().unwrap();
        });
    }
}
