# Functions shared by the scripts of deploy/ and benches/: they check and install what the machine
# needs, reserve hugepages and give them back, and show progress.
# Sourced with bash; the caller has set -euo pipefail.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
RUST_LEAST=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' "$ROOT/Cargo.toml")
TARGET=$(cd "$ROOT" && realpath -m "${CARGO_TARGET_DIR:-target}")

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Steps: step TITLE prints "==> [n/m, elapsed] TITLE". The caller sets STEPS to the number of steps.
STEPS=0 STEP=0
step() {
    STEP=$((STEP + 1))
    say "[$STEP/$STEPS, $((SECONDS / 60)) min $((SECONDS % 60)) s] $*"
}

# skip REASON: ends a check that this machine cannot run; deploy/test counts it as failed with CI=true.
skip() { echo "skipped: $*"; exit 0; }

# own_namespaces SCRIPT ARGUMENT...: starts the script again with mounts and processes of its own,
# which go with it however it ends.
own_namespaces() {
    local why
    [ -z "${OWN_NAMESPACES:-}" ] || return 0
    why=$(unshare --mount --pid --fork --mount-proc --net true 2>&1) ||
        skip "$(basename "$1"): no permission for namespaces: $why"
    OWN_NAMESPACES=1 exec unshare --mount --propagation private --pid --fork --kill-child --mount-proc "$@"
}

need_root() {
    [ "$(id -u)" = 0 ] || die "run as root: hugepages, taps and packages need it (sudo $0)"
}

# need_disk FOLDER GIB: fails early, since a compiler that runs out of space says so in odd ways.
need_disk() {
    local free
    mkdir -p "$1" || die "the folder $1 cannot be created"
    free=$(df --output=avail -BG "$1" | tail -n 1 | tr -dc 0-9)
    [ "$free" -ge "$2" ] ||
        die "$1 has $free GiB of free space, $2 GiB are needed; free some, or set CARGO_TARGET_DIR to a folder elsewhere"
}

# Packages needed to build the workspace, besides Rust.
BUILD_PACKAGES=(build-essential pkg-config libdpdk-dev libclang-dev libibverbs-dev librdmacm-dev)

# Programs that tests run, and libraries that they preload: sets of packages that belong to one release.
# "A|B" is one package under the names of several suites.
TEST_PROGRAMS=("qemu-system-x86 qemu-utils qemu-block-extra" "perftest" "qperf" "fio" "iperf3"
    "rdmacm-utils ibverbs-utils" "python3-pyverbs" "libfabric-bin" "tgt" "libiscsi-bin" "dapl2-utils" "dpdk-dev"
    "ucx-utils" "librpma-dev" "libjemalloc2" "libmimalloc3|libmimalloc2.0" "libtcmalloc-minimal4t64|libtcmalloc-minimal4")

# Those that only deploy/programs runs, because of their size. They would leave users and services,
# and are unpacked.
LARGE_PROGRAMS=("ceph-mon ceph-osd ceph-common")

is_installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# The suite of this machine by its code name (os-release(5)): bookworm, trixie, forky (testing and unstable), noble.
SUITE=$(. /etc/os-release 2>/dev/null; echo "${VERSION_CODENAME:-unknown}")

# lacks PACKAGE: whether this suite has no such package, by deploy/lacking.list.
lacks() { grep -qx "$SUITE $1" "$ROOT/deploy/lacking.list"; }

# has_package PACKAGE: whether the package lists have it under this very name.
has_package() { [[ $(LC_ALL=C apt-cache policy "$1" 2>/dev/null) =~ Candidate:\ [^\(] ]]; }

# debian_sources SUITE FILE: writes the package sources of any suite of Debian, by the registry of this machine.
debian_sources() {
    local uri keys=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -e "$keys" ] || die "$keys is missing: install debian-archive-keyring"
    uri=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list 2>/dev/null |
        awk '/^(URIs:|deb)[ \t]/ { for (i = 2; i <= NF; i++) if (!uri && $i ~ /^[a-z+]+:.*\/debian\/?$/) uri = $i }
            END { print uri }') || true
    [ -n "$uri" ] || die "no registry of Debian is in /etc/apt/sources.list or /etc/apt/sources.list.d"
    echo "deb [signed-by=$keys] $uri $1 main" >"$2"
}

# debian_root SUITE FOLDER PACKAGE,...: makes a root of a suite of Debian in a new folder, complete or not at all. Programs
# in it reach the registries as those of this machine do, which may take an expired Release (apt.conf(5)).
debian_root() {
    local work valid
    command -v mmdebstrap >/dev/null || need_packages mmdebstrap
    work=$(mktemp -d "${TMPDIR:-/tmp}/siwd-root.XXXXXX")
    debian_sources "$1" "$work/$1.list"
    rm -rf --one-file-system "$2.new"
    mkdir -p "$(dirname "$2")"
    valid=$(apt-config dump Acquire::Check-Valid-Until)
    mmdebstrap --quiet --variant=minbase ${valid:+--aptopt="$valid"} --include="ca-certificates,$3" "$1" "$2.new" "$work/$1.list" 2>"$work/log" || {
        tail -n 5 "$work/log" >&2
        rm -rf --one-file-system "$2.new" "$work"
        die "mmdebstrap could not make a root of $1: the registry of this machine lacks it, or its Release has expired, which apt takes with Acquire::Check-Valid-Until \"false\" in /etc/apt/apt.conf.d"
    }
    rm -rf "$work"
    cp -a /etc/apt/apt.conf.d/. "$2.new/etc/apt/apt.conf.d/"
    [ -z "$valid" ] || echo "$valid" >"$2.new/etc/apt/apt.conf.d/99valid"
    [ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$2.new/etc/"
    cp -L /etc/ssl/certs/ca-certificates.crt "$2.new/etc/ssl/certs/"
    cp -L /etc/resolv.conf "$2.new/etc/resolv.conf"
    mv "$2.new" "$2"
}

# fetch_packages SUITE FOLDER download|source PACKAGE[=VERSION]...: downloads packages of a suite of Debian, or their
# sources, to FOLDER/debs.
fetch_packages() {
    local of=$1 folder=$2 what=$3 command
    shift 3
    mkdir -p "$folder"/{lists/partial,cache/archives/partial,debs}
    debian_sources "$of" "$folder/sources"
    if [ "$what" = source ]; then
        sed -i 's/^deb /deb-src /' "$folder/sources"
        what="source --download-only"
    fi
    : >"$folder/status"
    for command in update "$what $*"; do
        # shellcheck disable=SC2086 # The command is several words.
        (cd "$folder/debs" && apt-get -q -o Dir::Etc::SourceList="$folder/sources" -o Dir::Etc::SourceParts=/dev/null \
            -o Dir::State::Lists="$folder/lists" -o Dir::State::status="$folder/status" -o Dir::Cache="$folder/cache" \
            -o Acquire::Languages=none -o APT::Sandbox::User= -o Debug::NoLocking=1 \
            $command) >"$folder/log" 2>&1 </dev/null ||
            die "packages of $of cannot be downloaded ($*): $(grep '^[EW]:' "$folder/log" | tail -n 1)"
    done
}

# unpack_packages SUITE FOLDER PACKAGE[=VERSION]...: downloads packages of a suite of Debian, unpacks them into a new
# folder, and writes the version of the first one into FOLDER/version. Nothing is installed.
unpack_packages() ( # A subshell, whose trap leaves that of the caller.
    local of=$1 folder=$2 work
    shift 2
    command -v apt-get dpkg-deb >/dev/null || die "apt-get and dpkg-deb are needed"
    work=$(mktemp -d "${TMPDIR:-/tmp}/siwd-unpack.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    mkdir "$work/tree"
    fetch_packages "$of" "$work" download "$@"
    local deb
    for deb in "$work"/debs/*.deb; do
        dpkg-deb -x "$deb" "$work/tree"
    done
    dpkg-deb -f "$work/debs/${1%%=*}"_*.deb Version >"$work/tree/version"
    rm -rf "$folder"
    mkdir -p "$(dirname "$folder")"
    mv "$work/tree" "$folder"
)

# in_root ROOT FOLDERS COMMAND...: runs COMMAND as root of the system in the folder ROOT, with /proc, /sys and /dev of
# this machine and no other environment, in namespaces that go with it. FOLDERS: lines "FOLDER PLACE"; each folder of
# this machine is at its place in the root. A root of its own instead of chroot(1), in which nobody can make user
# namespaces.
in_root() {
    unshare --mount --propagation private --pid --fork --kill-child sh -ec '
        root=$1 folders=$2
        shift 2
        mount --bind "$root" "$root"
        mount -t proc proc "$root/proc"
        for folder in sys dev; do mount --rbind /$folder "$root/$folder"; done
        for folder in tmp run; do mount -t tmpfs root "$root/$folder"; done
        mkdir -p "$root/run/lock"
        echo "$folders" | while read -r folder place; do
            [ -d "$folder" ] || continue
            mkdir -p "$root$place"
            mount --bind "$folder" "$root$place"
        done
        cd "$root"
        pivot_root . .
        umount -l .
        exec env -i HOME=/root LANG=C.UTF-8 "$@"
    ' sh "$@"
}

# suite_sources: the file of this machine's package sources.
suite_sources() {
    local file
    for file in /etc/apt/sources.list.d/{debian,ubuntu}.sources /etc/apt/sources.list; do
        [ ! -s "$file" ] || break
    done
    echo "$file"
}

# choose_packages WORD...: prints each package once, by the name that this suite gives it, and leaves
# out those that the suite lacks.
choose_packages() {
    local word names name chosen=()
    for word in "$@"; do
        IFS='|' read -ra names <<<"$word"
        for name in "${names[@]}"; do
            is_installed "$name" && break
            name=
        done
        if [ -z "$name" ] && [ ${#names[@]} -gt 1 ]; then
            refresh_lists
            for name in "${names[@]}"; do
                has_package "$name" && break
            done
        fi
        name=${name:-$word}
        lacks "$name" || [[ " ${chosen[*]} " = *" $name "* ]] || chosen+=("$name")
    done
    echo "${chosen[*]}"
}

# apt-get as every script calls it: it may add packages, and remove or downgrade none. An
# installation by somebody else at the same time is waited for.
apt_get() {
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 --no-remove \
        --no-install-recommends -y -q "$@" </dev/null
}

# Refreshes the package lists once per script.
refresh_lists() {
    [ -z "${LISTS_FRESH:-}" ] || return 0
    LISTS_FRESH=1
    apt_get update >/dev/null 2>&1 ||
        say "apt-get update failed (no network or no registry?): continuing with the package lists of this machine"
}

# apt_install PACKAGE...: one transaction for all of them.
apt_install() {
    local log status=0
    log=$(mktemp "${TMPDIR:-/tmp}/siwd-apt.XXXXXX")
    say "installing $*"
    (
        # Services of these packages must not start. The policy goes even if this is interrupted.
        policy=/usr/sbin/policy-rc.d
        if [ ! -e $policy ]; then
            trap 'rm -f $policy' EXIT
            trap 'exit 130' INT TERM
            printf '#!/bin/sh\nexit 101\n' >$policy
            chmod +x $policy
        fi
        apt_get install "$@"
    ) >"$log" 2>&1 || status=$?
    if [ "$status" != 0 ]; then
        tail -n 15 "$log" >&2
        rm -f "$log"
        die "apt-get install failed; nothing was removed. Check the network and free disk space, then run: apt-get install --no-remove $*"
    fi
    rm -f "$log"
}

# need_packages PACKAGE...: installs the missing ones.
need_packages() {
    need_all "$@" --
}

# need_all PACKAGE... -- SET...: packages that must be installed, and programs that tests run, by
# sets of packages that belong to one release ("qemu-system-x86 qemu-utils"). A set with a
# package that this machine has in another version, or cannot install without removing something,
# stays out of the machine: its packages are unpacked below the target folder (unpack_programs).
need_all() {
    local wanted=() sets=() accepted=() unpacked=() set package missing=
    while [ "$1" != -- ]; do wanted+=("$1"); shift; done
    shift
    for set in "$@"; do
        # shellcheck disable=SC2086 # A set is several words.
        set=$(choose_packages $set)
        [ -z "$set" ] || sets+=("$set")
    done
    for package in "${wanted[@]}"; do
        is_installed "$package" || missing=1
    done
    for set in "${sets[@]}"; do
        is_unpacked "$set" && continue
        for package in $set; do
            is_installed "$package" || missing=1
        done
    done
    [ -n "$missing" ] || return 0
    # Scripts that run at the same time take turns.
    exec 8>/run/lock/siwd-apt
    flock 8
    command -v apt-get >/dev/null ||
        die "packages are missing and apt-get is not here (Debian 12 and 13 are supported): ${wanted[*]} ${sets[*]}"
    refresh_lists
    apt_get -s install "${wanted[@]}" >/dev/null 2>&1 ||
        { apt_get -s install "${wanted[@]}" 2>&1 | tail -n 12 >&2
          die "these packages cannot be installed beside those of this machine: ${wanted[*]}"; }
    accepted=("${wanted[@]}")
    # shellcheck disable=SC2086
    if apt_get -s install "${wanted[@]}" ${sets[*]} >/dev/null 2>&1; then
        accepted+=(${sets[*]})
    else
        for set in "${sets[@]}"; do
            if apt_get -s install "${accepted[@]}" $set >/dev/null 2>&1; then
                accepted+=($set)
            else
                unpacked+=("$set")
            fi
        done
    fi
    missing=()
    for package in "${accepted[@]}"; do
        is_installed "$package" || missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"
    for set in "${unpacked[@]}"; do
        # shellcheck disable=SC2086
        unpack_programs $set
    done
    exec 8>&-
}

# Programs of unpacked packages come first, for the scripts and the tests that they run.
PROGRAMS=$TARGET/programs
PATH=$PROGRAMS/bin:$PATH:/usr/sbin:/sbin

is_unpacked() { [ -e "$PROGRAMS/${1// /+}/versions" ]; }

# need_unpacked SET...: unpacks those sets whose first package is not installed.
need_unpacked() {
    local set
    for set in "$@"; do
        # shellcheck disable=SC2086 # A set is several words.
        set=$(choose_packages $set)
        is_installed "${set%% *}" || is_unpacked "$set" || { refresh_lists; unpack_programs $set; }
    done
}

# unpack_programs PACKAGE...: for packages that cannot be installed beside those of this machine, or
# that would leave a user and a service. Unpacks them, with those that they depend on, into
# $PROGRAMS/PACKAGES/, and makes wrappers of their programs in $PROGRAMS/bin. Nothing of it is installed.
unpack_programs() {
    local set="$*" tree
    tree=$PROGRAMS/${set// /+}
    ! is_unpacked "$set" || return 0
    say "unpacking $* below $PROGRAMS"
    rm -rf "$tree"
    mkdir -p "$tree/debs/partial" "$PROGRAMS/bin"
    : >"$tree/status"
    # With an empty status file apt downloads the whole closure of dependencies.
    apt_get -o Dir::State::status="$tree/status" -o Dir::Cache::archives="$tree/debs" \
        -o Debug::NoLocking=1 -o APT::Sandbox::User=root --download-only install "$@" >"$tree/log" 2>&1 ||
        { tail -n 15 "$tree/log" >&2; rm -rf "$tree"; die "could not download $*; check the network and free disk space"; }
    local deb package version file program python=
    for deb in "$tree"/debs/*.deb; do
        package=$(dpkg-deb -f "$deb" Package)
        version=$(dpkg-deb -f "$deb" Version)
        # The C library is this machine's, as is all that it has in the same version.
        case $package in libc6 | libc-bin | libgcc-s1 | gcc-*-base | libcrypt1) continue ;; esac
        [ "$(dpkg-query -W -f '${db:Status-Status} ${Version}' "$package" 2>/dev/null)" != "installed $version" ] || continue
        dpkg-deb -x "$deb" "$tree" || { rm -rf "$tree"; die "could not unpack $package; check free disk space on $PROGRAMS"; }
    done
    [ ! -d "$tree/usr/lib/python3/dist-packages" ] || python="PYTHONPATH=$tree/usr/lib/python3/dist-packages "
    for package in "$@"; do
        for deb in "$tree/debs/${package}"_*.deb; do
            dpkg-deb --fsys-tarfile "$deb" | tar -t | sed -n 's|^\./\(usr/s\?bin/[^/]\+\)$|\1|p'
        done
    done | while read -r file; do
        program=$PROGRAMS/bin/$(basename "$file")
        # The libraries of this machine's own programs stay first: siwrun puts its own there.
        cat >"$program" <<WRAPPER
#!/bin/sh
${python}LD_LIBRARY_PATH=\${LD_LIBRARY_PATH:+\$LD_LIBRARY_PATH:}$tree/usr/lib/x86_64-linux-gnu:$tree/lib/x86_64-linux-gnu exec $tree/$file "\$@"
WRAPPER
        chmod +x "$program"
    done
    for package in "$@"; do
        dpkg-deb -W --showformat='${Package} ${Version}\n' "$tree/debs/${package}"_*.deb
    done >"$tree/versions.new"
    rm -rf "$tree/debs" "$tree/log"
    # Last, as the mark that all is there.
    mv "$tree/versions.new" "$tree/versions"
}

# build_valkey: Valkey with RDMA, which no package has, from the source of Debian unstable, below $PROGRAMS.
build_valkey() ( # A subshell, whose trap leaves that of the caller.
    local tree=$PROGRAMS/valkey work version program
    [ ! -e "$tree/versions" ] || return 0
    say "building Valkey with RDMA below $PROGRAMS"
    need_packages gcc make librdmacm-dev
    work=$(mktemp -d "${TMPDIR:-/tmp}/siwd-valkey.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    fetch_packages sid "$work" source valkey
    version=$(basename "$work"/debs/valkey_*.orig.tar.gz .orig.tar.gz)
    rm -rf "$tree"
    mkdir -p "$tree" "$PROGRAMS/bin"
    tar -xf "$work"/debs/valkey_*.orig.tar.gz -C "$tree" --strip-components=1
    make -C "$tree" -j"$(nproc)" BUILD_RDMA=yes MALLOC=libc USE_SYSTEMD=no >"$work/log" 2>&1 </dev/null ||
        { tail -n 15 "$work/log" >&2; die "Valkey cannot be built"; }
    for program in server cli benchmark; do
        ln -sf "$tree/src/valkey-$program" "$PROGRAMS/bin/"
    done
    echo "valkey ${version#valkey_}" >"$tree/versions"
)

# unpack_gasnet: GASNet, which only Debian unstable has, and the library hwloc of this suite, below $PROGRAMS. apt checks
# the packages by their checksums.
unpack_gasnet() {
    local tree=$PROGRAMS/gasnet version=2025.8.0-14
    [ ! -e "$tree/versions" ] || return 0
    say "unpacking GASNet below $PROGRAMS"
    need_packages gcc perl libibverbs-dev
    unpack_packages sid "$tree" "libgasnet-dev=$version" "gasnet=$version" &&
        unpack_packages "$SUITE" "$tree/hwloc" libhwloc15 || {
        say "its test will be skipped; Debian unstable may have another version than $version, which deploy/lib.sh names"
        return 0
    }
    # The program expects it beside itself, and the package has it here.
    ln -s ../share/gasnet/gasnetrun_ibv.pl "$tree/usr/bin/"
    mkdir -p "$PROGRAMS/bin"
    ln -sf "$tree/usr/bin/gasnetrun_ibv" "$PROGRAMS/bin/"
    echo "libgasnet-dev $version" >"$tree/versions"
}

# version_of_package PACKAGE: of the unpacked package, or of the installed one; fails if there is neither.
version_of_package() {
    cat "$PROGRAMS"/*/versions 2>/dev/null | awk -v name="$1" '$1 == name { print $2; found = 1; exit } END { exit !found }' ||
        dpkg-query -W -f '${Version}' "$1" 2>/dev/null
}

need_rust() {
    local how="install rustup (see rustup.rs), then run: rustup toolchain install stable"
    ! has_package rustc-web || how+="; or install this suite's packages: apt-get install rustc-web cargo-web"
    [ -f "$HOME/.cargo/env" ] && . "$HOME/.cargo/env"
    command -v cargo >/dev/null && command -v rustc >/dev/null || die "Rust is missing; $how"
    local have
    have=$(cd "$ROOT" && rustc --version | awk '{print $2}')
    [ "$(printf '%s\n%s\n' "$RUST_LEAST" "$have" | sort -V | head -n 1)" = "$RUST_LEAST" ] \
        || die "rustc $have is too old, $RUST_LEAST or newer is needed; $how"
}

# The crates are downloaded in a step of their own, so that a failure is not taken for one of the build.
fetch_crates() {
    local log
    log=$(mktemp "${TMPDIR:-/tmp}/siwd-fetch.XXXXXX")
    cargo fetch --locked >"$log" 2>&1 || {
        tail -n 8 "$log" >&2
        rm -f "$log"
        die "cargo could not download the crates; check the network or the registry in ~/.cargo/config.toml"
    }
    rm -f "$log"
}

# Runs cargo and shows which crates it builds, n of m: by its own bar on a terminal, by a line every
# ten seconds elsewhere.
run_cargo() {
    if [ -t 2 ]; then
        cargo "$@"
        return
    fi
    CARGO_TERM_PROGRESS_WHEN=always CARGO_TERM_PROGRESS_WIDTH=100 cargo "$@" 2> >(
        stdbuf -oL tr '\r' '\n' | awk '
            /^ *Building \[/ {
                now = systime()
                if (!begun) begun = last = now
                if (now - last >= 10) {
                    sub(/^ *Building \[[^]]*\] */, "")
                    printf "    building %s (%d s)\n", $0, now - begun
                    fflush()
                    last = now
                }
                next
            }
            /^ *(Compiling|Checking|Blocking|Fresh|Downloaded|Downloading|Locking) / || /^ *$/ { next }
            { sub(/^\033\[K/, ""); print }
            { fflush() }' >&2)
}

# Hugepages of 2 MiB. Scripts that run at the same time add up: a file holds the number from
# before the first one, and a line for each script; the last one out restores that number.
HUGE=/sys/kernel/mm/hugepages/hugepages-2048kB
HUGE_USERS=/run/lock/siwd-hugepages
HUGE_RESERVED=

# with_huge_users CHANGE WANT: locks the file, drops scripts that have ended, adds or removes this one.
with_huge_users() {
    (
        flock 9
        local before='' pid count users='' sum=0
        [ -s "$HUGE_USERS" ] && read -r before <"$HUGE_USERS"
        while read -r pid count; do
            [ "$pid" != $$ ] && [ -d "/proc/$pid" ] || continue
            users+="$pid $count"$'\n' sum=$((sum + count))
        done < <(tail -n +2 "$HUGE_USERS")
        [ -n "$before" ] || before=$(<$HUGE/nr_hugepages)
        [ "$1" != add ] || { users+="$$ $2"$'\n'; sum=$((sum + $2)); }
        echo $((before + sum)) >$HUGE/nr_hugepages || true
        if [ -n "$users" ]; then
            printf '%s\n%s' "$before" "$users" >"$HUGE_USERS"
        else
            : >"$HUGE_USERS"
        fi
    ) 9>>"$HUGE_USERS"
}
reserve_hugepages() {
    local free
    [ -w $HUGE/nr_hugepages ] || { say "this machine has no hugepages: normal pages are used"; return 0; }
    with_huge_users add "$1"
    HUGE_RESERVED=1
    free=$(<$HUGE/free_hugepages)
    if [ "$free" -lt "$1" ] && [ -w /proc/sys/vm/compact_memory ]; then
        # Cached files keep memory in small pieces.
        echo 1 >/proc/sys/vm/compact_memory
        with_huge_users add "$1"
        free=$(<$HUGE/free_hugepages)
    fi
    [ "$free" -ge "$1" ] || say "only $free of $1 hugepages are free: memory is fragmented or short"
}
restore_hugepages() {
    [ -n "$HUGE_RESERVED" ] || return 0
    with_huge_users remove 0
    HUGE_RESERVED=
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
