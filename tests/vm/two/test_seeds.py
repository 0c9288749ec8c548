"""Seed 001 on two hosts as its document intends: the same ports on both, Redis on the first, KV over RDMA although shared memory is allowed."""
from hosts import *
from seeds import SCRIPT, options

ASK = {'prompt': 'The capital of France is', 'max_tokens': 2, 'temperature': 0, 'return_trace': True}


class OpenRedis(Process):
    """A Redis that host 2 reaches."""

    def __init__(self):
        if not shutil.which('redis-server'):
            raise Skip('redis-server is not installed')
        super().__init__(['redis-server', '--port', '6379', '--bind', '0.0.0.0', '--protected-mode', 'no', '--save', '', '--appendonly', 'no', '--dir', '/tmp'], name='redis')


def test_seed_001():
    model = smollm2()
    wait_for_far_side()
    line = on(1, 'env', 'BATON_RDMA_SOFTWARE=1', 'bash', SCRIPT, 'gpu').strip()
    assert line == 'KVCACHE_RDMA_NICS=rxe_w', line
    common = dict(model=model, served_model_name='m', kv_cache_memory='0.2', scheduler_host=ADDRESS[1])
    nodes = []
    with closing(OpenRedis()):
        try:
            for host, role in ((1, 'prefill'), (2, 'decode')):
                argv = options('001', role, **common)
                nodes.append(HostNode(host, None, role, [*argv, '--cpu-isa', ISA], port=int(argv[argv.index('--port') + 1]), as_given=True))
            wait_pair(nodes)
            for n in nodes:
                status, _, body = n.request('POST', '/v1/completions', ASK)
                assert status == 200, body
                t = body['baton']
                assert t['prefill_node'] != t['decode_node'] and t['transport'] == 'rdma' and t['recomputed_tokens'] == 0, t
                print(f'  asked at {n.name}: {t}', flush=True)
        except BaseException:
            for n in nodes:
                print(f'--- {n.name} ---\n{n.state()[1][-4000:]}', flush=True)
            raise
        finally:
            for n in nodes:
                n.close()
