#!/bin/bash
# check_format.sh - checks that C and CUDA sources are formatted as .clang-format says. usage: check_format.sh [ROOT]
# Versions of clang-format differ in details; the tree uses Debian 12's. Exits with 77 (skipped) if it is not installed.
set -u
cd "${1:-$(dirname "$0")/../..}" || exit 2
version=14
for name in clang-format-$version clang-format; do
    command -v $name >/dev/null && $name --version | grep -q "version $version\." && format=$name && break
done
if [ -z "${format:-}" ]; then
    echo "skipped: there is no clang-format $version here (Debian 12: apt-get install clang-format)"
    exit 77
fi
files=$(find shared kernels kvtransfer prefill decode scheduler deploy tests \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cc' \) \
    -not -path 'tests/data/*' -not -path 'tests/fuzz/corpus/*' | sort)
bad=$(echo "$files" | xargs -P "$(nproc)" -n 40 $format --dry-run --Werror 2>&1 | sed -n 's/^\([^ :]*:[0-9]*\):.*error: code should be clang-formatted.*/\1/p')
[ -z "$bad" ] || { echo "not as .clang-format lays it out (run $format -i on them):"; echo "$bad" | head -n 40; }
echo "$(echo "$files" | wc -l) files, $(printf '%s' "$bad" | cut -d: -f1 | sort -u | grep -c .) to be formatted"
[ -z "$bad" ] && [ -n "$files" ]
