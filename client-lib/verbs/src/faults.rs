//! The fault plan of the program (`SIW_FAULTS`, or `siwrun --faults`): loaded once, when the library is loaded.
//! Each fault that happens is counted for siwrun and told on standard error.
//!
//! Without a plan, contexts, queues and queue pairs get the functions that they always have; with one, those of
//! `ibverbs/faulty/` in their place. Other calls look at [`loaded_plan`].

use crate::per_process::PerProcess;
use crate::status::logs_failures;
use siw::ProcessMutex;
use siw_faults::{
    COUNTS_VARIABLE, Decider, Hit, Kind, Object, PLAN_VARIABLE, Place, Plan, SEED_VARIABLE, Site,
};
use std::ffi::c_int;
use std::fmt::Display;
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The plan of this program.
pub struct LoadedPlan {
    plan: Plan,
    start: Instant,
    /// How often each fault was told by this process.
    told: Box<[AtomicU64]>,
    /// How often each fault happened in all processes of the program, for siwrun.
    counts: Option<&'static [AtomicU64]>,
}

static LOADED: OnceLock<Option<LoadedPlan>> = OnceLock::new();

/// Faults whose calls are counted for the process.
static OF_PROCESS: PerProcess<ProcessMutex<Option<Decider>>> = PerProcess::new();

/// Lines for each fault; the others are only counted, unless failed calls are logged.
const MOST_LINES: u64 = 10;

/// Loads the plan, if there is one. Called when the library is loaded.
pub fn load_plan() {
    LOADED.get_or_init(|| {
        let name = std::env::var(PLAN_VARIABLE).ok();
        let name = name.filter(|name| !name.is_empty())?;
        let plan = Plan::find(&name, Place::Program)
            .inspect_err(|error| {
                siw::print_line(format_args!(
                    "siw-verbs: {PLAN_VARIABLE}: {error}; no faults are injected"
                ));
            })
            .ok()?;
        Some(LoadedPlan::new(plan))
    });
}

/// The plan, if there is one.
#[inline]
pub fn loaded_plan() -> Option<&'static LoadedPlan> {
    LOADED.get()?.as_ref()
}

/// Maps the file of counts that siwrun has made.
fn map_counts(path: &Path, faults: usize) -> std::io::Result<&'static [AtomicU64]> {
    let size = faults * size_of::<AtomicU64>();
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_CLOEXEC);
    let file = options.open(path)?;
    if file.metadata()?.len() < size as u64 {
        return Err(std::io::Error::other("it is too short for the plan"));
    }
    // SAFETY: a new mapping of a file that is long enough. siwrun does not shorten it.
    let memory = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if memory == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the mapping is aligned to pages, has this size and is never removed; any bits are a number.
    Ok(unsafe { std::slice::from_raw_parts(memory.cast(), faults) })
}

impl LoadedPlan {
    fn new(mut plan: Plan) -> LoadedPlan {
        let seed = std::env::var(SEED_VARIABLE).ok();
        if let Some(seed) = seed.and_then(|seed| seed.parse().ok()) {
            plan.seed = seed;
        }
        let faults = plan.faults.len();
        let counts = std::env::var_os(COUNTS_VARIABLE).and_then(|path| {
            map_counts(Path::new(&path), faults)
                .inspect_err(|error| {
                    siw::print_line(format_args!(
                        "siw-verbs: {COUNTS_VARIABLE}: {error}; faults of this process are not counted"
                    ));
                })
                .ok()
        });
        LoadedPlan {
            told: (0..faults).map(|_| AtomicU64::new(0)).collect(),
            counts,
            start: Instant::now(),
            plan,
        }
    }

    /// The plan itself.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Time since the start of the program.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// The moment at a time since the start of the program.
    pub fn at(&self, time: Duration) -> Instant {
        self.start + time
    }

    /// Counts a fault that happens to an object, and tells of it.
    #[cold]
    pub fn tell(&self, hit: &Hit, object: &dyn Display) {
        if let Some(count) = self.counts.and_then(|counts| counts.get(hit.fault)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        let told = self.told[hit.fault].fetch_add(1, Ordering::Relaxed);
        if told < MOST_LINES || logs_failures() {
            let name = self.plan.name_of(hit.fault);
            siw::print_line(format_args!(
                "siw-verbs: injected {name}: {} on {object}",
                hit.kind
            ));
        } else if told == MOST_LINES {
            let name = self.plan.name_of(hit.fault);
            siw::print_line(format_args!(
                "siw-verbs: {name} was injected {MOST_LINES} times; further ones are counted, and shown by siwrun --verbose"
            ));
        }
    }

    /// Decides for a call of the process, and tells of the fault.
    #[cold]
    fn decide(
        &self,
        site: Site,
        device: Option<&str>,
        port: Option<u16>,
        object: &dyn Display,
    ) -> Option<Hit> {
        let mut decider = OF_PROCESS.get().lock_or_end_call();
        let decider = decider.get_or_insert_with(|| Decider::of_process(&self.plan));
        let hit = decider.decide_of_process(&self.plan, site, self.elapsed(), device, port)?;
        self.tell(&hit, object);
        Some(hit)
    }
}

/// Errno with which the creation of an object of a device has to fail.
#[inline]
pub fn creation_fault(object: Object, device: &str) -> Option<c_int> {
    let loaded = loaded_plan()?;
    let hit = loaded.decide(Site::Creation(object), Some(device), None, &device)?;
    match hit.kind {
        Kind::Create { errno, .. } => Some(errno),
        _ => None,
    }
}

/// Fault of a call of rdma_cm, with the port that the plan may aim at.
#[inline]
pub fn cm_fault(site: Site, port: Option<u16>, object: &dyn Display) -> Option<Kind> {
    let hit = loaded_plan()?.decide(site, None, port, object)?;
    Some(hit.kind)
}

/// Fault of an identifier that gets a device.
#[inline]
pub fn device_fault(device: &str) -> Option<Kind> {
    let hit = loaded_plan()?.decide(Site::Device, Some(device), None, &device)?;
    Some(hit.kind)
}
