"""A client of FastDeploy's native protocol, by `requests`. usage: native_client.py http://host:port   (needs the package)"""
import json, sys, uuid

import requests

URL = sys.argv[1] + '/v1/chat/completions'
TALK = [dict(role='user', content='Hello, who are you'), dict(role='system', content="I'm a helpful AI assistant."), dict(role='user', content='List 3 countries and their capitals.')]


def ask(**body):
    return requests.post(URL, json=body, timeout=60)


def items(**body):
    res = requests.post(URL, json={**body, 'stream': True}, stream=True, timeout=60)
    assert res.status_code == 200 and 'data:' not in res.headers, res.text
    return [json.loads(line) for line in res.iter_lines()]


def stream_and_whole():
    """The same answer in parts and whole, of a text and of a talk."""
    for prompt in (dict(text='What is the capital of France?'), dict(messages=TALK)):
        parts = items(**prompt, req_id=str(uuid.uuid1()), max_dec_len=48, temperature=0, return_usage=True)
        whole = ask(**prompt, max_dec_len=48, temperature=0, return_usage=True).json()
        assert all(p['error_msg'] == '' and p['error_code'] == 0 for p in parts)
        assert [p['is_end'] for p in parts] == [0] * (len(parts) - 1) + [1]
        assert [p['send_idx'] for p in parts] == sorted({p['send_idx'] for p in parts})
        assert ''.join(p['token'] for p in parts) == parts[-1]['tokens_all'] == whole['result'] == whole['tokens_all'], (parts, whole)
        assert sum((p['token_ids'] for p in parts), []) == parts[-1]['tokens_all_ids'] == whole['tokens_all_ids']
        assert parts[-1]['usage'] == whole['usage'] and whole['usage']['completion_tokens'] == whole['tokens_all_num'] == parts[-1]['send_idx'] + 1
    assert 'Paris' in ask(text='What is the capital of France?', max_dec_len=24, temperature=0).json()['result']


def one_item():
    all_at_once = items(text='Hi', max_dec_len=6, temperature=0, return_all_tokens=True)
    assert len(all_at_once) == 1 and all_at_once[0]['token'] == all_at_once[0]['tokens_all'] and all_at_once[0]['is_end'] == 1


def seeds():
    """An answer is a function of its body and its name, and of the seed that it shows."""
    first = ask(text='Tell me a story.', req_id='a-name', max_dec_len=24).json()
    assert ask(text='Tell me a story.', req_id='a-name', max_dec_len=24).json()['tokens_all_ids'] == first['tokens_all_ids']
    assert ask(text='Tell me a story.', max_dec_len=24, infer_seed=first['infer_seed']).json()['tokens_all_ids'] == first['tokens_all_ids']
    assert ask(text='Tell me a story.', req_id='another', max_dec_len=24).json()['tokens_all_ids'] != first['tokens_all_ids']


def errors():
    """A client knows one by error_msg and error_code, whether it asked for a stream or not."""
    for stream in (False, True):
        for body, said in ((dict(text='x', topp=2), 'topp is 2'), (dict(req_id='x'), 'neither text nor messages'), (dict(text='x', max_dec_len=100000), 'max_dec_len is 100000')):
            res = requests.post(URL, json={**body, 'stream': stream}, stream=stream, timeout=60)
            got = [json.loads(line) for line in res.iter_lines()]
            assert res.status_code == 400 and len(got) == 1 and said in got[0]['error_msg'] and got[0]['error_code'] == 400, got


CHECKS = (stream_and_whole, one_item, seeds, errors)
for check in CHECKS:
    check()
print(f'{len(CHECKS)} checks')
