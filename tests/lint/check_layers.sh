#!/bin/bash
# check_layers.sh - checks every #include against the layer table below. usage: check_layers.sh [ROOT]
#
# A folder may include itself and what its line names: other folders ("kernels/") or single headers ("kernels/dtype.h").
# Includes are written from the root, in quotes. The second table names the folders that may include a library's headers.
set -u
cd "${1:-$(dirname "$0")/../..}" || exit 2

LAYERS='
shared/base
shared/net       shared/base/
shared/text      shared/base/
shared/fabric    shared/base/
kernels          shared/base/ shared/fabric/ucx.h
shared/kv        shared/base/ kernels/device.h kernels/copy_stream.h kernels/dtype.h kernels/kv_rows.h kernels/kernels.h
kvtransfer       shared/base/ shared/fabric/ucx.h kernels/device.h kernels/copy_stream.h kernels/dtype.h kernels/kv_rows.h shared/kv/kv_layout.h
shared/model     shared/base/ kernels/ shared/kv/kv_layout.h
shared/engine    shared/base/ kernels/ shared/kv/ shared/model/
shared/cluster   shared/base/ shared/net/
shared/serve     shared/base/ shared/net/ shared/text/
prefill          shared/base/ shared/net/ shared/cluster/ shared/engine/ shared/kv/ kvtransfer/
decode           shared/base/ shared/net/ shared/cluster/ shared/engine/ shared/kv/ kvtransfer/
scheduler        shared/base/ shared/net/ shared/cluster/ shared/text/ shared/serve/
deploy           *
tests            *
'

LIBRARIES='
uv.h             shared/net deploy tests
hiredis/         shared/net deploy tests
llhttp           shared/net
nghttp2/         shared/net/grpc tests
openssl/         shared/base shared/net
curl/            deploy/pull
xxhash.h         shared/base tests
pcre2.h          shared/text
liburing.h       shared/kv
utf8proc.h       shared/text
protobuf-c/      shared/cluster shared/serve/grpc
infiniband/      kvtransfer
rdma/            kvtransfer tests
ucp/             shared/fabric kvtransfer deploy
cuda             kernels tests
nccl.h           kernels
cublas           kernels tests
'

# Headers that only tests have: an include path of the emulator must not bring them into the product. What stands for a
# header of CUDA, or has a counterpart for nvcc (kernels/cuda/nvcc), has that name.
test_headers=$(find tests/simt -name "simt*.h" -printf "%f ")
find shared kernels kvtransfer prefill decode scheduler deploy tests -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cc' | sort |
    xargs grep -HnE '^[[:space:]]*#[[:space:]]*include' |
    awk -v layers="$LAYERS" -v libraries="$LIBRARIES" -v test_headers="$test_headers" '
    function folder_of(path,   n, part) {
        n = split(path, part, "/")
        return part[1] == "shared" ? part[1] "/" part[2] : part[1]
    }
    function bad(text) { print where ": " text; n_bad++ }
    BEGIN {
        ours = "^(shared|kernels|kvtransfer|prefill|decode|scheduler|deploy|tests)/"
        n = split(test_headers, word, " ")
        for (i = 1; i <= n; i++) of_tests[word[i]] = 1
        n = split(layers, line, "\n")
        for (i = 1; i <= n; i++) {
            m = split(line[i], word, " ")
            if (m) known[word[1]] = 1
            for (j = 2; j <= m; j++) may[word[1], ++n_may[word[1]]] = word[j]
        }
        n_libraries = split(libraries, library, "\n")
    }
    {
        split($0, head, ":")
        file = head[1]
        where = file ":" head[2]
        folder = folder_of(file)
        text = substr($0, length(where) + 2)
        n_includes++
        if (!(folder in known)) { bad("the folder " folder " has no row in the layer table"); next }
        if (match(text, /<[^>]*>/)) {
            name = substr(text, RSTART + 1, RLENGTH - 2)
            if (name ~ ours) { bad("<" name "> is ours: it is written \"" name "\""); next }
            if (folder != "tests" && name in of_tests) bad("<" name "> is a header of tests")
            for (i = 1; i <= n_libraries; i++) {
                m = split(library[i], word, " ")
                if (!m || index(name, word[1]) != 1) continue
                ok = 0
                for (j = 2; j <= m; j++) ok = ok || word[j] == folder || index(file, word[j] "/") == 1
                if (!ok) bad(folder " may not include <" name ">")
            }
            next
        }
        if (!match(text, /"[^"]*"/)) next
        name = substr(text, RSTART + 1, RLENGTH - 2)
        target = folder_of(name)
        if (!(target in known)) { bad("\"" name "\" is not written from the root"); next }
        if (target == folder) next
        if (target == "tests") { bad("\"" name "\": nothing but tests may include tests"); next }
        ok = 0
        for (i = 1; i <= n_may[folder]; i++) {
            allowed = may[folder, i]
            ok = ok || allowed == "*" || allowed == name || (allowed ~ /\/$/ && index(name, allowed) == 1)
        }
        if (!ok) bad(folder " may not include \"" name "\"")
    }
    END {
        print n_includes " includes, " n_bad + 0 " against the layer table"
        exit n_bad > 0 || n_includes == 0
    }'
