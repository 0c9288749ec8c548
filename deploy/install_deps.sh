#!/bin/sh
# install_deps.sh - installs what building Baton needs on Debian 12; a second run changes nothing.
#
# usage: deploy/install_deps.sh [--tests] [--all]
#   --tests  also what tests/run.sh needs: g++ for an emulated GPU, clang-format, a real
#            redis-server, certificates for it and a wall clock that jumps, Python's venv, ps and
#            ss, a virtual machine, the tools that transfers are measured against
#   --all    also what tests/run.sh --all needs: clang with libFuzzer
# Runs as root or with sudo. Says nothing when there is nothing to do.
set -eu

build="gcc libc6-dev cmake ninja-build pkg-config libuv1-dev libnghttp2-dev libhiredis-dev
 libcjson-dev node-llhttp libpcre2-dev libutf8proc-dev libprotobuf-c-dev protobuf-c-compiler
 libxxhash-dev libssl-dev libcurl4-openssl-dev liburing-dev libibverbs-dev librdmacm-dev libucx-dev
 python3 python3-pip ca-certificates curl"
tests="g++ clang-format redis-server openssl faketime python3-venv procps iproute2 git
 qemu-system-x86 busybox-static ibverbs-providers perftest ucx-utils iperf3"
fuzz="clang libclang-rt-14-dev"

packages=$build
for arg in "$@"; do
    case $arg in
    --tests) packages="$packages $tests" ;;
    --all) packages="$packages $tests $fuzz" ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "install_deps.sh: there is no option $arg; --tests and --all are known" >&2; exit 2 ;;
    esac
done

command -v dpkg-query >/dev/null || {
    echo "install_deps.sh: this is not Debian (no dpkg-query); install the equivalents of:" \
        $packages >&2
    exit 1
}
missing=
for p in $packages; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] ||
        missing="$missing $p"
done
[ -n "$missing" ] || exit 0

as_root=
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || {
        echo "install_deps.sh: run as root, or install sudo; missing packages:$missing" >&2
        exit 1
    }
    as_root=sudo
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# With a service manager Debian starts the services that it installs. The tests start their own
# redis-server on ports of their own, so the new service is switched off again; one that was there
# before is left alone.
had_redis=yes
case " $missing " in *" redis-server "*) had_redis=no ;; esac

run_apt() {
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Dpkg::Use-Pty=0 \
        -o DPkg::Lock::Timeout=120 "$@" >>"$log" 2>&1
}
echo "installing, which takes a minute or two:$missing" >&2
if ! { run_apt update && run_apt install --no-install-recommends $missing; }; then
    tail -n 25 "$log" >&2
    echo "install_deps.sh: apt-get failed; its last lines are above" >&2
    exit 1
fi
if [ $had_redis = no ] && [ -d /run/systemd/system ]; then
    $as_root systemctl disable --now redis-server >>"$log" 2>&1 || true
fi
