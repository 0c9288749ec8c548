#!/usr/bin/env python3
"""cut_rounds.py - takes the network of one host of a group away at random points under load, for a while, and gives it back.

usage: cut_rounds.py [--ranks N] [--hosts N] [--redundant N] [--rounds N] [--seed N] [--cut SECONDS] [--pace CURVE]
       (BATON_BIN and BATON_TEST_DATA as for tests/e2e)

The hosts are namespaces (namespaces.py), over which the ranks are divided in order: with --hosts 8 of 8 ranks one rank is cut off, with --hosts 2 each half
from the other. In odd rounds the switch drops everything in silence, in even ones the host sees that it has no carrier. What must hold in every round
  - the streams of all ranks go on within 6 s of the cut, on both sides of it: each steps by itself, with all experts
  - the group is whole within 3 s of the network's return, and the streams go on then
  - no wrong, missing or repeated token, and no request fails, for every rank is its clients' entry
Each third cut is short: the network is back before anybody may have noticed, and then only the last two hold. At the end nothing is left, as in group_rounds.py.
The last line is the summary; ends with 77 where there can be no namespaces."""
import argparse, os, random, sys, time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import namespaces
from group_rounds import *

CUT_GO_ON_S, UNNOTICED_S = 6.0, 1.0    # nobody can know of a cut so early
SECRET = {'BATON_CLUSTER_SECRET': 'the secret of several hosts'}


class HostRank(Node):
    def __init__(self, host, args):
        self.host = host
        super().__init__(MODEL, args=args, env=SECRET)
        self.name = f'rank on {host.address}'

    def start(self):
        if self.argv[0] != self.host.enter[0]:
            self.argv = [*self.host.enter, *self.argv]
        with self.host.processes():
            super().start()


class SpreadGroup(Group):
    """Ranks 0, 1, .. on hosts 0, 0, .., 1, 1, .."""

    def __init__(self, size, n_hosts, redundant, args=()):
        namespaces.Switch()
        self.hosts = [namespaces.Host(i) for i in range(n_hosts)]
        super().__init__(size, 1, redundant, args)

    def rank(self, d, t):
        host = self.hosts[d * len(self.hosts) // len(self.meet)]
        return HostRank(host, ['--data-parallel-size', str(len(self.meet)), '--enable-expert-parallel', '--data-parallel-address', self.hosts[0].address,
                               '--data-parallel-rpc-port', str(self.meet[0]), '--data-parallel-rank', str(d), '--num-redundant-experts', str(self.redundant),
                               '--advertise-host', host.address, *SIZE, *self.args])

    def at(self, entry):
        return entry.host.network()

    def __str__(self):
        return f'{self.size} ranks on {len(self.hosts)} hosts, {self.redundant} copies of experts'


def go_on(load, since, what, most):
    """When the last of all streams has got a token that was not on its way before."""
    wait_until(what, lambda: all(t > since for t in load.last), 10 * most, 0.01)
    return min(load.last)


def cut(group, load, host, way, seconds, times):
    t0 = time.monotonic()
    host.cut(way)
    try:
        if seconds > CUT_GO_ON_S:
            took = go_on(load, t0 + UNNOTICED_S, 'both sides go on', CUT_GO_ON_S) - t0
            note(times, f'{way}: answers go on after', took, CUT_GO_ON_S)
        time.sleep(max(0, seconds - (time.monotonic() - t0)))
    finally:
        host.join()
    back = time.monotonic()
    wait_until('the group is whole', group.is_whole, 10 * WHOLE_S, 0.02)
    whole = time.monotonic() - back
    go_on(load, back + whole, 'all go on', WHOLE_S)
    print(f'  {host.address} cut off for {back - t0:.1f} s, {way}: ' + (f'answers go on after {took:.2f} s, ' if seconds > CUT_GO_ON_S else '') +
          f'whole {whole:.2f} s after the return', flush=True)
    note(times, f'{way}: whole after' if seconds > CUT_GO_ON_S else 'whole after a short cut', whole, WHOLE_S)


def rounds(size, n_hosts, n, seed, cut_s=8.0, redundant=0, args=()):
    rng = random.Random(seed)
    with under_load(size, n_hosts, redundant, seed, f'{n} cuts', SpreadGroup, args) as (group, load, times):
        for i in range(n):
            time.sleep(rng.uniform(0, 0.5))
            seconds = rng.uniform(0.2, 4) if i % 3 == 2 else rng.uniform(cut_s, 1.5 * cut_s)
            cut(group, load, rng.choice(group.hosts), namespaces.WAYS[i % 2], seconds, times)
            assert not load.wrong, load.wrong[:3]


if __name__ == '__main__':
    p = argparse.ArgumentParser()
    p.add_argument('--ranks', type=int, default=8)
    p.add_argument('--hosts', type=int, default=8)
    p.add_argument('--redundant', type=int, default=0)
    p.add_argument('--rounds', type=int, default=20)
    p.add_argument('--seed', type=int, default=1)
    p.add_argument('--cut', type=float, default=8.0)
    p.add_argument('--pace', metavar='CURVE')
    a = p.parse_args()
    namespaces.have_own()
    rounds(a.ranks, a.hosts, a.rounds, a.seed, a.cut, a.redundant, ['--pace', a.pace] if a.pace else [])
