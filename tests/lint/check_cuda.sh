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
early=$(echo "$kernels" | xargs awk '
    /__global__/ { begun = 1; at = FILENAME ":" FNR }
    begun && /\{/ { sub(/^[^{]*\{/, ""); begun = 2 }
    begun == 2 && /^ *[a-z0-9_]+_prefetch(<[A-Z]>)?\([^;]*\);$/ { next } # prefetches only weights, which no kernel writes
    begun == 2 && /[^ ]/ { if ($0 !~ /^ *grid_dependency_sync\(\);/) print at; begun = 0 }')
[ -z "$early" ] || echo "kernels that do not begin with grid_dependency_sync(): $early"
[ -z "$hits$twice$early" ] && [ "$n" -gt 0 ] && [ -n "$kernels" ]
