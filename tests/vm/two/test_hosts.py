"""Two virtual machines: prefill on one host, decode on the other, answers equal to one mixed node's; the bytes crossed the wire as the traces say."""
from hosts import *


def equal(name, protocol, concurrency, args=()):
    model, prompts, want, per_token = load(name)
    wait_for_far_side()
    with two_nodes(model, protocol, args) as nodes:
        before = counters(1), counters(2)
        jobs = [lambda b=b, n=nodes[i % 2]: n.request('POST', '/v1/completions', {**b, 'return_trace': True}) for i, b in enumerate(prompts)]
        moved = check(want, prompts, parallel(jobs, concurrency), per_token, protocol)
        after = counters(1), counters(2)
        here, there = ({k: a[k] - b[k] for k in a} for a, b in zip(after, before))
        print(f'  {protocol}: {moved} KV bytes; host 1 sent {here["tx"]} bytes, {here["sent"]} RoCE packets; host 2 took {there["rx"]} bytes, {there["received"]} RoCE packets', flush=True)
        assert moved > 0 and here['tx'] >= moved and there['rx'] >= moved, (here, there, moved)
        if protocol == 'tcp':
            assert here['sent'] * 4096 < moved, here
        else:  # a RoCE packet has at most 4,096 bytes of payload
            assert here['sent'] * 4096 >= moved and there['received'] * 4096 >= moved, (here, there, moved)


def test_tiny_rdma():
    equal('tiny', 'rdma', 4)


def test_tiny_ucx():
    equal('tiny', 'ucx', 4)


def test_tiny_tcp():
    equal('tiny', 'tcp', 4)


def test_smollm2_rdma():
    equal('smollm2', 'rdma', 1, ['--max-num-batched-tokens', '16'])


def test_smollm2_ucx():
    equal('smollm2', 'ucx', 1, ['--max-num-batched-tokens', '16'])


def test_smollm2_tcp():
    equal('smollm2', 'tcp', 1, ['--max-num-batched-tokens', '16'])
