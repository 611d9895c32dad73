# Functions of deploy/demo, deploy/test and others: check and install what the machine needs,
# reserve hugepages, and undo it.
# Sourced with bash; the caller has set -euo pipefail.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
RUST_LEAST=1.89

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

need_root() {
    [ "$(id -u)" = 0 ] || die "run as root: hugepages, taps and packages need it (sudo $0)"
}

# Installs Debian packages that are missing; nothing happens when all are there.
need_packages() {
    local missing=() p
    for p in "$@"; do
        dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q '^install ok installed' || missing+=("$p")
    done
    [ ${#missing[@]} = 0 ] && return
    command -v apt-get >/dev/null || die "these packages are missing and apt-get is not here: ${missing[*]}"
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq </dev/null >/dev/null 2>&1 || say "apt-get update failed; trying with the lists that are here"
    # A service of a package must not start on the machine.
    apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/tmp/siwd-apt.$$ 2>&1 \
        || { tail -n 20 /tmp/siwd-apt.$$ >&2; rm -f /tmp/siwd-apt.$$; die "apt-get install ${missing[*]} failed"; }
    rm -f /tmp/siwd-apt.$$
}

# What building the workspace takes besides Rust.
BUILD_PACKAGES=(build-essential pkg-config libdpdk-dev libclang-dev libibverbs-dev librdmacm-dev)

need_rust() {
    local how="install rustup (see rustup.rs), then run: rustup toolchain install stable"
    [ -f "$HOME/.cargo/env" ] && . "$HOME/.cargo/env"
    command -v cargo >/dev/null && command -v rustc >/dev/null || die "Rust is missing; $how"
    local have
    have=$(cd "$ROOT" && rustc --version | awk '{print $2}')
    [ "$(printf '%s\n%s\n' "$RUST_LEAST" "$have" | sort -V | head -n 1)" = "$RUST_LEAST" ] \
        || die "rustc $have is too old, $RUST_LEAST or newer is needed; $how"
}

# Makes sure that N 2 MiB hugepages are free, and remembers what there was.
HUGE=/sys/kernel/mm/hugepages/hugepages-2048kB
HUGE_BEFORE=
reserve_hugepages() {
    local want=$1 free total
    [ -w $HUGE/nr_hugepages ] || { say "no hugepages on this machine: normal pages are used"; return; }
    free=$(<$HUGE/free_hugepages); total=$(<$HUGE/nr_hugepages)
    [ "$free" -ge "$want" ] && return
    HUGE_BEFORE=$total
    echo $((total + want - free)) >$HUGE/nr_hugepages || true
    free=$(<$HUGE/free_hugepages)
    [ "$free" -ge "$want" ] || say "only $free of $want hugepages could be reserved: memory is fragmented or short"
}
restore_hugepages() {
    [ -n "$HUGE_BEFORE" ] && echo "$HUGE_BEFORE" >$HUGE/nr_hugepages
    HUGE_BEFORE=
}

# Processes that a script started and that must end with it.
CHILDREN=()
stop_children() {
    local p
    for p in "${CHILDREN[@]:-}"; do
        [ -n "$p" ] && kill -TERM "$p" 2>/dev/null || true
    done
    for p in "${CHILDREN[@]:-}"; do
        [ -n "$p" ] && wait "$p" 2>/dev/null || true
    done
    CHILDREN=()
}
