#!/usr/bin/env bash
# rte_eal_init succeeds although a device of a --vdev option could not be created: the only trace is a line of its log. Port
# ids are given in order of success, so the next device gets the id of the missing one, and a program that takes the
# order of its options for port ids uses another link without an error. rte_eth_dev_get_port_by_name tells the truth.
#
# Seen with DPDK 22.11.11-0+deb12u1 of Debian 12, x86-64:
#   rte_eal_init did not fail, 1 port
#   port 0: net_null1
#   net_af_packet0: -19, net_null1: port 0
#
# Needs python3, a Linux of glibc 2.36 or newer where this user may make namespaces, and the registry of Debian packages of
# this machine. Fails if the behaviour changes. siwd looks its ports up by name (dataplane/dpdk/src/probe.rs).
set -euo pipefail
. "$(dirname "$0")/../deploy/lib.sh"
TMP=$(mktemp -d "${TMPDIR:-/tmp}/finding.XXXXXX")
trap 'rm -rf "$TMP"' EXIT
DPDK=22.11.11-0+deb12u1
packages=()
for name in eal ethdev kvargs mbuf mempool meter net pci ring telemetry bus-pci bus-vdev net-null net-af-packet; do
    packages+=("librte-${name}23=$DPDK")
done
unpack_packages bookworm "$TMP/tree" "${packages[@]}" \
    libbsd0=0.11.7-2 libmd0=1.0.4-2 libfdt1=1.6.1-4+b1 libnuma1=2.0.16-1
cat >"$TMP/ports.py" <<'PYTHON'
import ctypes, os

eal = ctypes.CDLL("librte_eal.so.23", ctypes.RTLD_GLOBAL)
ethdev = ctypes.CDLL("librte_ethdev.so.23", ctypes.RTLD_GLOBAL)
core = str(min(os.sched_getaffinity(0)))
words = ["ports", "--no-huge", "--no-shconf", "-m", "64", "--no-pci", "--no-telemetry", "-l", core]
for driver in ("bus_vdev", "net_null", "net_af_packet"):
    words += ["-d", f"librte_{driver}.so.23"]
words += ["--vdev", "net_af_packet0,iface=absent", "--vdev", "net_null1"]
arguments = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
status = eal.rte_eal_init(len(words), arguments)
count = ethdev.rte_eth_dev_count_avail()
print(f"rte_eal_init {'failed' if status < 0 else 'did not fail'}, {count} port{'s'[count == 1:]}")
name = ctypes.create_string_buffer(64)
for port in range(count):
    ethdev.rte_eth_dev_get_name_by_port(ctypes.c_uint16(port), name)
    print(f"port {port}: {name.value.decode()}")
answers = []
for device in ("net_af_packet0", "net_null1"):
    port = ctypes.c_uint16()
    status = ethdev.rte_eth_dev_get_port_by_name(device.encode(), ctypes.byref(port))
    answers.append(f"{device}: {status if status else f'port {port.value}'}")
print(", ".join(answers), flush=True)
os._exit(0)
PYTHON
library=$TMP/tree/usr/lib/x86_64-linux-gnu
export FOLDER=$TMP LD_LIBRARY_PATH=$library:$library/dpdk/pmds-23.0:$TMP/tree/lib/x86_64-linux-gnu
# DPDK would load the drivers of an installed release of its version.
found=$(timeout 60 unshare --user --map-root-user --mount bash -ec '
    mkdir "$FOLDER/none"
    [ ! -d /usr/lib/x86_64-linux-gnu/dpdk ] || mount --bind "$FOLDER/none" /usr/lib/x86_64-linux-gnu/dpdk
    cd "$FOLDER" && HOME=$FOLDER XDG_RUNTIME_DIR=$FOLDER python3 ports.py' 2>"$TMP/log") || { cat "$TMP/log"; exit 1; }
expected='rte_eal_init did not fail, 1 port
port 0: net_null1
net_af_packet0: -19, net_null1: port 0'
echo "$found"
[ "$found" = "$expected" ] || { printf 'changed; expected:\n%s\n' "$expected"; exit 1; }
