//! Transfer engines from the Python package index, which connect queue pairs by GID and QP number.

use crate::common::Daemon;
use crate::common::programs::{Program, received_bytes};
use crate::common::python::{python_programs, python_programs_with};
use std::path::PathBuf;

/// Runs a script with the Python of these programs, on the embedded loopback.
fn run_script(programs: Option<PathBuf>, variables: &str, text: &str) {
    let Some(programs) = programs else {
        return;
    };
    let daemon = Daemon::loopback();
    let script = daemon.dir.path().join("transfers.py");
    std::fs::write(&script, text).unwrap();
    let line = format!(
        "env {variables} {}/python {}",
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

/// Reads and writes between the rails of two devices.
const PEERCACHE: &str = r#"
import ctypes
from peercache.config import PeerCacheConfig
from peercache.transport import ReadOp, create_transport

SIZES = (1, 4096, 100_000, 4 << 20)
ROOM = 8 << 20

def pattern(size, seed):
    return bytes((n * 13 + size + seed) % 253 for n in range(size))

def start(device):
    transport = create_transport(PeerCacheConfig(
        discovery_addr="127.0.0.1:0", protocol="rdma", device_name=device, gid_index=0,
        local_hostname="127.0.0.1", metrics_enabled=False, disk_enabled=False))
    assert type(transport).__name__ == "RdmaTransport", transport
    memory = ctypes.create_string_buffer(ROOM)
    region = transport.register_mr(ctypes.addressof(memory), ROOM)
    return transport, memory, ctypes.addressof(memory), region

target, target_memory, remote, target_region = start("siw1")
initiator, memory, local, region = start("siw0")
peer = target.local_endpoint()
half = ROOM // 2
for size in SIZES:
    ctypes.memmove(remote, pattern(size, 1), size)
    read = ReadOp(peer, local, remote, target_region.rkey, size)
    assert initiator.batch_read([read]) == [True], size
    assert memory.raw[:size] == pattern(size, 1), size
    ctypes.memmove(local, pattern(size, 2), size)
    assert initiator.batch_write_v([peer], [local], [remote + half], [target_region.rkey], [size]) == [True]
    # A read of what was written comes after the write.
    read = ReadOp(peer, local + half, remote + half, target_region.rkey, size)
    assert initiator.batch_read([read]) == [True], size
    assert memory.raw[half:half + size] == pattern(size, 2), size
many = [ReadOp(peer, local + n * 4096, remote + n * 4096, target_region.rkey, 4096) for n in range(200)]
assert all(initiator.batch_read(many))
assert memory.raw[:200 * 4096] == target_memory.raw[:200 * 4096]
initiator.close()
target.close()
print("all transfers are right")
"#;

#[test]
fn peercache_reads_and_writes() {
    run_script(python_programs(&["peercache==0.8.4"]), "TZ=UTC", PEERCACHE);
}

/// Endpoints of two devices: one-sided transfers, WRITE with immediate data, SEND.
const DLSLIME: &str = r#"
import ctypes
import dlslime

SIZES = (8, 4096, 100_000, 4 << 20)
ROOM = 8 << 20

def pattern(size, seed):
    return bytes((n * 13 + size + seed) % 253 for n in range(size))

def start(device):
    endpoint = dlslime.RDMAEndpoint(device_name=device, ib_port=1, link_type="RoCE", num_qp=2)
    memory = ctypes.create_string_buffer(ROOM)
    handle = endpoint.register_memory_region("memory", ctypes.addressof(memory), 0, ROOM)
    assert handle >= 0, handle
    return endpoint, memory, handle

assert {"siw0", "siw1"} <= set(dlslime.available_nic()), dlslime.available_nic()
first, memory, own = start("siw0")
second, target_memory, _ = start("siw1")
first.connect(second.endpoint_info())
second.connect(first.endpoint_info())
remote = first.register_remote_memory_region("memory", second.mr_info()["memory"])
assert remote >= 0, remote
for size in SIZES:
    ctypes.memmove(target_memory, pattern(size, 1), size)
    assert first.read([(own, remote, 0, 0, size)]).wait() == 0, size
    assert memory.raw[:size] == pattern(size, 1), size
    ctypes.memmove(memory, pattern(size, 2), size)
    assert first.write([(own, remote, 0, 0, size)]).wait() == 0, size
    assert target_memory.raw[:size] == pattern(size, 2), size
    ctypes.memmove(memory, pattern(size, 3), size)
    told = second.imm_recv()
    assert first.write_with_imm([(own, remote, 0, 0, size)], 77).wait() == 0, size
    assert told.wait() == 0 and told.imm_data() == 77, size
    assert target_memory.raw[:size] == pattern(size, 3), size
    ctypes.memmove(target_memory, pattern(size, 4), size)
    received = first.recv((ctypes.addressof(memory), 0, size))
    assert second.send((ctypes.addressof(target_memory), 0, size)).wait() == 0, size
    assert received.wait() == 0, size
    assert memory.raw[:size] == pattern(size, 4), size
print("all transfers are right", flush=True)
first.shutdown()
second.shutdown()
"#;

#[test]
fn dlslime_reads_writes_and_sends() {
    run_script(
        python_programs(&["dlslime==0.1.23"]),
        "SLIME_GID_INDEX=0",
        DLSLIME,
    );
}

/// A server, which is a child of the script, and clients on the other device. Each value is written
/// by one client and read by another.
const INFINISTORE: &str = r#"
import asyncio, ctypes, json, socket, subprocess, sys, time, urllib.request

if len(sys.argv) > 1:
    import infinistore.server as server
    # Needs CAP_SYS_RESOURCE, which containers lack.
    server.prevent_oom = lambda: None
    server.main()
    sys.exit()

import infinistore

SIZES = (4096, 65536, 1 << 20)
COUNT = 8
ROOM = COUNT * max(SIZES)

def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

service, manage = free_port(), free_port()
server = subprocess.Popen([
    sys.executable, __file__, "--host", "127.0.0.1", "--service-port", str(service),
    "--manage-port", str(manage), "--prealloc-size", "1", "--dev-name", "siw1",
    "--link-type", "Ethernet"])

def stored():
    with urllib.request.urlopen(f"http://127.0.0.1:{manage}/kvmap_len") as answer:
        return json.load(answer)["len"]

def await_server():
    while True:
        assert server.poll() is None, "the server ended"
        try:
            return stored()
        except OSError:
            time.sleep(0.02)

def connect():
    connection = infinistore.InfinityConnection(infinistore.ClientConfig(
        host_addr="127.0.0.1", service_port=service, dev_name="siw0",
        link_type=infinistore.LINK_ETHERNET, connection_type=infinistore.TYPE_RDMA))
    connection.connect()
    memory = ctypes.create_string_buffer(ROOM)
    address = ctypes.addressof(memory)
    connection.register_mr(address, ROOM)
    return connection, memory, address

try:
    assert await_server() == 0
    writer, sent, source = connect()
    reader, received, target = connect()
    for size in SIZES:
        data = bytes((n * 13 + size) % 253 for n in range(COUNT * size))
        blocks = [(f"{size}-{n}", n * size) for n in range(COUNT)]
        ctypes.memmove(source, data, len(data))
        asyncio.run(writer.rdma_write_cache_async(blocks, size, source))
        assert stored() == COUNT and reader.check_exist(blocks[0][0])
        asyncio.run(reader.rdma_read_cache_async(blocks, size, target))
        assert received.raw[:len(data)] == data, size
        try:
            asyncio.run(reader.rdma_read_cache_async([("none", 0)], size, target))
            raise AssertionError("a value that nobody wrote")
        except infinistore.InfiniStoreKeyNotFound:
            pass
        assert reader.delete_keys([key for key, _ in blocks]) == COUNT and stored() == 0
    print("all transfers are right", flush=True)
finally:
    server.kill()
    server.wait()
"#;

#[test]
fn infinistore_keeps_values() {
    // Without PyTorch, of which its server and its client use nothing.
    let dependencies = [
        "fastapi==0.115.12",
        "uvicorn==0.34.0",
        "uvloop==0.21.0",
        "numpy==2.2.4",
    ];
    let programs = python_programs_with(&dependencies, "infinistore==0.2.35");
    run_script(programs, "TZ=UTC", INFINISTORE);
}
