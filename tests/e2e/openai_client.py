"""Uses the official client as a developer would. usage: openai_client.py http://host:port STREAMS   (needs the openai package)

STREAMS: how many to ask for at once."""
import concurrent.futures, sys, time, urllib.request

import checks
import openai

URL, N_STREAMS = sys.argv[1], int(sys.argv[2])
client = openai.OpenAI(base_url=URL + '/v1', api_key='none', max_retries=0)
MODEL = client.models.list().data[0].id
FRANCE = [dict(role='user', content='What is the capital of France?')]


def held_blocks():
    text = urllib.request.urlopen(URL + '/metrics').read().decode()
    return sum(float(l.rsplit(' ', 1)[1]) for l in text.splitlines() if l.startswith('baton_kv_blocks') and 'state="held"' in l)


def models():
    m = client.models.retrieve(MODEL)
    assert m.id == MODEL and m.object == 'model'


def chat():
    r = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=24)
    assert 'Paris' in r.choices[0].message.content, r
    assert r.choices[0].message.role == 'assistant' and r.choices[0].finish_reason in ('stop', 'length')
    assert r.usage.completion_tokens > 0 and r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens


def chat_parts_and_roles():
    r = client.chat.completions.create(model=MODEL, temperature=0, max_tokens=8, messages=[
        dict(role='developer', content='Be short.'), dict(role='user', content=[dict(type='text', text='Say '), dict(type='text', text='hi.')])])
    assert r.choices[0].message.content


def chat_stream_with_usage():
    whole = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=24)
    chunks = list(client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=24, stream=True, stream_options=dict(include_usage=True)))
    text = ''.join(c.choices[0].delta.content or '' for c in chunks if c.choices)
    assert text == whole.choices[0].message.content, (text, whole)
    assert chunks[0].choices[0].delta.role == 'assistant' and chunks[0].choices[0].delta.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert not chunks[-1].choices and all(c.usage is None for c in chunks[:-1])
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def chat_logprobs():
    r = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=5, logprobs=True, top_logprobs=4)
    for t in r.choices[0].logprobs.content:
        assert len(t.top_logprobs) == 4 and t.top_logprobs[0].logprob >= t.logprob and t.logprob <= 0
        assert bytes(t.bytes).decode('utf-8', 'replace') is not None


def completions():
    r = client.completions.create(model=MODEL, prompt='The capital of France is', temperature=0, max_tokens=6)
    assert 'Paris' in r.choices[0].text and r.object == 'text_completion', r
    chunks = list(client.completions.create(model=MODEL, prompt='The capital of France is', temperature=0, max_tokens=6, stream=True))
    assert ''.join(c.choices[0].text for c in chunks) == r.choices[0].text


def prompt_ids():
    ids = [504, 3575, 282, 4649, 314]       # "The capital of France is"
    by_text = client.completions.create(model=MODEL, prompt='The capital of France is', temperature=0, max_tokens=6)
    by_ids = client.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=6)
    assert by_ids.choices[0].text == by_text.choices[0].text
    many = client.completions.create(model=MODEL, prompt=[ids, [504]], temperature=0, max_tokens=6)
    assert [c.index for c in many.choices] == [0, 1] and many.choices[0].text == by_text.choices[0].text


def completions_echo_logprobs():
    r = client.completions.create(model=MODEL, prompt='The capital of France is', temperature=0, max_tokens=1, echo=True, logprobs=2)
    lp = r.choices[0].logprobs
    assert r.choices[0].text.startswith('The capital of France is') and lp.token_logprobs[0] is None and len(lp.tokens) == 6
    for v, top in list(zip(lp.token_logprobs, lp.top_logprobs))[1:]:
        assert v in top.values(), (v, top)


def several_answers():
    r = client.chat.completions.create(model=MODEL, messages=FRANCE, n=3, temperature=1, seed=7, max_tokens=12)
    again = client.chat.completions.create(model=MODEL, messages=FRANCE, n=3, temperature=1, seed=7, max_tokens=12)
    assert sorted(c.index for c in r.choices) == [0, 1, 2]
    assert [c.message.content for c in r.choices] == [c.message.content for c in again.choices]
    assert len({c.message.content for c in r.choices}) > 1


def stop_strings():
    whole = client.completions.create(model=MODEL, prompt='Count: one, two, three,', temperature=0, max_tokens=24).choices[0].text
    cut = whole[3:6]
    r = client.completions.create(model=MODEL, prompt='Count: one, two, three,', temperature=0, max_tokens=24, stop=[cut, 'zzz'])
    assert r.choices[0].text == whole[:whole.index(cut)] and r.choices[0].finish_reason == 'stop', (whole, r)


def errors():
    def raises(kind, **kw):
        try:
            client.chat.completions.create(**{**dict(model=MODEL, messages=FRANCE, max_tokens=4), **kw})
        except kind as e:
            assert e.body and e.body['message'], e.body
            return e
        raise AssertionError(f'no {kind.__name__} for {kw}')
    raises(openai.NotFoundError, model='no-such-model')
    e = raises(openai.BadRequestError, temperature=-1)
    assert e.body['param'] == 'temperature', e.body
    raises(openai.BadRequestError, messages=[])
    raises(openai.BadRequestError, max_tokens=100000)
    raises(openai.BadRequestError, n=0)
    raises(openai.BadRequestError, response_format=dict(type='json_object'))
    e = raises(openai.BadRequestError, messages=[dict(role='user', content='x ' * 5000)])
    assert e.body['code'] == 'context_length_exceeded', e.body
    try:
        client.embeddings.create(model=MODEL, input='x')
    except openai.NotFoundError:
        return
    raise AssertionError('embeddings did not answer 404')


def streams_equal_sequential():
    """Concurrent streams equal their sequential answers."""
    def ask(i, stream):
        r = client.chat.completions.create(model=MODEL, messages=[dict(role='user', content=f'Write a sentence about the number {i}.')], temperature=0, max_tokens=12, stream=stream)
        return ''.join(c.choices[0].delta.content or '' for c in r if c.choices) if stream else r.choices[0].message.content
    want = [ask(i, False) for i in range(N_STREAMS)]
    with concurrent.futures.ThreadPoolExecutor(N_STREAMS) as pool:
        assert list(pool.map(lambda i: ask(i, True), range(N_STREAMS))) == want


def disconnect_frees():
    """When a client disconnects, its blocks are free within a second."""
    def blocks_free(deadline):
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            if held_blocks() == 0:
                return True
            time.sleep(0.05)
        return False
    assert blocks_free(5)
    s = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=1, max_tokens=700, stream=True, extra_body=dict(ignore_eos=True))
    for _, _chunk in zip(range(3), s):
        pass
    s.close()
    assert blocks_free(1.0), held_blocks()


def seed_004_base_urls():
    for base in ('/v1/chat/completions', '/v1'):
        c = openai.OpenAI(base_url=URL + base, api_key='EMPTY_API_KEY', max_retries=0)
        assert c.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=2).choices
        assert c.completions.create(model=MODEL, prompt='Hi', max_tokens=2).choices


checks.run([models, chat, chat_parts_and_roles, chat_stream_with_usage, chat_logprobs, completions, prompt_ids, completions_echo_logprobs,
            several_answers, stop_strings, errors, streams_equal_sequential, disconnect_frees, seed_004_base_urls])
