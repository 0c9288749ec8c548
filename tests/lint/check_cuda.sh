#!/bin/bash
# check_cuda.sh - only kernels/cuda and kernels/ep (and tests) call the CUDA API; everybody else uses device.h, copy_stream.h and the tables of
# kernels.h and ep.h. No two kernel files define a type of the same name, because the linker would merge their template instances. Every kernel
# waits for the one before it. usage: check_cuda.sh [ROOT]
set -u
cd "${1:-$(dirname "$0")/../..}" || exit 2
headers='^[[:space:]]*#[[:space:]]*include[[:space:]]*[<"](cuda|cublas|nccl|nvml|driver_types)'
calls='\b(cuda[A-Z][A-Za-z0-9_]*|cu[A-Z][A-Za-z0-9_]*|cublas(Lt)?[A-Z][A-Za-z0-9_]*|nccl[A-Z][A-Za-z0-9_]*)[[:space:]]*\('
files=$(find shared kernels kvtransfer prefill decode scheduler deploy \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cc' \) \
    -not -path 'kernels/cuda/*' -not -path 'kernels/ep/*' | sort)
n=$(echo "$files" | grep -c .)
hits=$(echo "$files" | xargs grep -HnE "$headers|$calls")
[ -z "$hits" ] || echo "$hits"
echo "$n files outside the two folders, $(printf '%s' "$hits" | grep -c .) speak to the GPU"
kernels=$(find kernels tests/gpu \( -name '*.cu' -o -name '*.cuh' \))
twice=$(echo "$kernels" | xargs grep -hoE '^(struct|union|class) [a-z_0-9]+( \{|$)' | awk '{ print $2 }' | sort | uniq -d)
[ -z "$twice" ] || echo "types of several files: $twice"
# Before they wait they may read what no kernel of a step writes (weights); scripts/overlap runs steps in which anything else ends the process.
never=$(echo "$kernels" | xargs awk '
    /__global__/ { in_kernel = 1; waits = 0; at = FILENAME ":" FNR }
    in_kernel && /grid_dependency_sync\(\);/ { waits = 1 }
    in_kernel && /^}|^ .*\) \{[^{}]*\}$/ { if (!waits) print at; in_kernel = 0 }')
[ -z "$never" ] || echo "kernels that never call grid_dependency_sync(): $never"
[ -z "$hits$twice$never" ] && [ "$n" -gt 0 ] && [ -n "$kernels" ]
