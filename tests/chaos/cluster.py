#!/usr/bin/env python3
"""cluster.py - a whole cluster is broken by script while clients ask it, and every answer is compared with that of a quiet node.

usage: cluster.py [--requests N] [--seed S | --replay S] [--longest SECONDS] [--hurry X] [--lanes LANE,..] [--only KIND,..]
                  [--history] [--cells FILE] [--loopback]
       cluster.py --calm SECONDS | --hang engine | --redis kill30|pause|flush|failover [--tls] [--clock] | --rolling | --break-pair | --aborts N | --full
       cluster.py --all-cells FILE
       (BATON_BIN and BATON_TEST_DATA as for tests/e2e)

The cluster: 3 prefill and 3 decode nodes, 2 routers, a Redis with a replica and three sentinels, each on a host of its own (a network namespace; without them all
on the loopback interface, which is said). What is done to it is a pure function of the seed (cluster/adversary.py), as are the requests (cluster/traffic.py).
--replay S does the same again and prints what was done, when. The exit status is 1 where an answer was wrong, repeated or lost tokens, a client was left waiting, a
request failed that must not, or something is left at the end; times are printed with their limits. README.md beside this has more."""
import argparse, os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from cluster import adversary, hosts, mode_aborts, mode_full, mode_pair, mode_quiet, mode_redis, mode_rolling, report, run
from harness import Skip, end_in_order


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--requests', type=int)
    p.add_argument('--seed', type=int, default=1)
    p.add_argument('--replay', type=int, metavar='SEED')
    p.add_argument('--only', help='kinds of faults, joined by commas')
    p.add_argument('--lanes', default=','.join(adversary.LANES), help='parts of the script, joined by commas')
    p.add_argument('--cells', metavar='FILE', help='append the cells that were taken')
    p.add_argument('--all-cells', metavar='FILE', help='no run: say which cells the file lacks')
    p.add_argument('--longest', type=float, default=30.0, help='seconds that a fault lasts at most')
    p.add_argument('--hurry', type=float, default=1.0, help='divides the pauses between faults')
    p.add_argument('--history', action='store_true', help='print all that was done')
    p.add_argument('--loopback', action='store_true', help='no namespaces')
    p.add_argument('--calm', type=float, metavar='SECONDS')
    p.add_argument('--hang', choices=['engine'])
    p.add_argument('--redis', choices=sorted(mode_redis.REDIS_WAYS))
    p.add_argument('--tls', action='store_true')
    p.add_argument('--clock', action='store_true')
    p.add_argument('--rolling', action='store_true')
    p.add_argument('--break-pair', action='store_true')
    p.add_argument('--aborts', type=int, metavar='N')
    p.add_argument('--full', action='store_true')
    return p.parse_args()


def chaos(where, a):
    n, seed = a.requests or 600, a.seed if a.replay is None else a.replay
    how = adversary.How(seed, a.lanes.split(','), a.only.split(',') if a.only else None, a.longest, a.hurry)
    status = run.chaos(where, n, how, a.history or a.replay is not None, a.cells)
    if status:
        more = f' --lanes {a.lanes}' + (f' --only {a.only}' if a.only else '') + (' --loopback' if a.loopback else '')
        print(f'to do the same again: tests/chaos/cluster.py --requests {n} --replay {seed} --longest {a.longest:g} --hurry {a.hurry:g}{more}', flush=True)
    return status


def main():
    a = options()
    end_in_order()
    if a.all_cells:
        return report.print_file(a.all_cells)
    where = hosts.start(not a.loopback)
    if a.calm:
        return mode_quiet.calm(where, a.calm, a.seed)
    if a.hang:
        return mode_quiet.hang(where, a.requests or 600, a.seed)
    if a.redis:
        return mode_redis.redis(where, a.redis, a.requests or 1000, a.seed, a.tls, a.clock)
    if a.rolling:
        return mode_rolling.rolling(where, a.requests or 600, a.seed)
    if a.break_pair:
        return mode_pair.break_pair(where, a.requests or 600, a.seed)
    if a.aborts:
        return mode_aborts.aborts(where, a.aborts, a.seed)
    if a.full:
        return mode_full.full(where, a.requests or 2000, a.seed)
    return chaos(where, a)


if __name__ == '__main__':
    try:
        sys.exit(main())
    except Skip as e:
        print(f'SKIP: {e}', flush=True)
        sys.exit(77)
