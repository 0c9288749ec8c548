"""FastDeploy's native form against real nodes: a client of its own, equal tokens, limits, and what all requests are promised."""
import subprocess
from test_pass import SLOW, LoadingNode, at, slow_model, wait_live
from test_router import Router

from harness import *

SIZE = ['--max-model-len', '1024', '--max-num-seqs', '32', '--num-gpu-blocks-override', '300']
CHAT = '/v1/chat/completions'


def python_with_requests():
    for python in (os.environ.get('BATON_OPENAI_PYTHON'), sys.executable):
        if python and subprocess.run([python, '-c', 'import requests'], capture_output=True).returncode == 0:
            return python
    raise Skip('neither BATON_OPENAI_PYTHON nor this Python has the package requests')


def lines(port, body, headers=None, path=CHAT):
    """Yields the items of a stream as they come."""
    c = http.client.HTTPConnection('127.0.0.1', port, timeout=60)
    try:
        c.request('POST', path, json.dumps({**body, 'stream': True}), {'Content-Type': 'application/json', **(headers or {})})
        r = c.getresponse()
        assert r.status == 200 and r.getheader('x-baton-stream') == 'lines' and r.getheader('Content-Type').startswith('text/event-stream'), (r.status, r.read()[:500])
        for line in r:
            yield json.loads(line)
    finally:
        c.close()


def refused(port, body, status, text, headers=None):
    got, _, answer = request(port, 'POST', CHAT, body, headers)
    assert got == answer['error_code'] == status and text in answer['error_msg'] and answer['req_id'], (got, answer)
    return answer


def test_a_client_by_requests_on_a_pair():
    python = python_with_requests()
    with pair(smollm2(), 'ipc', SIZE) as nodes:
        for n in nodes:
            r = subprocess.run([python, os.path.join(HERE, 'native_client.py'), f'http://127.0.0.1:{n.port}'], capture_output=True, text=True, timeout=120)
            assert r.returncode == 0, f'{n.name}:\n{r.stdout}\n{r.stderr[-3000:]}'
            print(f'  {n.name}: {r.stdout.splitlines()[-1]}')
        trace = request(nodes[0].port, 'POST', CHAT, dict(text='Hello there', max_dec_len=4, return_trace=True))[2]['baton']
        assert trace['prefill_node'] != trace['decode_node'] and trace['kv_bytes'] > 0, trace


def test_tokens_are_those_of_the_other_form():
    """Greedy and drawn, whole and in parts, at a node and through a router."""
    router = Router()
    with closing(router, Node(TINY, args=router.at()), Node(TINY, args=router.at())) as (_, node, other):
        wait_ready(router, node, other)
        for more, same in ((dict(temperature=0), dict(temperature=0)),
                           (dict(temperature=0.9, topp=0.8, infer_seed=7, penalty_score=1.2, frequency_score=0.3, presence_score=0.2),
                            dict(temperature=0.9, top_p=0.8, seed=7, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2))):
            body = dict(input_ids=[5, 6, 7, 8], max_dec_len=20, ignore_eos=True, **more)
            want = request(node.port, 'POST', '/v1/completions', dict(prompt=[5, 6, 7, 8], max_tokens=20, min_tokens=1, ignore_eos=True, return_token_ids=True, **same))[2]
            for port in (node.port, router.port):
                whole = request(port, 'POST', CHAT, body)[2]
                *_, last = lines(port, body)
                assert whole['tokens_all_ids'] == last['tokens_all_ids'] == want['choices'][0]['token_ids'], (more, port, whole, want)
        # a stream of events stays one
        events = list(stream(node.port, '/v1/completions', dict(prompt=[5], max_tokens=3, ignore_eos=True)))
        assert all('choices' in e for e in events)


def slow_steps(file):
    """A curve by which a token takes 20 ms, however fast the machine is."""
    json.dump({'prompt': {}, 'decode': {}, 'fixed_us': 20000}, file)
    file.flush()
    return file.name


def test_every_limit_has_its_error():
    limits = ['--max-model-len', '64', '--max-concurrency', '2', '--max-num-seqs', '1']
    with tempfile.NamedTemporaryFile('w', suffix='.json') as curve, \
            closing(Node(TINY, args=[*limits, '--pace', slow_steps(curve)], env={'MAX_DEC_LEN': '40', 'BATON_API_KEY': 'k'})) as n:
        wait_until('ready', lambda: request(n.port, 'GET', '/ready')[0] == 200)
        key = {'Authorization': 'Bearer k'}
        long = dict(input_ids=[5] * 10, max_dec_len=40, ignore_eos=True)
        refused(n.port, dict(text='x', req_id='r'), 401, 'API key')
        refused(n.port, dict(text='x', max_dec_len=41), 400, 'max_dec_len is 41, but this server gives answers of at most 40 tokens (MAX_DEC_LEN, --max-dec-len)', key)
        refused(n.port, dict(text='x', min_dec_len=41), 400, 'min_dec_len is 41', key)
        refused(n.port, dict(input_ids=[5] * 64), 400, 'input_ids has 64 tokens, but this server takes at most 64 (MAX_SEQ_LEN', key)
        refused(n.port, dict(input_ids=[5] * 30, max_dec_len=35), 400, 'max_dec_len is 35, but after the 30 tokens of input_ids only 34 more fit', key)
        refused(n.port, dict(text='x', model='other'), 404, 'other', key)
        status, _, openai = request(n.port, 'POST', '/v1/completions', dict(prompt='x', max_tokens=41), key)
        assert status == 400 and openai['error']['param'] == 'max_tokens' and '--max-dec-len' in openai['error']['message'], openai
        first, second = lines(n.port, {**long, 'req_id': 'one'}, key), lines(n.port, {**long, 'req_id': 'two'}, key)
        assert next(first)['req_id'] == 'one'
        refused(n.port, {**long, 'req_id': 'one'}, 409, "req_id is 'one', which another request that still runs", key)
        done = threading.Thread(target=lambda: list(second))
        done.start()
        wait_until('it is full', lambda: metrics(n.port, key)['baton_requests_live'] == 2, 10, 0.005)
        assert 'requests' in refused(n.port, {**long, 'req_id': 'three'}, 429, '', key)['error_msg']
        first.close()   # its client leaves: the work stops, and its name is free
        done.join(30)
        wait_until('nothing runs', lambda: metrics(n.port, key)['baton_requests_live'] == 0, 10)
        assert len(list(lines(n.port, {**long, 'req_id': 'one'}, key))) == 40
        status, _, late = request(n.port, 'POST', CHAT, long, {**key, 'x-baton-deadline-ms': '1'})
        assert status == late['error_code'] in (429, 504) and 'x-baton-deadline-ms is 1' in late['error_msg'], late
        refused(n.port, long, 400, 'x-baton-resume', {**key, 'x-baton-resume': '1'})


def test_a_timeout_ends_what_hangs():
    with closing(Node(TINY, env={'BATON_ENGINE_FAULT': 'hang@3'})) as n:
        wait_ready(n)
        *items, last = lines(n.port, dict(input_ids=[5, 6], max_dec_len=50, ignore_eos=True, timeout=1))
        assert items and all(i['error_code'] == 0 for i in items) and last['error_code'] == 504 and 'timeout is 1, and no token came' in last['error_msg'], last
        n.kill()  # its engine would hold its end up


def test_a_loading_node_passes_lines():
    """... line by line; when the other node dies the client gets an error line."""
    body = dict(input_ids=[5, 6, 7], max_dec_len=400, ignore_eos=True, req_id='mine')
    with slow_model() as folder, closing(Redis()) as redis, closing(Node(smollm2(), args=at(redis))) as node:
        wait_ready(node)
        with closing(LoadingNode(folder, args=[*at(redis), *SLOW])) as loading:
            wait_live(loading)
            *_, last = lines(loading.port, {**body, 'max_dec_len': 5})
            assert last['is_end'] == 1 and last['tokens_all_num'] == 5 and last['req_id'] == 'mine', last
            status, _, whole = request(loading.port, 'POST', CHAT, {**body, 'max_dec_len': 5})
            assert status == 200 and whole['tokens_all_ids'] == last['tokens_all_ids'], whole
            items = lines(loading.port, body)
            assert next(items)['is_end'] == 0
            node.kill()
            *_, last = items
            assert last['error_code'] == 502 and 'send it again' in last['error_msg'] and last['req_id'] == 'mine', last
            refused(loading.port, body, 503, 'being loaded')
