#!/usr/bin/env bash
# tshark calls a valid iWARP Send of fewer than 16 octets "malformed", whatever protocol the connection carries: it
# offers the payload of each Send to its dissector of RPC over RDMA (RFC 8166), which reads the fixed header of 16 octets
# before it decides whether the payload is its own. "Malformed Packet" and a filter by _ws.malformed then blame the
# sender.
#
# Seen with tshark 4.0.17-0+deb12u3 of Debian 12, x86-64:
#   by default: Send of 1 octets: [Malformed Packet: RPCoRDMA],_ws.malformed
#   by default: Send of 15 octets: [Malformed Packet: RPCoRDMA],_ws.malformed
#   by default: Send of 16 octets: no remark
#   by default: Send of 64 octets: no remark
#   without rpcordma: no remark on any of them
#
# Needs python3, a Linux of glibc 2.36 or newer, and the registry of Debian packages of this machine. Fails if the behaviour
# changes. The tests of siwd switch the dissector off (not_iwarp of dataplane/tests/common/net.rs).
set -euo pipefail
. "$(dirname "$0")/../deploy/lib.sh"
TMP=$(mktemp -d "${TMPDIR:-/tmp}/finding.XXXXXX")
trap 'rm -rf "$TMP"' EXIT
packages=()
for name in tshark libwireshark16 libwiretap13 libwsutil14; do
    packages+=("$name=4.0.17-0+deb12u3")
done
# The libraries that they need.
packages+=(libbrotli1 libc-ares2 libcap2 libcom-err2 libdbus-1-3 libffi8 libgcrypt20 libglib2.0-0 libgmp10 libgnutls30
    libgpg-error0 libhogweed6 libicu72 libidn2-0 libk5crypto3 libkeyutils1 libkrb5-3 libkrb5support0 liblua5.2-0 liblz4-1
    liblzma5 libnettle8 libnghttp2-14 libp11-kit0 libpcap0.8 libpcre2-8-0 libsmi2ldbl libsnappy1v5 libstdc++6 libsystemd0
    libtasn1-6 libunistring2 libxml2 libzstd1 zlib1g)
unpack_packages bookworm "$TMP/tree" "${packages[@]}"
cat >"$TMP/write.py" <<'PYTHON'
import struct, sys

CLIENT, SERVER = (bytes([10, 0, 0, 1]), 40001), (bytes([10, 0, 0, 2]), 41000)
positions = {CLIENT: 1000, SERVER: 5000}

def tcp(source, target, flags, payload=b""):
    positions_of_target = positions[target] if flags & 0x10 else 0
    segment = struct.pack("!HHIIBBHHH", source[1], target[1], positions[source], positions_of_target, 5 << 4, flags,
                          65535, 0, 0)
    positions[source] += len(payload) + (flags & 2) // 2
    packet = struct.pack("!BBHHHBBH", 0x45, 0, 40 + len(payload), 0, 0x4000, 64, 6, 0) + source[0] + target[0]
    return bytes([2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0]) + packet + segment + payload

def send(number, payload):
    """An FPDU without CRC (RFC 5044) with a Send (RFC 5040): length, last segment, opcode, queue 0, MSN, offset 0."""
    ulpdu = struct.pack("!BBIIII", 0x41, 0x43, 0, 0, number, 0) + payload
    padding = bytes(-(2 + len(ulpdu)) % 4)
    return struct.pack("!H", len(ulpdu)) + ulpdu + padding + bytes(4)

frames = [tcp(CLIENT, SERVER, 2), tcp(SERVER, CLIENT, 0x12), tcp(CLIENT, SERVER, 0x10),
          tcp(CLIENT, SERVER, 0x18, b"MPA ID Req Frame" + bytes([0, 1, 0, 0])),
          tcp(SERVER, CLIENT, 0x18, b"MPA ID Rep Frame" + bytes([0, 1, 0, 0]))]
for number, length in enumerate((1, 15, 16, 64), 1):
    frames.append(tcp(CLIENT, SERVER, 0x18, send(number, b"x" * length)))
with open(sys.argv[1], "wb") as capture:
    capture.write(struct.pack("=IHHiIII", 0xa1b2c3d4, 2, 4, 0, 0, 65535, 1))
    for number, frame in enumerate(frames):
        capture.write(struct.pack("=IIII", 1, number, len(frame), len(frame)) + frame)
PYTHON
python3 "$TMP/write.py" "$TMP/sends.pcap"
export HOME=$TMP LD_LIBRARY_PATH=$TMP/tree/usr/lib/x86_64-linux-gnu:$TMP/tree/lib/x86_64-linux-gnu
describe_sends() { # TITLE OPTION...
    local title=$1
    shift
    timeout 120 "$TMP/tree/usr/bin/tshark" -r "$TMP/sends.pcap" -Y iwarp_ddp_rdmap "$@" \
        -T fields -e iwarp_mpa.ulpdulength -e _ws.malformed 2>"$TMP/log" |
        awk -F '\t' -v title="$title" '{ print title ": Send of " $1 - 18 " octets: " ($2 ? $2 : "no remark") }'
}
found=$(describe_sends "by default" && describe_sends "without rpcordma" --disable-protocol rpcordma) ||
    { cat "$TMP/log"; exit 1; }
expected='by default: Send of 1 octets: [Malformed Packet: RPCoRDMA],_ws.malformed
by default: Send of 15 octets: [Malformed Packet: RPCoRDMA],_ws.malformed
by default: Send of 16 octets: no remark
by default: Send of 64 octets: no remark
without rpcordma: Send of 1 octets: no remark
without rpcordma: Send of 15 octets: no remark
without rpcordma: Send of 16 octets: no remark
without rpcordma: Send of 64 octets: no remark'
echo "$found"
[ "$found" = "$expected" ] || { printf 'changed; expected:\n%s\n' "$expected"; exit 1; }
