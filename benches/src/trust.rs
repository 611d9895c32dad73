//! Resources that killed clients leave behind in a daemon. Called by `siw-figures`; the clients are
//! those of `siw-hostile-client`, a program of the daemon's tests.

use crate::daemon::Process;
use anyhow::{anyhow, bail};
use serde::Serialize;
use serde_json::Value;
use siw::{Context, Error};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Time limit for the daemon to clean up a client.
const CLEAN_TIMEOUT: Duration = Duration::from_secs(60);

/// Threads that start clients one after the other.
const KILLERS: u32 = 2;

/// Maximum batches of killed clients for telling memory growth from a leak.
const BATCHES: u32 = 3;

/// Time limit for the daemon to return free memory, which it collects for a moment.
const RETURN_TIME: Duration = Duration::from_secs(2);

/// The daemon under test, and the program of misbehaving clients.
pub struct Victim {
    /// The daemon's process.
    pub process: Process,
    /// Connection for querying the daemon's state.
    pub observer: Context,
    /// Its control socket.
    pub socket: PathBuf,
    /// `siw-hostile-client`.
    pub program: PathBuf,
}

/// Resources held by a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Holdings {
    clients: u64,
    queue_pairs: u64,
    connections: u64,
    descriptors: u64,
    /// Keys of all users.
    memory_keys: u64,
}

/// Growth of the resources held by a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Growth {
    /// Private memory, in bytes.
    pub bytes: u64,
    /// Mapped shared memory and hugepages, in bytes.
    pub shared_bytes: u64,
    /// Open descriptors.
    pub descriptors: u64,
    /// TCP connections.
    pub connections: u64,
    /// Memory regions and windows.
    pub memory_keys: u64,
}

impl Growth {
    /// Combines the growth of two batches of clients: the minimum for private memory, the maximum
    /// for all else.
    fn combine(self, other: Growth) -> Growth {
        Growth {
            bytes: self.bytes.min(other.bytes),
            shared_bytes: self.shared_bytes.max(other.shared_bytes),
            descriptors: self.descriptors.max(other.descriptors),
            connections: self.connections.max(other.connections),
            memory_keys: self.memory_keys.max(other.memory_keys),
        }
    }
}

impl Victim {
    fn holdings(&self) -> anyhow::Result<Holdings> {
        let text = self.observer.read_stats().map_err(failed("statistics"))?;
        let stats: Value = serde_json::from_str(&text)?;
        let list = |name: &str| stats[name].as_array().cloned().unwrap_or_default();
        let sum = |name: &str, pointer: &str| {
            let values = list(name);
            let numbers = values
                .iter()
                .filter_map(|value| value.pointer(pointer)?.as_u64());
            numbers.sum()
        };
        Ok(Holdings {
            clients: list("clients").len() as u64,
            queue_pairs: sum("workers", "/queue_pairs"),
            connections: sum("total", "/mib/TcpCurrEstab"),
            descriptors: self.process.descriptors()?,
            memory_keys: stats["users"]
                .as_object()
                .ok_or_else(|| anyhow!("only operators may read the statistics of all clients"))?
                .values()
                .filter_map(|held| held["memory regions and windows"].as_u64())
                .sum(),
        })
    }

    /// Waits until the daemon holds no more than before; returns the time taken.
    fn wait_until_clean(&self, before: Holdings) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        loop {
            let now = self.holdings()?;
            if now.clients <= before.clients
                && now.queue_pairs <= before.queue_pairs
                && now.connections <= before.connections
                && now.descriptors <= before.descriptors
                && now.memory_keys <= before.memory_keys
            {
                return Ok(begin.elapsed());
            }
            if begin.elapsed() > CLEAN_TIMEOUT {
                bail!("the daemon still holds {now:?}, before {before:?}");
            }
            thread::yield_now();
        }
    }

    fn command(&self, kind: &str, seconds: f64, seed: u32) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg(kind)
            .arg(&self.socket)
            .arg(seconds.to_string())
            .arg(seed.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// Kills `count` clients at random points of their lives, and returns the growth of the
    /// daemon's resources. A first, unmeasured batch of `count` clients excludes one-time
    /// allocations, such as memory for the connections that are in TIME-WAIT at a time. If private
    /// memory grew, further batches follow: a leak grows with each batch, whereas peak use reaches
    /// new heights less and less often. Returns the minimum growth of private memory, and the
    /// maximum of all else.
    pub fn kill_clients(&self, count: u32) -> anyhow::Result<Growth> {
        self.start_and_kill(count)?;
        let clean = self.holdings()?;
        self.wait_until_clean(Holdings {
            clients: 1,
            ..clean
        })?;
        let mut grown = self.growth_of(count)?;
        for _ in 1..BATCHES {
            if grown.bytes == 0 {
                break;
            }
            eprintln!("{count} clients killed: {grown:?}; repeating to detect a leak");
            grown = grown.combine(self.growth_of(count)?);
        }
        Ok(grown)
    }

    /// Growth of the daemon's resources after `count` clients were killed.
    fn growth_of(&self, count: u32) -> anyhow::Result<Growth> {
        let before = self.holdings()?;
        let (bytes, shared) = (self.private_bytes(0)?, self.process.shared_bytes()?);
        self.start_and_kill(count)?;
        // Resources not freed in time count as growth.
        let cleaned = self.wait_until_clean(before);
        if let Err(error) = &cleaned {
            eprintln!("{error}");
        }
        let after = self.holdings()?;
        Ok(Growth {
            bytes: self.private_bytes(bytes)?.saturating_sub(bytes),
            shared_bytes: self.process.shared_bytes()?.saturating_sub(shared),
            descriptors: after.descriptors.saturating_sub(before.descriptors),
            connections: after.connections.saturating_sub(before.connections),
            memory_keys: after.memory_keys.saturating_sub(before.memory_keys),
        })
    }

    /// The daemon's private memory, once free memory is returned or at most `enough` is left.
    fn private_bytes(&self, enough: u64) -> anyhow::Result<u64> {
        let begin = Instant::now();
        loop {
            let bytes = self.process.private_bytes()?;
            if bytes <= enough || begin.elapsed() > RETURN_TIME {
                return Ok(bytes);
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn start_and_kill(&self, count: u32) -> anyhow::Result<()> {
        thread::scope(|scope| {
            let killers: Vec<_> = (0..KILLERS)
                .map(|killer| {
                    scope.spawn(move || {
                        for round in (killer..count).step_by(KILLERS as usize) {
                            // Lifetimes from zero to some milliseconds, in a repeating sequence.
                            let micros = round.wrapping_mul(7919) % 12_000;
                            self.command("killed", f64::from(micros) / 1e6, round)
                                .status()
                                .map_err(|error| self.not_started(&error))?;
                        }
                        anyhow::Ok(())
                    })
                })
                .collect();
            for killer in killers {
                let ended = killer.join();
                ended.unwrap_or_else(|_| Err(anyhow!("a killer panicked")))?;
            }
            Ok(())
        })
    }

    fn not_started(&self, error: &std::io::Error) -> anyhow::Error {
        anyhow!("{}: {error}", self.program.display())
    }

    /// Kills a client with many connected queue pairs; returns the time that the daemon takes to
    /// clean up.
    pub fn kill_large_client(&self) -> anyhow::Result<Duration> {
        let before = self.holdings()?;
        let mut child = self
            .command("many-queue-pairs", 300.0, 1)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(|error| self.not_started(&error))?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            let _ = BufReader::new(stdout).read_line(&mut line);
        }
        let held = self.holdings();
        let begin = Instant::now();
        let killed = child.kill().and_then(|()| child.wait());
        killed?;
        let held = held?.queue_pairs - before.queue_pairs;
        eprintln!("killed a client with {held} queue pairs");
        if line.trim() != "attacking" || held < 10_000 {
            bail!("the client had {held} queue pairs when it was killed");
        }
        self.wait_until_clean(before)?;
        Ok(begin.elapsed())
    }
}

fn failed(what: &str) -> impl Fn(Error) -> anyhow::Error + '_ {
    move |error| anyhow!("{what}: {error}")
}

/// Path of a program in the same folder as this one.
pub fn program_beside(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let path = own.parent().unwrap_or(Path::new(".")).join(name);
    if !path.exists() {
        bail!(
            "{} is missing; build it with `cargo build --release -p {name}`",
            path.display()
        );
    }
    Ok(path)
}
