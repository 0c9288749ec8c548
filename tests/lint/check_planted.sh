#!/bin/bash
# check_planted.sh - each check of this folder, run on a copy of the tree with violations planted, fails and names every one of them. That the tree
# as it is has none is the check's own test.
# usage: check_planted.sh [ROOT]
set -u
cd "${1:-$(dirname "$0")/../..}" || exit 2
copy=$(mktemp -d)
trap 'rm -rf "$copy" "$copy.log"' EXIT
git ls-files -co --exclude-standard -z -- . ':!tests/data' ':!tests/seeds/data' ':!tests/fuzz/corpus' | xargs -0 cp --parents -t "$copy" || exit 2
git -C "$copy" init -q && git -C "$copy" add -A || exit 2
bad=0 skipped=0
planted=() expected=() # of the check that runs next

# plant FILE TEXT EXPECTED: adds TEXT to the end of FILE in the copy. The next check must print a line that matches EXPECTED, a regular expression.
plant() {
    printf '%b' "$2" >>"$copy/$1"
    planted+=("$1: ${2:0:80}")
    expected+=("$3")
}

# caught_by CHECK: runs it on what was planted since the last one, and takes that out again. One run for all: some checks take seconds.
caught_by() {
    local check=$1 rc i
    "$copy/tests/lint/$check" "$copy" >"$copy.log" 2>&1
    rc=$?
    if [ $rc = 77 ]; then
        cat "$copy.log"
        skipped=$((skipped + 1))
    else
        [ $rc != 0 ] || { echo "FAIL  $check passes on a tree with violations"; bad=$((bad + 1)); }
        for i in "${!planted[@]}"; do
            if line=$(grep -m1 -E -e "${expected[i]}" "$copy.log"); then
                echo "ok    $check: $line"
            else
                echo "FAIL  $check does not see in ${planted[i]}"
                bad=$((bad + 1))
            fi
        done
    fi
    planted=() expected=()
    git -C "$copy" checkout -q -- . && git -C "$copy" clean -fdq || exit 2
}

plant shared/base/str.c '/* TO''DO: more. */\n' '^shared/base/str\.c:[0-9]+:'
plant docs/gpu.md 'Without a ca''rd a node says so.\n' '^docs/gpu\.md:[0-9]+:'
plant kvtransfer/transport.c '/* The first of the row''s is tried first. */\n' '^kvtransfer/transport\.c:[0-9]+:'
plant shared/engine/engine.c '/* Copies run on a la''ne of their own. */\n' '^shared/engine/engine\.c:[0-9]+:'
plant scheduler/view.c 'static const char *LOG = "ro''w=%%s";\n' '^scheduler/view\.c:[0-9]+:'
plant deploy/probe/server.c '/* The age''nt waits. */\n' '^deploy/probe/server\.c:[0-9]+:'
caught_by check_words.sh

plant shared/base/str.c 'struct buf {\n    int again;\n};\n' '^buf is defined in .*shared/base/str\.c:'
plant shared/base/str.c 'struct __attribute__((packed)) kv_layout {\n    int again;\n};\n' '^kv_layout is defined in .*shared/base/str\.c:'
caught_by check_structs.py

plant shared/base/str.c 'static int  badly( int x ){return x;}\n' '^shared/base/str\.c:[0-9]+$'
find "$copy"/*/ -name '*.[ch]*' -not -path '*/shared/base/*' -delete # each file is looked at alone, so a few tell as much as all
caught_by check_format.sh

plant shared/base/str.c '/* See shared/base/strings_of_old.c for more. */\n' 'there is no shared/base/strings_of_old\.c$'
plant shared/base/str.c '/* See shared/strings/of_old for more. */\n' 'there is no folder shared/strings/of_old$'
plant shared/base/str.c '/* Called by str_never_written. */\n' 'there is no str_never_written$'
plant shared/base/new.c '/* old.c - another name. */\n' '^shared/base/new\.c:1: the head names old\.c$'
plant tests/scripts/new.sh '#!/bin/sh\n' '/new[.]sh:1: begins with #!'
plant docs/unlisted.md '# A page\n' '^README\.md: no row of the table of pages is '
caught_by check_references.py

plant shared/base/str.c '#include "scheduler/place/place.h"\n' 'may not include "scheduler/place/place\.h"'
plant shared/base/str.c '#include <scheduler/place/place.h>\n' '<scheduler/place/place\.h> is ours'
plant kernels/device.c '#include <simt.h>\n' '<simt\.h> is a header of tests'
caught_by check_layers.sh

plant shared/base/str.c 'void *gpu_memory(void) { return cudaMallocHost(1); }\n' '^shared/base/str\.c:[0-9]+:.*cudaMallocHost'
caught_by check_cuda.sh

plant shared/base/str.c "$(printf '\\n%.0s' $(seq 1001))" '^shared/base/str\.c: [0-9]+ lines, over'
caught_by check_sizes.sh

plant shared/base/str.h 'int never_called(int x);\n' '^    never_called \(shared/base/str\.h\)'
plant shared/base/str.h 'enum status only_of_tests(int x);\n' '^    only_of_tests \(shared/base/str\.h\)'
plant shared/base/str.c "int long_function(int x)\n{\n$(printf '    x++;\\n%.0s' $(seq 41))    return x;\n}\n" '^    [0-9]+ shared/base/str\.c:[0-9]+ long_function$'
plant kvtransfer/transport.c 'const struct kvt_transport_ops empty = {\n    .name = "empty",\n};\n' '^    kvtransfer/transport\.c: empty has no fence$'
plant kvtransfer/transport.c 'const struct kvt_transport_ops zero = {\n    .fence = 0,\n};\n' '^    kvtransfer/transport\.c: zero has no fence$'
plant shared/base/new.h "/* new.h - a head.\n$(printf ' * More.\\n%.0s' $(seq 15)) */\n" '^    [0-9]+ shared/base/new\.h$'
plant docs/gpu.md 'This line of a document is longer than the hundred columns that a line may have, and it is neither a table nor an example.\n' '^    docs/gpu\.md:[0-9]+ \([0-9]+\)$'
plant shared/net/sse.c '/* Without a ca''rd it fails. */\n' '^    see check_words\.sh$'
for i in $(seq $((30 - $(ls "$copy/prefill" | wc -l)))); do echo "/* f$i.c - one. Thread: any. */" >"$copy/prefill/f$i.c"; done
plant prefill/last.c '/* last.c - one too many. Thread: any. */\n' '^    31 prefill$'
plant kernels/CMakeLists.txt '# This line is longer than the hundred columns that a line of the product outside of tables may have.\n' '^    kernels/CMakeLists.txt:[0-9]+ \([0-9]+\)$'
caught_by figures.py

echo "$bad failed, $skipped skipped"
[ $bad = 0 ]
