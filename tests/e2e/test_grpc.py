"""KServe's protocol over gRPC, with real clients: Triton's and grpcio. They have their own environment (BATON_GRPC_PYTHON, created by tests/run.sh)."""
import subprocess

from harness import *
from test_router import Router, up

SIZE = ['--max-model-len', '1024', '--max-num-seqs', '64', '--num-gpu-blocks-override', '400']


def need_client():
    python = os.environ.get('BATON_GRPC_PYTHON')
    if not python or not os.path.exists(python):
        raise Skip('BATON_GRPC_PYTHON does not name a Python with the packages grpcio and tritonclient[grpc]')
    return python


def run_client(grpc_port, http_port, n_streams=1, *checks, env=None):
    p = subprocess.run([need_client(), os.path.join(HERE, 'grpc_client.py'), *map(str, (grpc_port, http_port, n_streams)), *checks], capture_output=True, text=True, timeout=600,
                       env={**os.environ, 'GRPC_VERBOSITY': 'NONE', **(env or {})})
    assert p.returncode == 0, f'{p.stdout[-4000:]}\n{p.stderr[-3000:]}'
    print(f'  {grpc_port}: {p.stdout.splitlines()[-1]}')


def grpc_port():
    port = free_ports(1)[0]
    return port, ['--grpc-port', str(port)]


def test_tritons_client_and_grpcio():
    need_client()
    port, args = grpc_port()
    with closing(Node(smollm2(), args=[*SIZE, *args])) as node:
        wait_ready(node)
        run_client(port, node.port, 12)


def test_a_hundred_at_once():
    need_client()
    port, args = grpc_port()
    with closing(Node(TINY, args=['--max-model-len', '256', '--max-num-seqs', '64', '--num-gpu-blocks-override', '200', *args])) as node:
        wait_ready(node)
        run_client(port, node.port, 100, 'many_on_one_stream', 'many_streams', 'many_calls', 'native_many')
        counted = metrics(node.port)
        assert counted['baton_grpc_calls_total{method="inference.GRPCInferenceService/ModelStreamInfer",code="OK"}'] >= 100, counted
        assert counted['baton_grpc_answer_bytes'] == 0


def test_both_nodes_of_a_pair():
    """The work of a request is split, whichever node it came to."""
    need_client()
    (a, a_args), (b, b_args) = grpc_port(), grpc_port()
    with pair(TINY, args=['--max-model-len', '256'], prefill_args=a_args, decode_args=b_args) as nodes:
        for port, node in ((a, nodes[0]), (b, nodes[1])):
            run_client(port, node.port, 8, 'completion', 'streamed_completion', 'many_on_one_stream', 'many_calls')


def test_a_router_and_its_processes():
    need_client()
    port, args = grpc_port()
    router = Router('--workers', '2', *args)
    node = Node(TINY, args=['--max-model-len', '256', *router.at()])
    with closing(router, node):
        wait_ready(node)
        wait_until('the router is ready', lambda: request(router.port, 'GET', '/ready', timeout=2)[0] == 200)
        for _ in range(4):    # the kernel chooses the process
            run_client(port, router.port, 8, 'is_live_and_ready', 'completion', 'streamed_completion', 'many_on_one_stream')


def test_a_router_without_nodes_is_not_ready():
    need_client()
    port, args = grpc_port()
    with closing(Router(*args)) as router:
        up(router)
        run_client(port, router.port, 1, 'is_live_but_not_ready')


def test_the_port_before_ranks():
    need_client()
    port, args = grpc_port()
    parent = Process([BIN, 'serve', '--model', TINY, '--served-model-name', 'm', '--host', '127.0.0.1', '--port', str(free_ports(1)[0]), '-dp', '2', '-ep', '--max-model-len', '256',
                      '--compute-threads', '1', *args], name='parent')
    parent.port = int(parent.argv[parent.argv.index('--port') + 1])
    with closing(parent):
        wait_ready(parent)
        run_client(port, parent.port, 8, 'is_live_and_ready', 'completion', 'many_on_one_stream')


def test_keys():
    need_client()
    port, args = grpc_port()
    with closing(Node(TINY, args=['--max-model-len', '256', *args], env={'BATON_API_KEY': 'a key of these tests'})) as node:
        wait_ready(node)
        run_client(port, node.port, 1, 'keys', env={'KEY': 'a key of these tests'})


def test_a_node_that_stops_finishes_its_streams():
    python = need_client()
    port, args = grpc_port()
    with closing(Node(TINY, args=['--max-model-len', '256', *args, *paced()])) as node:
        wait_ready(node)
        client = Process([python, os.path.join(HERE, 'grpc_client.py'), str(port), str(node.port), '1', 'to_the_end'], {'GRPC_VERBOSITY': 'NONE'}, 'client')
        with closing(client):
            wait_until('a stream has begun', lambda: 'begun' in client.output() or not client.alive())
            node.kill(signal.SIGTERM)
            assert client.p.wait(60) == 0, client.output()
            assert node.p.wait(20) == 0, node.output()[-3000:]


def test_a_second_signal_ends_streams():
    python = need_client()
    port, args = grpc_port()
    with closing(Node(TINY, args=['--max-model-len', '256', *args, *paced()])) as node:
        wait_ready(node)
        client = Process([python, os.path.join(HERE, 'grpc_client.py'), str(port), str(node.port), '1', 'to_the_end'], {'GRPC_VERBOSITY': 'NONE'}, 'client')
        with closing(client):
            wait_until('a stream has begun', lambda: 'begun' in client.output() or not client.alive())
            node.kill(signal.SIGTERM)
            wait_until('the signal has come', lambda: 'signal=SIGTERM' in node.output())
            node.kill(signal.SIGTERM)
            assert node.p.wait(20) == 0, node.output()[-3000:]
            assert client.p.wait(60) == 1, client.output()
            assert 'shutting down' in client.output(), client.output()


def test_a_port_that_is_taken_stops_the_start():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        s.listen()
        with closing(Node(TINY, args=['--grpc-port', str(s.getsockname()[1])])) as node:
            assert node.p.wait(20) == 1 and '--grpc-port' in node.output(), node.output()


def test_http_at_the_grpc_port_is_told_so():
    port, args = grpc_port()
    with closing(Node(TINY, args=['--max-model-len', '256', *args])) as node:
        wait_ready(node)
        status, _, text = request(port, 'GET', '/v1/models')
        assert status == 400 and 'gRPC' in text, (status, text)
