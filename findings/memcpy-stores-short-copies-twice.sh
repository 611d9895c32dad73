#!/usr/bin/env bash
# memcpy of the GNU C library on x86-64 stores copies of 4, 8 and 16 bytes twice: their length class begins there, and
# each class is copied as two parts, from the start and up to the end, that overlap. Others store their end before bytes in
# front of it. A thread or a device that polls the last word of a buffer sees it before the rest is there; and if it
# clears the word for the next message, as one-sided protocols do, the second store brings the old message back.
#
# Seen with libc6-dev 2.36-9+deb12u14 and valgrind 1:3.19.0-1 of Debian 12, on processors with AVX2:
#   4 bytes: last byte stored 2 times
#   7 bytes: last byte stored 1 times, and other bytes after it
#   8 bytes: last byte stored 2 times
#   16 bytes: last byte stored 2 times
#   24 bytes: last byte stored 1 times
#   200 bytes: last byte stored 1 times, and other bytes after it
#
# Needs gcc and the registry of Debian packages of this machine. Fails if the behaviour changes. siwd stores the last word
# of what it places last, and once (copy_to_polled of shm-api/src/shared_memory.rs).
set -euo pipefail
. "$(dirname "$0")/../deploy/lib.sh"
TMP=$(mktemp -d "${TMPDIR:-/tmp}/finding.XXXXXX")
trap 'rm -rf "$TMP"' EXIT
unpack_packages bookworm "$TMP/tree" libc6-dev=2.36-9+deb12u14 libc6=2.36-9+deb12u14 valgrind=1:3.19.0-1
cat >"$TMP/copy.c" <<'C'
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char from[4096], to[16][4096] __attribute__((aligned(4096)));

int main(int count, char **lengths) {
    for (int i = 1; i < count; i++) {
        size_t length = strtoul(lengths[i], NULL, 10);
        printf("copy %zu %p\n", length, (void *)to[i]);
        fflush(stdout);
        memcpy(to[i], from, length);
    }
}
C
lib=$TMP/tree/usr/lib/x86_64-linux-gnu
gcc -O1 -fno-builtin -static -B "$lib" -L "$lib" -o "$TMP/copy" "$TMP/copy.c"
VALGRIND_LIB=$TMP/tree/usr/libexec/valgrind timeout 300 "$TMP/tree/usr/bin/valgrind" --tool=lackey --trace-mem=yes \
    --log-file="$TMP/trace" "$TMP/copy" 4 7 8 16 24 200 >"$TMP/copies"
found=$(awk '
    function number(text,   value, i) {
        for (i = 1; i <= length(text); i++) value = value * 16 + index("0123456789abcdef", substr(text, i, 1)) - 1
        return value
    }
    $1 == "copy" { length_of[++copies] = $2; start[copies] = number(substr($3, 3)) }
    $1 == "S" || $1 == "M" {
        split($2, store, ",")
        at = number(store[1])
        for (i = 1; i <= copies; i++) {
            last = start[i] + length_of[i] - 1
            if (at < start[i] || at > last) continue
            if (at + store[2] > last) times[i]++
            else if (times[i]) later[i] = 1
        }
    }
    END {
        for (i = 1; i <= copies; i++)
            printf "%d bytes: last byte stored %d times%s\n", length_of[i], times[i], later[i] ? ", and other bytes after it" : ""
    }' "$TMP/copies" "$TMP/trace")
expected='4 bytes: last byte stored 2 times
7 bytes: last byte stored 1 times, and other bytes after it
8 bytes: last byte stored 2 times
16 bytes: last byte stored 2 times
24 bytes: last byte stored 1 times
200 bytes: last byte stored 1 times, and other bytes after it'
echo "$found"
[ "$found" = "$expected" ] || { printf 'changed; expected:\n%s\n' "$expected"; exit 1; }
