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
    # At debug its router's log has every request that a busy pair sent back, not only the first of many alike.
    run, good = Run(hosts, n, seed, fronts=1, routers=1, router_env={'BATON_LOG_LEVEL': 'debug'}), True
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
            good &= print_pair(how, histories, during.histories, lines_of(router)[at:], a, b)
            before = append(before, during)
        status, _ = conclude(fleet, before, run.refs, run.watch)
        return status or int(not good)


def lines_of(router):
    return Logs([router]).of[router]


def ttft(histories, without=()):
    return [h.times[0] - h.begin for h in histories if h.times and h.plan.name not in without]


def print_pair(how, before, during, lines, a, b):
    """A request pays where it is moved, or where the pair sends it back to be placed again. The breaker opens, and says so, just before the line of the loss that
    opened it. Returns whether it opened, and few paid until it did."""
    breaker = [(i, l.text) for i, l in enumerate(lines) if l.text.startswith('breaker') and 'scope=pair' in l.text]
    opened = [i for i, text in breaker if 'to=open' in text]
    losses = [(i, l.fields()) for i, l in enumerate(lines) if l.text.startswith('request loss')]
    hit = [(i, f['api_request']) for i, f in losses if f['action'] == 'move' or is_sent_back(f, a, b)]
    opener = next((i for i, _ in hit if opened and i > opened[0]), len(lines))
    paid = {name for i, name in hit if i <= opener}
    probed = [i for i, text in breaker if 'to=half_open' in text]
    on_it = {name for i, name in hit if opener < i < (probed[0] if probed else len(lines))} - paid
    n_back = len({f['api_request'] for _, f in losses if is_sent_back(f, a, b)})
    much = '' if len(paid) <= PAID else '  OVER THE LIMIT'
    without = {name for _, name in hit}
    p99 = quantile(ttft(before), 0.99), quantile(ttft(during, without), 0.99)
    print(f'break-pair, {how}: {a.name} and {b.name}: {len(paid)} requests paid before the breaker opened (limit {PAID}){much}; {len(on_it)} more were on the pair then; '
          f'it opened {len(opened)} times, {len(probed)} probes, {len(without)} requests paid in all, {n_back} of them sent back by the pair')
    print(f'  p99 TTFT of the others, without those {len(without)} of {len(during)}, {p99[1]:.3f} s, {p99[0]:.3f} s before: {p99[1] / p99[0]:.2f} times (limit {SLOWER})' + ('' if p99[1] <= SLOWER * p99[0] else '  OVER THE LIMIT'), flush=True)
    return bool(opened) and len(paid) <= PAID


def is_sent_back(fields, a, b):
    """Whether this loss is that of a request for which the connection of the pair had no place."""
    return fields['action'] == 'requeue' and fields['st'] == 'ERR_BUSY' and fields['state'] == 'prefill' and (fields['prefill'], fields['decode']) == (a.known_as(), b.known_as())
