//! Error output of a build without DPDK: runs the build script itself with an environment in which
//! it finds no library.

use std::path::Path;
use std::process::Command;

/// The newest build script of this crate in the target folder of this test.
fn build_script() -> std::path::PathBuf {
    let build = Path::new(env!("OUT_DIR")).ancestors().nth(2).unwrap();
    std::fs::read_dir(build)
        .unwrap()
        .filter_map(Result::ok)
        .filter(|e| e.file_name().to_string_lossy().starts_with("dpdk-sys-"))
        .map(|e| e.path().join("build-script-build"))
        .filter(|p| p.exists())
        .max_by_key(|p| p.metadata().and_then(|m| m.modified()).unwrap())
        .expect("cargo built the script before this test")
}

#[test]
fn a_build_without_dpdk_names_the_package_to_install() {
    let out = std::env::temp_dir().join(format!("dpdk-sys-missing-{}", std::process::id()));
    std::fs::create_dir_all(&out).unwrap();
    let run = Command::new(build_script())
        .env("OUT_DIR", &out)
        .env("CARGO_MANIFEST_DIR", env!("CARGO_MANIFEST_DIR"))
        .env("TARGET", "x86_64-unknown-linux-gnu")
        .env("HOST", "x86_64-unknown-linux-gnu")
        .env("OPT_LEVEL", "0")
        .env("PKG_CONFIG_PATH", "")
        .env("PKG_CONFIG_LIBDIR", "/nonexistent")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    std::fs::remove_dir_all(&out).unwrap();
    let text = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
    assert!(!run.status.success(), "{text}");
    assert!(text.contains("apt-get install libdpdk-dev"), "{text}");
}
