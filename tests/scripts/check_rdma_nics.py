"""check_rdma_nics.py - runs deploy/get_rdma_nics.sh and `baton nics` against the sysfs trees of several kinds of servers.

usage: check_rdma_nics.py ROOT BATON     exit status 0: every expectation of every description in tests/data/sysfs holds

In every run one line goes to stdout. Failure is a status other than 0, a line without a value and one sentence on stderr, so that
`export $(... gpu)` never becomes an `export` without arguments, which prints the environment.
"""
import os
import subprocess
import sys
import tempfile

import sysfs_tree

PREFIX = {"gpu": "KVCACHE_RDMA_NICS=", "cpu": "KV_CACHE_SOCKET_IFNAME="}
EMPTY = [p + "\n" for p in PREFIX.values()]
n_run = n_bad = 0


def bad(name, what, text):
    global n_bad
    n_bad += 1
    print(f"{name}: {what}: {text}")


def run(command, arguments, **environment):
    environment = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=60)


def judge(name, kind, want, done):
    """Compares one run with one expectation."""
    global n_run
    n_run += 1
    lines = done.stdout.splitlines()
    if want.startswith("fails"):
        words = want.removeprefix("fails").strip()
        if done.returncode == 0 or done.stdout not in EMPTY:
            bad(name, kind, f"did not fail: status {done.returncode}, stdout {done.stdout!r}")
        elif words not in done.stderr or len(done.stderr.splitlines()) != 1:
            bad(name, kind, f"stderr is {done.stderr!r}, without '{words}'")
    elif done.returncode != 0 or lines != [want]:
        bad(name, kind, f"printed {done.stdout!r} (status {done.returncode}, {done.stderr.strip()!r}), expected '{want}'")
    elif not want.startswith(PREFIX[kind.split("+")[0]]):
        bad(name, kind, f"the expectation '{want}' is of another kind")


def check_tree(command, path):
    with open(path) as f, tempfile.TemporaryDirectory() as scratch:
        root = os.path.join(scratch, "sys")
        tree = sysfs_tree.build(f.read(), root)
        addresses = os.path.join(scratch, "addresses")
        with open(addresses, "w") as out:
            out.write(sysfs_tree.ip_addr_text(tree))
        if not tree.expectations:
            bad(os.path.basename(path), "description", "expects nothing")
        for kind, want in tree.expectations:
            software = "1" if kind.endswith("+software") else "0"
            done = run(command, [kind.split("+")[0]], SYSFS_ROOT=root, IP_ADDR_FILE=addresses, BATON_RDMA_SOFTWARE=software)
            judge(os.path.basename(path), kind, want, done)


def check_usage(command):
    """Wrong arguments, a folder that is not a sysfs tree, unreadable addresses, and the call as users write it."""
    with tempfile.TemporaryDirectory() as empty:
        for arguments in ([], ["gpu", "cpu"], ["tpu"], ["xpu"], ["vxpu"], ["vcpu"], ["cpu_ib"]):
            judge("usage", " ".join(arguments), "fails gpu", run(command, arguments))
        judge("usage", "gpu", "fails is not a sysfs tree", run(command, ["gpu"], SYSFS_ROOT=empty))
        os.makedirs(os.path.join(empty, "class/net"))
        judge("usage", "cpu", "fails cannot be read", run(command, ["cpu"], SYSFS_ROOT=empty, IP_ADDR_FILE=os.path.join(empty, "nothing")))
        tree = sysfs_tree.build("host 0000:00\n  bridge 0000:00:01.0\n    gpu 0000:01:00.0\n    rdma 0000:02:00.0 mlx5_0 port=ACTIVE/100/EDR/Ethernet\n",
                                os.path.join(empty, "sys"))
        line = f'export $({" ".join(command)} gpu); echo "$KVCACHE_RDMA_NICS"'
        done = subprocess.run(["bash", "-c", line], env={**os.environ, "SYSFS_ROOT": tree.root}, capture_output=True, text=True, timeout=60)
        if done.stdout != "mlx5_0\n":
            bad("usage", "export", repr(done.stdout))
        for kind in ("gpu", "cpu", "xpu", "nonsense"):
            done = subprocess.run(["bash", "-c", f'export $({" ".join(command)} {kind})'], env={**os.environ, "SYSFS_ROOT": "/nowhere", "SECRET": "s3cret"},
                                  capture_output=True, text=True, timeout=60)
            if done.stdout or "s3cret" in done.stderr:
                bad("usage", f"export without a device ({kind})", repr(done.stdout[:200]))


def main():
    root = os.path.abspath(sys.argv[1])
    commands = [["bash", os.path.join(root, "deploy/get_rdma_nics.sh")], [os.path.abspath(sys.argv[2]), "nics"]]
    folder = os.path.join(root, "tests/data/sysfs")
    names = sorted(n for n in os.listdir(folder) if n.endswith(".tree"))
    for command in commands:
        for name in names:
            check_tree(command, os.path.join(folder, name))
        check_usage(command)
    print(f"{len(names)} trees")
    print(f"{max(n_run - n_bad, 0)} passed, {n_bad} failed, 0 skipped")
    return 1 if n_bad or not names else 0


sys.exit(main())
