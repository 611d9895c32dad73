//! A specification of the Container Device Interface (CDI): with it, podman, containerd and CRI-O give a
//! container siwd's socket and its libibverbs and librdmacm, by the name of a device.

use anyhow::Context as _;
use clap::Args;
use serde_json::{Value, json};
use siw_shm::control::socket_path;
use std::path::{Path, PathBuf};

/// Version of the specification whose fields are used.
const CDI_VERSION: &str = "0.5.0";
/// Vendor and class of the devices.
const KIND: &str = "siwd.dev/rnic";

#[derive(Debug, Args)]
pub struct CdiArgs {
    /// Folder of libsiw_verbs.so and libsiw_mirror.so, on this machine and in containers
    #[arg(long, value_name = "FOLDER", default_value = "/usr/lib/siw-verbs")]
    libraries: PathBuf,
}

/// The specification, for a file in /etc/cdi, /var/run/cdi, or a folder that the runtime is told of.
pub fn run(socket: Option<&Path>, args: &CdiArgs) -> anyhow::Result<String> {
    let socket = std::path::absolute(socket_path(socket)?)?;
    let devices = siw::Context::open(Some(&socket))?.query_devices()?;
    let names: Vec<String> = devices.into_iter().map(|device| device.name).collect();
    for name in ["libsiw_verbs.so", "libsiw_mirror.so"] {
        let path = args.libraries.join(name);
        std::fs::metadata(&path).with_context(|| {
            format!(
                "{}: install the package siwrun, or use --libraries",
                path.display()
            )
        })?;
    }
    Ok(format!("{:#}\n", specify(&socket, &args.libraries, &names)))
}

/// The socket's folder is given, not the socket, which a new siwd replaces. Next to it are the files that
/// programs read in /sys.
fn specify(socket: &Path, libraries: &Path, names: &[String]) -> Value {
    let folder = socket.parent().unwrap_or(Path::new("/"));
    // The folder that siwrun prints with --print-links.
    let links = libraries.join("siw-verbs/lib");
    let preloaded = format!(
        "{}:{}",
        libraries.join("libsiw_mirror.so").display(),
        links.join("libibverbs.so.1").display()
    );
    let mount = |path: &Path, access: &str| {
        json!({
            "hostPath": path,
            "containerPath": path,
            "options": ["rbind", access, "nosuid", "nodev"],
        })
    };
    let devices: Vec<Value> = names
        .iter()
        .map(String::as_str)
        .chain(["all"])
        // A device without edits is not valid.
        .map(|name| {
            let socket = format!("SIWD_SOCKET={}", socket.display());
            json!({ "name": name, "containerEdits": { "env": [socket] } })
        })
        .collect();
    json!({
        "cdiVersion": CDI_VERSION,
        "kind": KIND,
        "devices": devices,
        "containerEdits": {
            "env": [
                format!("LD_PRELOAD={preloaded}"),
                format!("LD_LIBRARY_PATH={}", links.display()),
            ],
            "mounts": [mount(folder, "rw"), mount(libraries, "ro")],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_device_has_a_name_and_all_share_the_socket_and_the_libraries() {
        let names = ["siw0".to_owned(), "siw1".to_owned()];
        let spec = specify(
            Path::new("/run/siwd/siwd.sock"),
            Path::new("/usr/lib/siw-verbs"),
            &names,
        );
        assert_eq!(spec["kind"], "siwd.dev/rnic");
        let devices: Vec<_> = spec["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|device| device["name"].as_str().unwrap())
            .collect();
        assert_eq!(devices, ["siw0", "siw1", "all"]);
        let edits = &spec["containerEdits"];
        assert_eq!(edits["mounts"][0]["hostPath"], "/run/siwd");
        assert_eq!(edits["mounts"][1]["options"][1], "ro");
        let of_device = &spec["devices"][0]["containerEdits"];
        assert_eq!(of_device["env"][0], "SIWD_SOCKET=/run/siwd/siwd.sock");
        assert!(
            edits["env"][0]
                .as_str()
                .unwrap()
                .ends_with("/usr/lib/siw-verbs/siw-verbs/lib/libibverbs.so.1")
        );
    }
}
