#!/bin/bash
# quickstart.sh - from a fresh clone to a running pair: one prefill node, one decode node, a real
# model, one question to each.
#
# usage: deploy/quickstart.sh [--once]
#   --once   stop after the answers, exit status 0; nothing stays behind
# Environment: BATON_PORTS (two ports, default "8000,8001" where they are free), BATON_CACHE (the
# folder that keeps the model).
# On any failure: a sentence, the last lines of the log, everything stopped, a status other than 0.
set -euo pipefail
cd "$(dirname "$0")/.."

once=no
[ $# -le 1 ] || { echo "quickstart.sh: one option at most" >&2; exit 2; }
case ${1-} in
'') ;;
--once) once=yes ;;
-h | --help) sed -n '2,9s/^# \{0,1\}//p' deploy/quickstart.sh; exit 0 ;;
*) echo "quickstart.sh: there is no option $1; --once is known" >&2; exit 2 ;;
esac

question="What is the capital of France?"
start_limit_s=180  # loading the model takes seconds; a slow disk may take a minute
stop_limit_s=45    # the nodes' own limit is --drain-timeout, 30 s
work=$(mktemp -d)
log=$work/launch.log
launcher=

print_heading() { printf '\n== %s\n' "$*"; }

# Ends the launcher and with it the nodes; kills it after stop_limit_s. Every exit of this script
# comes here.
stop() {
    [ -n "$launcher" ] || return 0
    local pid=$launcher deadline=$((SECONDS + stop_limit_s))
    launcher=
    kill -TERM "$pid" 2>/dev/null || true
    while kill -0 "$pid" 2>/dev/null; do
        if [ $SECONDS -ge $deadline ]; then
            echo "quickstart.sh: the nodes did not stop in $stop_limit_s s; killed" >&2
            # the nodes too: they go on without it
            kill -KILL "$pid" $(cat "/proc/$pid/task/$pid/children" 2>/dev/null) 2>/dev/null || true
            break
        fi
        sleep 0.1
    done
    wait "$pid" 2>/dev/null || true
}

on_exit() {
    local status=$?
    trap '' INT TERM
    stop
    rm -rf "$work"
    exit $status
}
trap on_exit EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() {
    echo "quickstart.sh: $*" >&2
    if [ -s "$log" ]; then
        echo "--- the last lines of the nodes' log:" >&2
        tail -n 40 "$log" >&2
    fi
    exit 1
}

# Prints the CMake option that builds kernels only for the GPUs of this host, since all supported
# architectures take minutes. Prints nothing to leave the choice to CMakeLists.txt, "none" without a
# GPU.
cuda_architectures_here() {
    local capability list=
    local query="--query-gpu=compute_cap --format=csv,noheader"
    for capability in $(nvidia-smi $query 2>/dev/null | sort -u); do
        case $capability in
        8.*) list+="${list:+;}${capability/./}-real" ;;
        9.0) list+="${list:+;}90a-real" ;;
        [1-7].*) ;;    # no kernels of ours
        *[!0-9.]*) ;;  # words: the driver does not work
        *) return 0 ;; # newer
        esac
    done
    if [ -n "$list" ]; then
        echo "-DCMAKE_CUDA_ARCHITECTURES=$list"
    elif ! ls /dev/nvidia[0-9]* /dev/dxg >/dev/null 2>&1; then
        echo none
    fi
}

# An existing build folder keeps its generator and its options.
build() {
    local options=() architectures
    if [ ! -e build/CMakeCache.txt ]; then
        options=(-G Ninja)
        architectures=$(cuda_architectures_here)
        if [ "$architectures" != none ]; then
            options+=(${architectures:+"$architectures"})
        elif command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
            options+=(-DBATON_CUDA=off)
            echo "no GPU here: built without kernels for GPUs;" \
                "cmake -S . -B build -DBATON_CUDA=on adds them"
        fi
    fi
    cmake -S . -B build -DCMAKE_BUILD_TYPE=Release "${options[@]}" >"$work/cmake.log" 2>&1 || {
        tail -n 20 "$work/cmake.log" >&2
        fail "CMake could not configure the build"
    }
    cmake --build build --target baton --parallel "$(nproc)" || fail "the build failed"
}

# BATON_PORTS is checked before the minutes of the build; the search for free ports needs Python,
# which step 1 installs.
check_ports() {
    [ -n "${BATON_PORTS:-}" ] || return 0
    set -- ${BATON_PORTS//,/ }
    [[ $# = 2 && $1 != "$2" && $1$2 != *[!0-9]* ]] ||
        fail "two different ports are needed, as in BATON_PORTS=8000,8001; BATON_PORTS is" \
            "'$BATON_PORTS'"
}

choose_ports() {
    ports=${BATON_PORTS:-$(python3 deploy/ask.py --free-ports 2 8000 8001)}
    set -- ${ports//,/ }
    if [ -z "${BATON_PORTS:-}" ] && [ "$1,$2" != 8000,8001 ]; then
        echo "another program has port 8000 or 8001, so the nodes have $1 and $2: commands of" \
            "README.md for port 8000 are for $1 here (BATON_PORTS=P,D chooses other ports)"
    fi
    prefill_url=http://127.0.0.1:$1
    decode_url=http://127.0.0.1:$2
    ports=$1,$2
}

start() {
    local deadline=$((SECONDS + start_limit_s))
    : >"$log"
    build/baton launch --prefill 1 --decode 1 --ports "$ports" --model "$model" >"$log" 2>&1 &
    launcher=$!
    # The launcher prints "ready: all" when the nodes see each other. A single node is ready earlier
    # and would answer without the other.
    until grep -q '^ready: all' "$log"; do
        kill -0 $launcher 2>/dev/null || fail "the nodes ended while they started"
        [ $SECONDS -lt $deadline ] || fail "the nodes were not ready after $start_limit_s s"
        sleep 0.2
    done
}

ask() {
    printf '\n%s node, %s\n> %s\n' "$1" "$2" "$question"
    python3 deploy/ask.py --expect Paris "$2" "$question" ||
        fail "no good answer through the $1 node"
}

check_ports
print_heading "1/5 packages"
deploy/install_deps.sh
print_heading "2/5 build"
build
print_heading "3/5 model"
model=$(deploy/fetch_model.sh)
echo "$model"
print_heading "4/5 one prefill node and one decode node"
choose_ports
start
echo "ready: prefill $prefill_url, decode $decode_url"
print_heading "5/5 a question to each node"
ask prefill "$prefill_url"
ask decode "$decode_url"

if [ $once = yes ]; then
    stop
    echo
    echo "done; the nodes are stopped"
    exit 0
fi
# From here on Ctrl-C is the expected end.
trap 'trap "" INT; echo; echo "stopping"; stop; echo "the nodes are stopped"; exit 0' INT
cat <<END

Both nodes take requests; an OpenAI client uses base_url $prefill_url/v1 or $decode_url/v1:
  curl $prefill_url/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages":[{"role":"user","content":"$question"}],"temperature":0}'
  build/baton status --url $prefill_url       the cluster; each node has $prefill_url/metrics
Ctrl-C stops them.
END
status=0
wait $launcher || status=$?
launcher=
fail "the nodes ended by themselves (status $status)"
