# peer_setup.sh - what the comparisons with peers need, made once under build/peers; read by them with `.`, from the repository's root.
peers=$PWD/build/peers

# peer_venv NAME MODULE VERSION PACKAGE...    An environment of its own in $peers/NAME; nothing is done when MODULE has VERSION there.
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

# peer_model PYTHON NAME upcycle-option...    A form of SmolLM2 in $peers/models/NAME, made by tests/fixtures/upcycle.py when it is not there.
peer_model() {
    local python=$1 path=$peers/models/$2
    shift 2
    mkdir -p "$peers/models"
    [ -e "$path" ] || { "$python" tests/fixtures/upcycle.py "$@" "$path.part" && mv "$path.part" "$path"; } || return
    echo "$path"
}
