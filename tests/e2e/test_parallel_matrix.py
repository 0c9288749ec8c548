"""Every size of a group and of its nodes gives the tokens and log-probabilities of one rank, bit for bit: with prompts in chunks, prefix hits, preempted
answers, seeds, ranks without rows, copies of experts, and experts that are placed anew every 20 steps.

A cell is a model, an arithmetic, a number of ranks that share the experts (EP) and of ranks per node (TP), an arrangement of the experts, and a way for
rows between ranks."""
import functools, itertools, sys
from harness import *
from test_parallel import golden
from test_ranks import children_of, two_in_a_row

DENSE = 'llama', 'qwen3'
REAL, UPCYCLED = 'smollm2_moe', []       # SmolLM2, its FFN as each of 8 experts (tests/fixtures/upcycle.py); where it is
ARITHMETICS = {'f32': ['--activations', 'f32'], 'fast': []}
WAYS = {'shm': [], 'ucx': ['--memory-domain', 'a,b,c,d,e,f,g,h'], 'hosts': []}     # of rows; hosts: nodes take turns in two pid namespaces, which makes them hosts
SIZE = ['--max-model-len', '192', '--max-num-seqs', '8', '--block-size', '16']
AMPLE = ['--num-gpu-blocks-override', '256', '--no-enable-prefix-caching']
CROWDED = ['--max-num-batched-tokens', '24', '--num-gpu-blocks-override']       # and the number: an answer needs up to 12 blocks, of the real model 9
PLACED = {'contiguous': [], 'copies': ['--num-redundant-experts', '3'],
          'anew': ['--enable-eplb', '--eplb-config', json.dumps(dict(step_interval=20, num_redundant_experts=2))]}
SAMPLING = (dict(temperature=0), dict(temperature=0.8, seed=11), dict(temperature=1.2, top_p=0.9, top_k=40, seed=12),
            dict(temperature=0.7, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1, seed=13))


def path_of(name):
    return UPCYCLED[-1] if name == REAL else golden(name)


def python_with_numpy(folder):
    """This one, or one of its own in the folder."""
    own = os.path.join(folder, 'python', 'bin', 'python')
    for make in ([], [[sys.executable, '-m', 'venv', os.path.join(folder, 'python')], [own, '-m', 'pip', 'install', '-q', '--disable-pip-version-check', 'numpy']]):
        made = all(subprocess.run(m).returncode == 0 for m in make)
        python = own if make else sys.executable
        if made and subprocess.run([python, '-c', 'import numpy'], stderr=subprocess.DEVNULL).returncode == 0:
            return python
    raise Skip('numpy is not installed and cannot be fetched: SmolLM2 with experts was not tested')


@contextlib.contextmanager
def upcycled():
    with tempfile.TemporaryDirectory(prefix='baton-upcycled-') as d:
        path, script = os.path.join(d, 'model.gguf'), os.path.join(HERE, '..', 'fixtures', 'upcycle.py')
        subprocess.run([python_with_numpy(d), script, '--form', 'gguf_llama_moe', '--type', 'q4_1', '--experts', '8', '--used', '2', '--gguf', smollm2(), path], check=True)
        UPCYCLED.append(path)
        yield


def bodies_of(name):
    """Prompts of up to five chunks; half of them begin like another one, one has its own log-probabilities. Short answers of the real model, which is slow."""
    r = random.Random(name)
    common = [r.randrange(4, 500) for _ in range(100)]
    longest = 32 if name == REAL else 90
    out = []
    for i in range(8):
        n = (1, 17, 100, 65, 33, 90, 48, 75)[i]
        begin = (0, 16, 96, 40, 0, 80, 48, 0)[i]
        ids = common[:begin] + [r.randrange(4, 500) for _ in range(n - begin)]
        out.append(dict(model='m', prompt=ids, max_tokens=longest - 3 * i, logprobs=5, ignore_eos=True, return_token_ids=True, return_tokens_as_token_ids=True, **SAMPLING[i % len(SAMPLING)]))
    out[5]['echo'] = True
    return out


def ask(ports, bodies):
    """Body i at port i, modulo their number, all at once."""
    got = parallel([lambda i=i, b=b: request(ports[i % len(ports)], 'POST', '/v1/completions', b) for i, b in enumerate(bodies)], len(bodies))
    for g in got:
        assert not isinstance(g, Exception) and g[0] == 200, g
    return [answer_of(g[2]) for g in got]


@functools.cache
def alone(name, arithmetic):
    """One rank with room for everything, without chunks or a prefix cache: one answer after the other."""
    bodies = bodies_of(name)
    with closing(Node(path_of(name), args=[*SIZE, *AMPLE, *ARITHMETICS[arithmetic]])) as node:
        wait_ready(node)
        return [ask([node.port], [b])[0] for b in bodies]


class Elsewhere(Node):
    """A node in a pid namespace of its own, as in a container: for the others it runs on another host."""
    def start(self):
        self.argv = ['unshare', '--pid', '--fork', '--kill-child', '--mount-proc', *self.argv]
        super().start()

    def kill(self, sig=signal.SIGKILL):
        """unshare itself takes no SIGTERM."""
        for pid in children_of(self.p.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)


def can_be_elsewhere():
    return shutil.which('unshare') and subprocess.run(['unshare', '--pid', '--fork', '--kill-child', '--mount-proc', 'true'], capture_output=True).returncode == 0


def nodes_of(name, arithmetic, ep, tp, placed, way):
    """ep ranks in nodes of tp; ep 0: one node whose ranks share the experts because it is one."""
    args = [*SIZE, *CROWDED, '12' if name == REAL else '20', *ARITHMETICS[arithmetic], *PLACED[placed], *WAYS[way]]
    if tp > 1:
        args += ['--tensor-parallel-size', str(tp)]
    if ep > 1:
        args += ['--enable-expert-parallel']
    if ep <= tp:
        return [Node(path_of(name), args=args)]
    args += ['--data-parallel-size', str(ep // tp), '--data-parallel-address', '127.0.0.1', '--data-parallel-rpc-port', str(two_in_a_row())]
    return [(Elsewhere if way == 'hosts' and r % 2 else Node)(path_of(name), args=[*args, '--data-parallel-rank', str(r)]) for r in range(ep // tp)]


def engine_ports(nodes):
    """Of all processes that have an engine and requests. Nodes of several ranks are processes of a parent without one, and see each other."""
    return sorted({x['http_port'] for n in nodes for x in request(n.port, 'GET', '/cluster')[2]['nodes']})


def sum_of(ports, name):
    return sum(metrics(p)[name] for p in ports)


def lost(ports):
    counts = [v for p in ports for k, v in metrics(p).items() if k.startswith('baton_group_lost_total')]
    assert len(counts) >= len(ports)
    return sum(counts)


def check(what, got, want):
    different = [i for i, (g, w) in enumerate(zip(got, want)) if g != w]
    assert not different, f'{what}: answers {different} differ: {[(got[i][0], want[i][0], got[i][2], want[i][2]) for i in different[:1]]}'


def epoch_of(port):
    return (request(port, 'GET', '/cluster')[2].get('group') or {}).get('epoch', 0)


def cell(name, arithmetic, ep, tp, placed='contiguous', way='shm'):
    """All nodes at once, one request after the other, then so many that answers are preempted. Returns how often the experts were placed anew."""
    began, what = time.monotonic(), f'{name} {arithmetic} {f"EP {ep}" if ep else "one node"} TP {tp}, {placed}, by {way}'
    bodies, want = bodies_of(name), alone(name, arithmetic)
    nodes = nodes_of(name, arithmetic, ep, tp, placed, way)
    with closing(*nodes):
        wait_ready(*nodes)
        ports = [n.port for n in nodes]
        engines = engine_ports(nodes)
        if ep > 1 and name not in DENSE:
            assert all(request(p, 'GET', '/cluster')[2]['group']['backend'] == ('shm' if way == 'shm' else 'ucx') for p in engines), what
        begun = epoch_of(engines[0])
        check(f'{what}, all nodes', ask(ports, bodies), want)
        check(f'{what}, others idle', [ask(ports[-1:], [b])[0] for b in bodies[:3]], want[:3])
        for _ in range(5):      # nodes of one rank do not see each other, those of several share what they get
            crowd = 1 if tp == 1 else len(nodes)
            check(f'{what}, crowded', ask(ports[-1:], bodies * crowd), want * crowd)
            preempted, hits = sum_of(engines, 'baton_engine_preemptions_total'), sum_of(engines, 'baton_prefix_cache_hit_tokens_total')
            if preempted and hits and (placed != 'anew' or epoch_of(engines[0]) > begun):
                break
        assert preempted and hits, f'{what}: nothing was preempted, or no prefix was found'
        assert (ep <= 1 and tp == 1) or lost(engines) == 0, f'{what}: a group was lost'
        anew = epoch_of(engines[0]) - begun
    print(f'  equal: {what}: {preempted:.0f} preempted, {hits:.0f} tokens of prefixes, placed anew {anew} times, {time.monotonic() - began:.1f} s', flush=True)
    return anew


def sizes_of(name):
    """(EP, TP) of a model, TP where it divides the query heads."""
    tp = {'ernie_moe': (2,), REAL: (3,)}.get(name, (2, 4))
    ep = (3, 6) if name == REAL else (2, 4, 8)
    return [(1, 1), (2, 1), (4, 1), (8, 1), *[(0, t) for t in tp], *[(e, t) for t in tp for e in ep if e >= t]]


def has_ways(name, arithmetic, ep, tp, way):
    """Beyond the first way: where there are rows of experts, and hosts where there are nodes for them; of the real model the largest sizes."""
    return way == 'shm' or (name not in DENSE and ep > (tp if way == 'hosts' else 1) and (name != REAL or (arithmetic, ep) in (('fast', 8), ('fast', 6))))


def cells_of(name):
    """(arithmetic, EP, TP, placed, way). The real model, and ways beyond the first, with the placement that exercises them most."""
    out = []
    for way in WAYS:
        for a, (ep, t) in itertools.product(ARITHMETICS, sizes_of(name)):
            placed = ['contiguous'] if name in DENSE or ep <= 1 else ['anew'] if name == REAL or way != 'shm' else PLACED
            out += [(a, ep, t, p, way) for p in placed if has_ways(name, a, ep, t, way)]
    return out


def all_cells(name):
    began, cells = time.monotonic(), cells_of(name)
    if not can_be_elsewhere():
        print('  no pid namespace can be made here (unshare --pid): no cells of several hosts', flush=True)
        cells = [c for c in cells if c[4] != 'hosts']
    anew = [cell(name, *c) > 0 for c in cells if c[3] == 'anew']
    for c in cells:
        if c[3] != 'anew':
            cell(name, *c)
    print(f'  {name}: {len(cells)} cells in {time.monotonic() - began:.0f} s; experts placed anew in {sum(anew)} of {len(anew)}', flush=True)
    assert name in DENSE or any(anew), f'{name}: experts were never placed anew'


def test_some_cells():
    assert cell('qwen3_moe', 'fast', 4, 2, 'anew') > 0
    assert cell('mixtral', 'f32', 8, 1, 'anew') > 0
    cell('deepseek_v3', 'f32', 4, 4, 'copies')
    cell('llama', 'fast', 0, 4)
    cell('ernie_moe', 'f32', 4, 1, 'anew', 'ucx')
    if can_be_elsewhere():
        cell('qwen3_moe', 'f32', 4, 2, 'copies', 'hosts')


def test_heads_that_do_not_divide():
    for path, size, n_heads in ((golden('ernie_moe'), 4, 6), (golden('llama'), 3, 4), (smollm2(), 2, 9), (smollm2(), 4, 9)):
        p = subprocess.run([BIN, 'serve', path, '--host', '127.0.0.1', '--port', str(free_ports(1)[0]), '--tensor-parallel-size', str(size), '--data-parallel-size', '2', '--enable-expert-parallel'],
                           capture_output=True, text=True, timeout=60)
        assert p.returncode in (1, 2) and f'--tensor-parallel-size {size} does not divide the {n_heads} query heads' in p.stderr, (path, p.returncode, p.stderr)


def test_ernie_moe_long():
    all_cells('ernie_moe')


def test_qwen3_moe_long():
    all_cells('qwen3_moe')


def test_mixtral_long():
    all_cells('mixtral')


def test_deepseek_v2_grouped_long():
    all_cells('deepseek_v2_grouped')


def test_deepseek_v3_long():
    all_cells('deepseek_v3')


def test_dense_models_long():
    for name in DENSE:
        all_cells(name)


def test_upcycled_smollm2_long():
    with upcycled():
        all_cells(REAL)
