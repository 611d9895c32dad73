#!/usr/bin/env bash
# struct ibv_qp_ex of libibverbs has become longer, and the function that returns it, ibv_qp_to_qp_ex, has kept its
# symbol version. So a program that was built with newer headers links with an older library, and calls the function
# pointer behind the end of the older library's object if the memory there is not zero.
#
# Seen with libibverbs-dev 44.0 (Debian 12) and 56.1 (Debian 13), x86-64:
#   44.0: ibv_qp_ex 352 bytes, wr_flush no, ibv_qp_to_qp_ex IBVERBS_1.6
#   56.1: ibv_qp_ex 360 bytes, wr_flush yes, ibv_qp_to_qp_ex IBVERBS_1.6
#
# Needs a C compiler, objdump and the registry of Debian packages of this machine. Fails if the behaviour changes.
# siwd's objects have the newest layout (client-lib/verbs, test of struct layouts).
set -euo pipefail
. "$(dirname "$0")/../deploy/lib.sh"
TMP=$(mktemp -d "${TMPDIR:-/tmp}/finding.XXXXXX")
trap 'rm -rf "$TMP"' EXIT
cat >"$TMP/sizes.c" <<'C'
#include <infiniband/verbs.h>
#include <stdio.h>
int main(void)
{
#ifdef HAS_FLUSH
	(void)sizeof(((struct ibv_qp_ex *)0)->wr_flush);
#endif
	printf("ibv_qp_ex %zu bytes", sizeof(struct ibv_qp_ex));
}
C
describe_suite() { # SUITE
    local tree=$TMP/$1 flush=no
    unpack_packages "$1" "$tree" libibverbs-dev libibverbs1
    ! cc -I"$tree/usr/include" -DHAS_FLUSH -fsyntax-only "$TMP/sizes.c" 2>/dev/null || flush=yes
    cc -I"$tree/usr/include" -o "$tree/sizes" "$TMP/sizes.c"
    printf '%s: %s, wr_flush %s, ibv_qp_to_qp_ex %s\n' \
        "$(cut -d- -f1 "$tree/version")" "$("$tree/sizes")" "$flush" \
        "$(objdump -T "$tree"/usr/lib/x86_64-linux-gnu/libibverbs.so.1 | awk '$NF == "ibv_qp_to_qp_ex" { print $(NF - 1) }')"
}
found=$(describe_suite bookworm; describe_suite trixie)
expected='44.0: ibv_qp_ex 352 bytes, wr_flush no, ibv_qp_to_qp_ex IBVERBS_1.6
56.1: ibv_qp_ex 360 bytes, wr_flush yes, ibv_qp_to_qp_ex IBVERBS_1.6'
echo "$found"
[ "$found" = "$expected" ] || { printf 'changed; expected:\n%s\n' "$expected"; exit 1; }
