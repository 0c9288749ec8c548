#!/bin/bash
# run.sh - runs everything that needs a GPU: the limits of the GPU, the conformance suite and the reference answers, a prefill and a decode node over CUDA IPC,
# and benchmarks beside their limits. Writes one JSON file and prints short lines.
#
# usage: tests/gpu/run.sh [--emulated] [--programs FOLDER] [--out FILE] [--limit SECONDS] [--only STAGE,..] [--continue FILE] [--list]
#   --programs   the folder of pack.sh's archive (default: build-gpu, if it exists), or of a build. Without either, run.sh builds into build-gpu-here, which
#                needs nvcc and the packages of deploy/install_deps.sh
#   --emulated   uses an emulated GPU and tiny sizes, with the programs of a build with BATON_CUDA=emulate: tests the stages; figures mean nothing
#   --out        the JSON file (default: gpu.json in the folder of the programs), written after every stage
#   --limit      of the whole call (default: 465); stages that it leaves no time for are "not reached"
#   --only       runs these stages only; --list names all
#   --continue   the JSON file of an earlier call with the same programs: what passed or fell short there is not run again, and is in this one's JSON too
# It needs python3 and no network. Exit status: 0 everything passed and reached its goal, 1 something failed, fell short or was not reached, 2 it could not begin.
set -u
cd "$(dirname "$0")/../.." || exit 2
command -v python3 >/dev/null || { echo "run.sh: python3 is needed" >&2; exit 2; }
exec python3 -u tests/gpu/gpu_run.py "$@"
