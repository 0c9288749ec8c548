#!/bin/bash
# peer_llama_cpp.sh - compares Baton with llama.cpp on this machine: the same GGUF file, the same threads, in turns.
#
# usage: tests/perf/peer_llama_cpp.sh [--types q4_1,q8_0,bf16] [--moe] [--model FILE.gguf] [--threads 2] [--rounds 7] [--isa auto]
#   --types   weight types of SmolLM2 to compare
#   --moe     also SmolLM2 made into a mixture of 8 experts, 2 used per token
#   --model   only this file
# llama.cpp is the PyPI package llama-cpp-python, which pip builds for this CPU and which is kept in build/peers. Environment: BATON_BUILD (a build
# folder of Baton to use), BATON_CACHE. peer_llama_cpp.py says what is measured and prints one table.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/perf/peer_setup.sh
version=0.3.36

types=q4_1,q8_0,bf16 moe=no model= pass=()
while [ $# -gt 0 ]; do
    case $1 in
    --types) types=$2; shift 2 ;;
    --moe) moe=yes; shift ;;
    --model) model=$2; shift 2 ;;
    --threads | --rounds | --isa) pass+=("$1" "$2"); shift 2 ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' tests/perf/peer_llama_cpp.sh; exit 0 ;;
    *) echo "peer_llama_cpp.sh: there is no option $1 (--help shows all)" >&2; exit 2 ;;
    esac
done

CMAKE_ARGS=-DGGML_NATIVE=ON peer_venv llama_cpp llama-cpp-python $version "llama-cpp-python==$version"
python=$peers/llama_cpp/bin/python
peer_baton bench_engine bench_kernels
source=$(deploy/fetch_model.sh)

models=()
if [ -n "$model" ]; then
    models=("$model")
else
    for type in ${types//,/ }; do
        [ "$type" = q4_1 ] && models+=("$source") || models+=("$(peer_model "$python" "smollm2-$type.gguf" --gguf "$source" --form gguf_llama --type "$type")")
    done
    if [ $moe = yes ]; then
        for type in ${types//,/ }; do
            models+=("$(peer_model "$python" "smollm2-moe-$type.gguf" --gguf "$source" --form gguf_llama_moe --type "$type" --experts 8 --used 2)")
        done
    fi
fi
exec "$python" tests/perf/peer_llama_cpp.py --baton "$baton_build/tests" "${pass[@]}" "${models[@]}"
