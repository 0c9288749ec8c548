"""Decode nodes whose KV blocks run out: sequences that lose theirs are computed again where they are, or go on at another node; every answer is right and none waits for ever."""
from harness import *
from test_kv_faults import ask, check_answers, check_idle, ends_well, tokens_of, total

# Two contexts of 256 tokens fit on a decode node.
SMALL = ['--max-model-len', '256', '--block-size', '16', '--max-num-seqs', '8', '--max-num-batched-tokens', '64']
PACED = paced()


def bodies_that_outgrow(n, seed, tokens):
    """Each starts with 3 blocks and ends with up to 14."""
    r = random.Random(seed)
    return [dict(model='m', prompt=[r.randrange(5, 500) for _ in range(40)], max_tokens=r.choice(tokens), ignore_eos=True, return_token_ids=True,
                 **r.choice([dict(temperature=0), dict(temperature=0.9, seed=r.randrange(1 << 31))])) for _ in range(n)]


def preemptions(nodes, action):
    return sum(total(n, 'baton_preemptions_total', f'action="{action}"') for n in nodes)


def reference(bodies):
    with closing(Node(TINY, args=SMALL)) as mixed:
        wait_ready(mixed)
        return [tokens_of(a) for a in parallel([lambda b=b: ask(mixed.port, b) for b in bodies], 8)]


def a_node(role, n_blocks, *where):
    return Node(TINY, role, [*SMALL, *PACED, '--num-gpu-blocks-override', str(n_blocks), *where])


def check_pressure(nodes, bodies, want, answers, took):
    check_answers(bodies, want, answers)
    stayed, went = preemptions(nodes, 'recompute'), preemptions(nodes, 'hand_back')
    lost = sum(total(n, 'baton_engine_preemptions_total') for n in nodes)
    moves = sum(a['baton']['moves'] for a in answers)
    fetched = sum(a['baton']['cached_tokens_by_tier']['peer'] for a in answers)
    print(f'  {len(bodies)} requests in {took:.1f} s, all right: sequences lost their blocks {lost:.0f} times, {stayed:.0f} stayed and {went:.0f} went on elsewhere, with {fetched} tokens of KV that '
          'were fetched', flush=True)
    assert stayed > 0 and went > 0 and moves == 0, (stayed, went, moves)
    assert stayed <= lost
    check_idle(nodes)
    ends_well(nodes)


def test_requests_that_outgrow_two_decode_nodes():
    """The first is full of them, with nowhere else to go, when the second comes."""
    bodies, control = bodies_that_outgrow(8, 5, [180]), free_ports(1)[0]
    want = reference(bodies)
    first = a_node('prefill', 200, '--engine-worker-queue-port', str(control))
    nodes = [first, a_node('decode', 32, '--innode-prefill-ports', str(control))]
    with contextlib.ExitStack() as stack:
        for n in nodes:
            stack.enter_context(closing(n))
        wait_ready(*nodes)
        wait_sees(nodes, 2)
        answers, t0 = [], time.monotonic()
        t = threading.Thread(target=lambda: answers.extend(parallel([lambda i=i, b=b: ask(nodes[i % 2].port, b) for i, b in enumerate(bodies)], len(bodies))))
        t.start()
        wait_until('some have nowhere to go', lambda: preemptions(nodes, 'recompute') >= 2, 20, 0.01)
        assert preemptions(nodes, 'hand_back') == 0
        nodes.append(stack.enter_context(closing(a_node('decode', 32, '--innode-prefill-ports', str(control)))))
        wait_ready(nodes[2])
        t.join(60)
        assert not t.is_alive(), 'a request hangs'
        check_pressure(nodes, bodies, want, answers, time.monotonic() - t0)


def test_requests_that_outgrow_six_decode_nodes_long():
    bodies, control = bodies_that_outgrow(2000, 6, [40, 180]), free_ports(1)[0]
    want = reference(bodies)
    nodes = [a_node('prefill', 200, '--engine-worker-queue-port', str(control))]
    nodes += [a_node(role, size, '--innode-prefill-ports', str(control)) for role, size in [('prefill', 200)] * 5 + [('decode', 32)] * 6]
    with closing(*nodes):
        wait_ready(*nodes)
        wait_sees(nodes, 12)
        t0 = time.monotonic()
        answers = parallel([lambda i=i, b=b: ask(nodes[i % 12].port, b) for i, b in enumerate(bodies)], 80)
        check_pressure(nodes, bodies, want, answers, time.monotonic() - t0)
