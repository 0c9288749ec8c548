#!/bin/bash
# profile.sh - where the time of a forward pass goes, by function: samples of the backend that this CPU runs, and callgrind's counts of backend avx2.
#
# usage: tests/perf/profile.sh MODEL [BUILD]        BUILD: a Release build, by default build/tests/release
# Steps: a prompt of 512 tokens, one stream and eight streams after 512 tokens of context; for callgrind, which runs 50 times slower and knows no
# AVX-512, on one thread after 64. Needs perf and valgrind; says which is missing.
set -euo pipefail
cd "$(dirname "$0")/../.."
model=${1:?usage: tests/perf/profile.sh MODEL [BUILD]} build=${2:-build/tests/release}
engine=$build/tests/bench_engine
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

questions() { for ((i = 0; i < $2; i++)); do echo "$1"; done; }

samples() { # NAME QUESTION TIMES
    questions "$2" "$3" | perf record -q -F 4000 -o "$work/perf" "$engine" "$model" auto 2 512 >"$work/out" 2>"$work/err" || { cat "$work/err" >&2; return 1; }
    echo "$1: share of the samples, both threads"
    perf report -i "$work/perf" --no-children --sort symbol --percent-limit 1 --stdio 2>/dev/null | grep -E '^ +[0-9]' | awk 'NR <= 12'
}

counts() { # NAME QUESTION
    echo "$2" | valgrind --tool=callgrind --callgrind-out-file="$work/cg" --cache-sim=yes "$engine" "$model" avx2 1 64 >"$work/out" 2>"$work/err" ||
        { cat "$work/err" >&2; return 1; }
    echo "$1, avx2, one thread: instructions, first-level and last-level misses of reads"
    callgrind_annotate --show=Ir,D1mr,DLmr --threshold=97 "$work/cg" | grep -E '^ *[0-9,]+ \(' | sed 's/\[.*//; s,[^ ]*/,,' | awk 'NR <= 10'
}

if command -v perf >/dev/null; then
    samples "prompt of 512" "prefill 512" 20
    samples "one stream" "decode 1 512 64" 20
    samples "eight streams" "decode 8 512 32" 20
else echo "profile.sh: perf is not installed: no samples"; fi
if command -v valgrind >/dev/null; then
    counts "prompt of 64" "prefill 64"
    counts "one stream" "decode 1 64 4"
else echo "profile.sh: valgrind is not installed: no counts"; fi
