#!/usr/bin/env bash
# A frame that is longer than an entry of its ring is neither dropped nor counted as an error by DPDK's net_af_packet:
# rte_eth_rx_burst returns its first octets as a complete packet, of which no flag or counter tells the loss. With the
# driver's default framesz of 2048 the limit is 1,982 octets; rte_eth_dev_set_mtu does not change it.
#
# Seen with DPDK 22.11.11-0+deb12u1 of Debian 12, x86-64, and a veth of MTU 3000:
#   sent 1982: received 1982 octets in 1 buffer
#   sent 1983: received 1982 octets in 1 buffer
#   sent 3000: received 1982 octets in 1 buffer
#   counted: 3 packets, 0 missed, 0 errors, 0 without buffer
#
# Needs python3, iproute2, a Linux of glibc 2.36 or newer where this user may make namespaces, and the registry of Debian
# packages of this machine. Fails if the behaviour changes. siwd chooses framesz by the MTU of the device
# (packet_ring_frame of dataplane/dpdk/src/driver_traits.rs).
set -euo pipefail
. "$(dirname "$0")/../deploy/lib.sh"
TMP=$(mktemp -d "${TMPDIR:-/tmp}/finding.XXXXXX")
trap 'rm -rf "$TMP"' EXIT
DPDK=22.11.11-0+deb12u1
packages=()
for name in eal ethdev kvargs mbuf mempool mempool-ring meter net pci ring telemetry bus-pci bus-vdev net-af-packet; do
    packages+=("librte-${name}23=$DPDK")
done
unpack_packages bookworm "$TMP/tree" "${packages[@]}" \
    libbsd0=0.11.7-2 libmd0=1.0.4-2 libfdt1=1.6.1-4+b1 libnuma1=2.0.16-1
cat >"$TMP/receive.py" <<'PYTHON'
import ctypes, os, socket, struct, sys, time

eal = ctypes.CDLL("librte_eal.so.23", ctypes.RTLD_GLOBAL)
mempool = ctypes.CDLL("librte_mempool.so.23", ctypes.RTLD_GLOBAL)
mbuf = ctypes.CDLL("librte_mbuf.so.23", ctypes.RTLD_GLOBAL)
ethdev = ctypes.CDLL("librte_ethdev.so.23", ctypes.RTLD_GLOBAL)
core = str(min(os.sched_getaffinity(0)))
words = ["receive", "--no-huge", "--no-shconf", "-m", "64", "--no-pci", "--no-telemetry", "-l", core]
for driver in ("bus_vdev", "mempool_ring", "net_af_packet"):
    words += ["-d", f"librte_{driver}.so.23"]
words += ["--vdev", "net_af_packet0,iface=near"]

def check(name, status):
    if status < 0:
        sys.exit(f"{name}: {status}")

check("rte_eal_init", eal.rte_eal_init(len(words), (ctypes.c_char_p * len(words))(*(word.encode() for word in words))))
create = mbuf.rte_pktmbuf_pool_create
create.restype = ctypes.c_void_p
create.argtypes = [ctypes.c_char_p] + [ctypes.c_uint] * 2 + [ctypes.c_uint16] * 2 + [ctypes.c_int]
pool = create(b"pool", 511, 0, 0, 8192, 0) or sys.exit("rte_pktmbuf_pool_create")
# struct rte_eth_conf of 22.11 has fewer than 4096 octets; zero is the default.
check("rte_eth_dev_configure", ethdev.rte_eth_dev_configure(0, 1, 1, bytes(4096)))
check("rte_eth_rx_queue_setup", ethdev.rte_eth_rx_queue_setup(0, 0, 64, 0, None, ctypes.c_void_p(pool)))
check("rte_eth_tx_queue_setup", ethdev.rte_eth_tx_queue_setup(0, 0, 64, 0, None))
check("rte_eth_dev_start", ethdev.rte_eth_dev_start(0))

# rte_eth_rx_burst is an inline function of rte_ethdev.h; rx_pkt_burst and rxq.data of struct rte_eth_fp_ops.
port = (ctypes.c_void_p * 4).in_dll(ethdev, "rte_eth_fp_ops")
burst = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint16)(port[0])
queue = ctypes.c_void_p.from_address(port[3]).value
far = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
far.bind(("far", 0))
buffers = (ctypes.c_void_p * 32)()
for length in (1982, 1983, 3000):
    far.send(bytes([2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5]) + bytes(length - 14))
    count, end = 0, time.monotonic() + 10
    while not count and time.monotonic() < end:
        count = burst(queue, buffers, 32)
    for buffer in buffers[:count]:
        # nb_segs and pkt_len of struct rte_mbuf.
        parts, = struct.unpack("=H", ctypes.string_at(buffer + 20, 2))
        octets, = struct.unpack("=I", ctypes.string_at(buffer + 36, 4))
        print(f"sent {length}: received {octets} octets in {parts} buffer{'s'[parts == 1:]}")
counters = (ctypes.c_uint64 * 128)()
check("rte_eth_stats_get", ethdev.rte_eth_stats_get(0, counters))
packets, _, _, _, missed, errors, _, without = counters[:8]
print(f"counted: {packets} packets, {missed} missed, {errors} errors, {without} without buffer", flush=True)
os._exit(0)
PYTHON
library=$TMP/tree/usr/lib/x86_64-linux-gnu
export FOLDER=$TMP LD_LIBRARY_PATH=$library:$library/dpdk/pmds-23.0:$TMP/tree/lib/x86_64-linux-gnu
# Interfaces of its own, which go with it. DPDK would load the drivers of an installed release of its version.
found=$(timeout 60 unshare --user --map-root-user --mount --net bash -ec '
    mkdir "$FOLDER/none"
    [ ! -d /usr/lib/x86_64-linux-gnu/dpdk ] || mount --bind "$FOLDER/none" /usr/lib/x86_64-linux-gnu/dpdk
    ip link add near mtu 3000 type veth peer name far mtu 3000
    for name in near far; do
        echo 1 >/proc/sys/net/ipv6/conf/$name/disable_ipv6 2>/dev/null || true
        ip link set $name up
    done
    cd "$FOLDER" && HOME=$FOLDER XDG_RUNTIME_DIR=$FOLDER python3 receive.py' 2>"$TMP/log") || { cat "$TMP/log"; exit 1; }
expected='sent 1982: received 1982 octets in 1 buffer
sent 1983: received 1982 octets in 1 buffer
sent 3000: received 1982 octets in 1 buffer
counted: 3 packets, 0 missed, 0 errors, 0 without buffer'
echo "$found"
[ "$found" = "$expected" ] || { printf 'changed; expected:\n%s\n' "$expected"; exit 1; }
