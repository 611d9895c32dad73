#!/usr/bin/env bash
# rdma_getaddrinfo of librdmacm says "Bad value for ai_flags" on a machine without an RDMA device, whatever the flags:
# it returns -1 with ENODEV in errno, and -1 is EAI_BADFLAGS of getaddrinfo, whose gai_strerror the programs print.
#
# Seen with rdmacm-utils 44.0-2 of Debian 12, x86-64:
#   rdma_client: start
#   rdma_getaddrinfo: Bad value for ai_flags
#   rdma_client: end -1
#   flags 0: -1, ENODEV, Bad value for ai_flags
#
# Needs python3, a Linux of glibc 2.36 or newer where this user may make namespaces, and the registry of Debian packages
# of this machine. Fails if the behaviour changes. The table of symptoms in deploy/README.md has the message.
set -euo pipefail
. "$(dirname "$0")/../deploy/lib.sh"
TMP=$(mktemp -d "${TMPDIR:-/tmp}/finding.XXXXXX")
trap 'rm -rf "$TMP"' EXIT
unpack_packages bookworm "$TMP/tree" rdmacm-utils=44.0-2 librdmacm1=44.0-2 libibverbs1=44.0-2 \
    libnl-3-200=3.7.0-0.2+b1 libnl-route-3-200=3.7.0-0.2+b1
cat >"$TMP/flags.py" <<'PYTHON'
import ctypes, errno

cm = ctypes.CDLL("librdmacm.so.1", use_errno=True)
libc = ctypes.CDLL("libc.so.6")
libc.gai_strerror.restype = ctypes.c_char_p
answer = ctypes.c_void_p()
# struct rdma_addrinfo begins with ai_flags.
status = cm.rdma_getaddrinfo(b"127.0.0.1", b"7471", bytes(128), ctypes.byref(answer))
print(f"flags 0: {status}, {errno.errorcode.get(ctypes.get_errno())}, {libc.gai_strerror(status).decode()}")
PYTHON
export TREE=$TMP/tree SCRIPT=$TMP/flags.py
# Devices of the machine are out of sight.
found=$(timeout 60 unshare --user --map-root-user --mount --net bash -ec '
    mount -t tmpfs none /sys
    export LD_LIBRARY_PATH=$TREE/usr/lib/x86_64-linux-gnu:$TREE/lib/x86_64-linux-gnu
    "$TREE/usr/bin/rdma_client" -s 127.0.0.1 || true
    python3 "$SCRIPT"' 2>&1)
expected='rdma_client: start
rdma_getaddrinfo: Bad value for ai_flags
rdma_client: end -1
flags 0: -1, ENODEV, Bad value for ai_flags'
echo "$found"
[ "$found" = "$expected" ] || { printf 'changed; expected:\n%s\n' "$expected"; exit 1; }
