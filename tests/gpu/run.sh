#!/bin/bash
# run.sh - everything that wants a GPU, in one command and under 8 minutes: what the card can do, the conformance suite and the reference answers on
# it, a prefill and a decode node over CUDA IPC, benchmarks beside their limits. Writes one JSON and prints short lines.
#
# usage: tests/gpu/run.sh [--emulated] [--programs FOLDER] [--out FILE] [--limit SECONDS] [--only STAGE,..] [--list]
#   --programs   what pack.sh made (build-gpu, the default where it is there), or a build's folder. Without either it is built here, into build-gpu-here,
#                which takes nvcc and the packages of deploy/install_deps.sh
#   --emulated   an emulated card and tiny sizes, with the programs of a build with BATON_CUDA=emulate: shows that all of this works; figures mean nothing
#   --out        the JSON (default: gpu.json in the folder of the programs)
#   --only       these stages; --list names them
# It needs python3 and no network. Exit status: 0 all ran and reached what is wanted, 1 something failed or fell short, 2 it could not begin.
set -u
cd "$(dirname "$0")/../.." || exit 2
command -v python3 >/dev/null || { echo "run.sh: python3 is needed" >&2; exit 2; }
exec python3 -u tests/gpu/gpu_run.py "$@"
