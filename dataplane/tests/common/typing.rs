//! A TCP connection with the traffic of an ssh session: single bytes that are echoed one by one,
//! lines, and whole screens of text. Every byte is compared.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use super::{PATIENCE, pattern};

/// Keystrokes per line.
const KEYS: usize = 8;
/// Bytes per screen: several segments.
const SCREEN: usize = 4000;

/// Echoes all data until the peer ends the stream.
pub fn echo(mut stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match stream.read(&mut buffer).unwrap() {
            0 => return,
            len => stream.write_all(&buffer[..len]).unwrap(),
        }
    }
}

/// The client end of a connection to an echo server.
pub struct Typist {
    stream: TcpStream,
    turn: u64,
}

impl Typist {
    pub fn new(stream: TcpStream) -> Typist {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Typist { stream, turn: 0 }
    }

    /// Types a line, key by key, then a screen of text, and checks the echo.
    pub fn type_line(&mut self) {
        self.turn += 1;
        let text = pattern(self.turn, KEYS + SCREEN);
        let (keys, screen) = text.split_at(KEYS);
        for key in keys {
            self.exchange(&[*key]);
        }
        self.exchange(screen);
    }

    fn exchange(&mut self, bytes: &[u8]) {
        let begin = Instant::now();
        self.stream.write_all(bytes).unwrap();
        let mut back = vec![0; bytes.len()];
        self.stream.read_exact(&mut back).unwrap_or_else(|error| {
            panic!("line {}: {error} after {:?}", self.turn, begin.elapsed())
        });
        assert!(back == bytes, "line {}: other bytes came back", self.turn);
    }

    pub fn lines(&self) -> u64 {
        self.turn
    }
}
