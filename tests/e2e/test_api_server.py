"""test_api_server.py - one node from outside: limits, full pools, prompts that just fit, metrics, preempted batches."""
import json, os, re, shutil, signal, subprocess, tempfile, time

from harness import BIN, TINY, Node, alone, closing, metrics, pair, parallel, request, stream, wait_ready, wait_until

CONTEXT = 256


def completion(port, **body):
    status, _, answer = request(port, 'POST', '/v1/completions', {'return_token_ids': True, **body})
    assert status == 200, (status, answer)
    return [(c['token_ids'], c['logprobs'] and c['logprobs']['token_logprobs'], c['finish_reason']) for c in answer['choices']]


def tight_requests():
    out = []
    for i in range(32):
        length = (1, 5, 63, 64, 65, 128, 200, 254)[i % 8]
        prompt = [7] * length if i % 3 else [4 + (i * 31 + k * 7) % 490 for k in range(length)]
        out.append(dict(prompt=prompt, max_tokens=min(150, CONTEXT - length), temperature=(0, 1.1)[i % 2], seed=i, logprobs=1, ignore_eos=True, n=1 + i % 2))
    return out


def test_a_pool_with_room_for_one_gives_the_same_answers():
    """With blocks for one full context, 32 concurrent requests are preempted and recomputed, on one node and split over two."""
    asked = tight_requests()
    with closing(Node(TINY, args=['--max-model-len', str(CONTEXT)])) as roomy:
        wait_ready(roomy)
        want = [completion(roomy.port, **q) for q in asked]
    args = ['--max-model-len', str(CONTEXT), '--max-num-seqs', '16', '--num-gpu-blocks-override', '4']
    with closing(Node(TINY, args=args)) as tight, pair(TINY, args=args) as (prefill, decode):
        wait_ready(tight)
        for ports in ([tight.port], [prefill.port, decode.port]):
            got = parallel([lambda i=i, q=q: completion(ports[i % len(ports)], **q) for i, q in enumerate(asked)], len(asked))
            assert got == want, [(i, g) for i, (g, w) in enumerate(zip(got, want)) if g != w][0]
        for node, preempted in ((tight, True), (decode, True), (prefill, False)):
            wait_until('blocks free', lambda: metrics(node.port)['baton_kv_blocks{state="held"}'] == 0, 5)
            assert (metrics(node.port)['baton_engine_preemptions_total'] > 0) == preempted, node.name


@alone
def test_a_full_node_wastes_no_time():
    """64 short answers with capacity for 2: freed capacity is used at once, not with the next view of the cluster."""
    with closing(Node(TINY, args=['--max-num-seqs', '2'])) as n:
        wait_ready(n)
        completion(n.port, prompt=[5], max_tokens=1)
        t = time.monotonic()
        completion(n.port, prompt=[[5]] * 64, max_tokens=1)
        assert time.monotonic() - t < 2.5, 'each pair of answers waited for a snapshot'
        wait_until('no reservation left', lambda: metrics(n.port)['baton_directory_reservations'] == 0, 1)


def test_prompts_that_just_fit():
    with closing(Node(TINY, args=['--max-model-len', str(CONTEXT)])) as n:
        wait_ready(n)
        echo = request(n.port, 'POST', '/v1/completions', dict(prompt=[5] * CONTEXT, max_tokens=0, echo=True, logprobs=1))
        assert echo[0] == 200 and len(echo[2]['choices'][0]['logprobs']['tokens']) == CONTEXT, echo
        assert completion(n.port, prompt=[5] * (CONTEXT - 1), ignore_eos=True)[0][2] == 'length'
        for body in (dict(prompt=[5] * CONTEXT), dict(prompt=[5] * (CONTEXT + 1), max_tokens=0, echo=True), dict(prompt=[5] * 250, max_tokens=7)):
            status, _, answer = request(n.port, 'POST', '/v1/completions', body)
            assert status == 400 and answer['error']['code'] == 'context_length_exceeded', answer


def test_full_is_429_and_says_when_to_come_again():
    with closing(Node(TINY, args=['--max-concurrency', '1', '--max-num-seqs', '1'])) as n:
        wait_ready(n)
        got = parallel([lambda: request(n.port, 'POST', '/v1/completions', dict(prompt=[5], max_tokens=40, ignore_eos=True))] * 50, 50)
        refused = [(h, b) for s, h, b in got if s == 429]
        assert {s for s, _, _ in got} == {200, 429} and refused
        for headers, body in refused:
            assert int(headers['retry-after']) >= 1 and body['error']['type'] == 'rate_limit_error'
        assert metrics(n.port)['baton_requests_rejected_total{reason="full"}'] == len(refused)
        wait_until('nothing live', lambda: metrics(n.port)['baton_requests_live'] == 0, 2)


def test_tokens_the_model_does_not_have():
    """A tokenizer with more tokens than the embedding has rows is refused with its own sentence; nothing is computed."""
    with tempfile.TemporaryDirectory() as folder:
        model = shutil.copytree(TINY, os.path.join(folder, 'm'))
        path = os.path.join(model, 'tokenizer.json')
        os.chmod(path, 0o644)
        with open(path) as f:
            tok = json.load(f)
        tok['added_tokens'].append(dict(id=100000, content='<far>', special=True, single_word=False, lstrip=False, rstrip=False, normalized=False))
        with open(path, 'w') as f:
            json.dump(tok, f)
        with closing(Node(model)) as n:
            wait_ready(n)
            status, _, body = request(n.port, 'POST', '/v1/completions', dict(prompt='a <far> b', max_tokens=1))
            assert status == 400 and '<far>' in body['error']['message'] and body['error']['param'] == 'prompt', body


def test_a_message_without_content_is_an_empty_one():
    call = [dict(id='1', type='function', function=dict(name='f', arguments='{}'))]
    with closing(Node(TINY)) as n:
        wait_ready(n)
        tokens = []
        for message in (dict(content=''), dict(content=None), {}):
            body = dict(messages=[dict(role='user', content='a'), dict(role='assistant', tool_calls=call, **message), dict(role='user', content='b')])
            status, _, answer = request(n.port, 'POST', '/tokenize', body)
            assert status == 200, answer
            tokens.append(answer['tokens'])
        assert tokens[0] == tokens[1] == tokens[2]


def test_metrics_are_valid():
    """Each family has one HELP and TYPE followed by its samples, no sample stands twice, buckets grow up to the count."""
    with closing(Node(TINY)) as n:
        wait_ready(n)
        list(stream(n.port, '/v1/completions', dict(prompt=[5, 6], max_tokens=5, n=2)))
        text = request(n.port, 'GET', '/metrics')[2]
    kinds, samples, family = {}, {}, None
    for line in text.splitlines():
        if line.startswith('# '):
            _, what, family, rest = line.split(' ', 3)
            assert what == 'HELP' or family not in kinds, line
            if what == 'TYPE':
                kinds[family] = rest
            continue
        name, labels, value = re.fullmatch(r'([a-z_]+)(\{[^}]*\})? (\S+)', line).groups()
        base = re.sub('_(bucket|sum|count)$', '', name) if kinds[family] == 'histogram' else name
        assert base == family and (name, labels) not in samples, line
        samples[name, labels] = float(value)
    last = {}
    for (name, labels), value in samples.items():
        if not name.endswith('_bucket'):
            continue
        bound, rest = float(re.search(r'le="([^"]*)"', labels)[1]), re.sub(r',?le="[^"]*"', '', labels).replace('{}', '') or None
        before = last.get((name[:-7], rest), (-1.0, 0.0))
        assert bound > before[0] and value >= before[1], (name, labels)
        last[name[:-7], rest] = (bound, value)
    for (name, labels), (bound, value) in last.items():
        assert bound == float('inf') and value == samples[name + '_count', labels], (name, labels)


def run(*args, **kw):
    return subprocess.run([BIN, *args], capture_output=True, text=True, timeout=60, **kw)


def test_generate_and_its_files():
    with tempfile.TemporaryDirectory() as folder:
        many, out = os.path.join(folder, 'in'), os.path.join(folder, 'out')
        with open(many, 'w') as f:
            for i in range(3000):
                f.write(json.dumps(dict(custom_id=str(i), method='POST', url='/v1/completions', body=dict(prompt=[5], max_tokens=300, ignore_eos=True))) + '\n')
        p = subprocess.Popen([BIN, 'generate', '--model', TINY, '--input', many, '--output', out], stderr=subprocess.PIPE, text=True)
        wait_until('some answers', lambda: os.path.getsize(out + '.partial') > 0, 30)
        p.send_signal(signal.SIGINT)
        said = p.communicate(timeout=30)[1]
        assert p.returncode == 130 and 'interrupted' in said and out + '.partial' in said, (p.returncode, said)
        with open(out + '.partial') as f:
            ids = [json.loads(line)['custom_id'] for line in f]
        assert ids == [str(i) for i in range(len(ids))] and ids and not os.path.exists(out)
        fifo = os.path.join(folder, 'fifo')
        os.mkfifo(fifo)
        fd = os.open(fifo, os.O_RDWR)
        try:
            p = run('generate', '--model', TINY, '--input', '-', '--output', fifo, input=open(many).readline())
            assert p.returncode == 0 and json.loads(os.read(fd, 1 << 16))['custom_id'] == '0', p.stderr
        finally:
            os.close(fd)
        with open(many) as f:
            few = f.readline() + 'no json\n' + f.readline().replace('"max_tokens": 300', '"max_tokens": 0.5')
        p = run('generate', '--model', TINY, '--input', '-', input=few)
        assert p.returncode == 1 and [json.loads(line)['error'] is None for line in p.stdout.splitlines()] == [True, False, False], p.stdout
        assert '\nended 1 x: cut by max_tokens or --max-model-len (length)\n' in p.stderr, p.stderr
        assert len([line for line in p.stderr.splitlines() if line.startswith('failed 1 x: ')]) == 2 and '(first in line 2)' in p.stderr, p.stderr
        p = run('generate', '--model', TINY, '--raw', '--prompt', 'a', '--max-tokens', '2')
        assert p.returncode == 0 and 'the answer is cut: --max-tokens is 2, --max-model-len 2048' in p.stderr, p.stderr
        p = run('generate', '--model', TINY, '--input', many, '--output', folder)
        assert p.returncode == 1 and 'is a directory' in p.stderr, p.stderr
        with open('/dev/full', 'w') as full:
            p = subprocess.run([BIN, 'generate', '--model', TINY, '--raw', '--prompt', 'a', '--max-tokens', '2'], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert p.returncode == 1 and 'No space left' in p.stderr, p.stderr


def test_mistakes_are_one_sentence_before_the_model_is_loaded():
    for args, said in ((['--api-key', ''], '--api-key is "", which names nothing'),
                       (['--served-model-name', ','], 'names nothing'),
                       (['--served-model-name', ','.join('abcdefghijklmnopq')], '17 served model names'),
                       (['--prot', '1'], 'did you mean --port?'),
                       (['--quantization', 'wint3'], 'there is no quantization "wint3"'),
                       (['--load-format', 'gguf'], 'is safetensors; auto recognises it'),
                       (['--load-format', 'bitsandbytes'], '--load-format is "bitsandbytes", but must be auto, default, default_v1, safetensors, gguf or dummy'),
                       (['--kv-transfer-config', '{"kv_role":"kv_both","kv_prot":"1"}'], "there is no member 'kv_prot'"),
                       (['--kv-transfer-config', '{"kv_connector":"MooncakeConnectorV1"}'], 'has no kv_role'),
                       (['--router', '::1:9400'], 'an IPv6 address stands in brackets'),
                       (['--speculative-config', '{"method":"draft","model":"/nowhere"}'], '--speculative-config, the model that drafts: model "/nowhere" is not on this host'),
                       (['-md', '/nowhere'], '-md, the model that drafts: model "/nowhere"'),
                       (['--kv-cache-dir', os.path.join(TINY, 'config.json')], 'config.json: cannot be used: Not a directory'),
                       (['--kv-cache-dir', os.path.join(TINY, 'config.json', 'kv')], 'cannot be made: Not a directory'),
                       (['--kv-cache-dir', ''], '--kv-cache-dir is empty; give a folder'),
                       (['--grpc-port', '31010', '--metrics-port', '31010'], '--grpc-port and --metrics-port are both 31010; give each a port of its own'),
                       (['--engine-worker-queue-port', 'x'], "--engine-worker-queue-port: 'x' is not a port (0 to 65535)"),
                       (['--splitwise-role', 'prefill', '--kv-transfer-config', '{"kv_role":"kv_consumer"}'], 'contradict')):
        p = run('serve', '--model', TINY, '--port', '0', *args)
        assert p.returncode == 2 and said in p.stderr and len(p.stderr.strip().splitlines()) == 1, (args, p.stderr)
    p = run('launch', '--model', TINY, '--prefill', '1', '--decode', '1', '--ports', '31010,31011', '--metrics-ports', '31012,31012')
    assert p.returncode == 2 and '--metrics-ports gives 31012 twice' in p.stderr, p.stderr
    for url in 'https://127.0.0.1:1', 'ftp://127.0.0.1:1', 'http://https://127.0.0.1:1':
        p = run('status', '--url', url, '--api-key', 'a-key')
        assert p.returncode == 2 and 'is not http://host:port' in p.stderr, p.stderr


def test_dummy_weights_need_a_configuration_alone():
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(os.path.join(TINY, 'config.json'), folder)
        args = ['--model', folder, '--load-format', 'dummy']
        answers = set()
        for _ in range(2):
            p = run('generate', *args, '--raw', '--prompt', 'hello', '--max-tokens', '4')
            assert p.returncode == 0 and 'dummy weights' in p.stderr and 'no tokenizer' in p.stderr, p.stderr
            answers.add(p.stdout)
        assert len(answers) == 1 and answers != {'\n'}, answers
        p = run('doctor', *args, '--port', '0')
        assert 'dummy (--load-format dummy)' in p.stdout, p.stdout


def test_doctor_and_serve_refuse_the_same_models():
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(os.path.join(TINY, 'config.json'), folder)
        bare = os.path.join(folder, 'weights-alone')
        os.mkdir(bare)
        for name in 'config.json', 'model.safetensors':
            shutil.copy(os.path.join(TINY, name), bare)
        for args, command, said in ((['--model', folder], 'doctor', 'holds no weights'), (['--model', bare], 'serve', 'no tokenizer: tokenizer.json'),
                                    (['--model', TINY, '--max-model-len', '1000000'], 'doctor', '--max-model-len 1000000 is more than')):
            p = run(command, *args, '--port', '0')
            assert p.returncode != 0 and said in p.stdout + p.stderr, (args, p.stdout, p.stderr)
