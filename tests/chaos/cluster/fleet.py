"""fleet.py - the nodes and routers of a cluster, each a process on its own host that may die and be started again at its address.

A member's log stays readable over its lives, as do the marks of what was done to it (hits). Thread: members are started and stopped by the thread that breaks the
cluster; everything else may be read by any."""
import contextlib, http.client, json, os, resource, shutil, signal, subprocess, tempfile, threading, time
import namespaces
from harness import BIN, DATA, STARTED, TINY, Process, Undisturbed, wait_until
from .proxy import Proxy

SECRET = {'BATON_CLUSTER_SECRET': 'the secret of a cluster that is broken'}
SIZE = ['--max-model-len', '2048', '--max-num-seqs', '16', '--num-gpu-blocks-override', '400']
WAITS = ['--placement-timeout', '30', '--max-queue-time', '120', '--shutdown-timeout', '30']
TEMPLATE = ['--chat-template', os.path.join(DATA, 'text', 'chat_tools.jinja')]
QUICK = os.path.join(DATA, 'pace', 'quick.json')
LOG_FOLDER_KIB = 512    # of the folder whose disk gets full
DRAINED_S = 60
ROLE_TRIES = 5
# Without what tests set for themselves.
OUTSIDE = {k: v for k, v in os.environ.items() if not k.startswith(('BATON_CLUSTER', 'BATON_API', namespaces.MARK))}


class Member(Process):
    """A node or a router. `hits`: (kind, begin, end or None) by the wall clock. `base`: (which start, descriptors, MiB) when it was ready last."""

    def __init__(self, host, folder, role, args, env=None, front=None):
        self.front = front or host.address      # where others reach it
        self.host, self.role, self.port, self.hits, self.lock = host, role, host.http, [], threading.Lock()
        self.name = f'{role}-{host.address}:{host.http}'
        self.folder = f'{folder}/{role}-{host.address.rsplit(".", 1)[1]}-{host.http}'
        os.makedirs(self.folder)
        self.env = {**OUTSIDE, **SECRET, **(env or {})}
        self.extra, self.started, self.base = {}, [], None
        self.argv = [*host.enter, BIN, *self.words(args)]
        self.log = open(f'{self.folder}/log', 'a+')
        self.start()

    def words(self, args):
        where = ['--host', '0.0.0.0' if self.host.enter else '127.0.0.1', '--port', str(self.port), '--cluster-port', str(self.host.cluster), '--advertise-host', self.front]
        if self.role == 'router':
            return ['router', '--model', TINY, '--served-model-name', 'm', *where, *args]
        return ['serve', '--model', TINY, '--served-model-name', 'm', '--splitwise-role', self.role, '--compute-threads', '1', '--kv-port', str(self.host.kv), *where, *args]

    @property
    def address(self):
        return self.host.address

    def known_as(self):
        """Its name in the logs of others."""
        return f'{self.front}:{self.port}'

    def start(self):
        """`extra` is its environment beside the usual, until it is started again."""
        with Undisturbed(), self.host.processes():
            self.p = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env={**self.env, **self.extra}, start_new_session=True)
            STARTED.add(self)
        self.started.append(time.time())

    def call(self, method, path, body=None, timeout=5):
        c = http.client.HTTPConnection(self.address, self.port, timeout=timeout)
        try:
            c.request(method, path, None if body is None else json.dumps(body), {'Content-Type': 'application/json'} if body is not None else {})
            r = c.getresponse()
            raw = r.read()
            try:
                return r.status, json.loads(raw)
            except ValueError:
                return r.status, raw.decode('utf-8', 'replace')
        finally:
            c.close()

    def metrics(self, timeout=2):
        """{'name{labels}': value}; raises OSError where it does not answer."""
        status, text = self.call('GET', '/metrics', timeout=timeout)
        if status != 200:
            raise OSError(f'{self.name} has no metrics now: {status}')
        return {name: float(value) for name, value in (line.rsplit(' ', 1) for line in text.splitlines() if line and line[0] != '#')}

    def is_ready(self):
        try:
            return self.alive() and self.call('GET', '/ready', timeout=1)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    # ---- hits ----

    @contextlib.contextmanager
    def hit(self, kind):
        at = self.begin_hit(kind)
        try:
            yield
        finally:
            self.end_hit(at)

    def begin_hit(self, kind):
        with self.lock:
            self.hits.append([kind, time.time(), None])
            return len(self.hits) - 1

    def end_hit(self, at):
        with self.lock:
            self.hits[at][2] = time.time()

    def was_hit(self, kinds, begin, end, only_begin=False):
        """Whether something of these kinds was done to it between the two times; only_begin: whether it began then."""
        with self.lock:
            return any(k in kinds and a <= end and (a >= begin if only_begin else b is None or b >= begin) for k, a, b in self.hits)

    # ---- what it holds ----

    def footprint(self):
        """(descriptors, MiB)"""
        with open(f'/proc/{self.p.pid}/statm') as f:
            pages = int(f.read().split()[1])
        return len(os.listdir(f'/proc/{self.p.pid}/fd')), pages * resource.getpagesize() >> 20

    def note_footprint(self):
        """What it holds when it is ready: nothing was asked of it yet, or little."""
        self.base = (len(self.started), *self.footprint())

    def output(self):
        with open(f'{self.folder}/log', encoding='utf-8', errors='replace') as f:
            return f.read()

    def close(self):
        try:
            return self.stop()
        finally:
            self.log.close()


class Fleet:
    """Members and the Redis that they share. `args` are those of every node beside the usual."""

    def __init__(self, hosts, redis, prefills=3, decodes=3, routers=2, args=(), size=SIZE, decode_size=None, waits=WAITS, pace=QUICK, env=None, router_env=None,
                 fronts=0):
        """fronts: so many nodes of each role are reached through a proxy. router_env: beside env, of routers."""
        self.hosts, self.redis, self.folder = hosts, redis, tempfile.mkdtemp(prefix='baton-chaos-')
        self.keep, self.mounted = False, []
        common = [*redis.args(), *waits, *TEMPLATE]
        more = [*common, *(['--pace', pace] if pace else []), *args]
        self.proxies = {}
        self.nodes = [self.member('prefill', [*more, *size], env, i < fronts) for i in range(prefills)]
        self.nodes += [self.member('decode', [*more, *(decode_size or size)], env, i < fronts) for i in range(decodes)]
        self.routers = [self.member('router', common, {**(env or {}), **(router_env or {})}) for _ in range(routers)]
        self.members = self.nodes + self.routers

    def member(self, role, args, env=None, proxied=False):
        host, front = self.hosts.host(), self.hosts.front() if proxied else None
        logs = self.log_folder(host) if self.hosts.separate and role != 'router' else None
        m = Member(host, self.folder, role, [*args, *(['--log-dir', logs] if logs else [])], {**self.redis.env(), **(env or {})}, front)
        m.log_folder = logs
        if proxied:
            self.proxies[m] = Proxy(front, host.address, (host.http, host.cluster, host.kv))
        return m

    def log_folder(self, host):
        """A disk of its own for the node's log file, which can become full."""
        path = f'{self.folder}/disk-{host.address.rsplit(".", 1)[1]}'
        os.makedirs(path)
        subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={LOG_FOLDER_KIB}k', 'tmpfs', path], check=True)
        self.mounted.append(path)
        return path

    @property
    def prefill(self):
        return [m for m in self.nodes if m.role == 'prefill']

    @property
    def decode(self):
        return [m for m in self.nodes if m.role == 'decode']

    def wait_ready(self, timeout=90):
        for m in self.members:
            def ready(m=m):
                if not m.alive():
                    raise RuntimeError(f'{m.name} ended with {m.p.returncode}:\n{m.output()[-3000:]}')
                return m.is_ready()
            wait_until(f'{m.name} ready', ready, timeout)
        for m in self.members:
            wait_until(f'{m.name} sees all', lambda m=m: len(m.call('GET', '/cluster', timeout=2)[1]['nodes']) == len(self.nodes), timeout)

    def wait_ready_again(self, m, timeout=60):
        wait_until(f'{m.name} ready again', m.is_ready, timeout)
        m.note_footprint()

    def restart(self, m, extra=None):
        """Starts one that has ended, in the environment `extra` beside the usual."""
        m.p.wait()
        m.extra = extra or {}
        m.start()

    def drain(self, m):
        """SIGTERM, and until it has ended by itself. None: it did not in DRAINED_S."""
        m.kill(signal.SIGTERM)
        try:
            return m.p.wait(DRAINED_S)
        except subprocess.TimeoutExpired:
            return None

    def set_role(self, m, role):
        """As an operator does it. Returns why it is refused, since the cluster needs the role that the node has now; None: it is not."""
        line = [*m.host.enter, BIN, 'role', f'{m.front}:{m.port}', role, '--url', f'http://{m.front}:{m.port}']
        for _ in range(ROLE_TRIES):
            p = subprocess.run(line, capture_output=True, text=True, timeout=30, env={**OUTSIDE, **SECRET})
            if p.returncode == 1 and '(status 409)' in p.stderr:
                return p.stderr.strip()
            if p.returncode == 0 or 'nothing answers' not in p.stderr:
                break
            time.sleep(2)   # what goes to it is cut
        assert p.returncode == 0, f'baton role {m.name} {role} ended with {p.returncode}: {p.stdout}{p.stderr}'
        return None

    def close(self):
        with contextlib.ExitStack() as stack:
            for p in self.proxies.values():
                stack.callback(p.close)
            for m in self.members:
                stack.callback(m.close)
            for m in self.members:
                m.kill(signal.SIGCONT)
                m.kill(signal.SIGTERM)
        for path in self.mounted:
            subprocess.run(['umount', '-l', path])
        if self.keep:
            print(f'logs are kept in {self.folder}', flush=True)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
