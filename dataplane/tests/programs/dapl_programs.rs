//! DAPL's tests, dtest and dapltest, over its rdma_cm provider.

use crate::common::Daemon;
use crate::common::programs::{Program, await_listeners, is_installed, start_listening};

const PACKAGE: &str = "dapl2-utils";

/// dtest uses a fixed port for its control connection, so each run gets a network of its own. The
/// last column of the table is the state of a listening socket.
const BOTH_SIDES: &str = r"
ip link set lo up
dtest -P siw1 $* & server=$!
while ! grep -q ':3DD4 00000000:0000 0A' /proc/net/tcp; do kill -0 $server || exit 1; done
dtest -P siw0 -h 10.77.0.2 $*; client=$?
wait $server && exit $client
";

/// Registers siwd's devices as DAPL adapters under the same names. Returns the environment settings
/// for this.
fn describe_adapters(daemon: &Daemon) -> String {
    let file = daemon.dir.path().join("dat.conf");
    let line = |name, ip| {
        format!("{name} u2.0 nonthreadsafe default libdaplofa.so.2 dapl.2.0 \"{ip} 0\" \"\"\n")
    };
    let text = line("siw0", "10.77.0.1") + &line("siw1", "10.77.0.2");
    std::fs::write(&file, text).unwrap();
    format!("env DAT_OVERRIDE={}", file.display())
}

#[test]
fn dtest_passes_on_both_sides() {
    if !is_installed("dtest", PACKAGE) {
        return;
    }
    let daemon = Daemon::loopback();
    let env = describe_adapters(&daemon);
    let script = daemon.dir.path().join("dtest.sh");
    std::fs::write(&script, BOTH_SIDES).unwrap();
    // Writes and reads with messages between them; writes in both directions with verification.
    for options in ["-B 20 -b 65536", "-W -D -B 20 -b 16384"] {
        let line = format!("{env} unshare -n sh {} {options}", script.display());
        let said = Program::start(&daemon, &line).succeed();
        let passed = said.matches("DAPL Test Complete. PASSED").count();
        assert_eq!(passed, 2, "{options}: {said}");
    }
}

#[test]
fn dapltest_transfers_and_verifies() {
    if !is_installed("dapltest", PACKAGE) {
        return;
    }
    let daemon = Daemon::loopback();
    let env = describe_adapters(&daemon);
    let server = start_listening(&daemon, &format!("{env} dapltest -T S -D siw1"));
    let transactions = [
        "client SR 1024 3 -f server SR 1024 3 -f",
        "client RW 4096 1 server RR 2048 4 client SR 1024 2 server SR 2048 2",
    ];
    let transactions = transactions.map(|what| format!("-T T -i 50 -t 2 -w 2 -V {what}"));
    let speeds = ["-T P -i 100 RW 4096 2", "-T P -i 100 RR 4096 2"].map(str::to_owned);
    for options in transactions.iter().chain(&speeds) {
        await_listeners(&daemon, 1);
        let (test, what) = options.split_at("-T T".len());
        let line = format!("{env} dapltest {test} -D siw0 -s 10.77.0.2{what}");
        let said = Program::start(&daemon, &line).succeed();
        assert!(said.contains("End of Work"), "{options}: {said}");
        assert!(
            !said.to_lowercase().contains("mismatch"),
            "{options}: {said}"
        );
    }
    await_listeners(&daemon, 1);
    let quit = format!("{env} dapltest -T Q -D siw0 -s 10.77.0.2");
    Program::start(&daemon, &quit).succeed();
    let said = server.succeed();
    assert_eq!(
        said.matches("Transaction Test Finished").count(),
        2,
        "{said}"
    );
    assert_eq!(
        said.matches("Finished performance test").count(),
        4,
        "{said}"
    );
}
