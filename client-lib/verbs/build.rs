//! Generates the structs and constants of verbs and rdma_cm from the distribution's headers, and
//! tells the linker the library's name and its symbol versions.

use std::env;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::process::exit;

const PACKAGES: &str = "apt-get install libibverbs-dev librdmacm-dev libclang-dev";

/// Declarations taken from the headers; functions are defined by this crate itself.
const TYPES: &[&str] = &[
    "ibv_.*",
    "_ibv_.*",
    "_compat_ibv_.*",
    "verbs_.*",
    "rdma_.*",
    "sockaddr_in6?",
    "sockaddr_storage",
];
const CONSTANTS: &[&str] = &[
    "IBV_.*", "RDMA_.*", "RAI_.*", "RIO_.*", "SOL_RDMA", "VERBS_.*",
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src/abi.h");
    println!("cargo:rerun-if-changed=symbol-versions.map");
    generate_bindings();
    let root = env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    // The script only declares the nodes; `.symver` directives next to each function assign symbols
    // to them (src/export.rs). lld and mold accept the script along with rustc's own, GNU ld and
    // gold do not.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--version-script={root}/symbol-versions.map");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libibverbs.so.1");
    // Threads and thread-local data of the library live as long as the process.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}

fn exit_with_error(what: &str) -> ! {
    eprintln!("\nerror: {what}\n  on Debian or Ubuntu: {PACKAGES}\n");
    exit(1)
}

fn generate_bindings() {
    let mut builder = bindgen::Builder::default()
        .header("src/abi.h")
        .rust_target(bindgen::RustTarget::stable(88, 0).unwrap_or_default())
        .use_core()
        .ignore_functions()
        .generate_comments(false)
        .derive_default(false)
        .derive_debug(false)
        .prepend_enum_name(false)
        .allowlist_recursively(true);
    for name in TYPES {
        builder = builder.allowlist_type(name);
    }
    for name in CONSTANTS {
        builder = builder.allowlist_var(name);
    }
    // bindgen panics when libclang is missing; suppress the panic text, because the user only has
    // to install a package.
    std::panic::set_hook(Box::new(|_| {}));
    let bindings = match std::panic::catch_unwind(AssertUnwindSafe(|| builder.generate())) {
        Ok(Ok(bindings)) => bindings,
        Ok(Err(error)) => exit_with_error(&format!(
            "bindings for libibverbs could not be generated: {error}"
        )),
        Err(_) => exit_with_error("libclang, which generates the bindings, was not found."),
    };
    let _ = std::panic::take_hook();
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    bindings
        .write_to_file(out.join("abi.rs"))
        .expect("OUT_DIR is writable");
}
