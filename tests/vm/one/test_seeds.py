"""Seeds 001 and 003: the users' commands with --cache-transfer-protocol "rdma,ipc" and --rdma-comm-ports, on one machine."""
from rails import *
from seeds import SCRIPT, options

ASK = {'prompt': 'The capital of France is', 'max_tokens': 2, 'temperature': 0, 'return_trace': True}


def nics_of_script():
    """`export $(bash get_rdma_nics.sh gpu)`, with the machine's emulated devices counted."""
    done = subprocess.run(['bash', SCRIPT, 'gpu'], capture_output=True, text=True, env={**os.environ, 'BATON_RDMA_SOFTWARE': '1'})
    assert done.returncode == 0, (done.returncode, done.stderr)
    name, value = done.stdout.strip().split('=')
    return {name: value}


def start(role, argv, env=None):
    port = int(argv[argv.index('--port') + 1])
    node = Process([BIN, 'serve', *argv, '--compute-threads', '1', '--cpu-isa', ISA], env, role)
    node.port = port
    return node


def answered_by_both(nodes, transport):
    wait_ready(*nodes, timeout=120)
    wait_sees(nodes, 2, timeout=60)
    for n in nodes:
        status, _, body = request(n.port, 'POST', '/v1/completions', ASK, timeout=600)
        assert status == 200, body
        t = body['baton']
        assert t['prefill_node'] != t['decode_node'] and t['transport'] == transport and t['recomputed_tokens'] == 0, t
        print(f'  asked at {n.port}: {t}', flush=True)


def seed_001(model, kv_gib):
    """With Redis. The two commands name the same ports because they are for two hosts; on one host the second gets others."""
    env = nics_of_script()
    print(f'  {env}', flush=True)
    with closing(Redis()) as redis:
        common = dict(model=model, scheduler_port=redis.port, served_model_name='m', kv_cache_memory=kv_gib)
        given = dict(engine_worker_queue_port='26611,26612', rdma_comm_ports='8671,8672', pd_comm_port=2335)
        p = start('prefill', options('001', 'prefill', **common), env)
        d = start('decode', options('001', 'decode', **common, **given), env)
        with closing(p, d) as nodes:
            answered_by_both(nodes, 'ipc')


def test_seed_001():
    seed_001(TINY, 0.02)   # to register more takes an emulated CPU half a minute


def test_seed_001_long():
    seed_001(smollm2(), 0.2)


def seed_003(model):
    """Without Redis."""
    common = dict(model=model, served_model_name='m', max_model_len=1024, num_gpu_blocks_override=40, cache_transfer_protocol='rdma,ipc')
    p = start('prefill', options('003', 'prefill', **common, rdma_comm_ports='7671'))
    d = start('decode', options('003', 'decode', **common, rdma_comm_ports='7672'))
    with closing(p, d) as nodes:
        answered_by_both(nodes, 'ipc')


def test_seed_003():
    seed_003(TINY)


def test_seed_003_long():
    seed_003(smollm2())
