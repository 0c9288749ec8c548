#!/usr/bin/env python3
"""cluster.py - a whole cluster is broken by script while clients ask it, and every answer is compared with that of a quiet node."""
import argparse, os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from cluster import hosts, run


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--requests', type=int, default=600)
    p.add_argument('--seed', type=int, default=1)
    p.add_argument('--only', help='kinds of faults, joined by commas')
    p.add_argument('--longest', type=float, default=30.0)
    p.add_argument('--hurry', type=float, default=1.0)
    p.add_argument('--history', action='store_true', help='print all that was done')
    p.add_argument('--loopback', action='store_true')
    a = p.parse_args()
    where = hosts.start(not a.loopback)
    kinds = a.only.split(',') if a.only else None
    return run.chaos(where, a.requests, a.seed, kinds, a.longest, a.hurry, a.history)


if __name__ == '__main__':
    sys.exit(main())
