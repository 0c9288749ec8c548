"""Two virtual machines: prefill on one host, decode on the other, answers equal to one mixed node's; the bytes crossed the wire as the traces say."""
from hosts import *


def equal(name, protocol, concurrency, args=()):
    model, prompts, want, per_token = load(name)
    wait_for_far_side()
    with two_nodes(model, protocol, args) as nodes:
        ask_over_the_wire(nodes, protocol, prompts, want, per_token, concurrency)


def test_tiny_rdma():
    equal('tiny_long', 'rdma', 4)


def test_tiny_ucx():
    equal('tiny_long', 'ucx', 4)


def test_tiny_tcp():
    equal('tiny_long', 'tcp', 4)


def test_smollm2_rdma():
    equal('smollm2', 'rdma', 1, ['--max-num-batched-tokens', '16'])


def test_smollm2_ucx():
    equal('smollm2', 'ucx', 1, ['--max-num-batched-tokens', '16'])


def test_smollm2_tcp():
    equal('smollm2', 'tcp', 1, ['--max-num-batched-tokens', '16'])
