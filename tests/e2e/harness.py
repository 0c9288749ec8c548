"""harness.py - real nodes for end-to-end tests: processes, ports, Redis, requests. Standard library only.

Environment: BATON_BIN (the program), BATON_TEST_GGUF (SmolLM2; tests that need it skip loudly without), BATON_TEST_DATA.
A test is a function `test_*` in a file test_*.py; it may raise Skip. run.py runs them.
"""
import contextlib, ctypes, http.client, json, os, random, shutil, signal, socket, subprocess, sys, tempfile, threading, time

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = os.environ.get('BATON_TEST_DATA') or os.path.join(HERE, '..', 'data')
BIN = os.environ.get('BATON_BIN') or os.path.join(HERE, '..', '..', 'build', 'baton')
TINY = os.path.join(DATA, 'goldens', 'llama', 'model')


class Skip(Exception):
    pass


def smollm2():
    path = os.environ.get('BATON_TEST_GGUF')
    if not path or not os.path.exists(path):
        raise Skip('BATON_TEST_GGUF does not name the SmolLM2 file (deploy/fetch_model.sh fetches it)')
    return path


def alone(test):
    """Marks a test that must run alone: it checks what all processes share, or a short time."""
    test.alone = True
    return test


HANDED_OUT = set()
SHARE = [0, 1]


def take_ports(share, n_shares):
    """From now on free_ports returns only ports of this share, so that concurrent test processes never get the same one."""
    SHARE[:] = share, n_shares


def free_ports(n):
    """Ports below the kernel's ephemeral range, none twice in a process: no other program gets one before it is used. Those that `baton` itself draws for ranks are left out."""
    with open('/proc/sys/net/ipv4/ip_local_port_range') as f:
        end = max(int(f.read().split()[0]), 20000)
    ports = []
    while len(ports) < n:
        port = random.SystemRandom().randrange(10000, end)
        if port in HANDED_OUT or port % SHARE[1] != SHARE[0] or 20000 <= port < 30000:
            continue
        with socket.socket() as s:
            try:
                s.bind(('', port))
            except OSError:
                continue
        HANDED_OUT.add(port)
        ports.append(port)
    return ports


FORCED_END = 'node ends without freeing everything'


def end_in_order():
    """SIGTERM ends a test program as Ctrl-C does: with all that it has started. So does the end of the script that runs it, if that asks for it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if 'BATON_TEST_ENDS_WITH_PARENT' in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def run_chaos(script, *options):
    """Runs a script of tests/chaos, which ends with this process; its status 77 means that something is lacking here."""
    p = subprocess.run([sys.executable, '-u', os.path.join(HERE, '..', 'chaos', script), *map(str, options)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, text=True, preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))  # PR_SET_PDEATHSIG
    if p.returncode == 77:
        raise Skip('NOT TESTED: ' + p.stdout.strip())
    print(p.stdout, end='', flush=True)
    assert p.returncode == 0, p.returncode


class Undisturbed:
    """SIGTERM waits for the end of this: what is started inside is known to those who end it. Threads beside the main one get no signals."""

    def __enter__(self):
        self.came, self.before = False, None
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGTERM, self.note)
        return self

    def note(self, *_):
        self.came = True

    def __exit__(self, *_):
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)
        if self.came:
            signal.raise_signal(signal.SIGTERM)


STARTED = set() # the processes that run


def end_all():
    """Ends what a test that was ended has not: it may have been between starting a process and naming who closes it."""
    for p in STARTED:
        p.kill(signal.SIGTERM)
    for p in list(STARTED):
        p.close()


class Process:
    """One child process with its output in a file. One that hangs at its end and leaves by force fails the test, unless may_end_by_force."""

    may_end_by_force = 'BATON_VM_ANSWERS' in os.environ    # the emulated CPU of tests/vm is slow to give back a KV pool that RDMA devices know

    def __init__(self, argv, env=None, name='node'):
        self.argv, self.name = argv, name
        self.env = {**{k: v for k, v in os.environ.items() if not k.startswith(('BATON_CLUSTER', 'BATON_API'))}, **(env or {})}
        self.log = tempfile.NamedTemporaryFile('w+', prefix=f'baton-{name}-', suffix='.log', delete=False)
        self.start()

    def start(self):
        with Undisturbed():
            self.p = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=self.env, start_new_session=True)
            STARTED.add(self)

    def output(self):
        with open(self.log.name, encoding='utf-8', errors='replace') as f:
            return f.read()

    def alive(self):
        return self.p.poll() is None

    def kill(self, sig=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            self.p.send_signal(sig)

    def stop(self, timeout=20):
        """Sends SIGTERM and waits. Returns the exit status, or None if the process had to be killed."""
        if self.alive():
            self.kill(signal.SIGTERM)
        try:
            status = self.p.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill(signal.SIGCONT)
            self.kill()
            self.p.wait()
            status = None
        STARTED.discard(self)
        output = self.output()
        assert self.may_end_by_force or FORCED_END not in output, f'{self.name} hung at its end:\n{output[-3000:]}'
        return status

    def close(self):
        try:
            return self.stop()
        finally:
            self.log.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.log.name)


def paced(curve='quick'):
    """Arguments of a node whose steps last as a curve of tests/data/pace says, however fast or busy the machine is."""
    return ['--pace', os.path.join(DATA, 'pace', f'{curve}.json')]


def pid_of_port(port):
    """The process of the node that a launcher started at this port; 0: none."""
    for pid in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError), open(f'/proc/{pid}/cmdline', 'rb') as f:
            if f'--port={port}'.encode() in f.read().split(b'\0'):
                return int(pid)
    return 0


class Node(Process):
    def __init__(self, model, role='mixed', args=(), env=None, port=None, before=()):
        self.port = port or free_ports(1)[0]
        argv = [*before, BIN, 'serve', '--model', model, '--served-model-name', 'm', '--host', '127.0.0.1', '--port', str(self.port),
                '--splitwise-role', role, '--compute-threads', '1', *args]
        super().__init__(argv, env, f'{role}-{self.port}')

    def restart(self):
        if self.alive():
            self.kill()
        self.p.wait()
        self.start()


def request(port, method, path, body=None, headers=None, timeout=120):
    """(status, headers, parsed JSON or text)"""
    c = http.client.HTTPConnection('127.0.0.1', port, timeout=timeout)
    try:
        data = None if body is None else (body if isinstance(body, (bytes, str)) else json.dumps(body))
        c.request(method, path, data, {**({'Content-Type': 'application/json'} if data is not None else {}), **(headers or {})})
        r = c.getresponse()
        raw = r.read()
        try:
            parsed = json.loads(raw)
        except ValueError:
            parsed = raw.decode('utf-8', 'replace')
        return r.status, dict((k.lower(), v) for k, v in r.getheaders()), parsed
    finally:
        c.close()


def sse_events(lines):
    """Yields (id, data) of each event of a stream that came whole; id None: it has none."""
    event_id = data = None
    for raw in lines:
        line = raw.decode().rstrip('\n')
        if line.startswith('id: '):
            event_id = line[4:]
        elif line.startswith('data: '):
            data = line[6:]
        elif not line and data is not None:
            yield event_id, data
            event_id = data = None


def stream(port, path, body, headers=None, timeout=120):
    """Yields the JSON events of a streamed answer; raises on anything malformed. The last event must be [DONE]."""
    c = http.client.HTTPConnection('127.0.0.1', port, timeout=timeout)
    try:
        c.request('POST', path, json.dumps({**body, 'stream': True}), {'Content-Type': 'application/json', **(headers or {})})
        r = c.getresponse()
        if r.status != 200:
            raise AssertionError(f'{r.status} {r.read()[:500]!r}')
        assert r.getheader('Content-Type').startswith('text/event-stream'), r.getheader('Content-Type')
        done = False
        for raw in r:
            line = raw.decode('utf-8')
            if line == '\n':
                continue
            assert not done and line.startswith('data: ') and line.endswith('\n'), repr(line)
            if line == 'data: [DONE]\n':
                done = True
                continue
            yield json.loads(line[6:])
        assert done, 'the stream ended without [DONE]'
    finally:
        c.close()


def metrics(port, headers=None):
    """{'name{labels}': value}"""
    status, _, text = request(port, 'GET', '/metrics', headers=headers)
    assert status == 200, status
    out = {}
    for line in str(text).splitlines():
        if line and not line.startswith('#'):
            name, value = line.rsplit(' ', 1)
            out[name] = float(value)
    return out


def wait_until(what, fn, timeout=30, every=0.05):
    end = time.monotonic() + timeout
    last = None
    while time.monotonic() < end:
        try:
            last = fn()
            if last:
                return last
        except (OSError, http.client.HTTPException, AssertionError) as e:
            last = e
        time.sleep(every)
    raise AssertionError(f'not within {timeout} s: {what} (last: {last!r})')


def wait_ready(*nodes, timeout=60):
    for n in nodes:
        def ready():
            if not n.alive():
                raise RuntimeError(f'{n.name} ended with {n.p.returncode}:\n{n.output()[-3000:]}')
            return request(n.port, 'GET', '/ready', timeout=2)[0] == 200
        wait_until(f'{n.name} ready', ready, timeout)


def wait_sees(nodes, n, timeout=30):
    """Waits until every node sees n nodes in its topic."""
    for node in nodes:
        wait_until(f'{node.name} sees {n} nodes', lambda: len(request(node.port, 'GET', '/cluster', timeout=2)[2]['nodes']) == n, timeout)


class Redis(Process):
    def __init__(self, port=None, password=''):
        if not shutil.which('redis-server'):
            raise Skip('redis-server is not installed')
        self.port = port or free_ports(1)[0]
        self.password = password
        self.dir = tempfile.mkdtemp(prefix='baton-redis-')
        super().__init__(['redis-server', '--port', str(self.port), '--bind', '127.0.0.1', '--save', '', '--appendonly', 'no', '--dir', self.dir, '--requirepass', password], name='redis')
        wait_until('redis up', lambda: self.command('PING') == b'+PONG', 10)

    def command(self, *words):
        with socket.create_connection(('127.0.0.1', self.port), timeout=5) as s:
            if self.password:
                assert self.ask(s, 'AUTH', self.password) == b'+OK'
            return self.ask(s, *words)

    @staticmethod
    def ask(s, *words):
        s.sendall(b'*%d\r\n' % len(words) + b''.join(b'$%d\r\n%s\r\n' % (len(w), w.encode()) for w in words))
        return s.recv(65536).split(b'\r\n')[0]

    def close(self):
        super().close()
        shutil.rmtree(self.dir, ignore_errors=True)


@contextlib.contextmanager
def closing(*things):
    try:
        yield things[0] if len(things) == 1 else things
    except BaseException:
        for t in things:
            if isinstance(t, Process):
                print(f'--- {t.name} ({"alive" if t.alive() else t.p.returncode}) ---\n{t.output()[-4000:]}', flush=True)
        raise
    finally:
        with contextlib.ExitStack() as stack: # the last first, all of them whatever one raises
            for t in things:
                stack.callback(t.close)


@contextlib.contextmanager
def pair(model, protocol='ipc', args=(), prefill_args=(), decode_args=(), prefills=1, decodes=1):
    """Prefill and decode nodes without Redis: the first prefill node serves the directory, as in seed 003."""
    control = free_ports(1)[0]
    common = ['--cache-transfer-protocol', protocol, *args]
    first = Node(model, 'prefill', [*common, '--engine-worker-queue-port', str(control), *prefill_args])
    rest = [Node(model, 'prefill', [*common, '--innode-prefill-ports', str(control), *prefill_args]) for _ in range(prefills - 1)]
    decode = [Node(model, 'decode', [*common, '--innode-prefill-ports', str(control), *decode_args]) for _ in range(decodes)]
    nodes = [first, *rest, *decode]
    with closing(*nodes):
        wait_ready(*nodes)
        wait_sees(nodes, len(nodes))
        yield nodes


def parallel(jobs, concurrency):
    """Runs callables on threads. Returns their results in order, exceptions as values."""
    results, todo, lock = [None] * len(jobs), list(range(len(jobs)))[::-1], threading.Lock()

    def work():
        while True:
            with lock:
                if not todo:
                    return
                i = todo.pop()
            try:
                results[i] = jobs[i]()
            except Exception as e:          # the caller checks it
                results[i] = e
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(concurrency, len(jobs)))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


def mixed_requests(n, seed, vocab, longest, max_tokens=(1, 24)):
    """n completion requests as token ids: lengths log-uniform from 1 to `longest`, shared prefixes, greedy and seeded
    sampling."""
    r = random.Random(seed)
    prefix = [r.randrange(4, vocab) for _ in range(longest)]
    out = []
    for i in range(n):
        length = max(1, min(longest, round(longest ** (i / max(1, n - 1)))))
        shared = r.choice([0, 0, length // 2, length - 1])
        ids = prefix[:shared] + [r.randrange(4, vocab) for _ in range(length - shared)]
        body = dict(model='m', prompt=ids, max_tokens=r.randint(*max_tokens), logprobs=5, return_token_ids=True, return_tokens_as_token_ids=True, ignore_eos=True)
        body.update(r.choice([dict(temperature=0), dict(temperature=0.8, seed=r.randrange(1 << 31)), dict(temperature=1.2, top_p=0.9, top_k=40, seed=r.randrange(1 << 31)),
                              dict(temperature=0.7, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1, seed=r.randrange(1 << 31))]))
        out.append(body)
    r.shuffle(out)
    return out


def was_split(t):
    """Whether two nodes served the request of a trace: a decode node that should have nearly all of the prompt may compute the rest itself."""
    alone = t['prefill_node'] == t['decode_node']
    assert not alone or t['expected_cached_tokens'] > 0, t
    return not alone


def answer_of(body):
    """The parts of an answer that must be equal bit for bit: token ids and logprobs as serialised."""
    c = body['choices'][0]
    return c['token_ids'], c['finish_reason'], c['logprobs']['token_logprobs'], c['logprobs']['top_logprobs'], c['text']
