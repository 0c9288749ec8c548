#!/bin/bash
# check_planted.sh - runs each check of this folder on a copy of the tree: it must pass, and fail when a violation is planted.
# usage: check_planted.sh [ROOT]
set -u
cd "${1:-$(dirname "$0")/../..}" || exit 2
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -co --exclude-standard -z -- . ':!tests/data' ':!tests/seeds/data' ':!tests/fuzz/corpus' | xargs -0 cp --parents -t "$copy" || exit 2
git -C "$copy" init -q && git -C "$copy" add -A || exit 2
bad=0 skipped=0

# planted CHECK FILE TEXT: CHECK passes before TEXT is added to the end of FILE, fails with it.
planted() {
    local check=$1 file=$2 text=$3 rc
    "$copy/tests/lint/$check" "$copy" >"$copy.log" 2>&1
    rc=$?
    if [ $rc = 77 ]; then cat "$copy.log"; skipped=$((skipped + 1)); return; fi
    [ $rc = 0 ] || { echo "FAIL  $check fails on the tree as it is:"; tail -n 5 "$copy.log"; bad=$((bad + 1)); return; }
    [ -f "$copy/$file" ] && cp -p "$copy/$file" "$copy.saved" || : >"$copy.saved"
    printf '%b' "$text" >>"$copy/$file"
    if "$copy/tests/lint/$check" "$copy" >"$copy.log" 2>&1; then
        echo "FAIL  $check does not see in $file: $text"
        bad=$((bad + 1))
    else
        echo "ok    $check: $(grep -m1 -F "${file##*/}" "$copy.log" || tail -n 1 "$copy.log")"
    fi
    cp -p "$copy.saved" "$copy/$file"
}

planted check_words.sh shared/base/str.c '/* TO''DO: more. */\n'
planted check_words.sh docs/gpu.md 'Without a ca''rd a node says so.\n'
planted check_words.sh kvtransfer/transport.c '/* The first of the row''s is tried first. */\n'
planted check_words.sh shared/engine/engine.c '/* Copies run on a la''ne of their own. */\n'
planted check_structs.py shared/base/str.c 'struct buf {\n    int again;\n};\n'
planted check_format.sh shared/base/str.c 'static int  badly( int x ){return x;}\n'
planted check_references.py shared/base/str.c '/* See shared/base/strings_of_old.c for more. */\n'
planted check_layers.sh shared/base/str.c '#include "scheduler/place.h"\n'
planted figures.py shared/base/str.h 'int never_called(int x);\n'
planted figures.py kernels/CMakeLists.txt '# This line is longer than the hundred columns that a line of the product outside of tables may have.\n'
rm -f "$copy.log" "$copy.saved"
echo "$bad failed, $skipped skipped"
[ $bad = 0 ]
