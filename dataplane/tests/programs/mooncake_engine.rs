//! Mooncake's transfer engine (CPU wheel): one process writes and reads another's memory over queue
//! pairs that they connect by GID and QP number.

use crate::common::Daemon;
use crate::common::programs::{Program, received_bytes};
use crate::common::python::python_programs;

/// The target is a child of the initiator, on the other device. The initiator writes data and reads
/// it back into other memory; the target checks its memory, too.
const TRANSFERS: &str = r#"
import ctypes, subprocess, sys
from mooncake.engine import TransferEngine

SIZES = (1, 4096, 100_000, 4 << 20)
ROOM = 8 << 20

def pattern(size):
    return bytes((n * 13 + size) % 253 for n in range(size))

def start(device):
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", device) == 0
    memory = ctypes.create_string_buffer(ROOM)
    address = ctypes.addressof(memory)
    assert engine.register_memory(address, ROOM) == 0
    return engine, memory, address

if len(sys.argv) > 1:
    engine, memory, address = start("siw1")
    print(engine.get_rpc_port(), address, flush=True)
    for line in sys.stdin:
        size = int(line)
        print(memory.raw[:size] == pattern(size), flush=True)
    sys.exit()

target = subprocess.Popen([sys.executable, __file__, "target"], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE)
port, remote = map(int, target.stdout.readline().split())
engine, memory, address = start("siw0")
peer = f"127.0.0.1:{port}"
half = ROOM // 2
for size in SIZES:
    ctypes.memmove(address, pattern(size), size)
    assert engine.transfer_sync_write(peer, address, remote, size) == 0, size
    print(size, file=target.stdin, flush=True)
    assert target.stdout.readline().strip() == "True", size
    assert engine.transfer_sync_read(peer, address + half, remote, size) == 0, size
    assert memory.raw[half:half + size] == pattern(size), size
target.stdin.close()
assert target.wait() == 0
print("all transfers are right")
"#;

#[test]
fn writes_and_reads_of_all_sizes_arrive() {
    let package = "mooncake-transfer-engine-non-cuda==0.3.13.post1";
    let Some(programs) = python_programs(&[package]) else {
        return;
    };
    let daemon = Daemon::loopback();
    let script = daemon.dir.path().join("transfers.py");
    std::fs::write(&script, TRANSFERS).unwrap();
    let line = format!(
        "env MC_GID_INDEX=0 {}/python {}",
        programs.display(),
        script.display()
    );
    let said = Program::start(&daemon, &line).succeed();
    assert!(said.contains("all transfers are right"), "{said}");
    for device in ["siw0", "siw1"] {
        let received = received_bytes(&daemon, device);
        assert!(received > 4 << 20, "{device} received {received} bytes");
    }
}
