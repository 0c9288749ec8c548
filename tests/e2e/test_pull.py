"""test_pull.py - `baton pull` against a hub that is right and one that drops, stalls, truncates, corrupts and refuses (hub_server.py): the right files
come or none, what came is kept, and the sentence says what to do."""
import contextlib, json, os, random, resource, shutil, signal, subprocess, tempfile, threading, time

from harness import BIN, TINY, Node, Process, Skip, closing, request, wait_ready, wait_until
from hub_server import COMMIT, Hub, checkpoint, git_sum, sha256

SMALL = ['--chunk-size', '65536', '--stall-timeout', '0.5']
VARIABLES = ('HF_', 'HUGGING', 'MODELSCOPE', 'XDG_', 'SSL_CERT', 'CURL_', 'REQUESTS_', 'BATON_CACHE', 'BATON_MODELS', 'VLLM_USE')


@contextlib.contextmanager
def place():
    folder = tempfile.mkdtemp(prefix='baton-pull-')
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(folder, hub=None, **more):
    env = {k: v for k, v in os.environ.items() if not k.startswith(VARIABLES) and not k.lower().endswith('_proxy')}
    env.update(HOME=folder, BATON_CACHE=os.path.join(folder, 'cache'))
    if hub:
        env.update(HF_ENDPOINT=hub.url, MODELSCOPE_ENDPOINT=hub.url)
    return {**env, **more}


def pull(folder, hub, *args, status=0, env={}, limit=None, timeout=60):
    """Runs `baton pull`; (what it printed to standard output, to standard error)."""
    before = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) if limit else None
    p = subprocess.run([BIN, 'pull', *args], capture_output=True, text=True, timeout=timeout, env=environment(folder, hub, **env), preexec_fn=before)
    assert p.returncode == status, (args, p.returncode, p.stdout, p.stderr)
    return p.stdout.strip(), p.stderr


def fails(folder, hub, *args, said, status=1, **kw):
    _, text = pull(folder, hub, *args, status=status, **kw)
    line = next((x for x in text.splitlines() if x.startswith('baton pull: ')), '')
    assert all(s in line for s in ([said] if isinstance(said, str) else said)), (said, text)
    return text


def files_of(folder):
    return {os.path.relpath(os.path.join(at, n), folder): os.path.join(at, n) for at, _, names in os.walk(folder) for n in names}


def is_right(folder, files):
    """The folder has exactly these files, a marker with their sums, and nothing of the work."""
    found = files_of(folder)
    assert set(found) == {*files, '.baton-pull.json'}, (sorted(found), sorted(files))
    for name, data in files.items():
        with open(found[name], 'rb') as f:
            assert f.read() == data, name
    with open(found['.baton-pull.json'], encoding='utf-8') as f:
        marker = {f['name']: f for f in json.load(f)['files']}
    assert {n: (f['size'], f['sha256']) for n, f in marker.items()} == {n: (len(d), sha256(d)) for n, d in files.items()}


def is_not_loadable(folder):
    assert not os.path.exists(os.path.join(folder, 'config.json')) and not os.path.exists(os.path.join(folder, '.baton-pull.json')), files_of(folder)


# ---- what comes ----

def test_a_checkpoint_and_nothing_else_comes():
    """The files that a model needs, into the cache; sums in the marker; the token goes to the hub and not to where it redirects; a second pull
    asks for the list alone, and --model org/name finds the folder."""
    needed, others = checkpoint()
    with place() as folder, Hub({**needed, **others}) as hub:
        out, said = pull(folder, hub, 'org/name', *SMALL, env={'HF_TOKEN': 'hf_secret'})
        assert out == os.path.join(folder, 'cache', 'models', 'org', 'name') and 'checked' in said, (out, said)
        is_right(out, needed)
        assert {r.headers.get('Authorization') for r in hub.requests if r.port == hub.port} == {'Bearer hf_secret'}
        assert not any('Authorization' in r.headers for r in hub.requests if r.port == hub.bytes_port)
        assert any(r.port == hub.bytes_port for r in hub.requests)
        assert all(COMMIT in r.path for r in hub.asked() if r.port == hub.port), 'not by the commit of the list'
        hub.requests.clear()
        assert pull(folder, hub, 'org/name')[0] == out and hub.asked() == []
        p = subprocess.run([BIN, 'generate', '--model', 'org/name', '--prompt', 'a'], capture_output=True, text=True, env=environment(folder), timeout=60)
        assert p.returncode and 'tokenizer.json: malformed' in p.stderr, p.stderr  # it was found


def test_a_token_is_not_sent_in_clear_text():
    """127.0.0.1 alone is trusted without TLS: elsewhere the token stays here."""
    needed, _ = checkpoint(1, 100)
    with place() as folder, Hub(needed) as hub:
        with open(os.path.join(folder, 'token'), 'w', encoding='utf-8') as f:
            f.write('hf_file\n')
        pull(folder, hub, 'org/name', '--dir', f'{folder}/a', env={'HF_TOKEN_PATH': f'{folder}/token'})
        assert hub.requests[0].headers.get('Authorization') == 'Bearer hf_file'
        hub.requests.clear()
        pull(folder, hub, 'org/name', '--dir', f'{folder}/b', env={'HF_TOKEN': 'hf_x', 'HF_ENDPOINT': hub.other_url})
        assert hub.requests and not any('Authorization' in r.headers for r in hub.requests)


def test_patterns_revisions_and_one_file():
    needed, others = checkpoint(1, 1000)
    with place() as folder, Hub({**needed, **others}) as hub:
        pull(folder, hub, 'org/name@v1.0', '--include', '*.json,README.md', '--exclude', 'original/*', '--dir', f'{folder}/a')
        is_right(f'{folder}/a', {n: d for n, d in {**needed, **others}.items() if n.endswith('.json') and '/' not in n or n == 'README.md'})
        assert hub.requests[0].path == '/api/models/org/name/revision/v1.0', hub.requests[0]
        pull(folder, hub, f'{hub.url}/org/name/blob/main/onnx/model.onnx', '--dir', f'{folder}/b')
        is_right(f'{folder}/b', {'onnx/model.onnx': b'o'})
        fails(folder, hub, 'org/name', '--include', 'nothing', said='--include and --exclude leave none')
        fails(folder, hub, 'org/name/none.gguf', said='the source has no file "none.gguf"')
        fails(folder, hub, 'org/none', said='org/none has no such model or file')


def test_modelscope():
    needed, others = checkpoint()
    with place() as folder, Hub({**needed, **others}) as hub:
        pull(folder, hub, 'org/name', '--source', 'modelscope', '--dir', f'{folder}/a', env={'MODELSCOPE_API_TOKEN': 'ms'})
        is_right(f'{folder}/a', needed)
        assert hub.requests[0].query == {'Revision': 'master', 'Recursive': 'True'} and hub.requests[0].headers['Cookie'] == 'm_session_id=ms', hub.requests[0]
        pull(folder, hub, 'ms://org/name@v2', '--dir', f'{folder}/b')
        is_right(f'{folder}/b', needed)
        pull(folder, hub, 'org/name', '--dir', f'{folder}/c', env={'VLLM_USE_MODELSCOPE': 'True', 'MODELSCOPE_ENDPOINT': '', 'MODELSCOPE_DOMAIN': hub.url})
        is_right(f'{folder}/c', needed)
        assert all(r.path.startswith('/api/v1/') for r in hub.requests)


def test_gguf():
    """One of several by a part of its name, all parts of a split one, by name, by address and of a server that is no hub."""
    rng = random.Random(2)
    q4, q8 = rng.randbytes(200000), rng.randbytes(300000)
    split = {f'UD/big-{i:05}-of-00003.gguf': rng.randbytes(100000 + i) for i in (1, 2, 3)}
    files = {'m-Q4_K_M.gguf': q4, 'm-Q8_0.gguf': q8, 'mmproj-m.gguf': b'x', 'config.json': b'{}', **split}
    with place() as folder, Hub(files) as hub:
        fails(folder, hub, 'org/name', said=['several models', 'm-Q8_0.gguf', 'org/name:Q4_K_M'])
        out, _ = pull(folder, hub, 'org/name:q4_k_m', *SMALL)
        assert out.endswith('/org/name/m-Q4_K_M.gguf')
        is_right(os.path.dirname(out), {'m-Q4_K_M.gguf': q4})
        out, _ = pull(folder, hub, 'org/name/m-Q8_0.gguf', *SMALL)
        is_right(os.path.dirname(out), {'m-Q4_K_M.gguf': q4, 'm-Q8_0.gguf': q8})
        out, _ = pull(folder, hub, f'{hub.url}/org/name/resolve/main/UD/big-00001-of-00003.gguf', '--dir', f'{folder}/a', *SMALL)
        assert out == f'{folder}/a/UD/big-00001-of-00003.gguf'
        is_right(f'{folder}/a', split)
        out, _ = pull(folder, hub, f'{hub.bytes_url}/bytes/UD/big-00002-of-00003.gguf?key=1', *SMALL)
        assert out.endswith('/big-00001-of-00003.gguf')
        is_right(os.path.dirname(out), {n[3:]: d for n, d in split.items()})
        hub.requests.clear()
        pull(folder, hub, f'{hub.bytes_url}/bytes/UD/big-00002-of-00003.gguf?key=1')
        assert {(r.begin, r.end) for r in hub.requests} == {(0, 1)}, 'the same tag, and still it was fetched again'
        del files['UD/big-00003-of-00003.gguf'], hub.files['UD/big-00003-of-00003.gguf']
        fails(folder, hub, 'org/name:big', said='is one of 3 files, of which the source has 2')


def test_a_mirror_that_lists_no_sizes():
    needed, others = checkpoint()
    with place() as folder, Hub({**needed, **others}) as hub:
        hub.sizes = False
        pull(folder, hub, 'org/name', '--dir', f'{folder}/a', *SMALL)
        is_right(f'{folder}/a', needed)
        hub.fault = lambda r: {'corrupt_at': 5} if r.name == 'config.json' else None
        fails(folder, hub, 'org/name', '--dir', f'{folder}/b', *SMALL, said=['config.json came with the sum git:', git_sum(needed['config.json'])])


# ---- what goes wrong on the way ----

def test_connections_that_drop_stall_and_refuse():
    """Every third answer goes wrong in some way, and the files are right all the same; stalls are noticed, and what came is not asked for again."""
    needed, _ = checkpoint(3, 400000)
    rng, n_faults = random.Random(3), []

    def fault(r):
        kind = rng.choice(['drop', 'stall', 'none', '503', '500', 'slow', 'none', 'none'])
        if not r.name or kind == 'none':
            return None
        n_faults.append(kind)
        return {'drop': {'drop_after': rng.randrange(60000)}, 'stall': {'stall_after': rng.randrange(60000)}, '503': {'status': 503}, '500': {'status': 500},
                'slow': {'bytes_per_s': 400000}}[kind]

    with place() as folder, Hub(needed, fault=fault) as hub:
        out, _ = pull(folder, hub, 'org/name', '--connections', '4', '--retries', '30', *SMALL)
        is_right(out, needed)
        total = sum(map(len, needed.values()))
        assert {'drop', 'stall', '503'} <= set(n_faults) and hub.n_sent < 1.3 * total, (n_faults, hub.n_sent, total)


def test_a_server_that_stays_away():
    """The tries are bounded; what came is kept, and the next pull fetches the rest alone."""
    needed, _ = checkpoint(1, 600000)
    with place() as folder, Hub(needed) as hub:
        gone = []
        hub.fault = lambda r: {'drop_after': 0} if gone or (r.begin or 0) >= 300000 and not gone.append(1) else None
        text = fails(folder, hub, 'org/name', '--dir', f'{folder}/a', '--connections', '1', '--retries', '2', *SMALL, said='Recv failure')
        assert 'the same command goes on' in text
        is_not_loadable(f'{folder}/a')
        hub.fault, hub.n_sent = (lambda r: None), 0
        pull(folder, hub, 'org/name', '--dir', f'{folder}/a', *SMALL)
        is_right(f'{folder}/a', needed)
        assert hub.n_sent < 450000, hub.n_sent
    with place() as folder:
        fails(folder, None, 'org/name', '--retries', '1', '--hf-endpoint', 'http://127.0.0.1:9', said='http://127.0.0.1:9/api/models/org/name')
        assert files_of(folder) == {}, files_of(folder)


def test_corrupted_bytes_never_count():
    needed, _ = checkpoint(2)
    name = 'model-00002-of-00002.safetensors'
    with place() as folder, Hub(needed) as hub:
        hub.fault = lambda r: {'corrupt_at': 100} if r.name == name and r.port == hub.bytes_port and sum(x.begin in (0, None) for x in hub.asked(name) if x.port == r.port) <= 1 else None
        _, said = pull(folder, hub, 'org/name', '--dir', f'{folder}/a', *SMALL)
        assert 'pull begins a file again' in said
        is_right(f'{folder}/a', needed)
        hub.fault = lambda r: {'corrupt_at': 100} if r.name == name else None
        fails(folder, hub, 'org/name', '--dir', f'{folder}/b', *SMALL, said=[f'{name} came with the sum sha256:', 'but the source says sha256:' + sha256(needed[name])])
        is_not_loadable(f'{folder}/b')
        hub.fault = lambda r: None
        pull(folder, hub, 'org/name', '--dir', f'{folder}/b', *SMALL)
        is_right(f'{folder}/b', needed)


def test_a_file_that_is_replaced_while_it_comes():
    """A server without sums: what its ETag, or without one its Last-Modified, says is another file ends the pull; a file of both never counts."""
    old, new = random.Random(5).randbytes(400000), random.Random(6).randbytes(400000)
    for tags, modified in (True, None), (False, 'Mon, 05 Oct 2026 10:00:00 GMT'), (True, 'Mon, 05 Oct 2026 10:00:00 GMT'):
        with place() as folder, Hub({'m.gguf': old}) as hub:
            hub.tags, hub.modified = tags, modified

            def fault(r):
                if (r.begin or 0) >= 200000 and hub.files['m.gguf'] is old:
                    hub.files['m.gguf'] = new
                    hub.modified = modified and modified.replace('10:00', '10:01')

            hub.fault = fault
            args = [f'{hub.bytes_url}/bytes/m.gguf', '--dir', f'{folder}/a', '--connections', '1', *SMALL]
            fails(folder, hub, *args, said='m.gguf: the file was replaced at its source meanwhile')
            assert 'a/m.gguf' not in files_of(folder)
            pull(folder, hub, *args)
            is_right(f'{folder}/a', {'m.gguf': new})


def test_an_error_without_an_end():
    needed, _ = checkpoint(1, 1000)
    with place() as folder, Hub(needed) as hub:
        hub.fault = lambda r: {'status': 403, 'endless': True}
        fails(folder, hub, 'org/name', said='the server answers 403: nono', timeout=30)


def test_a_server_without_ranges():
    needed, _ = checkpoint(2)
    times = {}

    def fault(r):
        times[r.name] = times.get(r.name, 0) + 1
        return {'no_ranges': True, **({'drop_after': 100000} if times[r.name] == 3 else {})} if r.name else None

    with place() as folder, Hub(needed, fault=fault) as hub:
        _, said = pull(folder, hub, 'org/name', '--dir', f'{folder}/a', *SMALL)
        assert 'pull without ranges' in said
        is_right(f'{folder}/a', needed)


def test_pauses_that_a_server_asks_for():
    needed, _ = checkpoint(1, 1000)
    with place() as folder, Hub(needed) as hub:
        refused = []
        hub.fault = lambda r: {'status': 429, 'headers': {'Retry-After': '1'}} if len(refused) < 2 and not refused.append(time.monotonic()) else None
        _, said = pull(folder, hub, 'org/name', '--dir', f'{folder}/a')
        assert 'pull pauses status=429 seconds=1' in said and refused[1] - refused[0] >= 1, (said, refused)
        is_right(f'{folder}/a', needed)
        hub.fault = lambda r: {'status': 429, 'headers': {'Retry-After': '3600'}} if r.name else None
        fails(folder, hub, 'org/name', '--dir', f'{folder}/b', said='the server answers 429 and asks to come back in 3600 s')


def test_refusals_say_what_to_do():
    needed, _ = checkpoint(1, 1000)
    with place() as folder, Hub(needed) as hub:
        for status, code, token, said in ((401, 'RepoNotFound', '', ['there is no org/name', 'or set HF_TOKEN', 'the server answers 401: why']),
                                          (403, 'GatedRepo', '', ['has terms to accept', f'{hub.url}/org/name', 'HF_TOKEN']),
                                          (401, '', 'hf_x', 'the token in HF_TOKEN is not valid or has no right'),
                                          (404, 'RevisionNotFound', '', 'the server answers 404: why'),
                                          (418, '', '', 'the server answers 418: why')):
            hub.fault = lambda r: {'status': status, 'headers': {'X-Error-Code': code, 'X-Error-Message': 'why\x7f'}}
            fails(folder, hub, 'org/name', said=said, env={'HF_TOKEN': token})
            assert len(hub.requests) == 1, 'a refusal was tried again'
            hub.requests.clear()
        hub.fault = lambda r: {'status': 403, 'body': b'expired'} if r.port == hub.bytes_port else None
        fails(folder, hub, 'org/name', said='the server answers 403: expired')
        fails(folder, hub, 'org/name', said='HF_HUB_OFFLINE is set', status=2, env={'HF_HUB_OFFLINE': '1'})


def test_addresses_that_expire():
    """Chunks after the first go straight to where the hub led; when that address is no longer good the hub gives another."""
    needed, _ = checkpoint(1, 1000000)
    name = 'model-00001-of-00001.safetensors'
    with place() as folder, Hub(needed) as hub:
        used = {}

        def fault(r):
            if r.port == hub.bytes_port and r.name == name:
                used[r.query['key']] = used.get(r.query['key'], 0) + 1
                if used[r.query['key']] > 4:
                    return {'status': 403, 'body': b'expired'}

        hub.fault = fault
        out, _ = pull(folder, hub, 'org/name', '--connections', '2', *SMALL)
        is_right(out, needed)
        at_hub = [r for r in hub.asked(name) if r.port == hub.port]
        assert 2 < len(at_hub) < 12 and len([r for r in hub.asked(name) if r.port == hub.bytes_port]) >= 16, (len(at_hub), used)


def test_redirects_are_bounded():
    needed, _ = checkpoint(1, 1000)
    with place() as folder, Hub(needed) as hub:
        hub.fault = lambda r: {'redirect': hub.url + r.path}
        fails(folder, hub, 'org/name', said='redirects')
        for bad in 'file:///etc/passwd', 'gopher://127.0.0.1/', 'scp://127.0.0.1/x':
            hub.fault = lambda r: {'redirect': bad} if r.name == 'config.json' else None
            fails(folder, hub, 'org/name', said='config.json: ')
            is_not_loadable(f'{folder}/cache/models/org/name')


# ---- a hub that wants to do harm ----

def test_hostile_lists():
    """Names that lead outside, or that collide, end the pull before anything is written; lists that are no lists, endless ones, and sizes that no disk has."""
    good = {'rfilename': 'config.json', 'size': 2, 'blobId': git_sum(b'{}')}
    with place() as folder, Hub({'config.json': b'{}'}) as hub:
        body = b''
        hub.fault = lambda r: {'status': 200, 'body': body} if not r.name else None
        for name in '../evil', '/tmp/evil', 'a/../../evil', '..', '.', 'a//b', 'a/', '', 'a\u0001b', 'a\\b', '.baton-pull.json', '.baton-pull/lock', 'x' * 300, 'config.json', 'config.json/a':
            body = json.dumps({'sha': COMMIT, 'siblings': [good, {'rfilename': name, 'size': 1}]}).encode()
            fails(folder, hub, 'org/name', '--include', '*', said='refused')
        for body, said in ((b'{"siblings": [{"rfilename": "a\\u0000b", "size": 1}]}', '\\u0000'), (b'<html>', 'is not what a hub sends'), (b'{"a": 1}', 'no "siblings"'), (b'', 'is not what a hub sends'),
                           (b'{"sha": "../x", "siblings": []}', '"sha" is no commit'), (b'[' * 100000, 'is not what a hub sends'), (b'{"siblings": [{"rfilename": "a", "size": -1}]}', 'size'),
                           (json.dumps({'siblings': [{'rfilename': f'f{i}'} for i in range(20001)]}).encode(), 'more than 20000 files'),
                           (b'{"siblings": [' + b'0,' * 3000000 + b'0]}', 'is not what a hub sends'), (b' ' * (33 << 20), 'longer than any of its kind'),
                           (json.dumps({'siblings': [good, {'rfilename': 'model.safetensors', 'size': 1 << 52, 'lfs': {'sha256': 'a' * 64, 'size': 1 << 52}}]}).encode(), 'needs 4.00 PiB more')):
            fails(folder, hub, 'org/name', said=said)
        assert not any('evil' in n for n in os.listdir('/tmp')) and set(files_of(folder)) <= {'cache/models/org/name/.baton-pull/checked.json'}, files_of(folder)


def test_a_hostile_index():
    needed, _ = checkpoint(1, 1000)
    with place() as folder, Hub(needed) as hub:
        for index, said in ((b'{"weight_map": {"a": "../../x.safetensors"}}', 'names a file'), (b'{"weight_map": {"a": "none.safetensors"}}', 'none.safetensors, which the source does not have'),
                            (b'{"weight_map": {}}', 'no "weight_map"'), (b'{"weight_map": {"a": 1}}', 'names no file'), (b'{', 'is no index')):
            hub.files['model.safetensors.index.json'] = index
            fails(folder, hub, 'org/name', '--dir', f'{folder}/a', said=said)
            is_not_loadable(f'{folder}/a')


# ---- a pull that ends early, and others beside it ----

def test_killed_at_any_time_and_started_again():
    """kill -9 eight times at random moments: no half model is ever to be seen, little comes twice, and the files are right."""
    needed, _ = checkpoint(3, 1500000)
    rng, total = random.Random(4), sum(map(len, needed.values()))
    args = [BIN, 'pull', 'org/name', '--connections', '3', *SMALL]
    with place() as folder, Hub(needed, fault=lambda r: {'bytes_per_s': 400000} if r.name else None) as hub:
        at = os.path.join(folder, 'cache', 'models', 'org', 'name')
        for _ in range(8):
            with closing(Process(args, environment(folder, hub), 'pull')) as p:
                time.sleep(rng.uniform(0.05, 1.2))
                p.kill(signal.SIGKILL)
                p.p.wait()
            is_not_loadable(at)
        before, hub.fault = hub.n_sent, lambda r: None
        pull(folder, hub, 'org/name', *SMALL)
        is_right(at, needed)
        assert hub.n_sent - before < total and before > 0, (hub.n_sent, before, total)


def test_a_signal_ends_in_order():
    needed, _ = checkpoint(1, 2000000)
    with place() as folder, Hub(needed, fault=lambda r: {'bytes_per_s': 400000} if r.name and r.name.startswith('model-') else None) as hub:
        with closing(Process([BIN, 'pull', 'org/name', '--dir', f'{folder}/a', '--connections', '2', *SMALL], environment(folder, hub), 'pull')) as p:
            wait_until('bytes came', lambda: hub.n_sent > 500000, 20)
            p.kill(signal.SIGINT)
            assert p.p.wait(10) == 130 and 'the same command goes on' in p.output(), p.output()
        sent, hub.fault = hub.n_sent, lambda r: None
        pull(folder, hub, 'org/name', '--dir', f'{folder}/a', *SMALL)
        is_right(f'{folder}/a', needed)
        assert hub.n_sent < sum(map(len, needed.values())) + 500000, (sent, hub.n_sent)


def test_two_at_once():
    """Both end well, each byte comes once; and when the first is killed the second goes on."""
    needed, _ = checkpoint(2, 800000)
    total = sum(map(len, needed.values()))
    for killed in False, True:
        with place() as folder, Hub(needed, fault=lambda r: {'bytes_per_s': 600000} if r.name else None) as hub:
            args, env = [BIN, 'pull', 'org/name', '--dir', f'{folder}/a', '--connections', '2', *SMALL], environment(folder, hub)
            with closing(Process(args, env, 'first')) as first:
                wait_until('the first is at work', lambda: hub.n_sent > 100000, 20)
                with closing(Process(args, env, 'second')) as second:
                    wait_until('the second waits', lambda: f'pull waits dir={folder}/a for={first.p.pid}' in second.output(), 20)
                    if killed:
                        first.kill(signal.SIGKILL)
                    assert second.p.wait(30) == 0, second.output()
                assert first.p.wait(30) == (-signal.SIGKILL if killed else 0), first.output()
            is_right(f'{folder}/a', needed)
            assert hub.n_sent < (1.7 if killed else 1.01) * total, (killed, hub.n_sent, total)


def test_a_full_disk():
    """A limit on files, and a file system of two MiB: what came is kept, and with room the pull goes on."""
    needed, _ = checkpoint(2, 800000)
    with place() as folder, Hub(needed) as hub:
        fails(folder, hub, 'org/name', '--dir', f'{folder}/a', *SMALL, said=['cannot be written', 'File too large'], limit=300000)
        is_not_loadable(f'{folder}/a')
        pull(folder, hub, 'org/name', '--dir', f'{folder}/a', *SMALL)
        is_right(f'{folder}/a', needed)
        script = f'mount -t tmpfs -o size=1m none {folder}/t && exec "$@"'
        os.mkdir(f'{folder}/t')
        run = ['unshare', '--mount', *([] if os.getuid() == 0 else ['--user', '--map-root-user']), 'sh', '-c', script, 'sh', BIN, 'pull', 'org/name', '--dir']
        if subprocess.run([*run[:-5], script.split(' && ')[0], 'sh'], capture_output=True).returncode:
            print('no file system can be mounted here: a disk that is full was NOT tested')
            return
        p = subprocess.run([*run, f'{folder}/t/a'], capture_output=True, text=True, env=environment(folder, hub), timeout=60)
        assert p.returncode == 1 and f'{folder}/t/a needs 1.5' in p.stderr and 'its file system has' in p.stderr, p


# ---- folders that have something already ----

def test_another_revision():
    """Files that are the same stay, others come, those that are gone go; a pull of it that is killed leaves the folder without a config.json or whole."""
    needed, _ = checkpoint(3)
    with place() as folder, Hub(needed) as hub:
        at = f'{folder}/a'
        pull(folder, hub, 'org/name', '--dir', at)
        kept = os.stat(f'{at}/model-00001-of-00003.safetensors').st_ino
        index = {'weight_map': {'a': 'model-00001-of-00003.safetensors', 'b': 'new.safetensors'}}
        after = {n: d for n, d in needed.items() if not n.startswith(('model-00002', 'model-00003', 'special'))}
        after.update({'new.safetensors': b'n' * 1000, 'tokenizer_config.json': b'{"a": 2}', 'model.safetensors.index.json': json.dumps(index).encode()})
        hub.files, hub.commit, hub.n_sent = after, 'd' * 40, 0
        _, said = pull(folder, hub, 'org/name', '--dir', at)
        is_right(at, after)
        assert os.stat(f'{at}/model-00001-of-00003.safetensors').st_ino == kept and hub.n_sent < 3000 and said.count('pull removes') == 3, (hub.n_sent, said)
        fails(folder, hub, 'other/model', '--dir', at, said='other/model')


def test_files_that_somebody_changed_or_put_there():
    needed, _ = checkpoint(1)
    with place() as folder, Hub(needed) as hub:
        at = f'{folder}/a'
        os.mkdir(at)
        for name in 'tokenizer.json', 'model-00001-of-00001.safetensors':
            with open(f'{at}/{name}', 'wb') as f:
                f.write(needed[name])
        pull(folder, hub, 'org/name', '--dir', at)
        is_right(at, needed)
        assert not hub.asked('tokenizer.json') and not hub.asked('model-00001-of-00001.safetensors'), 'what was there already was fetched'
        with open(f'{at}/model-00001-of-00001.safetensors', 'r+b') as f:
            f.write(b'changed')
        os.utime(f'{at}/tokenizer.json')
        with open(f'{at}/mine.txt', 'w', encoding='utf-8') as f:
            f.write('mine')
        hub.requests.clear()
        _, said = pull(folder, hub, 'org/name', '--dir', at)
        assert 'pull replaces a file' in said and {r.name for r in hub.asked()} == {'model-00001-of-00001.safetensors'}, (said, hub.asked())
        assert open(f'{at}/mine.txt', encoding='utf-8').read() == 'mine' and open(f'{at}/model-00001-of-00001.safetensors', 'rb').read() == needed['model-00001-of-00001.safetensors']
        os.mkdir(f'{folder}/b')
        with open(f'{folder}/b/config.json', 'w', encoding='utf-8') as f:
            f.write('{"of": "its user"}')
        fails(folder, hub, 'org/name', '--dir', f'{folder}/b', status=2, said=[f'{folder}/b/config.json is not the file that org/name has', 'move it'])
        assert open(f'{folder}/b/config.json', encoding='utf-8').read() == '{"of": "its user"}'


def test_a_folder_is_copied_or_linked():
    needed, others = checkpoint()
    with place() as folder, Hub({**needed, **others}) as hub:
        pull(folder, hub, 'org/name', '--dir', f'{folder}/a', '--include', '*')
        pull(folder, None, f'{folder}/a', '--dir', f'{folder}/b', *SMALL)
        is_right(f'{folder}/b', needed)
        with open(f'{folder}/a/tokenizer.json', 'r+b') as f:
            before = os.stat(f.fileno())
            f.write(b'!!!')
        os.utime(f'{folder}/a/tokenizer.json', ns=(before.st_atime_ns, before.st_mtime_ns))
        fails(folder, None, f'{folder}/a', '--dir', f'{folder}/c', said='tokenizer.json came with the sum')
        os.utime(f'{folder}/a/tokenizer.json')
        out, _ = pull(folder, None, f'{folder}/a', '--dir', f'{folder}/d', '--link')
        assert os.readlink(f'{out}/config.json') == os.path.realpath(f'{folder}/a/config.json') and len(files_of(out)) == len(needed) + 1
        fails(folder, None, f'{folder}/a', status=2, said='--dir')


def test_links_that_did_not_get_to_their_places():
    """A pull that links is cut short; one that copies follows: there are copies, and the files of the source are as they were."""
    needed, _ = checkpoint()
    needed['0/first.json'] = b'{}'
    with place() as folder:
        for name, data in needed.items():
            os.makedirs(os.path.dirname(f'{folder}/a/{name}'), exist_ok=True)
            with open(f'{folder}/a/{name}', 'wb') as f:
                f.write(data)
        for changed in False, True:
            at = f'{folder}/b{changed}'
            os.mkdir(at)
            open(f'{at}/0', 'w', encoding='utf-8').close()      # in the way of the first file that gets to its place
            fails(folder, None, f'{folder}/a', '--dir', at, '--include', '*', '--link', said='0/first.json cannot be put in its place')
            os.remove(f'{at}/0')
            if changed:
                os.utime(f'{folder}/a/config.json')
            pull(folder, None, f'{folder}/a', '--dir', at, '--include', '*')
            is_right(at, needed)
            assert not any(os.path.islink(f'{at}/{n}') for n in needed)
            for name, data in needed.items():
                with open(f'{folder}/a/{name}', 'rb') as f:
                    assert f.read() == data, name


# ---- TLS ----

def certificates(folder):
    """ca.pem, and server.pem for 127.0.0.1 and localhost, with keys."""
    if not shutil.which('openssl'):
        raise Skip('the openssl command is not installed: TLS was NOT tested')

    def openssl(*args):
        subprocess.run(['openssl', *args], cwd=folder, check=True, capture_output=True)
    key = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes']
    for ca in 'ca', 'other':
        openssl('req', '-x509', *key, '-keyout', f'{ca}.key', '-out', f'{ca}.pem', '-subj', f'/CN={ca}', '-days', '2')
    with open(os.path.join(folder, 'ext'), 'w', encoding='utf-8') as f:
        f.write('subjectAltName=IP:127.0.0.1,DNS:localhost\n')
    openssl('req', *key, '-keyout', 'server.key', '-out', 'server.csr', '-subj', '/CN=server')
    openssl('x509', '-req', '-in', 'server.csr', '-CA', 'ca.pem', '-CAkey', 'ca.key', '-CAcreateserial', '-out', 'server.pem', '-days', '2', '-extfile', 'ext')


def test_tls():
    """With a CA that SSL_CERT_FILE names; not with another one, at once; and never from https to http."""
    needed, _ = checkpoint(2)
    with place() as folder:
        certificates(folder)
        with Hub(needed, tls=(f'{folder}/server.pem', f'{folder}/server.key')) as hub, Hub(needed) as plain:
            ca = {'SSL_CERT_FILE': f'{folder}/ca.pem', 'HF_TOKEN': 'hf_x'}
            pull(folder, hub, 'org/name', '--dir', f'{folder}/a', *SMALL, env=ca)
            is_right(f'{folder}/a', needed)
            assert hub.requests[0].headers['Authorization'] == 'Bearer hf_x'
            n = len(hub.requests)
            for env in {}, {'SSL_CERT_FILE': f'{folder}/other.pem'}:
                fails(folder, hub, 'org/name', '--dir', f'{folder}/b', said='certificate', env=env)
            fails(folder, hub, 'org/name', '--dir', f'{folder}/b', said='127.0.0.2', env={**ca, 'HF_ENDPOINT': hub.other_url})
            assert len(hub.requests) == n, 'something was asked of a server that was not trusted'
            hub.fault = lambda r: {'redirect': plain.url + r.path} if r.name == 'config.json' else None
            fails(folder, hub, 'org/name', '--dir', f'{folder}/c', said='config.json: ', env=ca)
            assert plain.requests == []


# ---- the commands that use it ----

def tiny_files():
    return {n: open(os.path.join(TINY, n), 'rb').read() for n in os.listdir(TINY)}


def test_serve_pulls_its_model():
    """--pull fetches what is not here, before the node starts; a second start asks nobody; a name of PaddleNLP's static models says how it is quantised."""
    body = dict(prompt=[5, 6, 7], max_tokens=4, temperature=0, return_token_ids=True)
    with place() as folder, Hub(tiny_files()) as hub, closing(Node(TINY)) as known:
        wait_ready(known)
        want = request(known.port, 'POST', '/v1/completions', body)[2]['choices'][0]['token_ids']
        env = environment(folder, hub)
        with closing(Node('org/name', args=['--pull'], env=env)) as n:
            wait_ready(n)
            assert request(n.port, 'POST', '/v1/completions', body)[2]['choices'][0]['token_ids'] == want
        hub.requests.clear()
        args = ['--prompt', 'a', '--raw', '--max-tokens', '2']
        for model in 'org/name', 'org/name/weight_only_int8', f'{hub.url}/org/name':
            p = subprocess.run([BIN, 'generate', model, '--pull', *args], capture_output=True, text=True, env=env, timeout=60)
            assert p.returncode == 0 and hub.requests == [], (p.stderr, hub.requests)
        shutil.rmtree(f'{folder}/cache')
        small = lambda model: ['--speculative-config', json.dumps(dict(method='draft', model=model))]
        url = f'{hub.url}/org/name'                                                            # the small model that drafts, too, once
        for i, draft in enumerate((small('org/name'), small('org/name'), small(url), ['-md', url])):
            p = subprocess.run([BIN, 'generate', TINY, '--pull', *draft, *args], capture_output=True, text=True, env=env, timeout=60)
            assert p.returncode == 0 and bool(hub.requests) == (i == 0), (p.stderr, hub.requests)
            hub.requests.clear()
        p = subprocess.run([BIN, 'generate', 'org/none', '--pull', *args], capture_output=True, text=True, env=env, timeout=60)
        assert p.returncode == 1 and 'org/none has no such model' in p.stderr, p.stderr
        p = subprocess.run([BIN, 'generate', 'org/none', *args], capture_output=True, text=True, env=env, timeout=60)
        assert p.returncode and 'fetch it with `baton pull org/none`, or add --pull' in p.stderr, p.stderr


def test_the_flags_of_download_model():
    """The command lines of document 004, whose model is a checkpoint's name with a quantisation and a number of hosts behind it."""
    needed, _ = checkpoint(1, 1000)
    with place() as folder, Hub(needed, repository='deepseek-ai/DeepSeek-R1') as hub:
        at = f'{folder}/models'
        out, said = pull(folder, hub, '--model_name', 'deepseek-ai/DeepSeek-R1-MTP-2nodes/weight_only_int8', '--dir', at, '--nnodes', '2', '--mode', 'slave',
                         '--speculate_model_path', at)
        assert out == at
        is_right(at, needed)
        for part in '--mode slave of 2 hosts: all files', 'add --quantization wint8', 'draft tokens are among its own files':
            assert part in said, said
        for kind, quantization in ('weight_only_int4', 'wint4'), ('a8w8_fp8', 'block_wise_fp8'), ('a8w8_fp8_wint4', 'block_wise_fp8'):
            assert f'add --quantization {quantization}' in pull(folder, hub, f'deepseek-ai/DeepSeek-R1/{kind}', '--dir', at, '--nnodes', '1')[1]
        fails(folder, hub, 'deepseek-ai/DeepSeek-R1/weight_only_int3', status=2, said='weight_only_int8, weight_only_int4')
        fails(folder, hub, 'org/name', '--mode', 'third', status=2, said='master or slave')
