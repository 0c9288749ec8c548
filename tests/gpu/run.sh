#!/bin/bash
# run.sh - runs everything that needs a GPU, in one command and under 8 minutes: the limits of the GPU, the conformance suite and the reference answers,
# a prefill and a decode node over CUDA IPC, and benchmarks beside their limits. Writes one JSON file and prints short lines.
#
# usage: tests/gpu/run.sh [--emulated] [--programs FOLDER] [--out FILE] [--limit SECONDS] [--only STAGE,..] [--list]
#   --programs   the folder of pack.sh's archive (default: build-gpu, if it exists), or of a build. Without either, run.sh builds into build-gpu-here, which
#                needs nvcc and the packages of deploy/install_deps.sh
#   --emulated   uses an emulated GPU and tiny sizes, with the programs of a build with BATON_CUDA=emulate: tests the stages; figures mean nothing
#   --out        the JSON file (default: gpu.json in the folder of the programs)
#   --only       runs these stages only; --list names all
# It needs python3 and no network. Exit status: 0 everything passed and reached its goal, 1 something failed or fell short, 2 it could not begin.
set -u
cd "$(dirname "$0")/../.." || exit 2
command -v python3 >/dev/null || { echo "run.sh: python3 is needed" >&2; exit 2; }
exec python3 -u tests/gpu/gpu_run.py "$@"
