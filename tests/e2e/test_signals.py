"""Signals in every phase of a node's life: while it loads, while it works, twice; also to the node that serves the directory."""
from harness import *


def long_request(port, n_tokens, results):
    try:
        body = dict(model='m', prompt=[5 + i % 1000 for i in range(n_tokens)], max_tokens=16, temperature=0, ignore_eos=True, return_token_ids=True)
        results.append(request(port, 'POST', '/v1/completions', body))
    except (OSError, http.client.HTTPException) as e:
        results.append(e)


def begin(port, n_tokens=1400):
    results = []
    t = threading.Thread(target=long_request, args=(port, n_tokens, results), daemon=True)
    t.start()
    return t, results


def busy(node):
    return metrics(node.port).get('baton_requests_live', 0) > 0 and node


def test_second_signal_while_working():
    with pair(smollm2()) as (prefill, decode):
        prefill.may_end_by_force = True # its engine may be inside a long step
        t, _ = begin(prefill.port)
        wait_until('work', lambda: busy(prefill))
        prefill.kill(signal.SIGTERM)
        time.sleep(0.2)
        prefill.kill(signal.SIGTERM)
        assert prefill.p.wait(20) == 0, prefill.p.returncode
        t.join()
        assert decode.stop() == 0


def test_first_signal_while_working_lets_requests_end():
    with pair(smollm2()) as (prefill, decode):
        t, results = begin(prefill.port, 500)
        wait_until('work', lambda: busy(prefill))
        assert prefill.stop(30) == 0
        t.join()
        status, _, body = results[0]
        assert status == 200 and len(body['choices'][0]['token_ids']) == 16, results


def test_signal_while_loading():
    for pause in (0.0, 0.02, 0.05, 0.1, 0.2):
        node = Node(smollm2())
        time.sleep(pause)
        node.kill(signal.SIGTERM)
        status = node.p.wait(20)
        assert status in (-signal.SIGTERM, 130, 0), (pause, status, node.output()) # the first: before there was a handler
        node.close()


def test_signal_while_a_large_model_loads():
    """Weights that take a minute to make: a signal ends the node within a second or so, whenever it comes."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(os.path.join(DATA, 'configs', 'llama-3-8b', 'config.json'), folder)
        for pause in 0.5, 3:
            for sig in signal.SIGTERM, signal.SIGINT:
                node = Node(folder, args=['--load-format', 'dummy', '--quantization', 'wint4', '--num-gpu-blocks-override', '64', '--max-model-len', '512'])
                wait_until('live', lambda: request(node.port, 'GET', '/live', timeout=2)[0] == 200 or not node.alive())
                time.sleep(pause)
                assert node.alive(), node.output()
                node.may_end_by_force = True # a worker may be inside a long conversion
                t = time.time()
                node.kill(sig)
                status = node.p.wait(60)
                took = time.time() - t
                print(f'  {sig.name} after {pause} s of loading: ended after {took:.2f} s')
                assert status == 130 and took < 2, (status, took, node.output()) # 1.2 s, and what a busy machine adds
                node.close()


@alone
def test_signal_between_model_and_ready():
    """Many million KV blocks take about a second to make: a signal that comes meanwhile is seen before the node is ready."""
    args = ['--block-size', '1', '--kv-cache-memory', '6']
    for sig in signal.SIGTERM, signal.SIGINT:
        node = Node(TINY, args=args)
        node.may_end_by_force = True # the worker cannot be interrupted
        with closing(node):
            wait_until('the model is loaded', lambda: 'model loaded' in node.output(), 20, 0.002)
            node.kill(sig)
            t = time.time()
            assert node.p.wait(10) == 130 and 'node ready' not in node.output(), node.output()
            assert time.time() - t < 2, node.output()
    with closing(Node(TINY, args=args)) as node:
        wait_ready(node)


def test_idle_pair_stops_cleanly():
    for _ in range(3):
        with pair(TINY) as (prefill, decode):
            assert prefill.stop() == 0 and decode.stop() == 0
