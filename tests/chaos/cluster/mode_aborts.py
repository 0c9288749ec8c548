"""mode_aborts.py - clients leave in every state of their requests: how long until no node holds anything for them, and whether the next ones are served as before.

Clients come in bursts to one prefill and one decode node and leave at the same moment, some before their requests have a node, some while they wait for a start
credit, some in mid-answer. The time of a request is that from its client's FIN until the last node that held something for it says that this is over, by the nodes'
logs; requests that no node held yet have none. That of a burst, from its first FIN until the blocks of both nodes are free by their metrics, stands beside it: it
sees what no request's end tells. The states are those of the entry's log."""
import collections, http.client, json, random, time
from harness import parallel
from .checker import Verdicts, check_left, quantile
from .logs import Logs
from .report import over
from .run import fleet_of

BURST, FREE_S, STEP_S, STATES = 20, 0.1, 0.012, ('placing', 'credit', 'reserve', 'prefill', 'decode')
SAMPLE, RECOVER_S = 12, 5.0
SMALL = ['--max-model-len', '2048', '--max-num-seqs', '8', '--num-gpu-blocks-override', '400', '--max-num-batched-tokens', '256']


def aborts(hosts, n, seed):
    r, bursts, left, v = random.Random(f'aborts {seed}'), [], {}, Verdicts()
    with fleet_of(hosts, None, prefills=1, decodes=1, routers=1, size=SMALL, env={'BATON_LOG_LEVEL': 'debug'}) as fleet:
        entry = fleet.routers[0]
        before = throughput(entry, r)
        for b in range(2 * -(-n // BURST)):     # as many again at most, where a state that lasts a moment only is missing
            if b * BURST >= n and set(STATES) <= {state for _, state in last_states(Logs([entry]).of[entry]).values()}:
                break
            took = burst(fleet, entry, b, r, left)
            if took is None:
                v.add_bad('leaked', f'burst {b}: blocks are held 10 s after all clients left')
            else:
                bursts.append(took)
        after = throughput(entry, r)
        check_left(fleet, v)
        logs = Logs([entry, *fleet.nodes])
        ended = last_states(logs.of[entry])
        times = times_of(logs, fleet.nodes, ended, left, v)
        states = collections.Counter(state for _, state in ended.values())
        for state in STATES:
            if not states[state]:
                v.add_bad('of the harness', f'no client left in the state {state}')
        if not times:
            v.add_bad('of the harness', 'no node held anything for a client when it left')
        fleet.keep = bool(v.bad)
    limit = FREE_S + STEP_S
    print(f'aborts: {len(left)} clients left, {len(times)} of them while a node held something for them; that was over after {times_say(times)} of {len(times)} '
          f'(limit of p99: {FREE_S} s and a step){over(quantile(times, 0.99), limit)}')
    print(f'  blocks of both nodes free after {times_say(bursts)} of {len(bursts)} bursts')
    print('  in the states ' + ', '.join(f'{s} {states[s]}' for s in STATES))
    print(f'  tokens per second {before:.0f} before, {after:.0f} in the {RECOVER_S:g} s after: {after / before:.2f} times' + ('' if after >= 0.9 * before else '  OVER THE LIMIT (0.9)'), flush=True)
    for kind, text in v.bad:
        print(f'BAD {kind}: {text}')
    return int(bool(v.bad))


def throughput(entry, r):
    """Tokens per second of some requests at once."""
    body = dict(model='m', max_tokens=100, ignore_eos=True, temperature=0)

    def one(i):
        status, answer = entry.call('POST', '/v1/completions', {**body, 'prompt': [r.randrange(4, 500) for _ in range(40)]}, timeout=60)
        assert status == 200, answer
        return answer['usage']['completion_tokens']
    t0 = time.monotonic()
    out = parallel([lambda i=i: one(i) for i in range(SAMPLE)], SAMPLE)
    for x in out:
        if isinstance(x, Exception):
            raise x
    return sum(out) / (time.monotonic() - t0)


def times_say(values):
    return f'p50 {quantile(values, 0.5):.3f}, p99 {quantile(values, 0.99):.3f}, max {max(values, default=0):.3f} s'


def burst(fleet, entry, b, r, left):
    """Seconds from the first FIN until nothing is held; None: not in 10 s. left: when each client sent its FIN, by the wall clock."""
    connections = []
    for i in range(BURST):
        c = http.client.HTTPConnection(entry.address, entry.port, timeout=30)
        body = dict(model='m', prompt=[r.randrange(4, 500) for _ in range(r.choice((20, 300, 900)))], max_tokens=300, ignore_eos=True, temperature=0, stream=True)
        c.request('POST', '/v1/completions', json.dumps(body), {'Content-Type': 'application/json', 'x-request-id': f'abort-{b}-{i}'})
        connections.append(c)
    time.sleep(r.choice((0, 0.002, 0.01, 0.05, 0.1, 0.3, 0.6)))
    t0 = time.monotonic()
    for i, c in enumerate(connections):
        left[f'abort-{b}-{i}'] = time.time()
        c.close()
    while time.monotonic() - t0 < 10:
        if all(is_free(m) for m in fleet.nodes) and entry.metrics().get('baton_requests_live', 0) == 0:
            return time.monotonic() - t0
    return None


def is_free(m):
    values = m.metrics()
    return not values.get('baton_kv_blocks{state="held"}') and not values.get('baton_kv_blocks{state="quarantine"}') and not values.get('baton_prefill_credited_tokens')


def last_states(lines):
    """{name of the request: (its number in the cluster, its last state before it ended)}"""
    out = {}
    for l in lines:
        if l.text.startswith('request request=') and 'api_request=abort-' in l.text:
            f = l.fields()
            if f['to'] == 'ended':
                out[f['api_request']] = f['request'], f['from']
    return out


def times_of(logs, nodes, ended, left, v):
    """Seconds from a client's FIN until no node held anything for its request, of those for which one did."""
    held = collections.defaultdict(list)    # number → [(when, +1 or -1)]
    for m in nodes:
        for l in logs.of[m]:
            if l.text.startswith(('prompt begin', 'sequence begin')):
                held[l.fields()['request']].append((l.at, 1))
            elif l.text.startswith(('prompt end', 'sequence end')):
                held[l.fields()['request']].append((l.at, -1))
    out = []
    for name, at in left.items():
        marks = held.get(ended[name][0], []) if name in ended else []
        if sum(step for _, step in marks) != 0:
            v.add_bad('leaked', f'{name}: a node began {sum(s > 0 for _, s in marks)} times with it, and ended {sum(s < 0 for _, s in marks)} times')
        over_at = max((t for t, step in marks if step < 0), default=at)
        if over_at > at:
            out.append(over_at - at)
    return out
