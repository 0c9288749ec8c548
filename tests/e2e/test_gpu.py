"""--device cuda. Without a GPU these tests need a program with an emulated GPU (BATON_BIN of a build with BATON_CUDA=emulate), which is thousands
of times slower: so requests are few and short, and more and longer ones only with --long."""
from harness import *
from moved import F32, check, kv_bytes_per_token
from test_parallel import SIZE as RANK_SIZE, ask_all
from test_ranks import Parent, is_whole
from test_split import check_equal, run
from test_tensor_parallel import processes, side, tensor

QWEN = os.path.join(DATA, 'goldens', 'qwen3_moe', 'model')
LLAMA = os.path.join(DATA, 'goldens', 'llama', 'model')
DEEPSEEK = os.path.join(DATA, 'goldens', 'deepseek_v3', 'model')
SIZE = ['--max-model-len', '512', '--max-num-seqs', '8', '--num-gpu-blocks-override', '64', '--max-num-batched-tokens', '128']
CUDA = ['--device', 'cuda', '--deterministic', *SIZE]
NO_CHECKSUM = ['--kv-checksum', 'false']
SHORT_STEPS = ['--max-num-batched-tokens', '32']  # short enough to end on an emulated GPU before the node counts as stuck


def has_gpu():
    """Whether the program can compute on a GPU; its own sentence if it cannot."""
    r = subprocess.run([BIN, 'generate', '--device', 'cuda', '--model', QWEN, '--prompt', 'a', '--max-tokens', '1', *SIZE], stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, text=True, timeout=120)
    return (r.returncode == 0, r.stderr.strip().splitlines()[-1] if r.stderr.strip() else '')


def need_gpu():
    gpu, why = has_gpu()
    if not gpu:
        assert 'no CUDA device' in why or 'has no device' in why, why
        raise Skip(f'no GPU: {why}')


def test_no_gpu_is_reported_before_anything_is_loaded():
    gpu, why = has_gpu()
    if gpu:
        raise Skip('this program has a GPU')
    assert '--device cuda' in why and ('no CUDA device' in why or 'has no device' in why), why


def test_a_ucx_that_cannot_move_gpu_memory_is_refused():
    """Without an RDMA device, UCX's tcp shows what this UCX reports about GPUs."""
    need_gpu()
    r = subprocess.run([BIN, 'serve', '--model', QWEN, '--port', '0', '--cache-transfer-protocol', 'ucx', *CUDA], env={**os.environ, 'BATON_UCX_TLS': 'tcp'},
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    assert r.returncode != 0 and "'ucx'" in r.stderr and 'ipc and tcp' in r.stderr, (r.returncode, r.stderr)


def test_a_gpu_that_fails_ends_the_node():
    """The node exits with a sentence and its own status: here the emulated GPU fails in its fourth captured step."""
    need_gpu()
    r = subprocess.run([BIN, 'generate', '--model', QWEN, '--prompt', 'a', '--max-tokens', '9', *CUDA],
                       env={**os.environ, 'BATON_SIMT_FAIL': 'cudaGraphLaunch 3 719'}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    if r.returncode == 0:
        raise Skip('a real GPU, which this test cannot make fail')
    assert r.returncode == 70 and 'node ends' in r.stderr and 'the GPU failed in' in r.stderr, (r.returncode, r.stderr)


def test_a_gpu_that_is_too_small_is_reported_at_start():
    need_gpu()
    r = subprocess.run([BIN, 'generate', '--model', QWEN, '--prompt', 'a', '--max-tokens', '2', *CUDA], env={**os.environ, 'BATON_SIMT_MEMORY': '5000000'},
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    if r.returncode == 0:
        raise Skip('a real GPU, which is not too small')
    assert r.returncode not in (0, 70) and 'GPU memory' in r.stderr, (r.returncode, r.stderr)


def test_a_small_model_drafts_on_the_gpu():
    """The model drafts for itself, so that many drafts are right; the answer is the one without."""
    need_gpu()

    def answer(*options):
        with closing(Node(LLAMA, 'mixed', [*CUDA, *SHORT_STEPS, *options])) as node:
            wait_ready(node)
            a = request(node.port, 'POST', '/v1/completions', dict(model='m', prompt=list(range(4, 16)), max_tokens=10, temperature=0, return_token_ids=True))
            return a[2]['choices'][0]['token_ids'], metrics(node.port).get('baton_spec_decode_num_accepted_tokens_total', 0)
    want, _ = answer()
    config = dict(method='draft', model=LLAMA, num_speculative_tokens=3, adaptive=False)
    got, accepted = answer('--speculative-config', json.dumps(config))
    assert got == want and accepted > 0, (got, want, accepted)


def test_the_draft_layer_drafts_ahead_on_the_gpu():
    """Answers with drafts of the model's own layer are those without; passes are recorded, and steps with drafts submitted ahead."""
    need_gpu()
    bodies = mixed_requests(5, 5, 512, 40, (6, 10))
    with closing(Node(DEEPSEEK, 'mixed', [*CUDA, *SHORT_STEPS])) as node:
        wait_ready(node, timeout=120)
        want = run([node.port], bodies, 1)
    config = dict(method='mtp', num_speculative_tokens=3, adaptive=False)
    with closing(Node(DEEPSEEK, 'mixed', [*CUDA, *SHORT_STEPS, '--speculative-config', json.dumps(config)])) as node:
        wait_ready(node, timeout=120)
        check_equal(want, run([node.port], bodies, len(bodies)), 'with drafts')
        m = metrics(node.port)
        assert m['baton_spec_decode_num_draft_tokens_total'] > 0 and m['baton_engine_draft_passes_recorded_total'] > 0, m
        assert 2 * m['baton_engine_steps_ahead_total'] > m['baton_engine_steps_total'], m


def test_the_gpu_gives_the_tokens_of_the_cpu():
    """With exact arithmetic, equal up to the last bits of sums: the most likely token of each position is the same."""
    tokens_of_the_cpu(mixed_requests(4, 3, 512, 80, (1, 5)))


def test_the_gpu_gives_the_tokens_of_the_cpu_long():
    tokens_of_the_cpu(mixed_requests(5, 3, 512, 150, (1, 6)))


def tokens_of_the_cpu(bodies):
    need_gpu()
    bodies = [{**b, 'temperature': 0} for b in bodies]
    for model in (QWEN, DEEPSEEK):
        with closing(Node(model, 'mixed', ['--activations', 'f32', *SIZE])) as cpu:
            wait_ready(cpu)
            want = run([cpu.port], bodies, 4)
        with closing(Node(model, 'mixed', ['--activations', 'f32', *CUDA, '--max-num-batched-tokens', '64'])) as gpu:  # a prompt takes two steps
            wait_ready(gpu, timeout=120)
            for i, (a, b) in enumerate(zip(want, run([gpu.port], bodies, 4))):
                assert answer_of(a)[0] == answer_of(b)[0], f'{model} on the GPU: answer {i} differs:\n{answer_of(a)[0]}\n{answer_of(b)[0]}'


def hashed(node):
    """Bytes of KV that a node has computed checksums of, in both directions."""
    return sum(v for k, v in metrics(node.port).items() if k.startswith('baton_kv_transfer_hashed_bytes_total'))


def check_split(model, protocol, args, bodies, want):
    with pair(model, protocol, [*CUDA, *SHORT_STEPS, *args]) as nodes:
        got = run([x.port for x in nodes], bodies, 3)
        check_equal(want, got, f'{model} split over two nodes by {protocol} {args}')
        for a in got:
            t = a['baton']
            assert t['recomputed_tokens'] == 0 and (not was_split(t) or t['transport'] == protocol and t['kv_bytes'] > 0), t
        moved = sum(a['baton']['kv_bytes'] for a in got)
        for n in nodes:
            assert hashed(n) == (0 if '--kv-checksum' in args else moved), (hashed(n), moved, args)


def test_split_equals_mixed():
    """Two processes on one GPU, with KV by CUDA IPC and by tcp and checksums computed on the GPU; one request at a time, many at once, and
    over two nodes."""
    split_equals_mixed(mixed_requests(4, 4, 512, 100, (1, 5)), (QWEN, (('tcp', []), ('ipc', NO_CHECKSUM))), (DEEPSEEK, (('ipc', []),)))


def test_split_equals_mixed_long():
    split_equals_mixed(mixed_requests(6, 4, 512, 200, (1, 6)), (QWEN, (('ipc', []), ('tcp', []), ('ipc', NO_CHECKSUM))), (DEEPSEEK, (('ipc', []), ('tcp', []))))


def split_equals_mixed(bodies, *cases):
    need_gpu()
    for model, ways in cases:
        with closing(Node(model, 'mixed', CUDA)) as mixed:
            wait_ready(mixed, timeout=120)
            want = run([mixed.port], bodies, 1)
            check_equal(want, run([mixed.port], bodies, len(bodies)), 'all at once')
        for protocol, args in ways:
            check_split(model, protocol, args, bodies, want)


@alone  # an emulated GPU beside another one converts so slowly that a transfer counts as stuck
def test_split_between_block_sizes():
    """The prefill node's GPU converts to the decode node's block size, smaller and larger."""
    between_block_sizes(mixed_requests(4, 5, 512, 80, (1, 5)))


def test_split_between_block_sizes_long():
    between_block_sizes(mixed_requests(6, 5, 512, 120, (1, 6)))


def between_block_sizes(bodies):
    need_gpu()
    with closing(Node(QWEN, 'mixed', CUDA)) as mixed:
        wait_ready(mixed, timeout=120)
        want = run([mixed.port], bodies, 1)
    for protocol, prefill, decode in (('ipc', '16', '64'), ('tcp', '64', '16')):
        with pair(QWEN, protocol, [*CUDA, *SHORT_STEPS], ['--block-size', prefill], ['--block-size', decode]) as nodes:
            got = run([x.port for x in nodes], bodies, 3)
            check_equal(want, got, f'split over blocks of {prefill} and {decode} by {protocol}')
            for a in got:
                t = a['baton']
                assert t['recomputed_tokens'] == 0 and (not was_split(t) or t['transport'] == protocol and t['kv_bytes'] > 0), t
            converted = sum(v for n in nodes for k, v in metrics(n.port).items() if k.startswith('baton_kv_transfer_converted_bytes_total'))
            assert converted == sum(a['baton']['kv_bytes'] for a in got), converted


def test_every_type_of_kv_on_the_gpu():
    """A cache of float16, int8 or fp8: with exact arithmetic the tokens of the CPU, else two nodes give the tokens of one. No mixture of experts: a
    value that rounds to another int8 step must not choose another expert."""
    types_of_kv(mixed_requests(4, 3, 512, 80, (1, 5)))


def test_every_type_of_kv_on_the_gpu_long():
    types_of_kv(mixed_requests(5, 3, 512, 150, (1, 6)))


def types_of_kv(bodies):
    need_gpu()
    bodies = [{**b, 'temperature': 0} for b in bodies]
    for t, way in (('float16', 'tcp'), ('int8', 'ipc'), ('fp8', 'tcp')):
        kind = ['--kv-cache-dtype', t]
        with closing(Node(LLAMA, 'mixed', ['--activations', 'f32', *SIZE, *kind])) as cpu:
            wait_ready(cpu)
            want = run([cpu.port], bodies, 4)
        with closing(Node(LLAMA, 'mixed', ['--activations', 'f32', *CUDA, *kind])) as gpu:
            wait_ready(gpu, timeout=120)
            for i, (a, b) in enumerate(zip(want, run([gpu.port], bodies, 4))):
                assert answer_of(a)[0] == answer_of(b)[0], f'{t} on the GPU: answer {i} differs:\n{answer_of(a)[0]}\n{answer_of(b)[0]}'
        with closing(Node(LLAMA, 'mixed', [*CUDA, *kind])) as mixed:
            wait_ready(mixed, timeout=120)
            want = run([mixed.port], bodies, 1)
        check_split(LLAMA, way, kind, bodies, want)


def test_ranks_that_share_experts_on_a_gpu():
    """Processes whose GPUs (here one for all) hold some of the experts each have the tokens and bits of one that holds all; one that is killed comes back."""
    check_ranks((DEEPSEEK, 2, 3), longest=40, tokens=(2, 4))


def test_ranks_that_share_experts_on_a_gpu_long():
    check_ranks((QWEN, 2, 6), (DEEPSEEK, 2, 4), (DEEPSEEK, 4, 6))


def check_ranks(*groups, longest=60, tokens=(2, 6)):
    need_gpu()
    args = ['--device', 'cuda', '--deterministic', *SHORT_STEPS]
    for model, size, n in groups:
        bodies = mixed_requests(n, 8, 512, longest, tokens)
        with closing(Node(model, args=[*RANK_SIZE, *args])) as one:
            wait_ready(one, timeout=120)
            want = ask_all([one.port], bodies)
        parent = Parent(model, size, args)
        parent.may_end_by_force = True  # a rank may be inside a step, which is long on an emulated GPU
        with closing(parent):
            wait_ready(parent, timeout=180)
            assert f'backend=peer ranks={size}' in parent.output(), parent.output()[-3000:]
            assert ask_all([parent.port], bodies) == want, (model, size)
            ports = parent_ports(parent)
            assert sorted(group_of_port(p)['rank'] for p in ports) == list(range(size))
            assert ask_all(ports, bodies) == want, (model, size)        # each with rows of its own
            assert ask_all(ports[:1], bodies) == want, (model, size)    # the others have none
            for p in ports:
                steps = {name: metrics(p)[f'baton_engine_{name}_total'] for name in ('steps', 'steps_recorded', 'steps_ahead')}
                print(f'  {os.path.basename(os.path.dirname(model))}, {size} ranks: {steps}', flush=True)
                assert steps['steps_recorded'] > 0 and steps['steps_ahead'] > 0, steps
            wait_until('all have fetched what the GPU counted', lambda: rows_agree(ports), 10)
            before = parent.ranks()
            os.kill(before[size - 1], signal.SIGKILL)
            wait_until('the group is whole', lambda: parent.ranks().get(size - 1) != before[size - 1] and is_whole(parent.port, size), 120)
            assert ask_all([parent.port], bodies) == want, (model, size)
            assert parent.stop() == 0, parent.output()[-3000:]


def test_experts_of_a_gpu_are_placed_by_load_long():
    need_gpu()
    args = ['--device', 'cuda', '--deterministic', *SHORT_STEPS]
    eplb = ['--enable-eplb', '--eplb-config', json.dumps({'step_interval': 10, 'num_redundant_experts': 2, 'log_balancedness': True})]
    bodies = mixed_requests(4, 8, 512, 60, (2, 6))
    with closing(Node(DEEPSEEK, args=[*RANK_SIZE, *args])) as one:
        wait_ready(one, timeout=120)
        want = ask_all([one.port], bodies)
    parent = Parent(DEEPSEEK, 2, [*args, *eplb])
    parent.may_end_by_force = True
    with closing(parent):
        wait_ready(parent, timeout=180)
        for _ in range(10):
            assert ask_all([parent.port], bodies) == want
            if ' experts are placed anew ' in parent.output():
                break
        wait_until('experts were placed anew', lambda: group_of_port(parent_ports(parent)[0])['epoch'] >= 2, 30)
        assert ask_all([parent.port], bodies) == want
        assert sum(metrics(p)['baton_group_epochs_total{of="experts",reason="rebalance"}'] for p in parent_ports(parent)) >= 2, parent.output()[-3000:]
        assert parent.stop() == 0, parent.output()[-3000:]


EXACT = ['--device', 'cuda', '--deterministic', '--activations', 'f32', *SHORT_STEPS]


def alike(want, got, what):
    """The same tokens, with log-probabilities within the bound of test_models: on a GPU a part of a matrix may be multiplied in another order than the whole."""
    assert got[:2] == want[:2], f'{what}: {got[0]}, not {want[0]}'
    for a, b in zip(got[2], want[2], strict=True):
        assert abs(a - b) <= 1e-3, f'{what}: {got[2]}, not {want[2]}'


def all_alike(want, got, what):
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        alike(a, b, f'{what}, answer {i}')


def asked_of_one(model, n):
    bodies = [{**b, 'temperature': 0} for b in mixed_requests(n, 8, 512, 15 * n, (2, 6))]
    with closing(Node(model, args=[*RANK_SIZE, *EXACT])) as one:
        wait_ready(one, timeout=120)
        return bodies, ask_all([one.port], bodies)


def test_a_node_of_several_ranks_on_a_gpu():
    """Processes with GPUs (here one for all) that share an attention; the node starts again when one that follows is killed."""
    check_node(QWEN, 1, 2, 3)


def test_nodes_of_several_ranks_on_a_gpu_long():
    check_node(QWEN, 1, 2, 4)
    check_node(LLAMA, 1, 4, 4)
    check_node(DEEPSEEK, 1, 2, 4)
    check_node(DEEPSEEK, 2, 2, 4)
    check_node(QWEN, 1, 2, 4, '--enforce-eager')


def check_node(model, dp, tp, n, *args):
    need_gpu()
    bodies, want = asked_of_one(model, n)
    what = f'{os.path.basename(os.path.dirname(model))}, {dp} nodes of {tp} ranks'
    parent = Parent(model, dp, [*EXACT, *tensor(tp), *args])
    parent.may_end_by_force = True  # a rank may be inside a step, which is long on an emulated GPU
    with closing(parent):
        wait_ready(parent, timeout=180)
        ports = parent_ports(parent)
        assert len(ports) == dp and len(processes(parent)) == dp * tp
        all_alike(want, ask_all([parent.port], bodies), what)
        all_alike(want, ask_all(ports, bodies), what)
        for p in ports:
            steps, recorded = (metrics(p)[f'baton_engine_{name}_total'] for name in ('steps', 'steps_recorded'))
            print(f'  {what}: {recorded:.0f} of {steps:.0f} steps were recorded', flush=True)
            assert (recorded == 0) if args else (recorded > 0), (steps, recorded)
        before = processes(parent)
        victim = max(before)
        os.kill(before[victim], signal.SIGKILL)
        wait_until('all processes of the node are new', lambda: {k for k, p in processes(parent).items() if before.get(k) != p} == {k for k in before if k[0] == victim[0]}, 60)
        wait_ready(parent, timeout=180)
        all_alike(want, ask_all([parent.port], bodies), f'{what}, after a loss')
        assert parent.stop() == 0, parent.output()[-3000:]


def test_pairs_of_nodes_of_several_ranks_on_a_gpu():
    """Each rank's heads of a prompt's KV go from GPU to GPU, by CUDA IPC."""
    check_pairs(LLAMA, 'ipc', (2, 2), n=3)
    check_pairs(QWEN, 'ipc', (2, 1), n=3)


def test_all_pairs_of_nodes_of_several_ranks_on_a_gpu_long():
    for model in LLAMA, QWEN, DEEPSEEK:
        check_pairs(model, 'ipc', (2, 2), (2, 1), (1, 2), (4, 2))
    check_pairs(QWEN, 'tcp', (2, 2), (1, 2))


def check_pairs(model, protocol, *pairs, n=4):
    need_gpu()
    bodies, want = asked_of_one(model, n)
    for prefill, decode in pairs:
        control = free_ports(1)[0]
        both = [side(model, role, (tp, 1), control, protocol, EXACT) for role, tp in (('prefill', prefill), ('decode', decode))]
        with closing(*both):
            for node in both:
                node.may_end_by_force = True
            wait_ready(*both, timeout=180)
            wait_sees(both, 2, timeout=60)
            got = parallel([lambda i=i, b=b: request(both[i % 2].port, 'POST', '/v1/completions', {**b, 'return_trace': True}) for i, b in enumerate(bodies)], 4)
            check(want, bodies, got, kv_bytes_per_token(model, decode, F32), protocol, same=alike)
        print(f'  {os.path.basename(os.path.dirname(model))} by {protocol}: {prefill} prefill ranks, {decode} decode ranks', flush=True)


def parent_ports(parent):
    return [n['http_port'] for n in request(parent.port, 'GET', '/cluster')[2]['nodes']]


def rows_agree(ports):
    """Have the ranks counted as many rows sent as received, and as many of experts as all together? They fetch the numbers now and then. Rows of a step that was given up may have been sent only."""
    all_ranks = [metrics(p) for p in ports]
    computed, sent, received = (sum(m.get(f'baton_{name}_rows{of}_total', 0) for m in all_ranks) for name, of in (('moe', ''), ('ep', '_sent'), ('ep', '_received')))
    by_expert = sum(v for m in all_ranks for name, v in m.items() if name.startswith('baton_expert_rows_total{'))
    lost = sum(m['baton_group_lost_total{of="experts"}'] for m in all_ranks)
    return computed > received > 0 and sent >= received and (sent == received or lost > 0) and by_expert == computed


def group_of_port(port):
    return request(port, 'GET', '/cluster')[2]['group']
