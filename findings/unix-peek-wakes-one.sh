#!/bin/sh
# Of several threads that wait in recv(MSG_PEEK) on a Unix socket, all return when data arrives on a
# SOCK_STREAM socket, but only one on a SOCK_SEQPACKET or SOCK_DGRAM socket, although the packet stays in
# the queue for the others: waits for packets are exclusive in the kernel, for peeking too.
#
# Seen on Linux 6.18:
#   stream: 3 of 3 peeking threads return
#   seqpacket: 1 of 3 peeking threads return
#   dgram: 1 of 3 peeking threads return
#
# Needs python3 of any version, and nothing else. Fails if the behaviour changes. siwd's libraries let
# threads wait by peeking at stream sockets only (client-lib/verbs/src/waiting.rs).
set -eu
echo "Linux $(uname -r)"
found=$(python3 - <<'PYTHON'
import os, socket, threading, time

THREADS = 3

def count_returns(kind):
    reader, writer = socket.socketpair(socket.AF_UNIX, kind)
    returned = []
    started = threading.Barrier(THREADS + 1)
    def peek():
        started.wait()
        reader.recv(1, socket.MSG_PEEK)
        returned.append(1)
    for _ in range(THREADS):
        threading.Thread(target=peek, daemon=True).start()
    started.wait()
    # The threads are in their system calls after a moment, and return within another.
    time.sleep(0.5)
    writer.send(b"x")
    time.sleep(0.5)
    return len(returned)

for name in ("stream", "seqpacket", "dgram"):
    count = count_returns(getattr(socket, "SOCK_" + name.upper()))
    print(f"{name}: {count} of {THREADS} peeking threads return", flush=True)
os._exit(0)
PYTHON
)
expected="stream: 3 of 3 peeking threads return
seqpacket: 1 of 3 peeking threads return
dgram: 1 of 3 peeking threads return"
echo "$found"
if [ "$found" != "$expected" ]; then
    echo "changed; expected:"
    echo "$expected"
    exit 1
fi
