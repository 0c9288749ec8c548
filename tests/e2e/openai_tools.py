"""Reasoning and tool calls as a developer sees them with the official client. usage: openai_tools.py http://host:port

The model is small but can repeat: after some examples it is asked to write what a larger model would write. Where its answer
has the right format, the tests do not require the exact words."""
import json, sys

import checks
import openai

client = openai.OpenAI(base_url=sys.argv[1] + '/v1', api_key='none', max_retries=0)
MODEL = client.models.list().data[0].id
TOOLS = [dict(type='function', function=dict(name='get_weather', parameters=dict(type='object', properties=dict(city=dict(type='string'))))),
         dict(type='function', function=dict(name='add', parameters=dict(type='object', properties=dict(a=dict(type='integer')))))]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
REASONING = '<think>\nI know.\n</think>\n\n'


def repeat(text, *examples):
    m = [dict(role='system', content='You repeat what the user says, word by word.')]
    for e in ('apple pie', 'The sky is blue.', *examples):
        m += [dict(role='user', content=e), dict(role='assistant', content=e)]
    return m + [dict(role='user', content=text)]


def ask(messages, max_tokens=96, **kw):
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=max_tokens, **kw)


def gather(stream):
    """Joins the chunks of choice 0: content, reasoning, calls as [id, name, arguments], finish_reason, usage."""
    content = reasoning = None
    calls, finish, usage = [], None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for c in chunk.choices:
            if c.index > 0:
                continue
            d = c.delta
            content = d.content if content is None else content + (d.content or '')
            more = getattr(d, 'reasoning_content', None)
            assert more == getattr(d, 'reasoning', None)
            reasoning = more if reasoning is None else reasoning + (more or '')
            for t in d.tool_calls or []:
                if t.index == len(calls):
                    assert t.id and t.type == 'function' and t.function.name, t
                    calls.append([t.id, t.function.name, ''])
                calls[t.index][2] += t.function.arguments or ''
            finish = c.finish_reason or finish
    return content, reasoning, calls, finish, usage


def same(messages, max_tokens=96, **kw):
    """Checks that the unstreamed and the streamed answer have the same parts. Returns the unstreamed choice."""
    whole = ask(messages, max_tokens, **kw)
    choice, m = whole.choices[0], whole.choices[0].message
    content, reasoning, calls, finish, usage = gather(ask(messages, max_tokens, stream=True, stream_options=dict(include_usage=True), **kw))
    assert content == m.content, (content, m)
    assert reasoning == getattr(m, 'reasoning_content', None), (reasoning, m)
    assert [c[1:] for c in calls] == [[t.function.name, t.function.arguments] for t in m.tool_calls or []], (calls, m)
    assert finish == choice.finish_reason
    assert usage.completion_tokens_details.reasoning_tokens == whole.usage.completion_tokens_details.reasoning_tokens
    return whole


def a_tool_is_called():
    r = same(repeat(CALL, ADD), tools=TOOLS)
    m = r.choices[0].message
    assert r.choices[0].finish_reason == 'tool_calls' and m.content is None, r
    assert m.tool_calls[0].function.name == 'get_weather' and json.loads(m.tool_calls[0].function.arguments) == dict(city='Paris'), r
    assert m.tool_calls[0].id.startswith('call_')


def two_tools_are_called():
    messages = repeat(CALL + '\n' + ADD, ADD + '\n' + CALL, CALL + '\n' + CALL, ADD + '\n' + ADD)
    r = same(messages, tools=TOOLS)
    calls = r.choices[0].message.tool_calls
    assert len(calls) == 2 and {c.function.name for c in calls} <= {'get_weather', 'add'} and calls[0].id != calls[1].id, r
    first = calls[0].function.name
    r = same(messages, tools=TOOLS, parallel_tool_calls=False)
    assert [c.function.name for c in r.choices[0].message.tool_calls] == [first], r


def the_answer_comes_back():
    r = ask(repeat(CALL, ADD), tools=TOOLS)
    m = r.choices[0].message
    follow = repeat(CALL, ADD) + [m.model_dump(exclude_none=True), dict(role='tool', tool_call_id=m.tool_calls[0].id, content='sunny')]
    assert ask(follow, 8, tools=TOOLS).choices[0].message.role == 'assistant'


def without_tools_a_call_is_text():
    for kw in (dict(), dict(tools=TOOLS, tool_choice='none')):
        r = same(repeat(CALL, ADD), **kw)
        assert r.choices[0].message.content == CALL and not r.choices[0].message.tool_calls and r.choices[0].finish_reason == 'stop', r


def a_named_tool_is_called():
    r = same(repeat('{"city": "Rome"}', '{"city": "Oslo"}'), tools=TOOLS, tool_choice=dict(type='function', function=dict(name='get_weather')))
    m = r.choices[0].message
    if m.tool_calls:        # the model is small: what it writes may not be a call, and is text then
        assert [c.function.name for c in m.tool_calls] == ['get_weather'], r
    else:
        assert m.content.startswith('<tool_call>\n{"name": "get_weather", "arguments":'), r


def a_demanded_call_names_a_tool():
    """Whatever the model writes: a call whose function the request lacks is content."""
    for seed in range(2):
        r = same(repeat('apple pie'), tools=TOOLS, tool_choice='required', seed=seed, extra_body=dict(temperature=1.5))
        m, finish = r.choices[0].message, r.choices[0].finish_reason
        for c in m.tool_calls or []:
            assert c.function.name in ('get_weather', 'add'), r
        if not m.tool_calls:
            assert finish in ('stop', 'length') and m.content.startswith('<tool_call>\n{"name": "'), r
    r = same(repeat('{"city": "Rome"}', '{"city": "Oslo"}'), tools=TOOLS[:1], tool_choice='required')
    m = r.choices[0].message
    assert m.tool_calls or m.content.startswith('<tool_call>\n{"name": "get_weather", "arguments":'), r


def reasoning():
    messages = repeat(REASONING + 'This is it.', REASONING + 'Yes.', REASONING + 'It is red.', REASONING + 'No.')
    r = same(messages)
    m = r.choices[0].message
    assert m.content and '<' not in m.content and m.reasoning_content == 'I know.', r
    assert 3 <= r.usage.completion_tokens_details.reasoning_tokens < r.usage.completion_tokens, r.usage
    r = same(messages, extra_body=dict(include_reasoning=False))
    assert r.choices[0].message.content == m.content and not hasattr(r.choices[0].message, 'reasoning_content'), r


def reasoning_begun_by_the_prompt():
    r = same(repeat('Think.'), 32, extra_body=dict(chat_template_kwargs=dict(enable_thinking=True)))
    assert r.choices[0].message.reasoning_content, r
    r = same(repeat('Think.'), 32, extra_body=dict(chat_template_kwargs=dict(enable_thinking=False)))
    assert not hasattr(r.choices[0].message, 'reasoning_content') and r.choices[0].message.content, r


def reasoning_then_a_call():
    r = same(repeat(REASONING + CALL, REASONING + ADD), tools=TOOLS, logprobs=True, n=2)
    m = r.choices[0].message
    assert m.reasoning_content == 'I know.' and m.tool_calls[0].function.name == 'get_weather' and m.content is None, r
    assert len(r.choices[0].logprobs.content) == r.usage.completion_tokens / 2, r.usage


def stream_helper():
    """Uses the client's own accumulator, which is strict about the shape of chunks."""
    with client.chat.completions.stream(model=MODEL, messages=repeat(CALL, ADD), tools=TOOLS, temperature=0, max_tokens=96) as s:
        done = [e for e in s if e.type == 'tool_calls.function.arguments.done']
        final = s.get_final_completion()
    assert len(done) == 1 and done[0].name == 'get_weather' and json.loads(done[0].arguments) == dict(city='Paris'), done
    assert final.choices[0].finish_reason == 'tool_calls' and final.choices[0].message.tool_calls[0].function.name == 'get_weather', final


def errors():
    def refused(param, **kw):
        try:
            ask([dict(role='user', content='x')], **kw)
        except openai.BadRequestError as e:
            assert e.body['param'] == param, e.body
            return
        raise AssertionError(f'not refused: {kw}')
    refused('tools', tools=[dict(type='web_search')])
    refused('tool_choice', tools=TOOLS, tool_choice=dict(type='function', function=dict(name='nosuch')))
    refused('tool_choice', tool_choice='required')


checks.run([a_tool_is_called, two_tools_are_called, the_answer_comes_back, without_tools_a_call_is_text, a_named_tool_is_called, a_demanded_call_names_a_tool,
            reasoning, reasoning_begun_by_the_prompt, reasoning_then_a_call, stream_helper, errors])
