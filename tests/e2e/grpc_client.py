"""Uses Triton's gRPC client, and grpcio itself, as their users would.
usage: grpc_client.py GRPC_PORT HTTP_PORT STREAMS [CHECK...]   (needs the packages grpcio and tritonclient[grpc])

STREAMS: how many to ask for at once. Without names of checks: those that need no key and a server that is ready."""
import concurrent.futures, json, os, queue, sys, time, urllib.request, uuid

import checks
import grpc
import numpy as np
import tritonclient.grpc as tritongrpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

PORT, HTTP, N_STREAMS = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
URL = f'127.0.0.1:{PORT}'
TEXT = 'The capital of France is'


def held_blocks():
    """KV blocks that are in use; all processes of a node have the same answer."""
    text = urllib.request.urlopen(f'http://127.0.0.1:{HTTP}/metrics').read().decode()
    return sum(float(l.rsplit(' ', 1)[1]) for l in text.splitlines() if l.startswith('baton_kv_blocks') and 'state="held"' in l)


def metric(name):
    text = urllib.request.urlopen(f'http://127.0.0.1:{HTTP}/metrics').read().decode()
    return sum(float(l.rsplit(' ', 1)[1]) for l in text.splitlines() if l.startswith(name))


def wait_until(what, fn, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if fn():
            return
        time.sleep(0.02)
    raise AssertionError(f'not within {seconds} s: {what}')


def over_http(text, **more):
    body = json.dumps(dict(prompt=text, **more)).encode()
    r = urllib.request.urlopen(urllib.request.Request(f'http://127.0.0.1:{HTTP}/v1/completions', body, {'Content-Type': 'application/json'}))
    return json.loads(r.read())['choices'][0]


def text_inputs(text, streaming=None):
    t = tritongrpc.InferInput('text_input', [1], 'BYTES')
    t.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    if streaming is None:
        return [t]
    s = tritongrpc.InferInput('streaming', [1], 'BOOL')
    s.set_data_from_numpy(np.array([streaming], dtype=bool))
    return [t, s]


class Stream:
    """One stream of tritonclient, whose results come in a queue."""

    def __init__(self, **more):
        self.results = queue.Queue()
        self.client = tritongrpc.InferenceServerClient(URL)
        self.client.start_stream(callback=lambda result, error: self.results.put((result, error)), **more)

    def ask(self, inputs, request_id='', **more):
        self.client.async_stream_infer('model', inputs, request_id=request_id, **more)

    def next(self):
        return self.results.get(timeout=60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.stop_stream()   # which waits for what was asked
        self.client.close()


def texts(stream, ids):
    """{id: (text, finish_reason)} of the streamed completions, once each has had its final response."""
    out, left = {i: ['', ''] for i in ids}, set(ids)
    while left:
        result, error = stream.next()
        assert error is None, error
        r = result.get_response()
        assert r.id in left, (r.id, left)
        out[r.id][0] += result.as_numpy('text_output')[0].decode()
        out[r.id][1] = result.as_numpy('finish_reason')[0].decode()
        if r.parameters['triton_final_response'].bool_param:
            left.discard(r.id)
    return {i: tuple(v) for i, v in out.items()}


# ---- what the server is ----

def is_live_and_ready():
    with tritongrpc.InferenceServerClient(URL) as c:
        assert c.is_server_live() and c.is_server_ready()
        assert c.is_model_ready('model') and c.is_model_ready('m') and not c.is_model_ready('other')


def is_live_but_not_ready():
    with tritongrpc.InferenceServerClient(URL) as c:
        assert c.is_server_live() and not c.is_server_ready() and not c.is_model_ready('model')
        try:
            c.infer('model', text_inputs(TEXT))
            assert False
        except InferenceServerException as e:
            assert e.status() == 'StatusCode.UNAVAILABLE' and e.message(), e


def is_described():
    with tritongrpc.InferenceServerClient(URL) as c:
        assert c.get_server_metadata().name == 'baton'
        m = c.get_model_metadata('model')
        assert [(t.name, t.datatype, list(t.shape)) for t in (*m.inputs, *m.outputs)] == [('IN', 'BYTES', [1]), ('OUT', 'BYTES', [1])], m
        m = c.get_model_metadata('m')
        assert [t.name for t in (*m.inputs, *m.outputs)] == ['text_input', 'streaming', 'text_output', 'finish_reason'], m
        config = c.get_model_config('model').config
        assert config.model_transaction_policy.decoupled and config.max_batch_size == 0 and config.input[0].data_type == 13, config


def health_service():
    """grpc.health.v1.Health/Check, with nothing but grpcio."""
    with grpc.insecure_channel(URL) as ch:
        check = ch.unary_unary('/grpc.health.v1.Health/Check', lambda b: b, lambda b: b)
        assert check(b'') == b'\x08\x01', check(b'')  # SERVING
        name = b'inference.GRPCInferenceService'
        assert check(b'\n' + bytes([len(name)]) + name) == b'\x08\x01'


# ---- completions ----

def completion():
    with tritongrpc.InferenceServerClient(URL) as c:
        r = c.infer('m', text_inputs(TEXT), request_id='r1', parameters=dict(max_tokens=6, temperature=0.0))
        want = over_http(TEXT, max_tokens=6, temperature=0)
        assert r.as_numpy('text_output')[0].decode() == want['text'], (r.get_response(), want)
        assert r.as_numpy('finish_reason')[0].decode() == want['finish_reason']
        assert r.get_response().id == 'r1' and r.get_response().model_name == 'm'


def streamed_completion():
    want = over_http(TEXT, max_tokens=20, temperature=0)
    with Stream() as s:
        s.ask(text_inputs(TEXT, True), 'one', parameters=dict(max_tokens=20, temperature=0.0))
        got = texts(s, ['one'])['one']
        assert got == (want['text'], want['finish_reason']), (got, want)


def empty_final_response():
    with Stream() as s:
        s.ask(text_inputs(TEXT, True), 'one', enable_empty_final_response=True, parameters=dict(max_tokens=5, temperature=0.0))
        n = 0
        while True:
            result, error = s.next()
            assert error is None, error
            r = result.get_response()
            if r.parameters['triton_final_response'].bool_param:
                assert len(r.outputs) == 0 and n > 0
                return
            assert len(r.outputs) == 2
            n += 1


def many_on_one_stream():
    """Each answer is the one that its text alone has."""
    ask = dict(max_tokens=8, temperature=0.0)
    prompts = {str(i): f'Number {i} and then' for i in range(N_STREAMS)}
    want = {}
    with Stream() as s:
        for i in list(prompts)[:8]:
            s.ask(text_inputs(prompts[i], True), i, parameters=ask)
            want.update(texts(s, [i]))
        for i, p in prompts.items():
            s.ask(text_inputs(p, True), i, parameters=ask)
        got = texts(s, prompts)
        assert len(got) == N_STREAMS and all(got[i] == v for i, v in want.items()), (got, want)


def many_streams():
    """As many connections and streams as that, all at once."""
    want = over_http(TEXT, max_tokens=8, temperature=0)

    def one(i):
        with Stream() as s:
            s.ask(text_inputs(TEXT, True), str(i), parameters=dict(max_tokens=8, temperature=0.0))
            return texts(s, [str(i)])[str(i)]
    with concurrent.futures.ThreadPoolExecutor(N_STREAMS) as pool:
        for got in pool.map(one, range(N_STREAMS)):
            assert got == (want['text'], want['finish_reason']), (got, want)


def many_calls():
    """All on one channel."""
    want = over_http(TEXT, max_tokens=4, temperature=0)['text']
    with tritongrpc.InferenceServerClient(URL) as c:
        done = queue.Queue()
        for _ in range(N_STREAMS):
            c.async_infer('model', text_inputs(TEXT), lambda result, error: done.put((result, error)), parameters=dict(max_tokens=4, temperature=0.0))
        for _ in range(N_STREAMS):
            result, error = done.get(timeout=60)
            assert error is None and result.as_numpy('text_output')[0].decode() == want, (result, error)


def asyncio_client():
    import asyncio
    import tritonclient.grpc.aio as aio

    async def run():
        async with aio.InferenceServerClient(URL) as c:
            async def requests():
                yield dict(model_name='model', inputs=text_inputs(TEXT, True), request_id='a', parameters=dict(max_tokens=5, temperature=0.0))
            out = ''
            async for result, error in c.stream_infer(requests()):
                assert error is None, error
                out += result.as_numpy('text_output')[0].decode()
            return out
    assert asyncio.run(run()) == over_http(TEXT, max_tokens=5, temperature=0)['text']


# ---- FastDeploy's native form, as the client of document 004's service uses it ----

def native_inputs(*requests):
    t = tritongrpc.InferInput('IN', [1], 'BYTES')
    t.set_data_from_numpy(np.array([json.dumps(list(requests))], dtype=np.object_))
    return [t]


def native_items(stream, req_id):
    """The items of one request to its end, each checked as that client does; an error ends it, too."""
    while True:
        result, error = stream.next()
        assert error is None, error
        assert result.get_response().id == req_id, result.get_response()
        item = json.loads(result.as_numpy('OUT')[0])
        if isinstance(item, list):
            assert len(item) == 1, item
            item = item[0]
        yield item
        if item.get('is_end') == 1 or 'error_msg' in item:    # a member error_msg is an error, even an empty one
            assert result.get_response().parameters['triton_final_response'].bool_param
            return


def chat_over_http(text, **more):
    body = json.dumps(dict(messages=[dict(role='user', content=text)], **more)).encode()
    r = urllib.request.urlopen(urllib.request.Request(f'http://127.0.0.1:{HTTP}/v1/chat/completions', body, {'Content-Type': 'application/json'}))
    return json.loads(r.read())['choices'][0]['message']['content']


def native_stream():
    want = chat_over_http('Hello, how are you?', max_tokens=12, temperature=0)
    req_id = str(uuid.uuid1())
    with Stream() as s:
        s.ask(native_inputs(dict(text='Hello, how are you?', req_id=req_id, max_dec_len=12, temperature=0, return_usage=True)), req_id, outputs=[tritongrpc.InferRequestedOutput('OUT')])
        items = list(native_items(s, req_id))
    assert all(i['req_id'] == req_id for i in items) and [i['is_end'] for i in items] == [0] * (len(items) - 1) + [1], items
    assert ''.join(i['token'] for i in items) == items[-1]['tokens_all'] == want, (items, want)
    assert items[-1]['usage']['completion_tokens'] == 12 == sum(len(i['token_ids']) for i in items), items


def native_conversation():
    """The one of the document, whose second message is the system's."""
    messages = [dict(role='user', content='Hello, who are you'), dict(role='system', content="I'm a helpful AI assistant."),
                dict(role='user', content='List 3 countries and their capitals.')]
    with Stream() as s:
        s.ask(native_inputs(dict(messages=messages, max_dec_len=8)), 'talk')
        items = list(native_items(s, 'talk'))
    assert items[-1]['is_end'] == 1 and items[0]['req_id'] == 'talk', items    # the request's id, as it has none


def native_infer():
    want = chat_over_http('Hello, how are you?', max_tokens=6, temperature=0)
    with tritongrpc.InferenceServerClient(URL) as c:
        r = c.infer('model', native_inputs(dict(text='Hello, how are you?', max_dec_len=6, temperature=0)), request_id='one')
        [item] = json.loads(r.as_numpy('OUT')[0])
        assert item['is_end'] == 1 and item['tokens_all'] == want and item['req_id'] == 'one', (item, want)
        refused(lambda: c.infer('model', native_inputs(dict(text='x', max_dec_len=-1))), 'INVALID_ARGUMENT', 'max_dec_len')


def native_errors():
    with Stream() as s:
        for bad, part in ((dict(text='x', max_dec_len=0), 'max_dec_len'), (dict(req_id='a'), 'text'), (dict(text='x', topp=7), 'topp')):
            s.ask(native_inputs(bad), 'bad')
            [item] = native_items(s, 'bad')
            assert part in item['error_msg'] and item['error_code'] != 0, item
        for requests in ((), (dict(text='x'), dict(text='y'))):
            s.ask(native_inputs(*requests), 'two')
            [item] = native_items(s, 'two')
            assert f'query num {len(requests)} should be 1' in item['error_msg'] and item['req_id'] == 'two', item
        s.ask(native_inputs(dict(text='x', max_dec_len=2)), 'good')
        assert list(native_items(s, 'good'))[-1]['is_end'] == 1


def native_same_req_id():
    with Stream() as one, Stream() as two:
        one.ask(native_inputs(dict(text='x', req_id='same', max_dec_len=500, min_dec_len=500)), 'same')
        assert json.loads(one.next()[0].as_numpy('OUT')[0])[0]['is_end'] == 0
        two.ask(native_inputs(dict(text='x', req_id='same', max_dec_len=2)), 'same')
        [item] = native_items(two, 'same')
        assert item['error_code'] == 409 and 'same' in item['error_msg'], item
        one.client.stop_stream(cancel_requests=True)
    wait_until('no block is held', lambda: held_blocks() == 0)


def native_many():
    """As many at once on one stream, told apart by their ids."""
    with Stream() as s:
        for i in range(N_STREAMS):
            s.ask(native_inputs(dict(text=f'Count to {i}', req_id=f'r{i}', max_dec_len=6, temperature=0)), f'r{i}')
        tokens, left = {}, {f'r{i}' for i in range(N_STREAMS)}
        while left:
            result, error = s.next()
            assert error is None, error
            [item] = json.loads(result.as_numpy('OUT')[0])
            r = result.get_response().id
            assert item['req_id'] == r and r in left
            tokens[r] = tokens.get(r, '') + item['token']
            if item['is_end']:
                assert tokens[r] == item['tokens_all']
                left.discard(r)


# ---- errors ----

def refused(fn, status, part):
    try:
        fn()
    except InferenceServerException as e:
        assert e.status() == f'StatusCode.{status}' and part in e.message(), (e.status(), e.message())
        return
    raise AssertionError(f'wanted {status} with {part}')


def errors_of_infer():
    with tritongrpc.InferenceServerClient(URL) as c:
        refused(lambda: c.infer('other', text_inputs(TEXT)), 'NOT_FOUND', "no model 'other'")
        refused(lambda: c.infer('model', text_inputs(TEXT), model_version='3'), 'NOT_FOUND', "version '3'")
        refused(lambda: c.infer('model', text_inputs(TEXT, True)), 'INVALID_ARGUMENT', 'ModelStreamInfer')
        refused(lambda: c.infer('model', text_inputs(TEXT), parameters=dict(heat=1)), 'INVALID_ARGUMENT', "no parameter 'heat'")
        refused(lambda: c.infer('model', text_inputs(TEXT), parameters=dict(temperature=7.0)), 'INVALID_ARGUMENT', 'temperature')
        refused(lambda: c.infer('model', text_inputs(TEXT), outputs=[tritongrpc.InferRequestedOutput('X')]), 'INVALID_ARGUMENT', "no output 'X'")
        refused(lambda: c.infer('model', text_inputs(TEXT * 2000), parameters=dict(max_tokens=4)), 'INVALID_ARGUMENT', 'context length')
        refused(lambda: c.get_model_repository_index(), 'UNIMPLEMENTED', 'RepositoryIndex')
        refused(lambda: c.infer('model', text_inputs(TEXT), parameters=dict(max_tokens=900, ignore_eos=True), client_timeout=3), 'DEADLINE_EXCEEDED', '')
    wait_until('no block is held', lambda: held_blocks() == 0)


def errors_of_a_stream():
    """Each has its request's id, and the stream goes on."""
    with Stream() as s:
        s.ask(text_inputs(TEXT, True), 'bad', parameters=dict(heat=1))
        result, error = s.next()
        assert result is None and "no parameter 'heat'" in error.message(), error
        s.ask(text_inputs(TEXT, True), 'good', parameters=dict(max_tokens=3, temperature=0.0))
        assert texts(s, ['good'])['good'][1]


def compressed_messages_are_refused():
    with tritongrpc.InferenceServerClient(URL) as c:
        refused(lambda: c.infer('model', text_inputs(TEXT), compression_algorithm='gzip'), 'UNIMPLEMENTED', 'compressed')


def large_messages_are_refused():
    stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(URL, options=[('grpc.max_send_message_length', -1)]))
    try:
        stub.ModelInfer(service_pb2.ModelInferRequest(model_name='model', id='x' * (46 << 20)))
        assert False
    except grpc.RpcError as e:
        assert e.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, e


# ---- clients that leave ----

def cancelled_streams_stop_their_work():
    before = metric('baton_grpc_clients_gone_total')
    with Stream() as s:
        for i in range(4):
            s.ask(text_inputs(TEXT, True), str(i), parameters=dict(max_tokens=900, ignore_eos=True))
        for _ in range(8):
            assert s.next()[1] is None
        assert held_blocks() > 0
        s.client.stop_stream(cancel_requests=True)
        wait_until('no block is held', lambda: held_blocks() == 0)
    wait_until('a client is gone', lambda: metric('baton_grpc_clients_gone_total') > before)


def lost_connections_stop_their_work():
    pid = os.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, *sys.argv[:4], 'leave_in_the_middle'])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    wait_until('no block is held', lambda: held_blocks() == 0)


def leave_in_the_middle():
    """For the check before: a client that is killed."""
    s = Stream()
    s.ask(text_inputs(TEXT, True), 'x', parameters=dict(max_tokens=900, ignore_eos=True))
    assert s.next()[1] is None and held_blocks() > 0
    os._exit(7)


# ---- keys: the server wants one, in KEY ----

def keys():
    ask = dict(parameters=dict(max_tokens=3, temperature=0.0))
    with tritongrpc.InferenceServerClient(URL) as c:
        assert c.is_server_live() and c.is_server_ready()
        refused(lambda: c.infer('model', text_inputs(TEXT), **ask), 'UNAUTHENTICATED', 'API key')
        refused(lambda: c.infer('model', text_inputs(TEXT), headers={'authorization': 'Bearer other'}, **ask), 'UNAUTHENTICATED', 'API key')
        refused(lambda: c.get_model_metadata('model'), 'UNAUTHENTICATED', 'API key')
        good = {'authorization': 'Bearer ' + os.environ['KEY']}
        assert c.infer('model', text_inputs(TEXT), headers=good, **ask).as_numpy('finish_reason')[0]
    with Stream(headers=good) as s:
        s.ask(text_inputs(TEXT, True), 'one', **ask)
        assert texts(s, ['one'])['one'][1]


# ---- a server that stops: this begins a stream, says so, and reads it to its end ----

def to_the_end():
    with Stream() as s, Stream() as idle:
        idle.ask(text_inputs(TEXT, True), 'short', parameters=dict(max_tokens=1, temperature=0.0))
        texts(idle, ['short'])
        s.ask(text_inputs(TEXT, True), 'long', parameters=dict(max_tokens=200, ignore_eos=True, temperature=0.0))
        assert s.next()[1] is None
        print('begun', flush=True)
        assert texts(s, ['long'])['long'][1] == 'length'
        result, error = idle.next()
        assert error.status() == 'StatusCode.UNAVAILABLE' and 'shutting down' in error.message(), error


NORMAL = [is_live_and_ready, is_described, health_service, completion, streamed_completion, empty_final_response, many_on_one_stream, many_streams, many_calls,
          asyncio_client, native_stream, native_conversation, native_infer, native_errors, native_same_req_id, native_many, errors_of_infer, errors_of_a_stream, compressed_messages_are_refused, large_messages_are_refused, cancelled_streams_stop_their_work,
          lost_connections_stop_their_work]
checks.run([globals()[name] for name in sys.argv[4:]] or NORMAL)
