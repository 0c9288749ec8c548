"""Signals in every phase of a node's life: while it loads, while it works, twice; also to the node that serves the directory."""
from harness import *
import sys


LIMIT_S = 1.0 # from a signal to the end of the process, at any moment without requests


def ends_in_time(moment, start, sig=signal.SIGTERM, status=130, by_force=True):
    """start() makes a process and returns it at the moment that is tested. The best of three tries counts: the limit is the program's, and what
    else the machine does at one of them is not."""
    spans = []
    while len(spans) < 3 and min(spans, default=LIMIT_S + 1) > LIMIT_S:
        process = start()
        process.may_end_by_force = by_force # a worker may be inside something long
        with closing(process):
            assert process.alive(), process.output()
            t = time.monotonic()
            process.kill(sig)
            got = process.p.wait(60)
            spans.append(time.monotonic() - t)
            output = process.output()
            assert got == status and (status == 0 or 'node ready' not in output.split('signal=')[-1]), (moment, got, output)
    print(f'  {sig.name} {moment}: ended after {", ".join(f"{s:.2f}" for s in spans)} s')
    assert min(spans) <= LIMIT_S, (moment, spans)


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


def test_second_signal_inside_a_long_step():
    """A step of many tokens cannot be interrupted; the second signal does not wait for it."""
    def start():
        node = Node(smollm2(), args=['--max-num-batched-tokens', '8192', '--max-model-len', '8192'])
        wait_ready(node)
        begin(node.port, 7000)
        wait_until('work', lambda: busy(node))
        time.sleep(0.3)
        node.kill(signal.SIGTERM)
        wait_until('it drains', lambda: 'signal=SIGTERM' in node.output(), 5, 0.01)
        time.sleep(0.1) # two signals at once are one
        return node
    ends_in_time('inside a step, the second', start, status=0)


def test_signal_while_generate_works():
    """Of a node without HTTP the first signal counts: nobody else waits for its answer."""
    def start():
        words = ' '.join(['word'] * 7000)
        p = Process([BIN, 'generate', smollm2(), '--raw', '--prompt', words, '--max-model-len', '8192', '--max-num-batched-tokens', '8192',
                     '--compute-threads', '1', '--log-level', 'info'], name='generate')
        wait_until('the model is loaded', lambda: 'node ready' in p.output(), 20, 0.01)
        time.sleep(0.3)
        return p
    for sig in signal.SIGTERM, signal.SIGINT:
        ends_in_time('inside a step of generate', start, sig)


@alone
def test_signal_while_nobody_reads_the_log():
    """The node cannot log another line, and ends nevertheless."""
    spans = []
    while len(spans) < 3 and min(spans, default=LIMIT_S + 1) > LIMIT_S:
        port, (reader, writer) = free_ports(1)[0], os.pipe()
        p = subprocess.Popen([BIN, 'serve', '--model', TINY, '--host', '127.0.0.1', '--port', str(port), '--max-model-len', '512'], stdout=writer, stderr=writer)
        try:
            wait_until('ready', lambda: request(port, 'GET', '/ready', timeout=2)[0] == 200)
            os.set_blocking(writer, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(writer, b'x' * 4096)
            os.set_blocking(writer, True)
            t = time.monotonic()
            p.send_signal(signal.SIGTERM)
            assert p.wait(20) == 0
            spans.append(time.monotonic() - t)
        finally:
            p.kill()
            p.wait()
            os.close(reader)
            os.close(writer)
    print(f'  SIGTERM while nobody reads the log: ended after {", ".join(f"{s:.2f}" for s in spans)} s')
    assert min(spans) <= LIMIT_S, spans


def test_signal_when_nothing_is_to_do():
    def start():
        node = Node(TINY)
        wait_ready(node)
        return node
    for sig in signal.SIGTERM, signal.SIGINT:
        ends_in_time('of an idle node', start, sig, 0, by_force=False)


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
    """Weights that take a minute to make: a signal ends the node within a second, whenever it comes."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(os.path.join(DATA, 'configs', 'llama-3-8b', 'config.json'), folder)
        for pause in 0.5, 3:
            def start():
                node = Node(folder, args=['--load-format', 'dummy', '--quantization', 'wint4', '--num-gpu-blocks-override', '64', '--max-model-len', '512'])
                wait_until('live', lambda: request(node.port, 'GET', '/live', timeout=2)[0] == 200 or not node.alive())
                time.sleep(pause)
                return node
            for sig in signal.SIGTERM, signal.SIGINT:
                ends_in_time(f'after {pause} s of loading', start, sig)


@alone
def test_signal_between_model_and_ready():
    """Many million KV blocks take about a second to make: a signal that comes meanwhile is seen before the node is ready."""
    args = ['--block-size', '1', '--kv-cache-memory', '6']

    def start():
        node = Node(TINY, args=args)
        wait_until('the model is loaded', lambda: 'model loaded' in node.output(), 20, 0.002)
        return node
    for sig in signal.SIGTERM, signal.SIGINT:
        ends_in_time('between model and ready', start, sig)
    with closing(Node(TINY, args=args)) as node:
        wait_ready(node)


def test_idle_pair_stops_cleanly():
    for _ in range(3):
        with pair(TINY) as (prefill, decode):
            assert prefill.stop() == 0 and decode.stop() == 0


def marked(mark):
    """The command lines of the living processes that inherited this from the test."""
    found = []
    for p in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError), open(f'/proc/{p}/environ', 'rb') as f, open(f'/proc/{p}/cmdline', 'rb') as words:
            if mark.encode() in f.read():
                found.append(words.read())
    return found


def test_tests_that_are_ended_leave_no_node_behind():
    """By a signal to the program that runs them, or with the script that runs it."""
    here = os.path.dirname(os.path.abspath(__file__))
    for jobs in ('1', '2'):
        for script in ('exec "$0" "$@"', '"$0" "$@" | cat'):
            mark = f'BATON_TEST_MARK={os.getpid()}-{jobs}-{len(script)}'
            p = Process(['bash', '-c', script, sys.executable, os.path.join(here, 'run.py'), '--jobs', jobs, 'test_a_killed_rank_of_a_parent_comes_back', 'test_a_stopped_rank_of_a_node'],
                        dict([mark.split('=')], BATON_TEST_ENDS_WITH_PARENT='1'), 'tests')
            with closing(p):
                wait_until('nodes run', lambda: any(b'serve' in words for words in marked(mark)), 30)
                p.kill(signal.SIGTERM)
                wait_until('nothing is left', lambda: not marked(mark), 20)
