//! Which threads of siwd are confined. `dataplane/seccomp/tests/refused_calls.rs` tries the restrictions.

use std::fs;

use crate::common::*;

/// Threads of a process by name.
fn threads(process: u32) -> Vec<(String, String)> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    tasks
        .map(|task| {
            let folder = task.unwrap().path();
            let name = fs::read_to_string(folder.join("comm")).unwrap();
            let status = fs::read_to_string(folder.join("status")).unwrap();
            (name.trim().to_owned(), status)
        })
        .collect()
}

fn is_confined(status: &str) -> bool {
    status.contains("Seccomp:\t2") && status.contains("NoNewPrivs:\t1")
}

#[test]
fn workers_are_confined_unless_the_configuration_says_otherwise() {
    let daemon = Daemon::loopback();
    let workers = |daemon: &Daemon| -> Vec<String> {
        let all = threads(daemon.child.id());
        let workers = all
            .into_iter()
            .filter(|(name, _)| name.starts_with("siwd-worker-"));
        workers.map(|(_, status)| status).collect()
    };
    let confined = workers(&daemon);
    assert!(!confined.is_empty());
    assert!(
        confined.iter().all(|status| is_confined(status)),
        "{confined:?}"
    );
    // The other threads open files and make threads.
    let others = threads(daemon.child.id());
    assert!(others.iter().any(|(_, status)| !is_confined(status)));

    let open = Daemon::start(
        &LOOPBACK.replace("[workers]", "[workers]\nconfine = false"),
        &[],
    );
    assert!(workers(&open).iter().all(|status| !is_confined(status)));
}
