//! Finds libdpdk with pkg-config, compiles the shim with the flags that DPDK requires (`-march`,
//! `-include rte_config.h`: they determine how its inline functions compile) and generates the
//! bindings of the allowlist.

use std::{
    env,
    panic::AssertUnwindSafe,
    path::{Path, PathBuf},
    process::{Command, exit},
};

const MIN_VERSION: &str = "22.11";
const PACKAGES: &str = "apt-get install libdpdk-dev libclang-dev";

/// Libraries whose symbols the shim and the bindings use. `rte_log` is a separate library since
/// 23.11; it is linked if pkg-config lists it.
const LIBS: &[&str] = &[
    "rte_ethdev",
    "rte_mbuf",
    "rte_mempool",
    "rte_ring",
    "rte_eal",
    "rte_log",
];

/// Allowlist of the bindings' functions; DPDK's own functions by full name.
const FUNCTIONS: &[&str] = &[
    "siw_.*",
    "rte_eal_(init|cleanup|iova_mode|get_runtime_dir)",
    "rte_(version|strerror|get_tsc_hz|socket_id)",
    "rte_thread_(register|unregister)",
    "rte_dev_(probe|remove|dma_map|dma_unmap)",
    "rte_extmem_(register|unregister)",
    "rte_pktmbuf_pool_create",
    "rte_mempool_(avail_count|free|lookup)",
    "rte_ring_(create|free)",
    "rte_eth_from_rings",
    "rte_eth_dev_(start|stop|close|set_mtu|get_mtu|socket_id)",
    "rte_eth_dev_(get_port_by_name|is_valid_port|default_mac_addr_set)",
    "rte_eth_dev_rx_intr_(enable|disable|ctl_q_get_fd)",
    "rte_eth_(promiscuous|allmulticast)_(enable|disable|get)",
    "rte_eth_macaddr_get",
    "rte_eth_dev_vlan_filter",
    "rte_eth_stats_reset",
    "rte_eth_tx_done_cleanup",
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=shim/shim.c");
    println!("cargo:rerun-if-changed=shim/shim.h");
    for var in ["PKG_CONFIG", "PKG_CONFIG_PATH", "PKG_CONFIG_LIBDIR"] {
        println!("cargo:rerun-if-env-changed={var}");
    }
    let cflags = find_dpdk();
    compile_shim(&cflags);
    generate_bindings(&cflags);
    link_dpdk();
}

/// Prints the missing requirement and how to install it, without a backtrace around it.
fn exit_with_error(what: &str) -> ! {
    eprintln!("\nerror: {what}\n  on Debian or Ubuntu: {PACKAGES}\n");
    exit(1)
}

fn pkg_config(args: &[&str]) -> Result<String, String> {
    let tool = env::var("PKG_CONFIG").unwrap_or_else(|_| "pkg-config".into());
    let out = Command::new(&tool).args(args).output().map_err(|error| {
        format!(
            "`{tool}` could not be run ({error}); it is needed to find DPDK: apt-get install pkg-config"
        )
    })?;
    if out.status.success() {
        Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
    } else {
        Err(String::from_utf8_lossy(&out.stderr).trim().to_owned())
    }
}

fn find_dpdk() -> Vec<String> {
    let wanted = format!("libdpdk >= {MIN_VERSION}");
    if let Err(error) = pkg_config(&["--exists", "--print-errors", &wanted]) {
        exit_with_error(&format!(
            "DPDK {MIN_VERSION} or newer was not found.\n  {error}"
        ));
    }
    match pkg_config(&["--cflags", "libdpdk"]) {
        Ok(flags) => flags.split_whitespace().map(str::to_owned).collect(),
        Err(error) => exit_with_error(&format!("pkg-config --cflags libdpdk failed: {error}")),
    }
}

fn compile_shim(cflags: &[String]) {
    let mut build = cc::Build::new();
    build.file("shim/shim.c").opt_level(3).warnings(false);
    for flag in cflags {
        build.flag(flag);
    }
    if let Err(error) = build.try_compile("siw_dpdk_shim") {
        exit_with_error(&format!(
            "the DPDK shim does not compile (a C compiler and matching DPDK headers are needed).\n  {error}"
        ));
    }
}

fn generate_bindings(cflags: &[String]) {
    let mut builder = bindgen::Builder::default()
        .header("shim/shim.h")
        .clang_args(cflags)
        .rust_target(bindgen::RustTarget::stable(88, 0).unwrap_or_default())
        .use_core()
        .layout_tests(false)
        .generate_comments(false)
        .derive_default(true)
        .prepend_enum_name(false)
        .allowlist_recursively(true)
        // Their layout is declared by hand in lib.rs and asserted in shim.c: the anonymous unions
        // inside are named differently in each DPDK version.
        .blocklist_type("rte_mbuf")
        .blocklist_type("rte_mbuf_ext_shared_info")
        .blocklist_type("rte_mbuf__.*")
        .blocklist_type("rte_mbuf_sched")
        // Used by pointer only.
        .blocklist_type("rte_mempool")
        .blocklist_type("rte_ring(_.*)?")
        .blocklist_type("__rte_ring_.*")
        .blocklist_type("rte_device")
        .parse_callbacks(Box::new(Names));
    for function in FUNCTIONS {
        builder = builder.allowlist_function(function);
    }
    builder = builder.allowlist_var("K_.*").allowlist_type("siw_.*");

    // bindgen panics when libclang is missing; the panic text is noise to a user who only has to
    // install a package.
    std::panic::set_hook(Box::new(|_| {}));
    let bindings = match std::panic::catch_unwind(AssertUnwindSafe(|| builder.generate())) {
        Ok(Ok(bindings)) => bindings,
        Ok(Err(error)) => exit_with_error(&format!(
            "bindings for DPDK could not be generated: {error}"
        )),
        Err(_) => {
            exit_with_error("libclang, which generates the bindings for DPDK, was not found.")
        }
    };
    let _ = std::panic::take_hook();
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    bindings
        .write_to_file(out.join("bindings.rs"))
        .expect("OUT_DIR is writable");
}

/// Constants are declared as `K_<name>` in the header, since DPDK has them as macros that bindgen
/// cannot evaluate; this callback removes the prefix.
#[derive(Debug)]
struct Names;

impl bindgen::callbacks::ParseCallbacks for Names {
    fn item_name(&self, item: bindgen::callbacks::ItemInfo) -> Option<String> {
        item.name.strip_prefix("K_").map(str::to_owned)
    }
}

fn link_dpdk() {
    let listed = pkg_config(&["--libs", "libdpdk"]).unwrap_or_default();
    let listed: Vec<&str> = listed.split_whitespace().collect();
    let mut dirs: Vec<String> = listed
        .iter()
        .filter_map(|flag| flag.strip_prefix("-L").map(str::to_owned))
        .collect();
    if let Ok(dir) = pkg_config(&["--variable=libdir", "libdpdk"])
        && !dir.is_empty()
        && !dirs.contains(&dir)
        && Path::new(&dir).is_dir()
    {
        dirs.push(dir);
    }
    for dir in &dirs {
        println!("cargo:rustc-link-search=native={dir}");
    }
    // The ring driver has an API of its own (rte_eth_from_rings), so it is linked by name; every
    // other driver is a plugin that the EAL loads.
    println!("cargo:rustc-link-lib=dylib=rte_net_ring");
    for lib in LIBS {
        if listed
            .iter()
            .any(|flag| flag.strip_prefix("-l") == Some(lib))
        {
            println!("cargo:rustc-link-lib=dylib={lib}");
        }
    }
}
