"""One virtual machine with prefill and decode at the two ends of its rails: answers equal those of one mixed node bit for bit, and the devices'
counters account for the KV bytes that the traces report, over the named transport and no other."""
from rails import *

SHORT_STEPS = ['--max-num-batched-tokens', '64']     # a busy host emulates slowly, and a node that tells no progress is taken for lost
SMALL_STEPS = ['--max-num-batched-tokens', '16', '--compute-threads', '2']
SLACK = 300_000  # control messages of a test: hello, grants, queue pairs, node protocol


def check_wire(protocol, moved, traffic):
    t = traffic.since()
    print(f'  {protocol}: {moved} KV bytes; left through the prefill end {t["near"]} bytes in {t["packets"]} RoCE packets, through the loopback {t["lo"]}', flush=True)
    if protocol == 'tcp':
        assert t['lo'] >= moved and t['near'] + t['far'] < SLACK, t
    else:
        assert t['near'] >= moved and t['packets'] * 4096 >= moved, t  # a RoCE packet has at most 4,096 bytes of payload
        assert t['far'] < moved / 4 + SLACK, t                         # acknowledgements


def equal(name, protocol, concurrency, args=(), env=None, layers=1.0, then=lambda nodes: None):
    """layers: that are moved, of those that the model has."""
    model, prompts, want, per_token = load(name)
    with split(model, protocol, args, env=env) as nodes:
        traffic = Traffic()
        answers = ask([n.port for n in nodes], prompts, concurrency)
        moved = check(want, prompts, answers, round(per_token * layers), protocol, BLOCK)
        assert moved > 0
        check_wire(protocol, moved, traffic)
        counted = metrics(nodes[0].port)
        sent = sum(v for k, v in counted.items() if k.startswith('baton_kv_transfer_bytes_total') and f'"{protocol}"' in k)
        assert sent >= moved, (sent, moved, {k: v for k, v in counted.items() if 'kv_transfer' in k})
        then(nodes)


def test_tiny_rdma():
    equal('tiny', 'rdma', 4, SHORT_STEPS)


def test_tiny_rdma_long():
    equal('tiny_long', 'rdma', 8)


def test_tiny_rdma_cm_long():
    equal('tiny_long', 'rdma', 8, env={'BATON_RDMA_CM': '1'})


def test_tiny_ucx():
    equal('tiny', 'ucx', 4, SHORT_STEPS)


def test_tiny_ucx_long():
    equal('tiny_long', 'ucx', 8)


def test_tiny_tcp_long():
    equal('tiny_long', 'tcp', 8)


def drafts(protocol):
    """The draft layer's KV, that of a fourth layer, travels with the model's, and the decode node drafts with it."""
    def drafted(nodes):
        assert metrics(nodes[1].port)['baton_spec_decode_num_draft_tokens_total'] > 0
    config = json.dumps(dict(method='mtp', num_speculative_tokens=2))
    equal('pair_deepseek_v3', protocol, 2, [*SHORT_STEPS, '--speculative-config', config], layers=4 / 3, then=drafted)


def test_drafts_rdma():
    drafts('rdma')


def test_drafts_ucx_long():
    drafts('ucx')


def test_drafts_tcp_long():
    drafts('tcp')


def test_smollm2_rdma_long():
    equal('smollm2', 'rdma', 1, SMALL_STEPS)


def test_smollm2_ucx_long():
    equal('smollm2', 'ucx', 1, SMALL_STEPS)


def test_smollm2_tcp_long():
    equal('smollm2', 'tcp', 1, SMALL_STEPS)
