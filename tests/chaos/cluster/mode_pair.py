"""mode_pair.py - the data path of one of nine pairs of nodes is cut, while their links, and all other pairs, live."""
from .checker import quantile
from .logs import Logs
from .run import conclude
from .single import Run, append, cannot

PAID, SLOWER = 3, 1.1
WAYS = (('its connection ends', True), ('its packets vanish', False))


def break_pair(hosts, n, seed):
    """All clients ask one router, whose breaker is looked at. The path is cut in one way after the other, between two pairs."""
    if not hosts.separate:
        return cannot('the data path of one pair', f'it is told by its addresses, which needs namespaces: {hosts.why}')
    run, opened = Run(hosts, n, seed, fronts=1, routers=1), True
    with run.fleet() as fleet:
        router, b = fleet.routers[0], next(m for m in fleet.proxies if m.role == 'decode')
        before = run.traffic(fleet, salt='-before', entries=[router])
        before.wait()
        histories = before.histories
        for (how, ends), a in zip(WAYS, fleet.prefill[1:]):
            at = len(lines_of(router))
            fleet.proxies[b].deny(a.address, b.host.kv, ends)
            during = run.traffic(fleet, salt='-during-' + how.split()[-1], entries=[router])
            during.wait()
            fleet.proxies[b].deny(None, 0)
            opened &= print_pair(how, histories, during.histories, lines_of(router)[at:], a, b)
            before = append(before, during)
        status, _ = conclude(fleet, before, run.refs, run.watch)
        return status or int(not opened)


def lines_of(router):
    return Logs([router]).of[router]


def ttft(histories, without=()):
    return [h.times[0] - h.begin for h in histories if h.times and h.plan.name not in without]


def print_pair(how, before, during, lines, a, b):
    """Returns whether the breaker opened at all."""
    opened = [l.at for l in lines if l.text.startswith('breaker') and 'scope=pair' in l.text and 'to=open' in l.text]
    moved = [(l.at, l.fields()['api_request']) for l in lines if l.text.startswith('request loss') and 'action=move' in l.text]
    paid = [name for at, name in moved if opened and at <= opened[0] + 0.001]
    probes = sum('to=half_open' in l.text for l in lines if l.text.startswith('breaker'))
    much = '' if len(set(paid)) <= PAID else '  OVER THE LIMIT'
    p99 = quantile(ttft(before), 0.99), quantile(ttft(during, {name for _, name in moved}), 0.99)
    print(f'break-pair, {how}: {a.name} and {b.name}: {len(set(paid))} requests paid a move before the breaker opened (limit {PAID}){much}; it opened {len(opened)} times, '
          f'{probes} probes, {len(set(n for _, n in moved))} requests moved in all')
    print(f'  p99 TTFT of the others {p99[1]:.3f} s, {p99[0]:.3f} s before: {p99[1] / p99[0]:.2f} times (limit {SLOWER})' + ('' if p99[1] <= SLOWER * p99[0] else '  OVER THE LIMIT'), flush=True)
    return bool(opened)
