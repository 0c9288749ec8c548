"""Every architecture gives the same answer bit for bit, wherever it is computed: on one node or split over two, after a move to another node in
the middle, and after a cached prefix whose end was generated. The reference is always a node that computes alone, without a cached prefix.

Each scenario compares everything that a client sees of an answer: token ids, text, every logprob as written, finish_reason."""
import re

from harness import *

GOLDENS = os.path.join(DATA, 'goldens')
NAMES = sorted(n for n in os.listdir(GOLDENS) if os.path.isdir(os.path.join(GOLDENS, n, 'model')))
BLOCK, VOCAB = 64, 512
SIZE = ['--max-model-len', '2048', '--max-num-seqs', '16', '--num-gpu-blocks-override', '400', '--placement-timeout', '10']
SAMPLING = (dict(temperature=0), dict(temperature=0.8, seed=11), dict(temperature=1.2, top_p=0.9, top_k=40, seed=12))
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 200, 5 * BLOCK)
LONG = 300               # tokens of an answer, at this pace enough to lose a node in the middle
PACED = paced()


def model_of(name):
    return smollm2() if name == 'smollm2' else os.path.join(GOLDENS, name, 'model')


def two_attention_paths(name):
    """MLA computes decode tokens by its absorbed path, so a prompt does not find them in the prefix cache."""
    return name.startswith('deepseek')


def bodies_of(seed, lengths, answers, **more):
    """Prompts without a common prefix, alternately greedy and sampled."""
    r, out = random.Random(seed), []
    for i, n in enumerate(lengths):
        ids = [r.randrange(4, VOCAB) for _ in range(n)]
        out.append(dict(model='m', prompt=ids, max_tokens=answers[i % len(answers)], logprobs=2, ignore_eos=True, return_token_ids=True,
                        return_tokens_as_token_ids=True, **SAMPLING[i % len(SAMPLING)], **more))
    return out


def ask(ports, bodies, concurrency=1, cold=False):
    """Bodies of answers, asked at the ports in turn. cold: each has its own salt, so that it finds no cached prefix of another."""
    def one(i):
        salt = dict(cache_salt=f'{random.random()} {i}') if cold else {}
        return request(ports[i % len(ports)], 'POST', '/v1/completions', {**bodies[i], **salt, 'return_trace': True}, timeout=300)
    out = parallel([lambda i=i: one(i) for i in range(len(bodies))], concurrency)
    for a in out:
        if isinstance(a, Exception):
            raise a
        assert a[0] == 200, a
    return [a[2] for a in out]


def check(want, got, what):
    for i, (a, b) in enumerate(zip(want, got)):
        for part, x, y in zip(('token ids', 'finish reason', 'logprobs', 'top logprobs', 'text'), answer_of(a), answer_of(b)):
            if x != y:
                at = next((k for k, (p, q) in enumerate(zip(x, y)) if p != q), min(len(x), len(y)))
                raise AssertionError(f'{what}: answer {i}: {part} differ from {at} on: {x[at:at + 3]} and {y[at:at + 3]}; {b.get("baton")}')


class Nodes:
    """A mixed node on its own, and a cluster without Redis whose first node serves the directory. theirs: options of the cluster's nodes alone, one
    list for all of them or one for each."""

    def __init__(self, name, roles, protocol='ipc', args=(), theirs=()):
        model, control = model_of(name), free_ports(1)[0]
        common = [*SIZE, *args, *PACED, '--cache-transfer-protocol', protocol]
        each = theirs if theirs and isinstance(theirs[0], list) else [theirs] * len(roles)
        self.alone = Node(model, 'mixed', [*SIZE, *args])
        self.first = Node(model, roles[0], [*common, *each[0], '--engine-worker-queue-port', str(control)])
        self.rest = [Node(model, r, [*common, *t, '--innode-prefill-ports', str(control)]) for r, t in zip(roles[1:], each[1:])]
        self.all = [self.first, *self.rest]

    def wait(self):
        wait_ready(self.alone, *self.all)
        wait_sees(self.all, len(self.all))

    def ports(self):
        return [n.port for n in self.all if n.alive()]


@contextlib.contextmanager
def nodes_of(*args, **more):
    nodes = Nodes(*args, **more)
    with closing(nodes.alone, *nodes.all):
        nodes.wait()
        yield nodes


def check_split(answers, least=0.5):
    for a in answers:
        t = a['baton']
        assert t['prefill_node'] and t['recomputed_tokens'] == 0 and t['moves'] == 0, t
    assert sum(was_split(a['baton']) for a in answers) >= len(answers) * least, [a['baton'] for a in answers]


def follow_ups(bodies, answers):
    """Requests that continue an answer: its tokens are now part of the prompt."""
    return [{**b, 'prompt': b['prompt'] + a['choices'][0]['token_ids'] + [7, 8, 9], 'max_tokens': 20} for b, a in zip(bodies, answers)]


def cached_of_follow_up(name, body, follow):
    """Tokens of `follow` that a node which answered `body` has cached: the KV of an answer's last token is never computed."""
    computed = len(body['prompt']) if two_attention_paths(name) else len(follow['prompt']) - 4
    return min(computed, len(follow['prompt']) - 1) // BLOCK * BLOCK


def split_and_prefixes(name, nodes, seed, lengths):
    """Compares the answers of one node and of the cluster, and of requests that contain them. Returns the follow-ups and their answers."""
    bodies = bodies_of(seed, lengths, (20, 3, 90, 1, 70))
    echo = bodies_of(seed + 1, (3, BLOCK + 5), (4, 20), echo=True)
    want, want_echo = ask([nodes.alone.port], bodies, cold=True), ask([nodes.alone.port], echo, cold=True)
    check(want, ask([nodes.alone.port], bodies, 8), f'{name}: one node, 8 at once')
    got, got_echo = ask(nodes.ports(), bodies, 4), ask(nodes.ports(), echo, 2)
    check(want + want_echo, got + got_echo, f'{name}: split')
    check_split(got + got_echo)
    assert sum(a['baton']['kv_bytes'] for a in got) > 0
    more = follow_ups(bodies, want)
    want_more = ask([nodes.alone.port], more, cold=True)
    warm = ask([nodes.alone.port], more)
    check(want_more, warm, f'{name}: one node, after its own answer')
    for b, m, a in zip(bodies, more, warm):
        assert a['baton']['cached_tokens'] == cached_of_follow_up(name, b, m), (name, len(b['prompt']), len(m['prompt']), a['baton'])
    got = ask(nodes.ports(), more)
    check(want_more, got, f'{name}: split, after its own answer')
    check_split(got, 0)  # the decode node has nearly all of each prompt
    check(want_more, ask(nodes.ports(), more, 4), f'{name}: split, once more')
    return more, want_more


def gathered(events):
    """A streamed answer in the shape of an unstreamed one."""
    out = dict(choices=[dict(token_ids=[], finish_reason=None, text='', logprobs=dict(token_logprobs=[], top_logprobs=[]))])
    whole = out['choices'][0]
    for e in events:
        assert 'error' not in e, e
        out['baton'] = e.get('baton') or out.get('baton')
        for c in e['choices']:
            whole['token_ids'] += c.get('token_ids') or []
            whole['text'] += c['text']
            whole['finish_reason'] = c['finish_reason'] or whole['finish_reason']
            for k in whole['logprobs']:
                whole['logprobs'][k] += (c.get('logprobs') or {}).get(k) or []
    return out


def streams(port, bodies, then):
    """Answers of all bodies, streamed concurrently; then() is called when all have begun."""
    begun = [threading.Event() for _ in bodies]

    def one(i):
        events = []
        try:
            for e in stream(port, '/v1/completions', {**bodies[i], 'return_trace': True}, timeout=120):
                events.append(e)
                begun[i].set()
        finally:
            begun[i].set()
        return gathered(events)
    out = []
    t = threading.Thread(target=lambda: out.extend(parallel([lambda i=i: one(i) for i in range(len(bodies))], len(bodies))))
    t.start()
    try:
        assert all(b.wait(60) for b in begun), 'an answer does not begin'
        then()
    finally:
        t.join(120)
    for a in out:
        if isinstance(a, Exception):
            raise a
    assert len(out) == len(bodies)
    return out


def lose_the_busiest(nodes, victims, sig):
    """Stops all nodes, asks the directory server which has most to do, and ends that one; the others continue."""
    for v in victims:
        v.kill(signal.SIGSTOP)
    placed = {n['name']: n['placed_seqs'] for n in request(nodes.first.port, 'GET', '/cluster')[2]['nodes']}
    victim = max(victims, key=lambda v: placed.get(f'127.0.0.1:{v.port}', 0))
    if sig != signal.SIGKILL:
        victim.kill(sig)
        victim.kill(signal.SIGCONT)
    else:
        victim.kill()
        victim.p.wait()
    for v in victims:
        if v is not victim:
            v.kill(signal.SIGCONT)
    return victim


def moved(name, nodes, seed, sig=signal.SIGKILL, tries=5):
    """Asks for long answers at the first node while a node that works on them is lost. Returns that node, the requests and their reference answers."""
    for attempt in range(tries):
        bodies = bodies_of(seed + 100 * attempt, (130, BLOCK, 30), (LONG,))
        want = ask([nodes.alone.port], bodies, 3, cold=True)
        lost = []
        got = streams(nodes.first.port, bodies, lambda: lost.append(lose_the_busiest(nodes, nodes.rest, sig)))
        check(want, got, f'{name}: moved')
        if any(a['baton']['moves'] for a in got):
            return lost[0], bodies, want
        lost[0].p.wait()
        back(nodes, lost[0])
    raise AssertionError(f'{name}: {tries} times nothing was at work on the node that was lost: the test proves nothing')


def back(nodes, node):
    node.restart()
    wait_ready(node)
    wait_sees(nodes.all, len(nodes.all))


def after_a_move(name, nodes, seed, sig=signal.SIGKILL):
    """Repeats the requests, and requests that contain their answers, where they were recomputed and when the lost node is back."""
    lost, bodies, want = moved(name, nodes, seed, sig)
    more = follow_ups(bodies, want)
    want_more = ask([nodes.alone.port], more, cold=True)
    check(want_more, ask([nodes.first.port], more), f'{name}: after a moved answer')
    return lost, more, want_more


def story(name, seed, protocol='ipc', args=(), lengths=LENGTHS, theirs=(), then=lambda nodes: None):
    with nodes_of(name, ('prefill', 'decode', 'decode'), protocol, args, theirs) as nodes:
        more, want_more = split_and_prefixes(name, nodes, seed, lengths)
        lost, moved_more, want_moved = after_a_move(name, nodes, seed)
        back(nodes, lost)
        check(want_more + want_moved, ask(nodes.ports(), more + moved_more, 3), f'{name}: after a restart')
        then(nodes)


def of_all(names, tell, concurrency=8):
    """Runs every scenario, several at once: they mostly wait for nodes to see each other."""
    t0 = time.monotonic()
    for n, r in zip(names, parallel([lambda n=n, i=i: tell(n, i) for i, n in enumerate(names)], concurrency)):
        if isinstance(r, Exception):
            raise AssertionError(n) from r
    print(f'  {len(names)} architectures in {time.monotonic() - t0:.1f} s', flush=True)


def test_every_architecture():
    of_all(NAMES, lambda n, i: story(n, i))


def test_every_layout_over_tcp():
    """One architecture per KV layout and type: GQA, GQA in f32, MLA, MLA in f32."""
    f32 = ['--activations', 'f32']
    cases = {'llama': [], 'deepseek_v3': [], 'qwen3_moe': f32, 'deepseek_v2_lite': f32}
    of_all(list(cases), lambda n, i: story(n, 50 + i, 'tcp', cases[n], LENGTHS[3:]))


def test_every_architecture_every_way_long():
    for protocol in ('ipc', 'tcp'):
        for arithmetic in ([], ['--activations', 'f32']):
            for step in ('64', '2048'):
                args = [*arithmetic, '--max-num-batched-tokens', step]
                print(f'  {protocol} {" ".join(args)}', flush=True)
                of_all(NAMES, lambda n, i: story(n, 1000 + i, protocol, args, range(1, 500, 31)))


def drained(name, seed):
    """A decode node told to end at once hands its answers over; a mixed node that takes one recomputes its prompt."""
    with nodes_of(name, ('prefill', 'decode', 'decode'), args=['--shutdown-timeout', '0']) as nodes:
        after_a_move(name, nodes, seed, signal.SIGTERM)
    with nodes_of(name, ('mixed', 'mixed', 'mixed')) as nodes:
        bodies = bodies_of(seed, LENGTHS, (20, 90))
        want = ask([nodes.alone.port], bodies, cold=True)
        check(want, ask(nodes.ports(), bodies, 4), f'{name}: three mixed nodes')


def test_drained_long():
    of_all(NAMES, drained)


def crowded(name, seed, tries=20, args=(), theirs=()):
    """With few blocks, answers are preempted and recomputed, including their generated tokens."""
    model = model_of(name)
    size = [*SIZE, *args]
    with closing(Node(model, 'mixed', size), Node(model, 'mixed', [*size, *theirs, '--max-model-len', '512', '--num-gpu-blocks-override', '12'])) as (alone, small):
        wait_ready(alone, small)
        for attempt in range(tries):        # they are fast: not every round has enough of them running together
            bodies = bodies_of(seed + 100 * attempt, (100, 200, 65, 130, 33, 190), (300,))
            check(ask([alone.port], bodies, 6, cold=True), ask([small.port], bodies, 6), f'{name}: preempted')
            if metrics(small.port)['baton_engine_preemptions_total'] > 0:
                return
    raise AssertionError(f'{name}: nothing was ever preempted')


def test_preempted():
    of_all([n for n in NAMES if n in ('llama', 'ernie_moe', 'deepseek_v3', 'deepseek_v2_lite')], crowded)


def without_prefill_nodes(name, seed):
    """The last prefill node dies: decode nodes continue alone with the same answers, also from blocks that were sent to them."""
    with nodes_of(name, ('decode', 'prefill')) as nodes:
        bodies = bodies_of(seed, LENGTHS, (20, 90))
        want = ask([nodes.alone.port], bodies, cold=True)
        check(want, ask([nodes.first.port], bodies), f'{name}: split')
        nodes.rest[0].kill()
        more = follow_ups(bodies, want)
        check(ask([nodes.alone.port], more, cold=True), ask([nodes.first.port], more), f'{name}: without a prefill node')


def test_without_prefill_nodes_long():
    of_all(NAMES, without_prefill_nodes)


def test_every_type_of_kv():
    """Split, moved and with cached prefixes, over a KV cache of each type of --kv-cache-dtype: pieces are pushed with their scales."""
    f32 = ['--activations', 'f32']
    cases = (('llama', 'int8', 'ipc', []), ('qwen3', 'int8', 'tcp', []), ('qwen3', 'fp8', 'ipc', []), ('llama', 'fp8', 'tcp', []),
             ('llama', 'float16', 'ipc', []), ('qwen3_moe', 'int8', 'tcp', f32))
    of_all([f'{name} over {t} by {way}' for name, t, way, _ in cases],
           lambda n, i: story(cases[i][0], 300 + i, cases[i][2], ['--kv-cache-dtype', cases[i][1], *cases[i][3]], LENGTHS[3:]), 3)


def test_preempted_over_int8():
    crowded('llama', 400, args=['--kv-cache-dtype', 'int8'])


def test_types_of_kv_are_what_they_say():
    """A node names each on its start page, and no two give the same numbers."""
    model, body, seen = os.path.join(GOLDENS, 'llama', 'model'), bodies_of(7, (200,), (8,))[0], {}
    for spelled, name in (('auto', 'bf16'), ('bfloat16', 'bf16'), ('half', 'f16'), ('int8', 'int8'), ('fp8_e4m3', 'f8_e4m3')):
        with closing(Node(model, 'mixed', [*SIZE, '--kv-cache-dtype', spelled])) as n:
            wait_ready(n)
            seen[spelled] = ask([n.port], [body])[0]
            assert f' kv_type={name} ' in n.output() and re.search(f'^  KV cache +{name} ', n.output(), re.M), n.output()
    check([seen['auto']], [seen['bfloat16']], 'auto is bfloat16')
    assert len({str(a['choices'][0]['logprobs']) for a in seen.values()}) == 4


def test_types_of_kv_that_cannot_be():
    for model, t, why in (('deepseek_v3', 'int8', 'latents (MLA), which can only be held as bf16, not as int8'),
                          ('llama', 'fp8_e5m2', 'a KV cache cannot be held as "fp8_e5m2"; it can as bfloat16, float16, int8, fp8'),
                          ('llama', 'f32', 'give --activations f32 too')):
        with closing(Node(os.path.join(GOLDENS, model, 'model'), 'mixed', ['--kv-cache-dtype', t])) as n:
            wait_until('the node ends', lambda: not n.alive(), 60)
            assert n.p.returncode != 0 and why in n.output(), n.output()


def test_nodes_whose_types_of_kv_differ():
    """KV is sent to a pool of another type only if it fits without loss, or if BATON_KV_LOSSY allows loss. Answers come in any case."""
    model, f32 = os.path.join(GOLDENS, 'llama', 'model'), ['--activations', 'f32']
    bodies = [dict(b, temperature=0) for b in bodies_of(8, (200, 130), (12,))]
    for sender, receiver, env, sent in (('bf16', 'int8', {}, False), ('int8', 'fp8', dict(BATON_KV_LOSSY='1'), True), ('int8', 'f32', {}, True),
                                        ('fp8', 'f32', {}, True)):
        control = str(free_ports(1)[0])
        common = [*SIZE, *f32, '--cache-transfer-protocol', 'tcp']
        decode = Node(model, 'decode', [*common, '--kv-cache-dtype', receiver, '--engine-worker-queue-port', control], env)
        prefill = Node(model, 'prefill', [*common, '--kv-cache-dtype', sender, '--innode-prefill-ports', control], env)
        with closing(decode, prefill):
            wait_ready(decode, prefill)
            wait_sees([decode, prefill], 2)
            traces = [a['baton'] for a in ask([decode.port], bodies)]
            assert all((t['kv_bytes'] > 0) == sent for t in traces), (sender, receiver, traces)
            said = lambda: 'bf16 at the sender does not fit into int8 at the receiver' in prefill.output() + decode.output()
            assert sent or wait_until('the reason', said, 5) or said()
