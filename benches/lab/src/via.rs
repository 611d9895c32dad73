//! siwd as the target, on this machine: a network namespace of the run's own with a veth pair, siwd on one
//! end and the lab on the other.
//!
//! Nothing outlives the run, even if it is killed: the namespaces vanish with their last process, the
//! processes get a signal when the lab ends, and socket and configuration lie in a private tmpfs.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::agent::Agent;
use crate::script::Running;

pub const LAB_INTERFACE: &str = "lab0";
/// Addresses of the lab and of its target, by whether they are IPv6.
pub fn addresses(ipv6: bool) -> (IpAddr, IpAddr) {
    if ipv6 {
        let host = |number| Ipv6Addr::new(0xFD77, 0, 0, 0, 0, 0, 0, number).into();
        (host(2), host(1))
    } else {
        let host = |number| Ipv4Addr::new(10, 77, 0, number).into();
        (host(2), host(1))
    }
}

pub const PORT: u16 = 7174;

/// Private to the run's mount namespace.
const PRIVATE: &str = "/dev/shm";

const CONFIG: &str = r#"
[workers]
idle = "adaptive"
[control]
socket = "/dev/shm/siwd.sock"
[dpdk]
hugepages = "never"
buffers = 8192
[[device]]
name = "siw0"
devargs = "DEVARGS"
mac = "02:00:00:77:00:01"
addresses = ["10.77.0.1/24", "fd77::1/64"]
"#;

/// The configuration with further settings of the device, each as `TABLE.KEY=VALUE`; a value with commas is
/// a list.
fn configuration(link: LocalLink, settings: &[String]) -> Result<String> {
    let mut config: toml::Table = CONFIG.replace("DEVARGS", link.devargs()).parse()?;
    let device = config["device"]
        .get_mut(0)
        .and_then(toml::Value::as_table_mut)
        .context("no device")?;
    for setting in settings {
        let (name, text) = setting.split_once('=').context("no value")?;
        let (table, key) = name.split_once('.').context("no table")?;
        let value = match text.split_once(',') {
            Some(_) => text.split(',').map(value).collect::<Vec<_>>().into(),
            None => value(text),
        };
        let table = device
            .entry(table)
            .or_insert_with(|| toml::Table::new().into());
        let table = table.as_table_mut().context("not a table")?;
        table.insert(key.to_owned(), value);
    }
    Ok(config.to_string())
}

fn value(text: &str) -> toml::Value {
    let boolean = text.parse().map(toml::Value::Boolean).ok();
    let number = || text.parse().map(toml::Value::Integer).ok();
    boolean.or_else(number).unwrap_or_else(|| text.into())
}

/// Link between the lab and siwd.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Default,
    clap::ValueEnum,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum LocalLink {
    /// A veth pair: siwd by AF_PACKET on one end
    #[default]
    Veth,
    /// A tap interface of siwd's own
    Tap,
}

impl LocalLink {
    fn devargs(self) -> &'static str {
        match self {
            LocalLink::Veth => "net_af_packet0,iface=siwd0",
            LocalLink::Tap => "net_tap0,iface=lab0",
        }
    }
}

/// Programs of siwd, and rping.
#[derive(Debug, Clone)]
pub struct Programs {
    siwd: PathBuf,
    folder: PathBuf,
    has_rping: bool,
}

fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    path.split(':')
        .map(|folder| Path::new(folder).join(name))
        .find(|file| file.is_file())
}

impl Programs {
    /// Finds siwd, a program of this name: as given, beside this program, or in `$PATH`; and the programs
    /// beside it.
    pub fn find(given: Option<&Path>, name: &str) -> Result<Programs> {
        let beside = std::env::current_exe().ok().and_then(|exe| {
            let folder = exe.parent()?;
            [folder, folder.parent()?]
                .map(|f| f.join(name))
                .into_iter()
                .find(|f| f.is_file())
        });
        let siwd = match given {
            Some(file) if file.is_file() => file.to_owned(),
            Some(file) => bail!("{} does not exist", file.display()),
            None => beside.or_else(|| in_path(name)).with_context(|| {
                format!(
                    "{name} is neither beside this program nor in $PATH; name it with --siwd FILE"
                )
            })?,
        };
        let siwd = siwd.canonicalize()?;
        let folder = siwd.parent().unwrap_or(Path::new("/")).to_owned();
        let has_rping = in_path("rping").is_some() && folder.join("siwrun").is_file();
        if !has_rping && !folder.join("siw-ping").is_file() {
            bail!(
                "neither rping (rdmacm-utils) with siwrun, nor siw-ping is beside {}",
                siwd.display()
            );
        }
        for needed in ["ip", "ethtool", "setpriv"] {
            if in_path(needed).is_none() {
                bail!("{needed} is not installed (iproute2, ethtool, util-linux)");
            }
        }
        Ok(Programs {
            siwd,
            folder,
            has_rping,
        })
    }

    /// Starts a program with siwd's libraries.
    fn siwrun(&self, program: &Path, args: &str, log: &Path) -> Result<Child> {
        let mut command = dying_with_the_lab("KILL", &self.folder.join("siwrun"));
        command
            .args([
                "--socket",
                "/dev/shm/siwd.sock",
                "--links",
                "/dev/shm/links",
            ])
            .arg(program);
        let child = start_client_program(command, args, log);
        child.with_context(|| format!("cannot start siwrun {}", program.display()))
    }

    fn rping(&self, args: &str, log: &Path) -> Result<Child> {
        if self.has_rping {
            return self.siwrun(Path::new("rping"), args, log);
        }
        let program = "siw-ping";
        let mut command = dying_with_the_lab("KILL", &self.folder.join(program));
        command.args(["--socket", "/dev/shm/siwd.sock"]);
        let child = start_client_program(command, args, log);
        child.with_context(|| format!("cannot start {program}"))
    }
}

/// Starts a program with these further arguments, whose errors go to the end of the log.
fn start_client_program(mut command: Command, args: &str, log: &Path) -> Result<Child> {
    let out = File::options().create(true).append(true).open(log)?;
    let child = command
        .args(args.split_whitespace())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(out)
        .process_group(0)
        .spawn()?;
    Ok(child)
}

fn dying_with_the_lab(signal: &str, program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", signal]).arg(program);
    command
}

/// Moves this process, which must have a single thread, into namespaces of its own.
pub fn enter_namespaces(link: LocalLink) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("--via siwd makes a network namespace with a veth pair: run it as root");
    }
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)
        .context("cannot make namespaces (CAP_SYS_ADMIN is needed)")?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("cannot make the mounts private")?;
    mount(
        Some("siw-lab"),
        PRIVATE,
        Some("tmpfs"),
        MsFlags::MS_NOSUID,
        Some("mode=755"),
    )
    .with_context(|| format!("cannot mount a private tmpfs on {PRIVATE}"))?;
    run("ip", "link set lo up")?;
    if link == LocalLink::Tap {
        return Ok(());
    }
    run(
        "ip",
        "link add lab0 mtu 1500 type veth peer name siwd0 mtu 1500",
    )?;
    for end in ["lab0", "siwd0"] {
        run(
            "ethtool",
            &format!("-K {end} tso off gso off gro off rx off tx off"),
        )?;
        run("ip", &format!("link set {end} up arp off addrgenmode none"))?;
    }
    Ok(())
}

fn run(program: &str, args: &str) -> Result<()> {
    let file = in_path(program).unwrap_or(program.into());
    let out = Command::new(file)
        .args(args.split(' '))
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    if !out.status.success() {
        bail!(
            "{program} {args}: {}",
            String::from_utf8_lossy(&out.stderr).trim()
        );
    }
    Ok(())
}

fn end_group(child: &mut Child) {
    if matches!(child.try_wait(), Ok(None)) {
        // A group whose leader was not reaped yet is this child's.
        let _ = killpg(Pid::from_raw(child.id() as i32), Signal::SIGKILL);
    }
    let _ = child.wait();
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        end_group(&mut self.0);
    }
}

/// Switches the faults of `siwd-mutants`.
pub struct MutantSwitch {
    wanted: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// Names of all faults.
    pub names: Vec<String>,
}

impl MutantSwitch {
    fn new(siwd: &mut Child) -> Result<MutantSwitch> {
        let (Some(wanted), Some(answers)) = (siwd.stdin.take(), siwd.stdout.take()) else {
            bail!("siwd has no pipes");
        };
        let mut switch = MutantSwitch {
            wanted,
            answers: BufReader::new(answers),
            names: Vec::new(),
        };
        let mut line = String::new();
        switch.answers.read_line(&mut line)?;
        let names = line.trim().strip_prefix("mutants ").with_context(
            || "this siwd has no mutants: build one from the copy that `siw-lab mutate` writes",
        )?;
        switch.names = names.split(' ').map(str::to_owned).collect();
        Ok(switch)
    }

    /// Switches a fault on and all others off; all off with an empty name.
    pub fn select(&mut self, name: &str) -> Result<()> {
        writeln!(self.wanted, "{name}")?;
        let (wanted, unknown) = (format!("mutant {name}"), format!("unknown {name}"));
        let mut line = String::new();
        // Other lines are of the daemon, as its ready line.
        while line.trim_end_matches('\n') != wanted {
            if line.trim_end() == unknown {
                bail!("siwd does not know the mutant {name}");
            }
            line.clear();
            if self.answers.read_line(&mut line)? == 0 {
                bail!("siwd ended");
            }
        }
        Ok(())
    }
}

/// A running siwd with `rping -s -P` on it, started again whenever it ends.
pub struct Siwd {
    siwd: Child,
    stop: Arc<AtomicBool>,
    pub restarts: Arc<AtomicU32>,
    supervisor: Option<JoinHandle<()>>,
    pub log: PathBuf,
    mutants: Option<MutantSwitch>,
}

impl Siwd {
    /// Starts everything, with further settings of the device; the namespaces were entered before.
    pub fn start(
        programs: &Programs,
        output: &Path,
        link: LocalLink,
        ipv6: bool,
        settings: &[String],
    ) -> Result<Siwd> {
        Siwd::start_program(programs, output, link, ipv6, settings, false)
    }

    /// Starts `siwd-mutants` over a veth pair; the namespaces were entered before.
    pub fn start_mutants(programs: &Programs, output: &Path) -> Result<Siwd> {
        Siwd::start_program(programs, output, LocalLink::Veth, false, &[], true)
    }

    /// The switch of a siwd that was started with mutants.
    pub fn mutants(&mut self) -> Result<&mut MutantSwitch> {
        self.mutants
            .as_mut()
            .context("siwd was started without mutants")
    }

    fn start_program(
        programs: &Programs,
        output: &Path,
        link: LocalLink,
        ipv6: bool,
        settings: &[String],
        has_mutants: bool,
    ) -> Result<Siwd> {
        let any = if ipv6 { "-a :: " } else { "" };
        let config = Path::new(PRIVATE).join("siwd.toml");
        let text = configuration(link, settings)
            .with_context(|| format!("siwd cannot have the settings {}", settings.join(" ")))?;
        std::fs::write(&config, text)?;
        let log = output.join("siwd.log");
        // The log of the siwd before, with other settings, is kept.
        let out = File::options()
            .create(true)
            .append(!settings.is_empty())
            .truncate(settings.is_empty())
            .write(true)
            .open(&log);
        let out = out.with_context(|| format!("cannot write {}", log.display()))?;
        let (stdin, stdout) = if has_mutants {
            (Stdio::piped(), Stdio::piped())
        } else {
            (Stdio::null(), out.try_clone()?.into())
        };
        let socket = Path::new(PRIVATE).join("siwd.sock");
        // That of the siwd before says nothing about this one.
        let _ = std::fs::remove_file(&socket);
        let mut siwd = dying_with_the_lab("TERM", &programs.siwd)
            .arg("--config")
            .arg(&config)
            .stdin(stdin)
            .stdout(stdout)
            .stderr(out)
            .spawn()
            .context("cannot start siwd")?;
        let mutants = has_mutants.then(|| MutantSwitch::new(&mut siwd));
        let mut started = Siwd {
            siwd,
            mutants: None,
            stop: Arc::default(),
            restarts: Arc::default(),
            supervisor: None,
            log: log.clone(),
        };
        started.mutants = mutants.transpose()?;
        let deadline = Instant::now() + Duration::from_secs(30);
        while !socket.exists() {
            if let Some(status) = started.siwd.try_wait()? {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                bail!("siwd ended with {status}:\n{}", said.trim());
            }
            if Instant::now() > deadline {
                bail!("siwd is not ready after 30 s; see {}", log.display());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        if link == LocalLink::Tap {
            // The kernel's end, which has no address; it comes after the socket.
            while nix::net::if_::if_nametoindex(LAB_INTERFACE).is_err() && Instant::now() < deadline
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            run("ip", "link set lab0 up arp off addrgenmode none")?;
        }
        let (stop, restarts) = (started.stop.clone(), started.restarts.clone());
        let (programs, log) = (programs.clone(), output.join("rping.log"));
        started.supervisor = Some(std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let Ok(child) = programs.rping(&format!("-s -P {any}-p {PORT}"), &log) else {
                    return;
                };
                let mut server = Ended(child);
                while matches!(server.0.try_wait(), Ok(None)) && !stop.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(20));
                }
                restarts.fetch_add(1, Ordering::Relaxed);
            }
        }));
        Ok(started)
    }

    /// Whether siwd itself still runs.
    pub fn runs(&mut self) -> bool {
        matches!(self.siwd.try_wait(), Ok(None))
    }
}

impl Drop for Siwd {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(supervisor) = self.supervisor.take() {
            let _ = supervisor.join();
        }
        if self.runs() {
            let _ = nix::sys::signal::kill(Pid::from_raw(self.siwd.id() as i32), Signal::SIGTERM);
        }
        let _ = self.siwd.wait();
    }
}

/// Starts a client that connects to the lab by a shell command: the lab's address and port take the place of
/// `{address}` and `{port}`.
pub fn start_client_by(command: &str, log: &Path, lab: IpAddr, port: u16) -> Result<Running> {
    let command = command
        .replace("{address}", &lab.to_string())
        .replace("{port}", &port.to_string());
    let out = File::options()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("cannot write {}", log.display()))?;
    let child = dying_with_the_lab("KILL", Path::new("sh"))
        .args(["-c", &command])
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(out)
        .process_group(0)
        .spawn();
    Ok(Box::new(Ended(child.context("cannot start a shell")?)))
}

/// Port of the agent on this machine.
const AGENT_PORT: u16 = 7470;

/// Starts the agent's program on siwd and connects to it.
pub fn start_agent(
    programs: &Programs,
    output: &Path,
    program: &Path,
    patience: Duration,
) -> Result<(Running, Agent)> {
    if !program.is_file() {
        bail!("--agent {}: the program does not exist", program.display());
    }
    let program = program.canonicalize()?;
    let log = output.join("agent.log");
    let child = programs.siwrun(&program, &AGENT_PORT.to_string(), &log)?;
    let running: Running = Box::new(Ended(child));
    let address = (Ipv4Addr::LOCALHOST, AGENT_PORT).into();
    let agent = Agent::connect(address, patience)
        .with_context(|| format!("the agent's log: {}", log.display()))?;
    Ok((running, agent))
}

/// Runs the shell command that starts a dead target again.
pub fn restart_by(command: &str) -> Result<()> {
    let status = Command::new("sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .context("cannot start a shell")?;
    if !status.success() {
        bail!("`{command}` ended with {status}");
    }
    Ok(())
}

/// Starts a client on siwd that connects to the lab.
pub fn start_client(programs: &Programs, output: &Path, lab: IpAddr, port: u16) -> Result<Running> {
    let log = output.join("rping-client.log");
    let child = programs.rping(&format!("-c -a {lab} -p {port} -C 1000"), &log)?;
    Ok(Box::new(Ended(child)))
}
