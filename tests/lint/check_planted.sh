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
    rm -f "$copy.saved"
    [ ! -f "$copy/$file" ] || cp -p "$copy/$file" "$copy.saved"
    printf '%b' "$text" >>"$copy/$file"
    if "$copy/tests/lint/$check" "$copy" >"$copy.log" 2>&1; then
        echo "FAIL  $check does not see in $file: $text"
        bad=$((bad + 1))
    else
        echo "ok    $check: $(grep -m1 -F "${file##*/}" "$copy.log" || tail -n 1 "$copy.log")"
    fi
    rm -f "$copy/$file"
    [ ! -f "$copy.saved" ] || cp -p "$copy.saved" "$copy/$file"
}

planted check_words.sh shared/base/str.c '/* TO''DO: more. */\n'
planted check_words.sh docs/gpu.md 'Without a ca''rd a node says so.\n'
planted check_words.sh kvtransfer/transport.c '/* The first of the row''s is tried first. */\n'
planted check_words.sh shared/engine/engine.c '/* Copies run on a la''ne of their own. */\n'
planted check_words.sh scheduler/view.c 'static const char *LOG = "ro''w=%%s";\n'
planted check_words.sh deploy/probe/server.c '/* The age''nt waits. */\n'
planted check_structs.py shared/base/str.c 'struct buf {\n    int again;\n};\n'
planted check_structs.py shared/base/str.c 'struct __attribute__((packed)) buf {\n    int again;\n};\n'
planted check_format.sh shared/base/str.c 'static int  badly( int x ){return x;}\n'
planted check_references.py shared/base/str.c '/* See shared/base/strings_of_old.c for more. */\n'
planted check_references.py shared/base/str.c '/* See shared/strings/of_old for more. */\n'
planted check_references.py shared/base/str.c '/* Called by str_never_written. */\n'
planted check_references.py shared/base/new.c '/* old.c - another name. */\n'
planted check_references.py tests/scripts/new.sh '#!/bin/sh\n'
planted check_layers.sh shared/base/str.c '#include "scheduler/place.h"\n'
planted check_layers.sh shared/base/str.c '#include <scheduler/place.h>\n'
planted check_layers.sh kernels/device.c '#include <simt.h>\n'
planted check_cuda.sh shared/base/str.c 'void *gpu_memory(void) { return cudaMallocHost(1); }\n'
planted check_sizes.sh shared/base/str.c "$(printf '\\n%.0s' $(seq 1001))"
planted figures.py shared/base/str.h 'int never_called(int x);\n'
planted figures.py shared/base/str.h 'enum status only_of_tests(int x);\n'
planted figures.py shared/base/str.c "int long_function(int x)\n{\n$(printf '    x++;\\n%.0s' $(seq 41))    return x;\n}\n"
planted figures.py kvtransfer/transport.c 'const struct kvt_transport_ops empty = {\n    .name = "empty",\n};\n'
planted figures.py kvtransfer/transport.c 'const struct kvt_transport_ops empty = {\n    .fence = 0,\n};\n'
planted figures.py shared/base/new.h "/* new.h - a head.\n$(printf ' * More.\\n%.0s' $(seq 15)) */\n"
planted figures.py docs/gpu.md 'This line of a document is longer than the hundred columns that a line may have, and it is neither a table nor an example.\n'
planted figures.py shared/net/sse.c '/* Without a ca''rd it fails. */\n'
for i in $(seq $((30 - $(ls "$copy/prefill" | wc -l)))); do echo "/* f$i.c - one. Thread: any. */" >"$copy/prefill/f$i.c"; done
planted figures.py prefill/last.c '/* last.c - one too many. Thread: any. */\n'
rm -f "$copy"/prefill/f[0-9]*.c
planted figures.py kernels/CMakeLists.txt '# This line is longer than the hundred columns that a line of the product outside of tables may have.\n'
rm -f "$copy.log" "$copy.saved"
echo "$bad failed, $skipped skipped"
[ $bad = 0 ]
