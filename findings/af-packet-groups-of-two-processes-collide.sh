#!/usr/bin/env bash
# DPDK's net_af_packet puts its sockets into a fanout group whose number is the process id exclusive-or the interface
# index, and the kernel lets a group have sockets of one interface only. Two processes of a namespace that start soon after
# each other, on interfaces made soon after each other, have ids and indices that are near, and may get the same number: then
# the second has no port, with "could not set PACKET_FANOUT ...: Invalid argument" in its log, and works when it is started
# again. No option of the driver chooses the number.
#
# Seen with DPDK 22.11.11-0+deb12u1 of Debian 12, x86-64, Linux 6.18, with ids and indices that differ in the same bit:
#   process 1000 at interface 2: a port
#   process 1016 at interface 18: no port, Invalid argument
#   process 1040 at interface 18: a port
#
# Needs python3, ip, a Linux of glibc 2.36 or newer where this user may make namespaces, and the registry of Debian packages
# of this machine. Fails if the behaviour changes. siwd gives the driver's sentence as the reason why a device is not
# opened; its tests make another interface (dataplane/ports/tests/kernel_interfaces.rs), and deploy/soak another namespace.
set -euo pipefail
. "$(dirname "$0")/../deploy/lib.sh"
TMP=$(mktemp -d "${TMPDIR:-/tmp}/finding.XXXXXX")
trap 'rm -rf "$TMP"' EXIT
DPDK=22.11.11-0+deb12u1
packages=()
for name in eal ethdev kvargs mbuf mempool meter net pci ring telemetry bus-pci bus-vdev net-af-packet; do
    packages+=("librte-${name}23=$DPDK")
done
unpack_packages bookworm "$TMP/tree" "${packages[@]}" \
    libbsd0=0.11.7-2 libmd0=1.0.4-2 libfdt1=1.6.1-4+b1 libnuma1=2.0.16-1
cat >"$TMP/groups.py" <<'PYTHON'
import ctypes, os, signal

def start(iface, log):
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY, 0o600), 2)
    eal = ctypes.CDLL("librte_eal.so.23", ctypes.RTLD_GLOBAL)
    ethdev = ctypes.CDLL("librte_ethdev.so.23", ctypes.RTLD_GLOBAL)
    core = str(min(os.sched_getaffinity(0)))
    words = ["groups", "--no-huge", "--no-shconf", "-m", "64", "--no-pci", "--no-telemetry", "-l", core,
             "-d", "librte_bus_vdev.so.23", "-d", "librte_net_af_packet.so.23", "--vdev", f"net_af_packet0,iface={iface}"]
    arguments = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
    assert eal.rte_eal_init(len(words), arguments) >= 0
    return ethdev.rte_eth_dev_count_avail()

children = []
for number, iface in ((1000, "left"), (1016, "right"), (1040, "right")):
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write(str(number - 1))
    from_child, to_parent = os.pipe()
    child = os.fork()
    if not child:
        os.write(to_parent, bytes([start(iface, f"log.{number}")]))
        signal.pause()
    children.append(child)
    assert child == number, child
    with open(f"/sys/class/net/{iface}/ifindex") as file:
        index = int(file.read())
    os.close(to_parent)
    count = os.read(from_child, 1)[0]
    with open(f"log.{number}", errors="replace") as log:
        told = "Invalid argument" if "PACKET_FANOUT" in (text := log.read()) and "Invalid argument" in text else "no reason"
    print(f"process {number} at interface {index}: {'a port' if count else f'no port, {told}'}", flush=True)
for child in children:
    os.kill(child, signal.SIGKILL)
os._exit(0)
PYTHON
library=$TMP/tree/usr/lib/x86_64-linux-gnu
export FOLDER=$TMP LD_LIBRARY_PATH=$library:$library/dpdk/pmds-23.0:$TMP/tree/lib/x86_64-linux-gnu
# DPDK would load the drivers of an installed release of its version.
found=$(timeout 120 unshare --user --map-root-user --mount --net --pid --fork --kill-child --mount-proc bash -ec '
    mkdir "$FOLDER/none"
    [ ! -d /usr/lib/x86_64-linux-gnu/dpdk ] || mount --bind "$FOLDER/none" /usr/lib/x86_64-linux-gnu/dpdk
    mount -t sysfs sys /sys
    # Interface 2 is the first after lo.
    ip link add name left index 2 type veth peer name right index 18
    ip link set left up && ip link set right up
    cd "$FOLDER" && HOME=$FOLDER XDG_RUNTIME_DIR=$FOLDER python3 groups.py' 2>"$TMP/log") || { cat "$TMP/log"; exit 1; }
expected='process 1000 at interface 2: a port
process 1016 at interface 18: no port, Invalid argument
process 1040 at interface 18: a port'
echo "$found"
[ "$found" = "$expected" ] || { printf 'changed; expected:\n%s\n' "$expected"; exit 1; }
