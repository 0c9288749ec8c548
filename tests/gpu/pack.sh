#!/bin/bash
# pack.sh - builds the programs that tests/gpu/run.sh runs, and packs them with the libraries that they need into build-gpu/gpu.tar.xz, for a machine that
# has a GPU but not the packages to build with. There run.sh unpacks it.
#
# usage: tests/gpu/pack.sh [--arch LIST] [--to FOLDER] [--build FOLDER]
#   --arch   CMAKE_CUDA_ARCHITECTURES (default: 90a-real, Hopper)
# The archive has bin/, the stripped programs, which find lib/ in the same folder, and lib/glibc/, the C library of this machine and its loader, which run.sh
# uses only on machines whose own is older. The programs contain CUDA's runtime; the driver, cuBLAS and NCCL are the machine's. With the data of the tests,
# which is part of the tree, it stays under 60 MB.
set -euo pipefail
cd "$(dirname "$0")/../.."
arch=90a-real to=$PWD/build-gpu build=$PWD/build/gpu most_mb=60
while [ $# -gt 0 ]; do
    case $1 in
    --arch) arch=$2 ;;
    --to) to=$2 ;;
    --build) build=$2 ;;
    *) sed -n '2,6s/^# \{0,1\}//p' tests/gpu/pack.sh >&2; exit 2 ;;
    esac
    shift 2
done
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
fail() { echo "pack.sh: $*" >&2; exit 1; }

# RPATH and not RUNPATH, because it is also used for the libraries that the libraries need.
mkdir -p "$build"
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBATON_CUDA=on -DCMAKE_CUDA_ARCHITECTURES="$arch" "${launcher[@]}" \
    -DCMAKE_BUILD_RPATH='$ORIGIN/../lib' -DCMAKE_EXE_LINKER_FLAGS='-static-libstdc++ -static-libgcc -Wl,--disable-new-dtags' >"$build.log" || fail "see $build.log"
mapfile -t tests < <(cut -d ' ' -f 1 "$build/gpu_tests.txt" | sort -u)
ninja -C "$build" -j "$(nproc)" baton bench_gpu bench_ep "${tests[@]}" >>"$build.log" || { tail -n 30 "$build.log" >&2; fail "it does not build"; }

archive=$to/gpu.tar.xz
to=$(mktemp -d)
trap 'rm -rf "$to"' EXIT
mkdir -p "$to/bin" "$to/lib/glibc"
cp "$build/gpu_tests.txt" "$to/"
for name in baton bench_gpu bench_ep "${tests[@]}"; do
    for path in "$build/$name" "$build/tests/$name" "$build/tests/gpu/$name"; do
        [ -f "$path" ] && strip -o "$to/bin/$name" "$path"
    done
    [ -f "$to/bin/$name" ] || fail "there is no program $name"
done
# All parts of the C library stay together; everything else goes into the folder that programs search first.
ldd "$to"/bin/* | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p; s/^\s*\(\/[^ ]*ld-linux[^ ]*\) .*/\1/p' | sort -u | while read -r library; do
    case $(basename "$library") in
    ld-linux-* | libc.so.* | libm.so.* | libpthread.so.* | libdl.so.* | librt.so.* | libresolv.so.* | libmvec.so.*) cp -L "$library" "$to/lib/glibc/" ;;
    *) cp -L "$library" "$to/lib/" && strip --strip-unneeded "$to/lib/$(basename "$library")" ;;
    esac
done
# Tries the archive as on another machine, with this machine's loader and with the one in the archive.
env -i "$to/bin/baton" version >/dev/null || fail "baton does not start from $to"
env -i "$to/lib/glibc/ld-linux-x86-64.so.2" --library-path "$to/lib/glibc:$to/lib" "$to/bin/baton" version >/dev/null || fail "baton does not start with the C library in $to"

mkdir -p "$(dirname "$archive")"
git describe --always --dirty >"$to/commit" 2>/dev/null || echo unknown >"$to/commit"
# Every program contains most of the same kernels: a dictionary that spans several programs stores them once.
tar -C "$to" --sort=name -c . | xz -T1 --lzma2=preset=6,dict=64MiB >"$archive"
bytes() { find "$@" -type f -printf '%s\n' | awk '{ n += $1 } END { print n }'; }
data=$(bytes tests/data) packed=$(bytes "$archive")
echo "tests for a GPU: ${tests[*]}"
echo "$archive: $(ls "$to/bin" | wc -l) programs, ${#tests[@]} of them tests, $(find "$to/lib" -type f | wc -l) libraries, $((packed / 1000)) kB; with tests/data $(((packed + data) / 1000000)) MB of $most_mb"
[ $((packed + data)) -le $((most_mb * 1000000)) ] || fail "that is too much to carry"
