"""Decode nodes whose KV blocks run out: sequences that lose theirs are computed again where they are, or go on at another node; every answer is right and none waits for ever."""
from harness import *
from test_kv_faults import ask, check_answers, check_idle, ends_well, tokens_of, total

# Two contexts of 256 tokens fit on a decode node.
SMALL = ['--max-model-len', '256', '--block-size', '16', '--max-num-seqs', '8', '--max-num-batched-tokens', '64']
PACED = ['--pace', os.path.join(DATA, 'pace', 'quick.json')]


def bodies_that_outgrow(n, seed):
    """Each starts with 3 blocks and ends with up to 14."""
    r = random.Random(seed)
    return [dict(model='m', prompt=[r.randrange(5, 500) for _ in range(40)], max_tokens=r.choice([40, 180]), ignore_eos=True, return_token_ids=True,
                 **r.choice([dict(temperature=0), dict(temperature=0.9, seed=r.randrange(1 << 31))])) for _ in range(n)]


def preemptions(nodes, action):
    return sum(total(n, 'baton_preemptions_total', f'action="{action}"') for n in nodes)


def outgrow(n, n_decodes, n_entries, concurrency, seed):
    bodies = bodies_that_outgrow(n, seed)
    with closing(Node(TINY, args=SMALL)) as mixed:
        wait_ready(mixed)
        want = [tokens_of(a) for a in parallel([lambda b=b: ask(mixed.port, b) for b in bodies], 8)]
    control = free_ports(1)[0]
    first = Node(TINY, 'prefill', [*SMALL, *PACED, '--num-gpu-blocks-override', '200', '--engine-worker-queue-port', str(control)])
    prefills = [first] + [Node(TINY, 'prefill', [*SMALL, *PACED, '--num-gpu-blocks-override', '200', '--innode-prefill-ports', str(control)]) for _ in range(n_entries - n_decodes - 1)]
    decodes = [Node(TINY, 'decode', [*SMALL, *PACED, '--num-gpu-blocks-override', '32', '--innode-prefill-ports', str(control)]) for _ in range(n_decodes)]
    nodes = [*prefills, *decodes]
    with closing(*nodes):
        wait_ready(*nodes)
        wait_sees(nodes, len(nodes))
        t0 = time.monotonic()
        answers = parallel([lambda i=i, b=b: ask(nodes[i % len(nodes)].port, b) for i, b in enumerate(bodies)], concurrency)
        took = time.monotonic() - t0
        check_answers(bodies, want, answers)
        stayed, went = preemptions(nodes, 'recompute'), preemptions(nodes, 'hand_back')
        lost = sum(total(d, 'baton_engine_preemptions_total') for d in decodes)
        moves = sum(a['baton']['moves'] for a in answers)
        print(f'  {n} requests in {took:.1f} s, all right: sequences lost their blocks {lost:.0f} times, {stayed:.0f} stayed and {went:.0f} went on elsewhere', flush=True)
        assert stayed > 0 and went > 0 and moves == 0, (stayed, went, moves)
        assert stayed + went <= lost
        check_idle(nodes)
        ends_well(nodes)


def test_requests_that_outgrow_two_decode_nodes():
    outgrow(24, 2, 3, 14, 5)


def test_requests_that_outgrow_six_decode_nodes_long():
    outgrow(2000, 6, 12, 80, 6)
