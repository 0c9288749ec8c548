"""Prefill on one host, decode on the other, each a node of 1, 2 or 4 ranks (--tensor-parallel-size): every pair of ranks that share heads moves its part over the wire."""
from hosts import *

SIZES = 1, 2, 4
# UCX fills the receive queues of each connection entry by entry. There are up to 16 connections at once here, which an emulated CPU would not have ready in time.
SHORT_QUEUES = {'UCX_RC_VERBS_RX_QUEUE_LEN': '256', 'UCX_UD_VERBS_RX_QUEUE_LEN': '256'}


def until_all_connected(prefill, decode):
    """Which of the ranks that have a head or the latent sends it depends on the request: after so many all of up to four have (missed once in 1,000 times)."""
    return 8 * max(prefill, decode)


def tensor(size):
    return ['--tensor-parallel-size', str(size)]


def pairs_equal_one(name, protocol, sizes):
    """sizes: (ranks of the prefill node, ranks of the decode node)"""
    model, prompts, want, _ = load(f'pair_{name}')
    failed = []
    wait_for_far_side()
    for prefill, decode in sizes:
        print(f'  {name}: prefill TP{prefill}, decode TP{decode}', flush=True)
        began = time.monotonic()
        try:
            with two_nodes(model, protocol, (), tensor(prefill), tensor(decode), SHORT_QUEUES, until_all_connected(prefill, decode), 300) as nodes:
                ask_over_the_wire(nodes, protocol, prompts, want, kv_bytes_per_token(model, decode), 2)
            print(f'  equal, {time.monotonic() - began:.1f} s', flush=True)
        except (AssertionError, OSError, RuntimeError) as e:    # the others are tried as well
            failed.append((prefill, decode, f'{type(e).__name__}: {e}'[:500]))
    assert not failed, (name, protocol, failed)


def test_pairs_rdma():
    pairs_equal_one('qwen3_moe', 'rdma', [(1, 4), (4, 2)])
    pairs_equal_one('deepseek_v3', 'rdma', [(2, 1)])


def test_pairs_ucx():
    pairs_equal_one('llama', 'ucx', [(2, 4)])
    pairs_equal_one('deepseek_v3', 'ucx', [(4, 2)])


def all_pairs(name, protocol):
    pairs_equal_one(name, protocol, [(p, d) for p in SIZES for d in SIZES])


def test_all_pairs_of_qwen3_moe_rdma_long():
    all_pairs('qwen3_moe', 'rdma')


def test_all_pairs_of_llama_rdma_long():
    all_pairs('llama', 'rdma')


def test_all_pairs_of_deepseek_v3_rdma_long():
    all_pairs('deepseek_v3', 'rdma')


def test_all_pairs_of_qwen3_moe_ucx_long():
    all_pairs('qwen3_moe', 'ucx')


def test_all_pairs_of_llama_ucx_long():
    all_pairs('llama', 'ucx')


def test_all_pairs_of_deepseek_v3_ucx_long():
    all_pairs('deepseek_v3', 'ucx')
