//! The Rust examples of the client library against the daemon on the embedded loopback.

use std::process::Command;

use crate::common::{Daemon, client_example};

#[test]
fn every_rust_example_says_ok() {
    let examples = [
        "ping",
        "read",
        "write_with_completion_channel",
        "srq_server",
        "atomics",
        "tokio_echo",
        "tokio_key_value",
    ];
    let daemon = Daemon::loopback();
    for name in examples {
        let out = Command::new(client_example(name))
            .arg(&daemon.socket)
            .output()
            .unwrap();
        let (said, complained) = (
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr),
        );
        assert_eq!((said.as_ref(), complained.as_ref()), ("ok\n", ""), "{name}");
    }
}
