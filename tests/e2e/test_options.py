"""What options, help and messages promise, held against the real program: help by word, numbers, launch's refusals, generate's sentences,
`baton status` and the limits of clients."""
import re
import subprocess

from harness import *

SIZE = ['--max-model-len', '512', '--max-num-seqs', '4', '--num-gpu-blocks-override', '64']
ASK = dict(model='m', prompt=[7, 8, 9, 10, 11], max_tokens=4, temperature=0, ignore_eos=True)


def run(*args, **kw):
    return subprocess.run([BIN, *args], capture_output=True, text=True, timeout=60, **kw)


def options_in(text):
    """{option: its whole entry} of a help text."""
    return {re.match(r'--([a-z0-9-]+)', e)[1]: e for e in re.split(r'\n  (?=--)', text)[1:]}


# ---- help ----

def test_help_by_command_and_by_word():
    whole = run('serve', '--help').stdout
    assert run('help', 'serve').stdout == whole and whole.startswith('usage: baton serve MODEL')
    p = run('serve', '--help=port')
    about = options_in(p.stdout)
    assert p.returncode == 0 and {'port', 'metrics-port', 'scheduler-port', 'engine-worker-queue-port'} <= set(about), about.keys()
    assert all('port' in entry.lower() for entry in about.values()) and len(about) < len(options_in(whole)), about
    assert run('help', 'port').stdout == run('--help=port').stdout == p.stdout
    for args in ('help', 'zzzz'), ('--help=zzzz',), ('serve', '--help=zzzz'):
        p = run(*args)
        assert p.returncode == 2 and not p.stdout and 'no option of baton serve is about "zzzz"; --help-all' in p.stderr, p
    p = run('help', 'max-modle-lenn')
    assert p.returncode == 2 and 'did you mean --max-model-len?' in p.stderr, p
    for words in ('max-model-len',), ('max_model_len',), ('max', 'model', 'len'), ('Max model len',):
        p = run('help', *words)
        assert p.returncode == 0 and next(iter(options_in(p.stdout))) == 'max-model-len', (words, p)
    for words, only in (('-m', 'model'), ('m', 'model'), ('--port', 'port'), ('--scheduler-topic', 'scheduler-topic')):
        p = run('help', *[words])
        assert p.returncode == 0 and list(options_in(p.stdout)) == [only], (words, p)
    for wrong, right in ('lauch', 'launch'), ('srve', 'serve'), ('stauts', 'status'):
        for p in run(wrong), run('help', wrong):
            assert p.returncode == 2 and f"there is no command '{wrong}', did you mean '{right}'?" in p.stderr, p
    for page, said in (('foo', "there is no page 'foo'; pages are configuration, compatibility, recovery; "), ('recovry', "there is no page 'recovry', did you mean 'recovery'?")):
        p = run('docs', page)
        assert p.returncode == 2 and not p.stdout and said in p.stderr, p
    p = run('zzzz')
    assert p.returncode == 2 and 'did you mean' not in p.stderr and '`baton --help` lists them' in p.stderr, p


def test_options_of_ranks_are_in_help_and_in_a_note():
    entries = options_in(run('serve', '--help').stdout)
    for name in 'tensor-parallel-size', 'data-parallel-size', 'pipeline-parallel-size', 'enable-expert-parallel':
        assert name in entries, entries.keys()
    p = run('generate', TINY, '--raw', '--prompt', 'a', '--max-tokens', '2', '--tensor-parallel-size', '2')
    assert p.returncode == 0 and 'note: --tensor-parallel-size' in p.stderr, p.stderr


# ---- values ----

def test_values_out_of_range_name_option_value_and_range():
    for args, said in ((['--port', '70000'], '--port is "70000", but must be a whole number from -1 to 65535'),
                       (['--max-model-len', '32q'], '--max-model-len is "32q", but must be a whole number from 1 to 16777216'),
                       (['--max-num-seqs', '5k'], '--max-num-seqs is "5000", but must be a whole number from 1 to 4096'),
                       (['--gpu-memory-utilization', '1.5'], '--gpu-memory-utilization is "1.5", but must be a number from 0.01 to 1'),
                       (['--splitwise-role', 'prefil'], '--splitwise-role is "prefil", but must be mixed, prefill or decode'),
                       (['--kv-checksum=maybe'], '--kv-checksum is "maybe", but must be true or false')):
        p = run('serve', TINY, *args)
        assert p.returncode == 2 and said in p.stderr and len(p.stderr.strip().splitlines()) == 1, (args, p.stderr)
    p = run('serve', TINY, env={**os.environ, 'BATON_PORT': '70000'})
    assert p.returncode == 2 and 'BATON_PORT' in p.stderr and 'from -1 to 65535' in p.stderr, p.stderr


def test_numbers_may_have_a_suffix():
    """k is a thousand, K is 1024: what a node then says of its limit shows it."""
    for given, limit in (('0.5k', 500), ('1K', 1024)):
        with closing(Node(TINY, args=['--max-model-len', given])) as n:
            wait_ready(n)
            status, _, body = request(n.port, 'POST', '/v1/completions', {**ASK, 'prompt': [5] * 1100})
            assert status == 400 and re.search(rf'\b{limit}\b', body['error']['message']), body


# ---- launch ----

def test_launch_says_what_to_give():
    p = run('launch', '--model', TINY, '--prefill', '1')
    assert p.returncode == 2 and '--prefill 1 without a node that decodes; add --decode N' in p.stderr and '--router' in p.stderr, p.stderr
    p = run('launch', '--model', TINY, '--num-servers', '1', '--port', '8000')
    assert p.returncode == 2 and '--port is not an option of "launch"; did you mean --ports?' in p.stderr, p.stderr
    p = run('serve', TINY, '--ports', '8000')
    assert p.returncode == 2 and '--ports is not an option of "serve"; these take it: launch' in p.stderr, p.stderr
    first = free_ports(1)[0]
    with socket.socket() as s:
        s.bind(('127.0.0.1', free_ports(1)[0]))
        s.listen(1)
        port = s.getsockname()[1]
        p = run('launch', '--model', TINY, '--num-servers', '4', '--host', '127.0.0.1', f'--ports=-1,{first},-1,{port}')
    ports = re.search(r'nodes +4 mixed, .* each on port (\d+), (\d+), (\d+),? (?:and )?(\d+)', p.stderr)
    assert ports and int(ports[2]) == first and all(port < int(ports[i]) < port + 100 for i in (1, 3)) and int(ports[4]) == port, p.stderr
    assert p.returncode == 1 and f'127.0.0.1:{port}' in p.stderr and f'(--ports): the port is in use by process {os.getpid()} (' in p.stderr, p.stderr
    assert 'stop it or choose another port' in p.stderr and 'launch: stopped, because' in p.stderr, p.stderr


def test_a_launch_that_stops_says_what_it_waits_for():
    ports = free_ports(2)
    with closing(Process([BIN, 'launch', '--model', TINY, '--num-servers', '2', '--ports', ','.join(map(str, ports)), '--shutdown-timeout', '7',
                          '--log-level', 'info', *SIZE], name='launch')) as l:
        wait_until('ready', lambda: 'ready: all 2 nodes' in l.output(), 60)
        l.kill(signal.SIGINT)
        assert l.p.wait(20) == 0
        assert l.output().count('stopping: nodes finish their requests, at most 7 s; Ctrl-C again ends them') == 1, l.output()


def test_options_of_redis_without_redis_are_warned_of():
    def warned(*args, env=None):
        with closing(Node(TINY, args=[*args, *SIZE], env=env)) as n:
            wait_ready(n)
            return re.findall(r'^warning: (--\S+) has no effect without --scheduler-name splitwise', n.output(), re.M)
    redis, topic = ['--scheduler-host', '10.0.0.1', '--scheduler-port', '6390', '--scheduler-password', 'x'], ['--scheduler-topic', 't']
    assert warned(*redis, *topic) == redis[::2] + topic[:1]
    assert warned(*topic, '--engine-worker-queue-port', str(free_ports(1)[0])) == [] # others may register there
    assert warned(*redis, '--log-level', 'error') == []
    assert warned(env=dict(BATON_SCHEDULER_HOST='10.0.0.1', BATON_TOPIC='t')) == [] # of a whole cluster's environment
    p = run('generate', TINY, '--raw', '--prompt', 'a', '--max-tokens', '2', *redis)
    assert p.returncode == 0 and 'warning: --scheduler' not in p.stderr, p.stderr
    ports = free_ports(2)
    with closing(Process([BIN, 'launch', '--model', TINY, '--num-servers', '2', '--ports', ','.join(map(str, ports)), *redis[:2], *topic, *SIZE], name='launch')) as l:
        wait_until('ready', lambda: 'ready: all 2 nodes' in l.output(), 60)
        assert re.findall(r'warning: (--\S+) has no effect', l.output()) == ['--scheduler-host'], l.output() # the launcher alone; the topic is its directory's


def test_the_quickstart_checks_its_ports_first():
    script = os.path.join(os.path.dirname(__file__), '../../deploy/quickstart.sh')
    for ports in '8000', '8000,8000', '8000,800x', '1,2,3':
        with tempfile.TemporaryDirectory() as nothing: # without programs nothing is installed or built
            for program in 'bash', 'dirname', 'mktemp', 'rm':
                os.symlink(shutil.which(program), os.path.join(nothing, program))
            p = subprocess.run([script, '--once'], env=dict(PATH=nothing, BATON_PORTS=ports, HOME=nothing), capture_output=True, text=True, timeout=20)
        assert p.returncode == 1 and f"BATON_PORTS is '{ports}'" in p.stderr and '1/5' not in p.stdout, p


# ---- generate ----

def batch_line(i, **body):
    return json.dumps(dict(custom_id=str(i), method='POST', url='/v1/completions', body={**dict(prompt=[5], max_tokens=2, ignore_eos=True), **body})) + '\n'


def test_generate_takes_the_model_as_an_argument_and_sums_up_why_lines_failed():
    lines = [batch_line(0), batch_line(1, model='other'), batch_line(2, top_p=9), batch_line(3, model='other')]
    p = run('generate', TINY, '--input', '-', input=''.join(lines))
    assert p.returncode == 1 and [json.loads(l)['error'] is None for l in p.stdout.splitlines()] == [True, False, False, False], p.stdout
    said = p.stderr.splitlines()
    assert any(l.startswith('1 answered, 3 failed') for l in said) and 'ended 1 x: cut by max_tokens or --max-model-len (length)' in said, said
    reasons = [l for l in said if l.startswith('failed ')]
    assert len(reasons) == 2 and reasons[0].startswith('failed 2 x: 404: ') and 'other' in reasons[0] and reasons[0].endswith('(first in line 2)'), reasons
    assert reasons[1].startswith('failed 1 x: 400: ') and 'top_p' in reasons[1] and reasons[1].endswith('(first in line 3)'), reasons
    p = run('generate', TINY, '--input', '-', '--ignore-model', input=lines[1])
    assert p.returncode == 0 and json.loads(p.stdout)['response']['status_code'] == 200, p
    p = run('generate', TINY, '--model', TINY, '--prompt', 'a')
    assert p.returncode == 2 and 'the model was given twice' in p.stderr and 'a prompt is given with --prompt' in p.stderr, p.stderr
    p = run('generate', TINY, '--input', '-', input=lines[1])
    assert re.match(r'0 answered, 1 failed, .* 0\.0 answers/s$', p.stderr.splitlines()[-2]), p.stderr


def test_generate_and_files_that_would_be_lost():
    with tempfile.TemporaryDirectory() as folder:
        path, out, fifo = (os.path.join(folder, name) for name in ('in.jsonl', 'out', 'fifo'))

        def refuses(said, *args):
            for name in path, out + '.partial':
                with open(name, 'w') as f:
                    f.write(batch_line(0))
            p = run('generate', TINY, *args, stdin=open(path))
            assert p.returncode == 2 and said in p.stderr and 'loading' not in p.stderr, p.stderr
            for name in path, out + '.partial':
                with open(name) as f:
                    assert f.read() == batch_line(0), name
        for source in path, '-':
            refuses(f'--output {path} is the input file; name another', '--input', source, '--output', path)
        refuses(f'{out}.partial has the answers of an interrupted run; move it away, or remove it', '--input', path, '--output', out)
        refuses('the one to --prompt goes to standard output', '--prompt', 'a', '--output', out)
        os.mkfifo(fifo)
        p = Process([BIN, 'generate', TINY, '--input', fifo, '--log-level', 'info'], name='generate')
        with closing(p):
            wait_until('the model is loaded', lambda: 'node ready' in p.output(), 20, 0.01)
            time.sleep(0.3)
            t = time.monotonic()
            p.kill(signal.SIGTERM)
            assert p.p.wait(10) == 130 and time.monotonic() - t < 1, p.output()


def test_generate_and_a_file_with_an_odd_first_line():
    line = batch_line(0)
    with tempfile.TemporaryDirectory() as folder:
        path, out = os.path.join(folder, 'in.jsonl'), os.path.join(folder, 'out')

        def generate(data, *args):
            with open(path, 'wb') as f:
                f.write(data)
            return run('generate', TINY, '--input', path, '--output', out, *args)
        p = generate(b'\xef\xbb\xbf' + line.encode())
        with open(out) as f:
            assert p.returncode == 0 and json.load(f)['custom_id'] == '0', p
        os.unlink(out)
        for data, said in (((f'[{line.strip()},\n{line}]').encode(), "the file is a JSON array; a batch file has one JSON object on each line (jq -c '.[]'"),
                           (json.dumps(json.loads(line), indent=1).encode(), '(jq -c . writes it so)'),
                           (line.encode('utf-16'), 'iconv -f UTF-16 -t UTF-8'),
                           (line.encode()[9:], 'the end of a JSON object without its beginning')):
            p = generate(data)
            assert p.returncode == 2 and f'{path}, line 1: ' in p.stderr and said in p.stderr, (data, p.stderr)
            assert 'loading' not in p.stderr and not os.path.exists(out) and not os.path.exists(out + '.partial'), p.stderr
        p = generate((line[:40] + '\n' + line).encode())
        with open(out) as f:
            cut, whole = map(json.loads, f)
        assert p.returncode == 1 and whole['error'] is None and f'{path}, line 1: malformed JSON' in cut['error']['message'], (cut, whole)
        assert 'each line must be one whole JSON object (first in line 1)' in p.stderr, p.stderr


# ---- status ----

def test_status_is_a_table_and_watch_asks_again():
    with closing(Node(TINY, args=SIZE)) as n:
        wait_ready(n)
        for _ in range(3):
            assert request(n.port, 'POST', '/v1/completions', ASK)[0] == 200
        p = run('status', '--port', str(n.port))
        said = p.stdout.splitlines()
        assert p.returncode == 0 and re.match(rf'baton \d+\.\d+\.\d+ 127\.0\.0\.1:{n.port} \(mixed\), model m, up \d+ s(econds?)?.*; KV by ', said[0]), said
        assert re.match(r'requests that came here: 3, 0 % of them split over two nodes; [\d.]+ tokens/s', said[1]), said
        head = next(i for i, l in enumerate(said) if l.startswith('node '))
        assert said[head].split()[:5] == ['node', 'role', 'topic', 'running', 'waiting'], said
        assert said[head + 1].split() == [f'127.0.0.1:{n.port}', 'mixed', 'default', '0', '0', said[head + 1].split()[5], '0', '-', '-'] and '/64' in said[head + 1], said
        w = subprocess.Popen([BIN, 'status', '--port', str(n.port), '--watch'], stdout=subprocess.PIPE, text=True)
        try:
            pages = 0
            end = time.monotonic() + 10
            while pages < 2 and time.monotonic() < end:
                pages += w.stdout.readline().startswith('requests that came here: 3')
            assert pages == 2
            w.send_signal(signal.SIGINT)
            assert w.wait(5) == -signal.SIGINT
        finally:
            w.kill()
            w.wait()


# ---- requests ----

def test_requests_are_logged_only_when_that_is_asked():
    for args in [], ['--log-requests']:
        with closing(Node(TINY, args=[*SIZE, *args])) as n:
            wait_ready(n)
            for _ in range(3):
                assert request(n.port, 'POST', '/v1/completions', ASK)[0] == 200
            n.stop()
            for event in 'request begin', 'request end':
                lines = [l for l in n.output().splitlines() if event in l]
                assert len(lines) == (3 if args else 0) and all(' info ' in l for l in lines), n.output()
            if args:
                assert all(len(re.findall(r'\w+_ms=', l)) >= 2 for l in lines), lines


def test_temperature_above_2():
    for args in [], ['--allow-temperature-above-2']:
        with closing(Node(TINY, args=[*SIZE, *args])) as n:
            wait_ready(n)
            for temperature, ok in (2, True), (2.5, bool(args)), (100, bool(args)), (101, False):
                status, _, body = request(n.port, 'POST', '/v1/completions', {**ASK, 'temperature': temperature})
                assert status == (200 if ok else 400), (args, temperature, body)
                assert ok or (body['error']['param'] == 'temperature' and str(100 if args else 2) in body['error']['message']), body


def test_a_conversion_of_kv_is_said_once_per_pair():
    with pair(TINY, 'tcp', SIZE, ['--block-size', '16'], ['--block-size', '64']) as (p, d):
        for i in range(4):
            status, _, body = request(p.port, 'POST', '/v1/completions', {**ASK, 'prompt': [5 + i] * 200, 'return_trace': True})
            assert status == 200 and body['baton']['kv_bytes'] > 0, body
        said = [l for n in (p, d) for l in n.output().splitlines() if 'kv is converted for this peer' in l]
        assert len(said) == 1 and ' info ' in said[0] and 'block_tokens=16 ' in said[0] and 'to_block_tokens=64' in said[0], said


# ---- clients ----

def ask_on(s, body=None):
    """Status and text of an answer on a connection: to a request for a completion, or to GET /live."""
    data = json.dumps(body) if body else ''
    head = f'POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}' if body else 'GET /live HTTP/1.1'
    s.sendall(f'{head}\r\nHost: x\r\n\r\n{data}'.encode())
    text = s.recv(65536).decode()
    return int(text.split()[1]), text.lower()


def from_address(host, port, keep=None, body=None):
    """Asks on a new connection from an address of this host; `keep` holds the connection if the answer is 200."""
    s = socket.create_connection(('127.0.0.1', port), 10, source_address=(host, 0))
    status, text = ask_on(s, body)
    if keep is not None and status == 200:
        keep.append(s)
    else:
        s.close()
    return status, text


def test_a_client_has_a_limit_of_requests():
    with closing(Node(smollm2(), args=['--max-model-len', '4096', '--max-requests-per-client', '1'])) as n:
        wait_ready(n)
        with contextlib.closing(stream(n.port, '/v1/completions', {**ASK, 'max_tokens': 3000})) as events:
            next(events)
            status, text = from_address('127.0.0.1', n.port, body=ASK)
            assert status == 429 and 'retry-after: ' in text and 'as many running requests as the server accepts' in text, text
            status, text = from_address('127.0.0.2', n.port, body=ASK)
            assert status == 200, text # another client is not concerned
        wait_until('the first client may ask again', lambda: from_address('127.0.0.1', n.port, body=ASK)[0] == 200, 10)


def test_connections_have_a_limit():
    """Each client's, and all together."""
    held = []
    with closing(Node(TINY, args=[*SIZE, '--max-connections', '5', '--max-connections-per-client', '3'])) as n:
        wait_ready(n)
        for _ in range(3):
            assert from_address('127.0.0.3', n.port, held)[0] == 200
        status, text = from_address('127.0.0.3', n.port)
        assert status == 429 and 'retry-after: ' in text and 'this address has as many connections' in text, text
        for _ in range(2): # the server sees at some time that the refused one is closed
            wait_until('another client', lambda: from_address('127.0.0.4', n.port, held)[0] == 200, 10)
        status, text = from_address('127.0.0.4', n.port)
        assert status == 503 and 'retry-after: ' in text and 'the server has as many connections' in text, text
        held.pop(0).close()
        wait_until('there is room again', lambda: from_address('127.0.0.4', n.port, held)[0] == 200, 10)
        for s in held:
            s.close()
