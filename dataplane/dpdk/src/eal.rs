//! DPDK's environment: initialised once per process, before any pool or port.
//!
//! Every pool, port and registered thread holds an [`Eal`]; when the last one is dropped, the
//! environment is cleaned up and its hugepages return to the kernel.

use crate::{Error, RegisteredThread, Result, error, hugepages, log, thread};
use parking_lot::{Mutex, MutexGuard};
use std::ffi::{CStr, CString, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Addresses that devices use to read memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IovaMode {
    /// Virtual addresses of this process: an IOMMU translates them, or no device reads memory by
    /// DMA.
    Virtual,
    /// Physical addresses: there is no IOMMU. Packets cannot refer to memory outside DPDK's own.
    Physical,
}

/// How to start DPDK.
#[derive(Debug, Clone)]
pub struct EalConfig {
    /// Separates several DPDK processes on one machine.
    pub file_prefix: String,
    /// If false, normal pages are used, which suffice for virtual links.
    pub hugepages: bool,
    /// Memory for buffer pools and the drivers' own structures.
    pub memory_mb: u32,
    /// Addresses that devices use to read memory.
    pub iova: IovaMode,
    /// Skip the PCI bus scan.
    pub no_pci: bool,
    /// PCI addresses to probe; empty means all that are bound to a DPDK driver.
    pub pci_allow: Vec<String>,
    /// Virtual devices to create at start; [`crate::Port::attach_vdev`] adds them later.
    pub vdevs: Vec<String>,
    /// Log level by DPDK's name: `error`, `warning`, `notice`, `info`, `debug`.
    pub log_level: String,
    /// The CPU of DPDK's main lcore.
    pub main_core: usize,
    /// Answer DPDK's telemetry tools on a socket in the runtime directory.
    pub telemetry: bool,
    /// Further EAL arguments, appended to all others.
    pub extra_args: Vec<String>,
}

impl Default for EalConfig {
    fn default() -> Self {
        Self {
            file_prefix: format!("siwd-{}", std::process::id()),
            hugepages: true,
            memory_mb: 256,
            iova: IovaMode::Virtual,
            telemetry: false,
            extra_args: Vec::new(),
            no_pci: true,
            pci_allow: Vec::new(),
            vdevs: Vec::new(),
            log_level: "notice".into(),
            main_core: thread::allowed_cores().first().copied().unwrap_or(0),
        }
    }
}

/// The running environment. Clones are handles to the same environment.
#[derive(Clone)]
pub struct Eal(Arc<EalInner>);

struct EalInner {
    iova_is_va: bool,
}

static STARTED: AtomicBool = AtomicBool::new(false);

/// The environment may have made the socket of telemetry.
static HAS_TELEMETRY: AtomicBool = AtomicBool::new(false);
/// Name of that socket (usertools/dpdk-telemetry.py).
const TELEMETRY_SOCKET: &str = "dpdk_telemetry.v2";

/// Objects whose memory mbufs may still refer to after their owner was dropped. If there are any,
/// the environment's memory stays mapped until the process ends.
static LEAKED: AtomicUsize = AtomicUsize::new(0);

pub(crate) fn leak_environment() {
    LEAKED.fetch_add(1, Ordering::Relaxed);
}

/// DPDK attaches and removes devices one at a time.
static DEVICES: Mutex<()> = Mutex::new(());

/// Held around the calls that attach or remove a device.
pub(crate) fn device_lock() -> MutexGuard<'static, ()> {
    DEVICES.lock()
}

impl Eal {
    /// Starts DPDK. Missing hugepages, a missing /sys and unusable cores are detected before DPDK is called, so
    /// that the caller can retry with another configuration; after any other error this process
    /// cannot retry.
    ///
    /// The calling thread keeps its CPU affinity, which DPDK would change.
    pub fn init(config: EalConfig) -> Result<Self> {
        let args = config.eal_args()?;
        if !thread::allowed_cores().contains(&config.main_core) {
            return Err(thread::core_error(config.main_core));
        }
        thread::check_sysfs(config.main_core)?;
        if config.hugepages {
            hugepages::check_free_hugepages(config.memory_mb)?;
        }
        if STARTED.swap(true, Ordering::SeqCst) {
            return Err(Error::AlreadyInitialised);
        }
        let has_telemetry = config.telemetry;
        log::capture_eal_log();
        let _quote = log::quote_lines();

        // The EAL keeps pointers into its arguments, so they are never freed.
        let argv: Vec<*mut c_char> = args.into_iter().map(CString::into_raw).collect();
        let argv = Box::leak(argv.into_boxed_slice());
        let affinity = thread::current_affinity();
        // SAFETY: argv holds argc NUL-terminated strings that are never freed, and STARTED lets
        // exactly one thread reach this point.
        let rc = unsafe { dpdk_sys::rte_eal_init(argv.len() as i32, argv.as_mut_ptr()) };
        let failed = (rc < 0).then(error::rte_errno);
        let _ = thread::set_affinity(&affinity);
        HAS_TELEMETRY.store(has_telemetry, Ordering::Relaxed);
        remove_runtime_dir();
        if let Some(errno) = failed {
            return Err(Error::Eal {
                reason: error::errno_text(errno),
                log: log::kept_lines(),
            });
        }
        // SAFETY: the EAL is initialised.
        let mode = unsafe { dpdk_sys::rte_eal_iova_mode() };
        Ok(Self(Arc::new(EalInner {
            iova_is_va: mode == dpdk_sys::RTE_IOVA_MODE_VA,
        })))
    }

    /// Registers the calling thread with DPDK while the guard lives. A worker pins itself first.
    pub fn register_thread(&self) -> Result<RegisteredThread> {
        RegisteredThread::new(self.clone())
    }

    /// Returns true if I/O addresses equal virtual addresses.
    pub fn iova_is_va(&self) -> bool {
        self.0.iova_is_va
    }

    /// DPDK's version string.
    pub fn version() -> String {
        // SAFETY: returns a static string.
        let text = unsafe { CStr::from_ptr(dpdk_sys::rte_version()) };
        text.to_string_lossy().into_owned()
    }
}

/// The EAL creates a directory for files shared between processes. We share none, so it is empty;
/// without this removal, each start would leave one behind.
fn remove_runtime_dir() {
    // SAFETY: returns a static string, empty before the directory is chosen.
    let dir = unsafe { CStr::from_ptr(dpdk_sys::rte_eal_get_runtime_dir()) };
    let dir = OsStr::from_bytes(dir.to_bytes());
    if !dir.is_empty() {
        // If it is not empty, or belongs to another process, it stays.
        let _ = std::fs::remove_dir(dir);
    }
}

/// Removes the socket of telemetry, which DPDK would remove in an exit handler.
fn remove_telemetry_socket() {
    // SAFETY: returns a static string, empty before the directory is chosen.
    let dir = unsafe { CStr::from_ptr(dpdk_sys::rte_eal_get_runtime_dir()) };
    let dir = Path::new(OsStr::from_bytes(dir.to_bytes()));
    if HAS_TELEMETRY.load(Ordering::Relaxed)
        && std::fs::remove_file(dir.join(TELEMETRY_SOCKET)).is_ok()
    {
        remove_runtime_dir();
    }
}

/// Ends the process without its exit handlers, after flushing standard output and standard error:
/// threads of DPDK's drivers (for example vhost's) never end, and crash in libraries that are torn
/// down.
pub fn exit_process(code: i32) -> ! {
    let _ = std::io::Write::flush(&mut std::io::stdout());
    let _ = std::io::Write::flush(&mut std::io::stderr());
    remove_telemetry_socket();
    // SAFETY: ends the process; none of its code runs afterwards.
    unsafe { libc::_exit(code) }
}

impl Drop for EalInner {
    fn drop(&mut self) {
        if LEAKED.load(Ordering::Relaxed) > 0 {
            tracing::debug!("buffers outlive their pool: DPDK's memory stays until exit");
            return;
        }
        // SAFETY: no pool, port or registered thread is left, since each holds an `Eal`; no mbuf is
        // left either, since LEAKED would count it.
        unsafe { dpdk_sys::rte_eal_cleanup() };
    }
}

impl EalConfig {
    fn eal_args(&self) -> Result<Vec<CString>> {
        let mut args: Vec<String> = vec!["siwd".into()];
        args.push("--lcores".into());
        args.push(format!("0@{}", self.main_core));
        args.push(format!("--file-prefix={}", self.file_prefix));
        args.push(format!("--log-level={}", self.log_level));
        if !self.telemetry {
            args.push("--no-telemetry".into());
        }
        args.push("-m".into());
        args.push(self.memory_mb.max(1).to_string());
        if self.hugepages {
            // No file is left behind, and no hugetlbfs mount is needed.
            args.push("--in-memory".into());
            args.push("--single-file-segments".into());
        } else {
            // 22.11 refuses --in-memory together with --no-huge.
            args.push("--no-huge".into());
            args.push("--no-shconf".into());
        }
        args.push(
            match self.iova {
                IovaMode::Virtual => "--iova-mode=va",
                IovaMode::Physical => "--iova-mode=pa",
            }
            .into(),
        );
        if self.no_pci {
            args.push("--no-pci".into());
        } else {
            for addr in &self.pci_allow {
                args.push("-a".into());
                args.push(addr.clone());
            }
        }
        for vdev in &self.vdevs {
            args.push(format!("--vdev={vdev}"));
        }
        args.extend(self.extra_args.iter().cloned());
        args.into_iter()
            .map(|arg| {
                CString::new(arg.clone()).map_err(|_| Error::Invalid {
                    what: "DPDK argument",
                    value: arg,
                    why: "it contains a NUL byte".into(),
                })
            })
            .collect()
    }
}
