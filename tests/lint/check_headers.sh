#!/bin/bash
# check_headers.sh - every header compiles alone, has a guard, and opens with a comment. usage: check_headers.sh COMPILER [INCLUDE_DIR...]
# A header that a C file or another header includes before anything else has been compiled alone with it; only the others are compiled here.
# INCLUDE_DIRs hold generated headers and those of libraries outside the compiler's path.
set -u
cc=${1:-cc}
shift
cd "$(dirname "$0")/../.." || exit 2
flags="-std=c11 -D_GNU_SOURCE -DBATON_VERSION=\"x\" -Wall -Wextra -Werror -I. -fsyntax-only"
for dir in "$@"; do flags="$flags -isystem $dir"; done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Headers with vector types need their instruction set; they are included only by the files compiled with it.
isa_of() {
    case $1 in
    *avx512*) echo -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq ;;
    *avx2*) echo -mavx2 -mfma -mf16c ;;
    esac
}

first=$(find shared kernels kvtransfer prefill decode scheduler deploy tests -name '*.[ch]' -not -path 'tests/perf/*' -print0 |
    xargs -0 awk 'FNR == 1 { found = 0 } /^#(ifndef|define) BATON_[A-Z0-9_]+_H$/ { next }
        !found && /^#[ \t]*(if|include|define|undef)/ { found = 1; if (split($0, part, "\"") == 3) print part[2] }')
bad=0 n=0
headers=$(find shared kernels kvtransfer prefill decode scheduler deploy tests -name '*.h' | sort)
for h in $headers; do
    n=$((n + 1))
    [[ $'\n'$first$'\n' != *$'\n'$h$'\n'* ]] || continue
    echo "#include \"$h\"" >"$work/alone.c"
    $cc $flags $(isa_of "$h") "$work/alone.c" 2>"$work/log" || { echo "$h does not compile alone:"; head -n 5 "$work/log"; bad=$((bad + 1)); }
done
faults=$(echo "$headers" | xargs awk '
    FNR == 1 { if (name && !guard) print name " has no include guard BATON_..._H"; name = FILENAME; guard = 0 }
    FNR == 1 && !/^\/\*/ { print FILENAME " does not open with a comment" }
    /^#ifndef BATON_[A-Z0-9_]+_H$/ { guard = 1 }
    END { if (name && !guard) print name " has no include guard BATON_..._H" }')
[ -z "$faults" ] || { echo "$faults"; bad=$((bad + $(echo "$faults" | wc -l))); }
dup=$(grep -rhoE '^#ifndef BATON_[A-Z0-9_]+_H$' --include=*.h shared kernels kvtransfer prefill decode scheduler deploy tests | sort | uniq -d)
[ -z "$dup" ] || { echo "include guards used twice: $dup"; bad=$((bad + 1)); }
echo "$n headers, $bad at fault"
[ $bad = 0 ] && [ $n -gt 0 ]
