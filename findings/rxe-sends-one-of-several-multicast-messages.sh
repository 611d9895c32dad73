#!/usr/bin/env bash
# rxe, the RoCE driver of Linux, sends the first of ten multicast messages that are posted at once, from 6.12 on; 6.1
# sends all. mckey(1), the program of librdmacm for this, counts completions without a look at their status, and reports
# success.
#
# Seen with the kernels 6.1.192-3 of Debian 12, 6.12.117-1 of Debian 13 and 7.2.13-1 of sid:
#   6.1: mckey says data transfers complete; 10 packets sent
#   6.12: mckey says data transfers complete; 1 packets sent
#   7.2: mckey says data transfers complete; 1 packets sent
#
# Needs root, the registry of Debian packages of this machine, and 5 GiB; boots a virtual machine of each suite
# (deploy/lab/linux-siw), which runs neither siwd nor anything else of this project. Fails if the behaviour changes. The
# receiver of dataplane/tests/guest/linux_rxe.rs waits for one message, which is sent until it has come.
set -euo pipefail
. "$(dirname "$0")/../deploy/lib.sh"
cd "$ROOT"
need_all iproute2 -- "${TEST_PROGRAMS[0]}"
TAP=f$$
sent_of() { # sent_of SUITE
    deploy/lab/linux-siw/build --suite "$1" >/dev/null 2>&1
    deploy/lab/linux-siw/guest --suite "$1" --tap "$TAP" --ip 10.77.0.2/24 --timeout 60 --cmd '
        modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0; rdma link del siw0; modprobe rdma_ucm
        ip route add 239.0.0.0/8 dev eth0
        mckey -m 239.1.2.3 -b 10.77.0.2 -s -C 10 | grep "data transfers complete"
        cat /sys/class/infiniband/*/ports/1/hw_counters/sent_pkts; uname -r'
}
deploy/lab/linux-siw/tap up "$TAP" >/dev/null
trap 'deploy/lab/linux-siw/tap down "$TAP" >/dev/null' EXIT
found=
for suite in bookworm trixie sid; do
    mapfile -t said < <(sent_of "$suite" 2>/dev/null)
    version=$(cut -d. -f1,2 <<<"${said[2]:-}")
    found+="$version: mckey says ${said[0]:-nothing}; ${said[1]:-no} packets sent"$'\n'
done
expected='6.1: mckey says data transfers complete; 10 packets sent
6.12: mckey says data transfers complete; 1 packets sent
7.2: mckey says data transfers complete; 1 packets sent
'
printf %s "$found"
[ "$found" = "$expected" ] || { printf 'changed; expected:\n%s' "$expected"; exit 1; }
