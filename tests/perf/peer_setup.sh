# peer_setup.sh - prepares once, under build/peers, what the comparisons with peers need; they source it from the repository's root.
peers=$PWD/build/peers

# peer_venv NAME MODULE VERSION PACKAGE...    Creates an environment in $peers/NAME unless MODULE has VERSION there.
peer_venv() {
    local python=$peers/$1/bin/python module=$2 version=$3 name=$1
    shift 3
    "$python" -c "import importlib.metadata as m, sys; sys.exit(m.version('$module') != '$version')" 2>/dev/null && return
    echo "installing $* into build/peers/$name" >&2
    rm -rf "${peers:?}/$name"
    python3 -m venv "$peers/$name" && "$python" -m pip install -q --disable-pip-version-check "$@"
}

# peer_baton TARGET...    Builds into $BATON_BUILD, by default build/peers/baton, and sets baton_build.
peer_baton() {
    baton_build=${BATON_BUILD:-$peers/baton}
    [ -f "$baton_build/build.ninja" ] || cmake -S . -B "$baton_build" -G Ninja -DCMAKE_BUILD_TYPE=Release >&2 || return
    ninja -C "$baton_build" "$@" >&2
}

# peer_model PYTHON NAME upcycle-option...    Makes a variant of SmolLM2 in $peers/models/NAME with tests/fixtures/upcycle.py, if it is missing.
peer_model() {
    local python=$1 path=$peers/models/$2
    shift 2
    mkdir -p "$peers/models"
    [ -e "$path" ] || { "$python" tests/fixtures/upcycle.py "$@" "$path.part" && mv "$path.part" "$path"; } || return
    echo "$path"
}
