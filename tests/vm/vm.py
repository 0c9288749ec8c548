#!/usr/bin/env python3
"""vm.py - runs a command in a virtual machine that has RDMA devices; its output is streamed, its exit status is this program's.

usage: vm.py [--rails N] [--far] [--work FOLDER] [--limit SECONDS] [--wire PORT --host 1|2] -- COMMAND [ARG ...]
Status 125: the machine could not start or ended early, and a sentence says why; 124: the command did not end in time. See machine.py."""
import argparse, os, signal, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from machine import NO_STATUS, Machine, Unavailable


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--rails', type=int, default=2, help='RDMA devices rxe0, rxe1, ... (2)')
    a.add_argument('--far', action='store_true', help='RDMA devices far0, ... on the other ends')
    a.add_argument('--work', help='folder that the command may write to (none)')
    a.add_argument('--limit', type=float, default=600, help='seconds (600)')
    a.add_argument('--cpus', type=int, help='CPU cores (as many as here)')
    a.add_argument('--mib', type=int, default=4096, help='memory (4096)')
    a.add_argument('--wire', type=int, help='loopback port that joins two machines; start host 1 first')
    a.add_argument('--host', type=int, default=1, choices=(1, 2))
    a.add_argument('command', nargs='+')
    a = a.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with Machine(a.command, os.path.abspath(a.work) if a.work else None, rails=a.rails, far=a.far, wire=a.wire, host=a.host, cpus=a.cpus, mib=a.mib, limit_s=a.limit) as m:
            return m.wait()
    except Unavailable as e:
        print(f'vm: no virtual machine here: {e}', file=sys.stderr)
        return NO_STATUS


sys.exit(main())
