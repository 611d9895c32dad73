//! `siw-stream` in a private network of the test, and Linux sockets that are its peers.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, channel};

use serde_json::Value;
use siw_stream::StreamPattern;

use super::PATIENCE;
use super::net::Netns;

pub const SEED: u64 = 0x5eed;
/// Addresses of `siw-stream` and of Linux.
pub const OURS: &str = "10.77.0.1";
pub const OURS6: &str = "fd77::1";
pub const LINUX: &str = "10.77.0.2";
pub const LINUX6: &str = "fd77::2";

/// A running endpoint.
pub struct Endpoint {
    child: Child,
    lines: Receiver<String>,
    pub mac: [u8; 6],
}

/// The program's output at its end.
pub struct Outcome {
    pub success: bool,
    pub result: Value,
}

impl Outcome {
    pub fn count(&self, name: &str) -> u64 {
        match self.result[name].as_u64() {
            Some(n) => n,
            None => panic!("no {name} in {}", self.result),
        }
    }

    /// A counter by its nstat or MIB name.
    pub fn mib(&self, name: &str) -> u64 {
        match self.result["mib"][name].as_u64() {
            Some(n) => n,
            None => panic!("no {name} in {}", self.result),
        }
    }

    /// A TCP counter.
    pub fn tcp(&self, name: &str) -> u64 {
        match self.result["tcp"][name].as_u64() {
            Some(n) => n,
            None => panic!("no tcp counter {name} in {}", self.result),
        }
    }
}

fn lines(out: ChildStdout) -> Receiver<String> {
    let (tell, told) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            let _ = tell.send(line);
        }
    });
    told
}

/// A pair of interfaces with Linux's addresses on `veth1`; the endpoint takes `veth0`.
pub fn network(mtu: u32) -> Netns {
    let ns = Netns::new();
    ns.veth(mtu);
    ns.address("veth1", "10.77.0.2/24");
    ns.address("veth1", "fd77::2/64");
    ns
}

/// The program with arguments separated by spaces.
pub fn command(args: &str) -> Command {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let mut command = Command::new(PROGRAM.get_or_init(super::stream_program));
    command
        .args(args.split(' '))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit());
    command
}

impl Endpoint {
    /// Starts an endpoint on `veth0` and waits until it is ready.
    pub fn start(ns: &Netns, args: &str) -> Endpoint {
        Endpoint::on(ns, "net_af_packet0,iface=veth0", args)
    }

    /// Starts an endpoint on a port given by its devargs and waits until it is ready.
    pub fn on(ns: &Netns, devargs: &str, args: &str) -> Endpoint {
        Endpoint::spawn(
            ns,
            &format!(
                "--devargs {devargs} --mac 02:00:00:77:00:01 --address {OURS}/24 \
                 --address {OURS6}/64 --no-hugepages {args}"
            ),
        )
    }

    /// Starts an endpoint on `veth0`, configured by these lines of a device section, and waits
    /// until it is ready.
    pub fn configured(ns: &Netns, device: &str, args: &str) -> Endpoint {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("stream.toml");
        let text = format!(
            "[dpdk]\nhugepages = \"never\"\nbuffers = 4096\n[[device]]\nname = \"siw0\"\n\
             devargs = \"net_af_packet0,iface=veth0\"\nmac = \"02:00:00:77:00:01\"\n{device}\n"
        );
        std::fs::write(&file, text).unwrap();
        Endpoint::spawn(ns, &format!("--config {} {args}", file.display()))
    }

    fn spawn(ns: &Netns, args: &str) -> Endpoint {
        let args = format!("--json --seed {SEED} {args}");
        let mut child = ns.run(|| command(&args).spawn().unwrap());
        let lines = lines(child.stdout.take().unwrap());
        let mut e = Endpoint {
            child,
            lines,
            mac: [0; 6],
        };
        let ready = e.line();
        assert_eq!(ready["ready"], true, "{ready}");
        let mac = ready["devices"][0]["mac"].as_str().unwrap();
        for (to, from) in e.mac.iter_mut().zip(mac.split(':')) {
            *to = u8::from_str_radix(from, 16).unwrap();
        }
        e
    }

    fn line(&mut self) -> Value {
        match self.lines.recv_timeout(2 * PATIENCE) {
            Ok(line) => serde_json::from_str(&line).unwrap(),
            Err(_) => panic!("siw-stream said nothing"),
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the program ends by itself; returns its result.
    pub fn wait(mut self) -> Outcome {
        let result = self.line();
        let status = super::wait(&mut self.child);
        assert!(result["result"].is_object(), "{result}");
        Outcome {
            success: status.success(),
            result: result["result"].clone(),
        }
    }

    /// Sends SIGTERM; returns the result.
    pub fn stop(self) -> Outcome {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        self.wait()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if self.child.try_wait().ok().flatten().is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Connects a Linux socket in this namespace; its operations time out when nothing moves.
pub fn dial(ns: &Netns, ip: &str, port: u16) -> std::io::Result<TcpStream> {
    let to = SocketAddr::new(ip.parse::<IpAddr>().unwrap(), port);
    let s = ns.run(|| TcpStream::connect_timeout(&to, PATIENCE))?;
    patient(&s);
    Ok(s)
}

pub fn patient(s: &TcpStream) {
    s.set_read_timeout(Some(PATIENCE)).unwrap();
    s.set_write_timeout(Some(PATIENCE)).unwrap();
}

/// Writes `bytes` bytes of the endpoint's pattern.
pub fn write_pattern(mut s: &TcpStream, bytes: u64) {
    let pattern = StreamPattern::new(SEED);
    let mut block = vec![0; 64 << 10];
    let mut at = 0;
    while at < bytes {
        let n = (block.len() as u64).min(bytes - at) as usize;
        pattern.fill(at, &mut block[..n]);
        s.write_all(&block[..n]).unwrap();
        at += n as u64;
    }
}

/// Reads to the end, which must come after exactly `bytes` bytes of the pattern.
pub fn read_pattern(s: &TcpStream, bytes: u64) {
    assert_eq!(read_matching(s), bytes, "the stream's length");
}

/// Reads to the end; every byte must match the pattern. Returns the number of bytes.
pub fn read_matching(mut s: &TcpStream) -> u64 {
    let pattern = StreamPattern::new(SEED);
    let mut block = vec![0; 64 << 10];
    let mut at = 0;
    loop {
        let n = s.read(&mut block).unwrap();
        if n == 0 {
            return at;
        }
        assert_eq!(
            pattern.matching(at, &block[..n]),
            n,
            "a wrong byte after {at}"
        );
        at += n as u64;
    }
}
