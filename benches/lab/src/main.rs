//! Command line of siw-lab.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use parking_lot::Mutex;

use siw_lab::agent::Agent;
use siw_lab::case::{Case, Level, built_in, is_setting, parse, sort};
use siw_lab::expect::{Peer, news_without_peer};
use siw_lab::impair::{self, Between};
use siw_lab::link::{Mac, Station, StationGuard, memory_link, packet_link};
use siw_lab::mutants::{self, Subject};
use siw_lab::record::{self, Record};
use siw_lab::reference::{Lie, Reference};
use siw_lab::report::{Entry, Report, Settings, VERSION, file_name, write_pcapng};
use siw_lab::script::{Clients, Outcome, Running, Target, Verdict};
use siw_lab::suite::{Instance, Ran, order, run_all};
use siw_lab::via::{self, LocalLink, Programs, Siwd};
use siw_lab::{capture, catalogue, conformance, mutate};

/// Conformance cases for iWARP targets, judged from outside by a scripted peer.
///
/// Exit status: 0 all verdicts as expected, 1 news, 2 the run could not be set up.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the cases
    List {
        #[command(flatten)]
        select: Select,
        /// Cases of the catalogue that do not exist yet, with the reason
        #[arg(long)]
        missing: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print a case: its rule, its steps
    Explain { id: String },
    /// Check case files
    CheckCases {
        /// Files, or folders with files that end in .case
        #[arg(required = true)]
        paths: Vec<PathBuf>,
    },
    /// Run cases against a target
    Run(Box<Run>),
    /// Repeat cases of an earlier run with its settings and seed
    Replay {
        /// Folder of the run
        folder: PathBuf,
        /// Cases; without any, those that did not pass
        cases: Vec<String>,
    },
    /// Compare two runs; status 1 if a verdict is worse
    Compare {
        /// Folder of the earlier run
        before: PathBuf,
        /// Folder of the later run
        after: PathBuf,
    },
    /// Print a table of runs in Markdown: groups by targets, in both roles
    Matrix {
        /// Folder whose sub-folders are runs
        folder: PathBuf,
    },
    /// Print a peer file with the verdicts of a run other than pass
    Peer {
        /// Folder of the run
        folder: PathBuf,
        /// Peer file whose head is kept: name, settings
        #[arg(long)]
        from: PathBuf,
        /// Folder of another run of some of its cases, to say how often a verdict was seen
        #[arg(long)]
        again: Vec<PathBuf>,
    },
    /// Print siwd's conformance, case by case, from a run of all cases, in Markdown
    Conformance {
        /// Folder of the run
        folder: PathBuf,
    },
    /// Judge the lab itself: faults of `siwd-mutants` that have to turn their cases red
    Mutants(Mutants),
    /// Write a copy of siwd's source with the faults of `siw-lab mutants`, from which cargo builds
    /// `siwd-mutants`
    Mutate {
        /// Folder of the copy; only what changed since the copy before is written
        folder: PathBuf,
        /// Root of siwd's source
        #[arg(long, default_value = ".")]
        source: PathBuf,
    },
    /// Stand between two peers: pass their frames on, and impair TCP segments by a profile, until a signal
    Between(BetweenArgs),
    /// Judge the senders of a capture by the rules that hold in any conversation
    Check {
        /// A pcap or pcapng file that has connections from their beginning on
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
}

#[derive(Args, Clone, Default)]
struct Select {
    /// Groups, for example mpa,tag
    #[arg(long, value_delimiter = ',')]
    group: Vec<String>,
    /// Cases, for example TAG-20,MPA-03
    #[arg(long, value_delimiter = ',')]
    case: Vec<String>,
    /// Only rules of this level: must, should, may, rob, int
    #[arg(long)]
    level: Option<String>,
    /// smoke: one instance of the cheapest cases
    #[arg(long, value_enum, default_value = "full")]
    profile: Profile,
    /// Include cases that may crash a target's kernel
    #[arg(long)]
    hazard: bool,
    /// Folder with case files that are read in addition to those built in
    #[arg(long)]
    cases: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Default)]
enum Profile {
    Smoke,
    #[default]
    Full,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
enum Via {
    /// siwd on this machine, over a veth pair in a network namespace
    Siwd,
    /// The reference peer within this process
    Reference,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Html,
    Junit,
    Json,
}

#[derive(Args)]
struct Run {
    /// Address of the target, which runs `rping -s -P -p 7174`
    #[arg(long, conflicts_with = "via")]
    target: Option<IpAddr>,
    /// The same address again, where it is not a private one
    #[arg(long)]
    confirm_target: Option<IpAddr>,
    /// Interface towards the target
    #[arg(long)]
    interface: Option<String>,
    /// Address of the lab in the target's network, unused by this machine
    #[arg(long)]
    address: Option<IpAddr>,
    /// A target on this machine instead
    #[arg(long, value_enum)]
    via: Option<Via>,
    /// Program siwd for --via siwd
    #[arg(long)]
    siwd: Option<PathBuf>,
    /// Fault of the reference peer, for --via reference
    #[arg(long, value_enum)]
    lie: Option<Lie>,
    /// Port of rping on the target
    #[arg(long, default_value_t = 7174)]
    port: u16,
    /// Port of the lab for `rping -c` on the target
    #[arg(long, default_value_t = 7174)]
    client_port: u16,
    /// Shell command that starts a client on the target, with the lab's address and port in place of
    /// `{address}` and `{port}`; without one the operator keeps `rping -c` running
    #[arg(long, conflicts_with = "via")]
    client: Option<String>,
    /// ADDRESS:PORT of siw-lab-agent on the target, for the cases that need it; with --via siwd the program
    #[arg(long)]
    agent: Option<String>,
    /// Shell command that starts the target again after it died; the run then goes on. Cases run one at a
    /// time
    #[arg(long, conflicts_with = "via")]
    restart: Option<String>,
    /// A setting that the target has, as mpa.crc=off, for the cases that need it; --via siwd starts siwd with
    /// each that is needed
    #[arg(long, conflicts_with = "via")]
    setting: Vec<String>,
    #[command(flatten)]
    select: Select,
    /// Decides sequence numbers, ports and data; random without it
    #[arg(long)]
    seed: Option<u64>,
    /// Cases that run at once; rping refuses more than three connections that it has yet to accept
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Seconds to wait for an answer
    #[arg(long, default_value_t = 10)]
    patience: u64,
    /// Peer file with expected verdicts
    #[arg(long)]
    expect: Option<PathBuf>,
    /// IPv6 addresses, with --via
    #[arg(long)]
    ipv6: bool,
    /// Write a capture of every instance, not only of those that did not pass
    #[arg(long)]
    all_captures: bool,
    /// Link towards siwd, for --via siwd
    #[arg(long, value_enum, default_value = "veth")]
    link: LocalLink,
    /// Reports to write
    #[arg(long, value_enum, value_delimiter = ',')]
    report: Vec<Format>,
    /// Folder of reports, captures and logs
    #[arg(long, default_value = "target/siw-lab-run")]
    output: PathBuf,
}

#[derive(Args)]
struct BetweenArgs {
    /// Interface towards one peer; it needs no address
    left: String,
    /// Interface towards the other peer
    right: String,
    /// loss, reorder, duplicate, delay, corrupt, cut, window, rough, or a file like benches/lab/profiles/rough.toml
    #[arg(long)]
    profile: String,
    /// Decides which segments are impaired, and how; random without it
    #[arg(long)]
    seed: Option<u64>,
    /// Print the counts as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct Mutants {
    /// Program siwd-mutants
    #[arg(long)]
    siwd: Option<PathBuf>,
    /// Only these mutants, for example AnyRequestKey,WriteLost
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Tries of each case without the fault, all of which have to pass, and with it, all of which have to
    /// fail
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    tries: u32,
    /// Decides sequence numbers, ports and data; random without it
    #[arg(long)]
    seed: Option<u64>,
    /// Seconds to wait for an answer
    #[arg(long, default_value_t = 3)]
    patience: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Folder of logs
    #[arg(long, default_value = "target/siw-lab-mutants")]
    output: PathBuf,
}

/// Interval of the lines about a run's progress where there is no terminal.
const PROGRESS: Duration = Duration::from_secs(30);

/// Prints formatted text; a reader that has seen enough, like head(1), ends the program.
macro_rules! say {
    ($($text:tt)*) => {
        if let Err(error) = write!(std::io::stdout(), $($text)*) {
            std::process::exit((error.kind() != std::io::ErrorKind::BrokenPipe).into());
        }
    };
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    let result = match cli.command {
        Command::List {
            select,
            missing,
            json,
        } => list(&select, missing, json),
        Command::Explain { id } => explain(&id),
        Command::CheckCases { paths } => check_cases(&paths),
        Command::Run(run) => start(*run),
        Command::Replay { folder, cases } => replay(&folder, cases),
        Command::Compare { before, after } => compare_runs(&before, &after),
        Command::Matrix { folder } => record::matrix(&folder).map(|table| {
            say!("{table}");
            true
        }),
        Command::Peer {
            folder,
            from,
            again,
        } => peer_file(&folder, &from, &again),
        Command::Conformance { folder } => conformance_of(&folder),
        Command::Mutants(wanted) => judge_mutants(&wanted),
        Command::Mutate { folder, source } => mutate::patches()
            .and_then(|patches| mutate::write_copy(&patches, &source, &folder))
            .map(|()| true),
        Command::Between(wanted) => stand_between(&wanted),
        Command::Check { files } => check_captures(&files),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("siw-lab: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn case_files(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let context = || format!("cannot read {}", path.display());
    if path.is_dir() {
        let mut inside: Vec<_> = std::fs::read_dir(path)
            .with_context(context)?
            .filter_map(|e| Some(e.ok()?.path()))
            .collect();
        inside.sort();
        for path in inside {
            if path.is_dir() || path.extension().is_some_and(|e| e == "case") {
                case_files(&path, files)?;
            }
        }
    } else {
        files.push(path.to_owned());
    }
    Ok(())
}

fn read_cases(path: &Path) -> Result<(Vec<Case>, Vec<String>)> {
    let mut files = Vec::new();
    case_files(path, &mut files)?;
    let (mut cases, mut errors) = (Vec::new(), Vec::new());
    for file in files {
        let text = std::fs::read_to_string(&file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        match parse(&file.display().to_string(), &text) {
            Ok(case) => cases.push(case),
            Err(error) => errors.push(error.to_string()),
        }
    }
    Ok((cases, errors))
}

fn all_cases(folder: Option<&Path>) -> Result<Vec<Case>> {
    let mut cases = built_in()?;
    if let Some(folder) = folder {
        let (more, errors) = read_cases(folder)?;
        if !errors.is_empty() {
            bail!("{}", errors.join("\n"));
        }
        // A file replaces the built-in case with its id.
        cases.retain(|case| more.iter().all(|m| m.id != case.id));
        cases.extend(more);
    }
    sort(&mut cases);
    Ok(cases)
}

impl Select {
    fn check(&self, cases: &[Case]) -> Result<()> {
        for group in &self.group {
            if !cases.iter().any(|c| c.group().eq_ignore_ascii_case(group)) {
                bail!("group {group} does not exist");
            }
        }
        for id in &self.case {
            if !cases.iter().any(|c| c.id.eq_ignore_ascii_case(id)) {
                bail!("case {id} does not exist (siw-lab list)");
            }
        }
        match &self.level {
            Some(level) if Level::parse(&level.to_uppercase()).is_none() => {
                bail!("level {level} does not exist: must, should, may, rob, int")
            }
            _ => Ok(()),
        }
    }

    fn takes(&self, case: &Case) -> bool {
        let group = self.group.is_empty()
            || self
                .group
                .iter()
                .any(|g| case.group().eq_ignore_ascii_case(g));
        let id = self.case.is_empty() || self.case.iter().any(|i| case.id.eq_ignore_ascii_case(i));
        let level = self
            .level
            .as_ref()
            .is_none_or(|l| Level::parse(&l.to_uppercase()) == Some(case.level()));
        let profile = self.profile == Profile::Full || case.smoke;
        group && id && level && profile && (self.hazard || !case.hazard)
    }
}

fn list(select: &Select, missing: bool, json: bool) -> Result<bool> {
    let cases = all_cases(select.cases.as_deref())?;
    select.check(&cases)?;
    let absent = catalogue::missing()?;
    if json {
        let of_the_catalogue = cases.len() + absent.len();
        let rows = |case: &Case| {
            serde_json::json!({
                "case": case.id, "title": case.title, "role": case.role, "rules": case.rules,
                "instances": case.instances().len(), "hazard": case.hazard,
                "agent": case.needs_agent(), "settings": case.settings,
            })
        };
        let chosen = cases.iter().filter(|c| select.takes(c));
        let value = serde_json::json!({
            "implemented": cases.len(),
            "catalogue": of_the_catalogue,
            "share": cases.len() as f64 / of_the_catalogue as f64,
            "missing": absent,
            "cases": chosen.map(rows).collect::<Vec<_>>(),
        });
        say!("{}\n", serde_json::to_string_pretty(&value)?);
        return Ok(true);
    }
    if missing {
        for case in &absent {
            say!("{:8} {:10} {}\n", case.case, case.needs.name(), case.title);
        }
        say!(
            "{} of {} cases exist; missing are {}\n",
            cases.len(),
            cases.len() + absent.len(),
            catalogue::summary(&absent)
        );
        return Ok(true);
    }
    let mut counts: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    let mut passive = 0;
    for case in cases.iter().filter(|c| select.takes(c)) {
        passive += usize::from(!case.needs_agent());
        let instances = case.instances().len();
        let count = counts.entry(case.group()).or_default();
        *count = (count.0 + 1, count.1 + instances);
        let role = if case.role == siw_lab::stream::Role::Responder {
            "R"
        } else {
            "I"
        };
        let times = if instances > 1 {
            format!(" x{instances}")
        } else {
            String::new()
        };
        say!(
            "{:8} {:6} {role} {}{times}\n",
            case.id,
            case.level().name(),
            case.title
        );
    }
    let total = counts
        .values()
        .fold((0, 0), |sum, c| (sum.0 + c.0, sum.1 + c.1));
    for (group, (cases, instances)) in counts {
        say!("{group}: {cases} cases, {instances} instances\n");
    }
    say!(
        "all: {} cases, {} instances; {passive} cases need no agent\n",
        total.0,
        total.1
    );
    Ok(true)
}

fn explain(id: &str) -> Result<bool> {
    let cases = built_in()?;
    let case = cases.iter().find(|c| c.id.eq_ignore_ascii_case(id));
    let case = case.with_context(|| format!("case {id} does not exist (siw-lab list)"))?;
    say!("{} {}\n", case.id, case.title);
    for rule in &case.rules {
        say!(
            "RFC {} section {}, {}: {}\n",
            rule.rfc,
            rule.section,
            rule.level.name(),
            rule.text
        );
    }
    for remark in &case.remarks {
        say!("{remark}\n");
    }
    let role = match case.role {
        siw_lab::stream::Role::Responder => "the target runs rping -s",
        siw_lab::stream::Role::Initiator => "the target runs rping -c",
    };
    say!("{role}; {} instances\n", case.instances().len());
    if !case.settings.is_empty() {
        say!("settings of the target: {}\n", case.settings.join(" "));
    }
    for (name, values) in &case.params {
        say!("  {name}: {}\n", values.join(" "));
    }
    for step in &case.steps {
        say!("  {}\n", step.source);
    }
    Ok(true)
}

fn check_cases(paths: &[PathBuf]) -> Result<bool> {
    let (mut count, mut errors) = (0, Vec::new());
    for path in paths {
        let (cases, wrong) = read_cases(path)?;
        count += cases.len();
        errors.extend(wrong);
    }
    if !errors.is_empty() {
        bail!("{}", errors.join("\n"));
    }
    say!("{count} cases without an error\n");
    Ok(true)
}

/// Everything that a run keeps alive.
struct Setup {
    target: Target,
    _agent: Option<Running>,
    siwd: Option<Siwd>,
    _reference: Option<Reference>,
    _station: StationGuard,
}

/// Ports start at random, so that a target does not find old connections of the same four-tuple.
fn first_port(seed: u64) -> u16 {
    20_000 + (seed % 40_000) as u16
}

fn resolve(station: &Station, ip: IpAddr) -> Result<Mac> {
    let mac = station.resolve(ip, Duration::from_secs(5));
    mac.with_context(|| {
        let question = if ip.is_ipv4() {
            "ARP"
        } else {
            "neighbor solicitations"
        };
        format!("{ip} does not answer {question}: is it up, and in the lab's network?")
    })
}

/// The lab's station on a siwd that was started on this machine.
fn siwd_target(
    programs: &Programs,
    output: &Path,
    ipv6: bool,
    seed: u64,
    patience: Duration,
) -> Result<(Target, StationGuard)> {
    let (lab, its) = via::addresses(ipv6);
    let guard = Station::start(packet_link(via::LAB_INTERFACE)?, lab, first_port(seed));
    let mac = resolve(&guard.station, its).with_context(|| {
        let log = output.join("siwd.log");
        format!("siwd is unreachable; its log: {}", log.display())
    })?;
    let (programs, folder) = (programs.clone(), output.to_owned());
    let clients = Clients::Started(Box::new(move |port| {
        via::start_client(&programs, &folder, lab, port)
    }));
    let target = Target {
        patience,
        seed,
        ..Target::new(guard.station.clone(), its, mac, via::PORT, clients)
    };
    Ok((target, guard))
}

/// Sets a run up, its target with the settings that the next cases need.
fn set_up(
    settings: &Settings,
    needed: &[String],
    patience: Duration,
    output: &Path,
) -> Result<Setup> {
    let first_port = first_port(settings.seed);
    let (lab, its) = via::addresses(settings.ipv6);
    match settings.via.as_deref() {
        Some("reference") => {
            let (ours, theirs) = memory_link();
            let lie = settings
                .lie
                .as_deref()
                .and_then(|l| Lie::from_str(l, true).ok());
            let station = Station::start(ours, lab, first_port);
            let reference = Reference::start(theirs, its, via::PORT, lie);
            let mac = resolve(&station.station, its)?;
            let target = Target {
                patience,
                seed: settings.seed,
                ..Target::new(
                    station.station.clone(),
                    its,
                    mac,
                    via::PORT,
                    reference.clients(lab),
                )
            };
            Ok(Setup {
                target,
                _agent: None,
                siwd: None,
                _reference: Some(reference),
                _station: station,
            })
        }
        Some(_) => {
            let programs = Programs::find(settings.siwd.as_deref().map(Path::new), "siwd")?;
            let siwd = Siwd::start(&programs, output, settings.link, settings.ipv6, needed)?;
            let (mut target, station) =
                siwd_target(&programs, output, settings.ipv6, settings.seed, patience)?;
            let mut agent = None;
            if let Some(program) = &settings.agent {
                let (running, connected) =
                    via::start_agent(&programs, output, Path::new(program), patience)?;
                target.agent = Some(Mutex::new(connected));
                agent = Some(running);
            }
            Ok(Setup {
                target,
                _agent: agent,
                siwd: Some(siwd),
                _reference: None,
                _station: station,
            })
        }
        None => {
            let ip: IpAddr = settings
                .target
                .as_deref()
                .context("no target: --target ADDRESS or --via")?
                .parse()?;
            let interface = settings
                .interface
                .as_deref()
                .context("--interface is missing: the one towards the target")?;
            let address: IpAddr = settings
                .address
                .as_deref()
                .context("--address is missing: an address in the target's network that this machine does not use")?
                .parse()?;
            if ip.is_ipv4() != address.is_ipv4() {
                bail!("{ip} and {address} are of different address families");
            }
            if interface_has(address) {
                bail!(
                    "{address} belongs to this machine, whose kernel would reset the lab's connections: choose an unused one"
                );
            }
            let station = Station::start(packet_link(interface)?, address, first_port);
            let mac = resolve(&station.station, ip)?;
            let agent = match settings.agent.as_deref() {
                Some(at) => {
                    let address = at
                        .parse()
                        .with_context(|| format!("--agent {at}: expected ADDRESS:PORT"))?;
                    Some(Agent::connect(address, patience)?)
                }
                None => None,
            };
            let clients = match settings.client.clone() {
                Some(command) => {
                    let log = output.join("client.log");
                    Clients::Started(Box::new(move |port| {
                        via::start_client_by(&command, &log, address, port)
                    }))
                }
                None => Clients::Operator {
                    port: settings.client_port,
                    syns: Mutex::new(station.station.listen(settings.client_port)),
                },
            };
            let target = Target {
                patience,
                seed: settings.seed,
                agent: agent.map(Mutex::new),
                restart: settings.restart.clone(),
                ..Target::new(station.station.clone(), ip, mac, settings.port, clients)
            };
            Ok(Setup {
                target,
                _agent: None,
                siwd: None,
                _reference: None,
                _station: station,
            })
        }
    }
}

fn interface_has(address: IpAddr) -> bool {
    let is = |storage: &nix::sys::socket::SockaddrStorage| match address {
        IpAddr::V4(v4) => storage.as_sockaddr_in().is_some_and(|a| a.ip() == v4),
        IpAddr::V6(v6) => storage.as_sockaddr_in6().is_some_and(|a| a.ip() == v6),
    };
    nix::ifaddrs::getifaddrs().is_ok_and(|mut all| all.any(|i| i.address.as_ref().is_some_and(is)))
}

fn is_private(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_private() || ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unique_local() || ip.is_unicast_link_local(),
    }
}

fn start(run: Run) -> Result<bool> {
    if let Some(ip) = run.target
        && !is_private(ip)
        && run.confirm_target != Some(ip)
    {
        bail!(
            "{ip} is not a private address; if it is your own, name it twice: --confirm-target {ip}"
        );
    }
    if run.ipv6 && run.via.is_none() {
        bail!("--ipv6 is for --via; to a target outside it are IPv6 addresses");
    }
    if run.link != LocalLink::Veth && run.via != Some(Via::Siwd) {
        bail!("--link is for --via siwd; to a target outside it is --interface");
    }
    if run.agent.is_some() && run.via == Some(Via::Reference) {
        bail!("--agent is for a target with RDMA verbs, not for the reference peer");
    }
    if let Some(wrong) = run.setting.iter().find(|setting| !is_setting(setting)) {
        bail!("--setting {wrong}: expected TABLE.KEY=VALUE, for example mpa.crc=off");
    }
    if run.lie.is_some() && run.via != Some(Via::Reference) {
        bail!("--lie is for --via reference");
    }
    let settings = Settings {
        via: run.via.map(|via| format!("{via:?}").to_lowercase()),
        siwd: run.siwd.as_ref().map(|p| p.display().to_string()),
        lie: run
            .lie
            .and_then(|lie| lie.to_possible_value())
            .map(|v| v.get_name().to_owned()),
        link: run.link,
        ipv6: run.ipv6,
        target: run.target.map(|t| t.to_string()),
        interface: run.interface.clone(),
        address: run.address.map(|t| t.to_string()),
        port: run.port,
        client_port: run.client_port,
        client: run.client.clone(),
        agent: run.agent.clone(),
        restart: run.restart.clone(),
        settings: run.setting.clone(),
        seed: seed_or_random(run.seed)?,
        hazard: run.select.hazard,
    };
    let cases = all_cases(run.select.cases.as_deref())?;
    run.select.check(&cases)?;
    let peer = run
        .expect
        .as_ref()
        .map(|file| Peer::read(file, &cases))
        .transpose()?;
    execute(&settings, &cases, &run, peer.as_ref())
}

fn seed_or_random(seed: Option<u64>) -> Result<u64> {
    let random = SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos();
    Ok(seed.unwrap_or(u64::from(random)))
}

fn judge_mutants(wanted: &Mutants) -> Result<bool> {
    let cases = built_in()?;
    let mut mutants = mutants::table(&cases)?;
    for name in &wanted.only {
        if mutants.iter().all(|mutant| mutant.name != *name) {
            bail!("mutant {name} does not exist (benches/lab/mutants/table.toml)");
        }
    }
    let programs = Programs::find(wanted.siwd.as_deref(), "siwd-mutants")?;
    std::fs::create_dir_all(&wanted.output)
        .with_context(|| format!("cannot make {}", wanted.output.display()))?;
    let output = wanted.output.canonicalize()?;
    // Before any thread that uses them exists.
    via::enter_namespaces(LocalLink::Veth)?;
    watch_signals()?;
    let mut subject = Subject::start(programs, &output, &mutants)?;
    mutants.retain(|mutant| wanted.only.is_empty() || wanted.only.contains(&mutant.name));
    let seed = seed_or_random(wanted.seed)?;
    let (target, _station) = siwd_target(
        &subject.programs,
        &output,
        false,
        seed,
        Duration::from_secs(wanted.patience),
    )?;
    let report = |judged: &mutants::Judged| {
        if !wanted.json {
            let word = if judged.killed { "killed" } else { "SURVIVED" };
            say!(
                "{word:8} {:24} {:24} {}\n",
                judged.mutant,
                judged.case,
                judged.summary()
            );
        }
    };
    let is_stopped = || STOPPED.load(Ordering::Relaxed);
    let summary = mutants::judge_all(
        &mut subject,
        &target,
        &mutants,
        wanted.tries,
        &is_stopped,
        &report,
    )?;
    if wanted.json {
        say!("{}\n", serde_json::to_string_pretty(&summary)?);
    } else {
        say!(
            "{} of {} mutants killed by {} of {} tries in {:.1} s; seed {seed}\n",
            summary.killed,
            summary.all,
            summary.tries,
            summary.tries,
            summary.seconds
        );
    }
    Ok(summary.killed == summary.all)
}

fn compare_runs(before: &Path, after: &Path) -> Result<bool> {
    let comparison = record::compare(&Record::read(before)?, &Record::read(after)?);
    say!("{}", comparison.text);
    Ok(!comparison.worse)
}

fn peer_file(folder: &Path, from: &Path, again: &[PathBuf]) -> Result<bool> {
    let peer = Peer::read(from, &built_in()?)?;
    let again: Vec<_> = again
        .iter()
        .map(|folder| Record::read(folder))
        .collect::<Result<_>>()?;
    say!("{}", Record::read(folder)?.peer_file(peer, &again)?);
    Ok(true)
}

fn conformance_of(folder: &Path) -> Result<bool> {
    let record = Record::read(folder)?;
    say!(
        "{}",
        conformance::render(&all_cases(None)?, &|name| record.verdict(name))?
    );
    Ok(true)
}

fn stand_between(wanted: &BetweenArgs) -> Result<bool> {
    let profile = impair::Profile::find(&wanted.profile)?;
    let seed = seed_or_random(wanted.seed)?;
    if wanted.left == wanted.right {
        bail!("{} is named for both peers", wanted.left);
    }
    watch_signals()?;
    let (left, right) = (packet_link(&wanted.left)?, packet_link(&wanted.right)?);
    let between = Between::start(left, right, &profile, seed);
    eprintln!(
        "siw-lab: between {} and {}, profile {}, seed {seed}",
        wanted.left, wanted.right, wanted.profile
    );
    while !STOPPED.load(Ordering::Relaxed) && !between.ended() {
        std::thread::sleep(Duration::from_millis(50));
    }
    let is_lost = !STOPPED.load(Ordering::Relaxed);
    let (left, right) = between.end();
    if wanted.json {
        let counts = serde_json::json!({ "seed": seed, "left": left, "right": right });
        say!("{}\n", serde_json::to_string_pretty(&counts)?);
    } else {
        for (interface, counts) in [(&wanted.left, left), (&wanted.right, right)] {
            say!(
                "from {interface}: {} segments: {} lost, {} late, {} duplicated, {} corrupted, {} cut\n",
                counts.segments,
                counts.lost,
                counts.late,
                counts.duplicated,
                counts.corrupted,
                counts.cut
            );
        }
    }
    if is_lost {
        bail!("an interface is gone or down");
    }
    Ok(true)
}

fn check_captures(files: &[PathBuf]) -> Result<bool> {
    let mut clean = true;
    for file in files {
        for connection in capture::check(file)? {
            let all = connection.messages.len();
            let forth = connection
                .messages
                .iter()
                .filter(|m| m.from_initiator)
                .count();
            say!(
                "{}: {} -> {}: {} FPDUs, and {} back; {} broken rules\n",
                file.display(),
                connection.initiator,
                connection.responder,
                forth,
                all - forth,
                connection.findings.len()
            );
            for finding in &connection.findings {
                say!(
                    "  frame {} from {}: {}\n",
                    finding.frame,
                    finding.from,
                    finding.text
                );
            }
            for note in &connection.notes {
                say!("  note: {note}\n");
            }
            clean &= connection.findings.is_empty();
        }
    }
    Ok(clean)
}

fn replay(folder: &Path, wanted: Vec<String>) -> Result<bool> {
    let record = Record::read(folder)?;
    let settings = record.settings;
    let mut ids = wanted;
    if ids.is_empty() {
        for row in record.results {
            if row.verdict > Verdict::Recorded && !ids.contains(&row.case) {
                ids.push(row.case);
            }
        }
    }
    if ids.is_empty() {
        say!("every case of this run passed\n");
        return Ok(true);
    }
    let cases = all_cases(None)?;
    let select = Select {
        case: ids,
        hazard: settings.hazard,
        ..Select::default()
    };
    select.check(&cases)?;
    let run = Run {
        target: None,
        confirm_target: None,
        interface: None,
        address: None,
        via: None,
        siwd: None,
        lie: None,
        port: settings.port,
        client_port: settings.client_port,
        client: None,
        agent: None,
        restart: None,
        setting: Vec::new(),
        select,
        seed: Some(settings.seed),
        jobs: 1,
        patience: 10,
        all_captures: false,
        link: settings.link,
        ipv6: settings.ipv6,
        expect: None,
        report: vec![Format::Html],
        output: folder.join("replay"),
    };
    execute(&settings, &cases, &run, None)
}

static STOPPED: AtomicBool = AtomicBool::new(false);

/// Ends the run at SIGINT, SIGTERM or SIGHUP: the signals are blocked in all threads but this one.
fn watch_signals() -> Result<()> {
    use nix::sys::signal::{SigSet, Signal};
    let mut set = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        set.add(signal);
    }
    set.thread_block()?;
    std::thread::spawn(move || {
        while set.wait().is_ok() {
            if STOPPED.swap(true, Ordering::Relaxed) {
                // A second signal does not wait for the cases that run.
                std::process::exit(2);
            }
            eprintln!("siw-lab: ending");
        }
    });
    Ok(())
}

fn execute(settings: &Settings, cases: &[Case], run: &Run, peer: Option<&Peer>) -> Result<bool> {
    let is_siwd = settings.via.as_deref() == Some("siwd");
    let has_settings = |case: &Case| {
        is_siwd
            || case
                .settings
                .iter()
                .all(|one| settings.settings.contains(one))
    };
    let chosen: Vec<&Case> = cases
        .iter()
        .filter(|c| run.select.takes(c) && has_settings(c))
        .filter(|c| settings.agent.is_some() || !c.needs_agent())
        .collect();
    let mut instances = Vec::new();
    for case in chosen {
        let all = case.instances();
        let count = if run.select.profile == Profile::Smoke {
            1
        } else {
            all.len()
        };
        instances.extend(
            all.into_iter()
                .take(count)
                .map(|params| Instance { case, params }),
        );
    }
    if instances.is_empty() {
        bail!(
            "no case is selected (cases that may crash a kernel need --hazard, those with the agent --agent, those with settings of the target --setting)"
        );
    }
    order(&mut instances, is_siwd);
    std::fs::create_dir_all(&run.output)
        .with_context(|| format!("cannot make {}", run.output.display()))?;
    let output = run.output.canonicalize()?;
    if is_siwd {
        // Before any thread that uses them exists.
        via::enter_namespaces(settings.link)?;
    }
    watch_signals()?;
    let begin = Instant::now();
    let total = instances.len();
    let done = AtomicUsize::new(0);
    let terminal = std::io::stderr().is_terminal();
    let told = Mutex::new(begin);
    let progress = |outcome: &Outcome| {
        let count = done.fetch_add(1, Ordering::Relaxed) + 1;
        if terminal {
            eprint!("\r{count}/{total} {:60}", outcome.name());
            let _ = std::io::stderr().flush();
            return;
        }
        let mut told = told.lock();
        if told.elapsed() >= PROGRESS {
            *told = Instant::now();
            let seconds = begin.elapsed().as_secs();
            eprintln!(
                "siw-lab: {count} of {total} instances in {seconds} s, {}",
                outcome.name()
            );
        }
    };
    let (mut outcomes, mut lost) = (Vec::new(), None);
    let same = |a: &Instance, b: &Instance| !is_siwd || a.case.settings == b.case.settings;
    for part in instances.chunk_by(same) {
        let needed = &part[0].case.settings;
        let ran = execute_part(settings, needed, part, run, peer, &output, &progress)?;
        outcomes.extend(ran.outcomes);
        lost = ran.lost;
        if lost.is_some() || STOPPED.load(Ordering::Relaxed) {
            break;
        }
    }
    if terminal {
        eprint!("\r{:72}\r", "");
    }
    let expected = finish(settings, run, peer, &instances, &outcomes, begin, &output)?;
    if STOPPED.load(Ordering::Relaxed) {
        bail!(
            "ended by a signal after {} of {total} instances; their reports are in {}",
            outcomes.len(),
            output.display()
        );
    }
    if let Some(lost) = lost {
        bail!(
            "the target does not converse any more, since {lost}; {} of {total} instances ran, their reports are in {}",
            outcomes.len(),
            output.display()
        );
    }
    Ok(expected)
}

/// Runs instances that need the same settings of the target.
fn execute_part(
    settings: &Settings,
    needed: &[String],
    instances: &[Instance],
    run: &Run,
    peer: Option<&Peer>,
    output: &Path,
    progress: &(dyn Fn(&Outcome) + Sync),
) -> Result<Ran> {
    let mut setup = set_up(settings, needed, Duration::from_secs(run.patience), output)?;
    setup.target.swapped_terminates = peer.is_some_and(|peer| peer.swapped_terminates);
    // The first conversation tells whether there is a target at all.
    let deadline = Instant::now() + 2 * setup.target.patience;
    while let Err(reason) = setup.target.sane(1) {
        if Instant::now() > deadline || STOPPED.load(Ordering::Relaxed) {
            bail!(
                "no conversation with the target: {reason}; it has to run `rping -s -P -p {}`",
                setup.target.port
            );
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    // A death is told from a restart only if no other case runs.
    let jobs = if settings.restart.is_some() {
        1
    } else {
        run.jobs
    };
    let ran = run_all(&setup.target, instances, jobs, &STOPPED, progress);
    if let Some(siwd) = &mut setup.siwd
        && !siwd.runs()
    {
        bail!("siwd ended during the run; see {}", siwd.log.display());
    }
    Ok(ran)
}

fn finish(
    settings: &Settings,
    run: &Run,
    peer: Option<&Peer>,
    instances: &[Instance],
    outcomes: &[Outcome],
    begin: Instant,
    output: &Path,
) -> Result<bool> {
    let mut results = Vec::new();
    for (instance, outcome) in instances.iter().zip(outcomes) {
        let news = peer.map_or_else(|| news_without_peer(outcome), |peer| peer.news(outcome));
        let known = peer.and_then(|peer| peer.reason(outcome));
        results.push(Entry::new(instance.case, outcome, news, known));
        let wanted = run.all_captures || outcome.verdict > Verdict::Recorded;
        if wanted && !outcome.ladder.is_empty() {
            let folder = output.join("captures");
            std::fs::create_dir_all(&folder)?;
            write_pcapng(
                &folder.join(file_name(&outcome.name()) + ".pcapng"),
                outcome,
            )?;
        }
    }
    let mut counts = BTreeMap::new();
    for outcome in outcomes {
        *counts.entry(outcome.verdict.name()).or_insert(0) += 1;
    }
    let report = Report {
        version: VERSION,
        program: concat!("siw-lab ", env!("CARGO_PKG_VERSION")),
        settings,
        peer: peer.map(|p| p.peer.as_str()),
        started: SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
        seconds: begin.elapsed().as_secs_f64(),
        counts,
        results,
    };
    print_terminal(&report);
    report.write_json(&output.join("run.json"))?;
    for format in &run.report {
        match format {
            Format::Html => report.write_html(&output.join("run.html"))?,
            Format::Junit => report.write_junit(&output.join("junit.xml"))?,
            Format::Json => {}
        }
    }
    Ok(report.results.iter().all(|e| e.news.is_none()))
}

fn print_terminal(report: &Report) {
    let mut groups: BTreeMap<&str, BTreeMap<Verdict, usize>> = BTreeMap::new();
    for entry in &report.results {
        *groups
            .entry(entry.group)
            .or_default()
            .entry(entry.verdict)
            .or_default() += 1;
    }
    for entry in &report.results {
        if let Some(news) = &entry.news {
            say!(
                "{} {}: {} ({news})\n",
                entry.name,
                entry.title,
                entry.verdict.name()
            );
            say!("{}", entry.details());
            say!("\n");
        }
    }
    for (group, verdicts) in groups {
        let counts: Vec<_> = verdicts
            .iter()
            .map(|(v, n)| format!("{n} {}", v.name()))
            .collect();
        say!("{group:4} {}\n", counts.join(", "));
    }
    let counts: Vec<_> = report
        .counts
        .iter()
        .map(|(v, n)| format!("{n} {v}"))
        .collect();
    let news = report.results.iter().filter(|e| e.news.is_some()).count();
    say!(
        "{} instances in {:.1} s: {}; {news} news; seed {}\n",
        report.results.len(),
        report.seconds,
        counts.join(", "),
        report.settings.seed
    );
}
