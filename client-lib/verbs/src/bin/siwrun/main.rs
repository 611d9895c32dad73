//! `siwrun PROGRAM ARGS...` runs an RDMA program on siwd: it places the drop-in libibverbs and
//! librdmacm before those of the system, and executes the program. `siwrun doctor PROGRAM` only
//! reports what will not work, and `siwrun --self-test` checks what siwd advertises. With
//! `--private` the program gets a siwd of its own, with `--faults` it meets the faults of a plan.

mod doctor;
mod faults;
mod fuzz;
mod private;
mod running;
mod self_test;

use clap::builder::PossibleValuesParser;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use faults::PlannedFaults;
use private::PrivateDaemon;
use running::{exit_code, run_for, run_program};
use siw_shm::persona::{PERSONA_VARIABLE, Persona};
use std::ffi::{OsStr, OsString};
use std::fs::DirBuilder;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;
use std::{env, fs, io};

/// Runs an RDMA program on siwd instead of on the kernel's RDMA devices: no recompilation, no
/// root, no kernel module.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Socket of siwd; else $SIWD_SOCKET, else $XDG_RUNTIME_DIR/siwd/siwd.sock if this user has it,
    /// else /run/siwd/siwd.sock.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The drop-in library, libsiw_verbs.so; by default in the folder of siwrun.
    #[arg(long, value_name = "PATH", env = "SIW_VERBS_LIBRARY")]
    library: Option<PathBuf>,
    /// Folder for the links libibverbs.so.1 and librdmacm.so.1; by default next to the library, or in
    /// $XDG_RUNTIME_DIR or /tmp if that is not writable.
    #[arg(long, value_name = "PATH")]
    links: Option<PathBuf>,
    /// Has the library write the reason of failed calls to standard error.
    #[arg(short, long)]
    verbose: bool,
    /// Uses rsockets for TCP sockets of the program whose address siwd has, or routes to.
    #[arg(long)]
    rsockets: bool,
    /// Does not add siwd's addresses to those of the kernel's interfaces for the program, nor
    /// redirect its kernel sockets at these addresses to the loopback.
    #[arg(long)]
    no_mirror: bool,
    /// Kind of device that the program sees, instead of that in the configuration of siwd: `roce` or
    /// `ib` for programs that refuse iWARP devices. Connections are iWARP under each.
    #[arg(long, value_parser = known_personas())]
    persona: Option<String>,
    /// Handling of a message that arrives before its receive work request: iWARP ends the
    /// connection; with `wait` the message waits, as with an InfiniBand sender.
    #[arg(long, value_enum, default_value = "terminate")]
    rnr: ReceiverNotReady,
    /// Wakes a program that sleeps for a completion event after this time (in milliseconds) without
    /// one: some wait for data that a WRITE of their peer brings, and a WRITE raises no event.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    wake_after: Option<u32>,
    /// Starts a siwd for this program alone, and stops it when the program ends: the embedded
    /// loopback (siw0 10.77.0.1, siw1 10.77.0.2), without privileges and hugepages. Its warnings and
    /// errors are shown if the program fails.
    #[arg(long, conflicts_with_all = ["socket", "print_links", "self_test"])]
    private: bool,
    /// Configuration file of the private siwd.
    #[arg(long, value_name = "FILE", requires = "private")]
    config: Option<PathBuf>,
    /// The program siwd; by default in the folder of siwrun, else in $PATH.
    #[arg(long, value_name = "PATH", requires = "private")]
    siwd: Option<PathBuf>,
    /// Injects the faults of a plan: a TOML file, or the name of a built-in plan. `--faults list` lists those.
    #[arg(long, value_name = "PLAN", conflicts_with_all = ["print_links", "self_test"])]
    faults: Option<OsString>,
    /// Seed in place of that of the plan: the same seed injects the same faults.
    #[arg(long, value_name = "NUMBER", requires = "faults")]
    seed: Option<u64>,
    /// Writes the counts of the injected faults to this file, as JSON.
    #[arg(long, value_name = "FILE", requires = "faults")]
    faults_report: Option<PathBuf>,
    /// Runs the command under COUNT random plans, of the seeds from SEED on, and prints the plans with which it
    /// fails, made smaller. The exit code is 1 if it fails with one.
    #[arg(
        long,
        num_args = 2,
        value_names = ["SEED", "COUNT"],
        conflicts_with_all = ["faults", "print_links", "self_test"]
    )]
    fuzz: Vec<u64>,
    /// Time of a run of --fuzz in seconds, after which the command is killed and counts as failed.
    #[arg(long, value_name = "SECONDS", requires = "fuzz", default_value_t = 60,
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    fuzz_time: u64,
    /// Only creates the links and prints their folder, for LD_LIBRARY_PATH; its subfolder pkgconfig
    /// is for PKG_CONFIG_PATH, to compile against them.
    #[arg(long)]
    print_links: bool,
    /// Tests every capability, limit and operation that devices of siwd advertise, and prints one
    /// line for each. The exit code is 1 if one fails.
    #[arg(long)]
    self_test: bool,
    /// Devices of the self-test, which connect to each other; by default the first two.
    #[arg(
        long,
        value_name = "NAME[,NAME]",
        value_delimiter = ',',
        requires = "self_test"
    )]
    devices: Vec<String>,
    /// Prints the result of the self-test as JSON.
    #[arg(long, requires = "self_test")]
    json: bool,
    /// The program and its arguments; or `doctor PROGRAM`, which reports the parts of a program that
    /// will not work, without running it.
    #[arg(trailing_var_arg = true, required_unless_present_any = ["print_links", "self_test", "faults"])]
    program: Vec<OsString>,
}

/// Names of personas.
fn known_personas() -> PossibleValuesParser {
    PossibleValuesParser::new(Persona::ALL.map(Persona::name))
}

/// Handling of messages that arrive without a receive work request.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ReceiverNotReady {
    Terminate,
    Wait,
}

const LIBRARY: &str = "libsiw_verbs.so";
/// Library preloaded by `--rsockets`, in the folder of the drop-in library.
const PRELOAD_LIBRARY: &str = "libsiw_preload.so";
/// Library that shows siwd's addresses to programs, in the folder of the drop-in library.
const MIRROR_LIBRARY: &str = "libsiw_mirror.so";
/// Names of libraries that programs load, and that compilers link with.
const NAMES: [&str; 4] = [
    "libibverbs.so.1",
    "librdmacm.so.1",
    "libibverbs.so",
    "librdmacm.so",
];
/// pkg-config packages with their versions: the headers are the distribution's.
const PACKAGES: [(&str, &str); 2] = [("ibverbs", "1.14.44.0"), ("rdmacm", "1.3.44.0")];

/// Finds the library next to siwrun, where cargo puts it, or in the lib folder of an installation.
fn find_library() -> Result<PathBuf, String> {
    let own = env::current_exe().map_err(|error| format!("cannot find siwrun itself: {error}"))?;
    let folder = own.parent().unwrap_or(Path::new("/"));
    let candidates = [
        folder.join(LIBRARY),
        folder.join("../lib/siw-verbs").join(LIBRARY),
        folder.join("../lib").join(LIBRARY),
    ];
    candidates
        .iter()
        .find(|path| path.is_file())
        .cloned()
        .ok_or_else(|| {
            format!(
                "{LIBRARY} is not in the folder of {}; build it with cargo build -p siw-verbs, or specify it with --library",
                own.display()
            )
        })
}

/// Refuses a folder that other users could change: programs load the libraries its links point to.
fn check_owner(folder: &Path) -> io::Result<()> {
    let metadata = fs::symlink_metadata(folder)?;
    let is_own = metadata.uid() == rustix::process::getuid().as_raw();
    if metadata.is_dir() && is_own && metadata.mode() & 0o022 == 0 {
        return Ok(());
    }
    let why = format!("{} can be changed by other users", folder.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// A folder for links, and their target.
struct LinkPlace {
    folder: PathBuf,
    target: PathBuf,
}

impl LinkPlace {
    /// Next to the library. The target is relative: the same folder may have another path in a container.
    fn beside(library: &Path) -> LinkPlace {
        let beside = library.parent().unwrap_or(Path::new("/"));
        let name = library.file_name().unwrap_or_default();
        LinkPlace {
            folder: beside.join("siw-verbs").join("lib"),
            target: Path::new("../..").join(name),
        }
    }

    /// In a folder of this user, with a part for each library: programs of several may run at once.
    fn of_user(folder: &Path, library: &Path) -> LinkPlace {
        let mut hasher = DefaultHasher::new();
        library.hash(&mut hasher);
        let part = format!("{:016x}", hasher.finish());
        LinkPlace {
            folder: folder.join(part).join("lib"),
            target: library.to_owned(),
        }
    }
}

/// Creates the folder and a link for each name, unless they exist. Several siwrun processes may do
/// so concurrently.
fn link_names(place: &LinkPlace, library: &Path) -> io::Result<()> {
    let LinkPlace { folder, target } = place;
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(folder)?;
    let temporary_folder = env::temp_dir();
    let parts = folder.ancestors();
    // Any user may have created those in the folder for temporary files.
    for part in
        parts.take_while(|part| *part != temporary_folder && part.starts_with(&temporary_folder))
    {
        check_owner(part)?;
    }
    for name in NAMES {
        let link = folder.join(name);
        if fs::canonicalize(&link).is_ok_and(|present| present == library) {
            continue;
        }
        let temporary = folder.join(format!(".{name}.{}", std::process::id()));
        let _ = fs::remove_file(&temporary);
        std::os::unix::fs::symlink(target, &temporary)?;
        fs::rename(&temporary, &link)?;
    }
    describe_packages(folder)
}

/// Writes pkg-config files for the links, for programs that are compiled against them.
fn describe_packages(folder: &Path) -> io::Result<()> {
    let place = folder.join("pkgconfig");
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(&place)?;
    for (name, version) in PACKAGES {
        let text = format!(
            "Name: lib{name}\n\
             Description: lib{name} on siwd, with the headers of lib{name}-dev\n\
             Version: {version}\n\
             Libs: -L${{pcfiledir}}/.. -l{name}\n\
             Cflags: -I/usr/include\n"
        );
        let file = place.join(format!("lib{name}.pc"));
        if fs::read_to_string(&file).is_ok_and(|old| old == text) {
            continue;
        }
        let temporary = place.join(format!(".{name}.{}", std::process::id()));
        fs::write(&temporary, text)?;
        fs::rename(&temporary, &file)?;
    }
    Ok(())
}

fn make_links(wanted: Option<PathBuf>, library: &Path) -> Result<PathBuf, String> {
    let places = match wanted {
        Some(folder) => vec![LinkPlace {
            folder,
            target: library.to_owned(),
        }],
        None => {
            let private = format!("siw-verbs-{}", rustix::process::getuid().as_raw());
            let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
            let runtime = runtime.map(|folder| folder.join("siw-verbs"));
            let of_user = runtime.into_iter().chain([env::temp_dir().join(private)]);
            let of_user = of_user.map(|folder| LinkPlace::of_user(&folder, library));
            [LinkPlace::beside(library)]
                .into_iter()
                .chain(of_user)
                .collect()
        }
    };
    let mut reasons = Vec::new();
    for place in places {
        match link_names(&place, library) {
            Ok(()) => return Ok(place.folder),
            Err(error) => reasons.push(format!("{}: {error}", place.folder.display())),
        }
    }
    Err(format!(
        "cannot create the links libibverbs.so.1 and librdmacm.so.1 in {}; specify another folder with --links",
        reasons.join(", nor in ")
    ))
}

/// Prepends `value` to a list variable.
fn prepend(variable: &str, value: &Path) -> OsString {
    let mut all = value.as_os_str().to_owned();
    if let Some(old) = env::var_os(variable).filter(|old| !old.is_empty()) {
        all.push(":");
        all.push(old);
    }
    all
}

/// Adds another preloaded library, from the folder of the drop-in library, before the others.
fn add_preload_library(
    name: &str,
    package: &str,
    library: &Path,
    others: OsString,
) -> Result<OsString, String> {
    let path = library.with_file_name(name);
    if !path.is_file() {
        return Err(format!(
            "{name} is not in the folder of {}; build it with cargo build -p {package}",
            library.display()
        ));
    }
    let mut all = path.into_os_string();
    all.push(":");
    all.push(others);
    Ok(all)
}

/// Sets the environment for the library when it runs in this process.
fn set_for_library(
    socket: Option<&Path>,
    persona: Option<&str>,
    verbose: bool,
) -> Result<(), String> {
    // SAFETY: this process still has one thread, and the library is not loaded.
    unsafe {
        if let Some(socket) = socket {
            let socket = std::path::absolute(socket)
                .map_err(|error| format!("--socket {}: {error}", socket.display()))?;
            env::set_var("SIWD_SOCKET", socket);
        }
        if let Some(persona) = persona {
            env::set_var(PERSONA_VARIABLE, persona);
        }
        if verbose {
            env::set_var("SIW_VERBS_LOG", "1");
        }
    }
    Ok(())
}

/// Ends siwrun as for any other wrong argument.
fn refuse_argument(kind: ErrorKind, reason: impl std::fmt::Display) -> ! {
    Arguments::command().error(kind, reason).exit()
}

/// Reads the plan of `--faults`, before anything starts.
fn load_faults(arguments: &Arguments) -> Option<PlannedFaults> {
    let name = arguments.faults.as_deref()?;
    if arguments.program.is_empty() {
        refuse_argument(
            ErrorKind::MissingRequiredArgument,
            "no program given; usage: siwrun --faults PLAN PROGRAM ARGS..., or siwrun --faults list",
        );
    }
    match PlannedFaults::load(name, arguments.seed) {
        Ok(faults) => Some(faults),
        Err(error) => refuse_argument(ErrorKind::ValueValidation, error),
    }
}

/// Runs the program as a child, beside a private siwd if there is one.
fn run_child(
    mut command: Command,
    daemon: Option<PrivateDaemon>,
    faults: Option<&PlannedFaults>,
    report: Option<&Path>,
) -> Result<ExitCode, String> {
    if let Some(faults) = faults {
        faults.set_for(&mut command);
    }
    let code = match daemon {
        Some(daemon) => daemon
            .run_program(command)
            .map_err(|error| error.to_string())?,
        None => {
            let status = run_program(&mut command, || Ok(()));
            exit_code(status.map_err(|error| error.to_string())?)
        }
    };
    if let Some(faults) = faults {
        eprintln!("siwrun: {}", faults.summary());
        if let Some(path) = report {
            faults
                .write_report(path)
                .map_err(|error| error.to_string())?;
        }
    }
    Ok(ExitCode::from(code))
}

fn run() -> Result<ExitCode, String> {
    let arguments = Arguments::parse();
    if arguments.faults.as_deref() == Some(OsStr::new(faults::LIST)) && arguments.program.is_empty()
    {
        faults::list_plans();
        return Ok(ExitCode::SUCCESS);
    }
    let faults = load_faults(&arguments);
    let library = arguments.library.map_or_else(find_library, Ok)?;
    let library = fs::canonicalize(&library)
        .map_err(|error| format!("cannot open the library {}: {error}", library.display()))?;
    if arguments
        .program
        .first()
        .is_some_and(|word| word == "doctor")
    {
        return Ok(doctor::run(arguments.program, &library));
    }
    if arguments.self_test {
        set_for_library(
            arguments.socket.as_deref(),
            arguments.persona.as_deref(),
            arguments.verbose,
        )?;
        return self_test::run(&library, &arguments.devices, arguments.json);
    }
    let links = make_links(arguments.links, &library)?;
    if arguments.print_links {
        println!("{}", links.display());
        return Ok(ExitCode::SUCCESS);
    }
    let Some((program, rest)) = arguments.program.split_first() else {
        return Err("no program given; usage: siwrun PROGRAM ARGS...".into());
    };
    let mut preloaded = prepend("LD_PRELOAD", &links.join("libibverbs.so.1"));
    if !arguments.no_mirror {
        preloaded = add_preload_library(MIRROR_LIBRARY, "siw-mirror", &library, preloaded)?;
    }
    if arguments.rsockets {
        preloaded = add_preload_library(PRELOAD_LIBRARY, "siw-preload", &library, preloaded)?;
    }
    let mut environment = vec![
        ("LD_LIBRARY_PATH", prepend("LD_LIBRARY_PATH", &links)),
        // Wheels bring a libibverbs of their own, which they find by RPATH; symbols of preloaded
        // libraries take precedence nevertheless.
        ("LD_PRELOAD", preloaded),
    ];
    if let Some(socket) = arguments.socket {
        let socket = std::path::absolute(&socket)
            .map_err(|error| format!("--socket {}: {error}", socket.display()))?;
        environment.push(("SIWD_SOCKET", socket.into()));
    }
    if let Some(persona) = arguments.persona {
        environment.push((PERSONA_VARIABLE, persona.into()));
    }
    if arguments.rnr == ReceiverNotReady::Wait {
        environment.push(("SIW_RNR", "wait".into()));
    }
    if let Some(milliseconds) = arguments.wake_after {
        environment.push(("SIW_WAKE_AFTER_MS", milliseconds.to_string().into()));
    }
    if arguments.verbose {
        environment.push(("SIW_VERBS_LOG", "1".into()));
    }
    let new_command = || {
        let mut command = Command::new(program);
        command.args(rest);
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        command
    };
    let start_daemon = |command: &mut Command| -> Result<Option<PrivateDaemon>, String> {
        if !arguments.private {
            return Ok(None);
        }
        let started = PrivateDaemon::start(arguments.siwd.clone(), arguments.config.clone());
        let daemon = started.map_err(|error| error.to_string())?;
        command.env("SIWD_SOCKET", daemon.socket());
        Ok(Some(daemon))
    };
    if let [seed, count] = arguments.fuzz[..] {
        let time = Duration::from_secs(arguments.fuzz_time);
        return fuzz::run_plans(seed, count, |faults| {
            let mut command = new_command();
            command.stdin(Stdio::null());
            if !arguments.verbose {
                command.stdout(Stdio::null()).stderr(Stdio::null());
            }
            // Each run has a daemon of its own.
            let daemon = start_daemon(&mut command)?;
            match faults {
                Some(faults) => faults.set_for(&mut command),
                None => PlannedFaults::unset_for(&mut command),
            }
            match daemon {
                Some(daemon) => daemon
                    .run_for(command, time)
                    .map_err(|error| error.to_string()),
                None => run_for(&mut command, time).map_err(|error| error.to_string()),
            }
        });
    }
    let mut command = new_command();
    let daemon = start_daemon(&mut command)?;
    if daemon.is_some() || faults.is_some() {
        let report = arguments.faults_report.as_deref();
        return run_child(command, daemon, faults.as_ref(), report);
    }
    let error = command.exec();
    Err(format!(
        "cannot run {}: {error}",
        Path::new(program).display()
    ))
}

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(reason) => {
            eprintln!("siwrun: {reason}");
            ExitCode::from(127)
        }
    }
}
