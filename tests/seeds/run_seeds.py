#!/usr/bin/env python3
"""run_seeds.py - starts every command of the five documents (data/*.txt) as it is written there and asks it something, or meets the
sentence with which docs/compatibility.md refuses it.

usage: run_seeds.py BATON SOURCE_DIR [--all] [test ...]

Blocks of the documents are run by bash. Programs of the same names stand before PATH and call `baton` in their place; models, addresses,
paths and ports that are taken are replaced, and sizes are made small by BATON_... variables. Needs redis-server; the OpenAI client's
example needs BATON_OPENAI_PYTHON. Prints what became of each command. Last line: N passed, N failed, N skipped."""
import ast, atexit, collections, json, os, re, shutil, signal, socket, subprocess, sys, tempfile, time

BATON, SOURCE = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
os.environ['BATON_BIN'] = BATON
sys.path.append(os.path.join(SOURCE, 'tests', 'e2e'))
import documents as texts
import dummy_checkpoint
from documents import commands, continued, document, documents, table
from harness import DATA, Process, Redis, Skip, answer_of, closing, end_in_order, free_ports, request, wait_until
from hub_server import Hub

PROXY = 'python load_balance_proxy_server_example.py'
API, MULTI, ROUTER = ('python -m fastdeploy.' + m for m in ('entrypoints.openai.api_server', 'entrypoints.openai.multi_api_server', 'router.launch'))
ERNIE_FP8, ERNIE, DEEPSEEK = 'ERNIE-4_5-300B-A47B-FP8-Paddle', 'baidu/ERNIE-4.5-21B-A3B-Paddle', 'vllm-ascend/DeepSeek-R1-W8A8'
POSITIONS = 131072  # the longest context that a document asks for
ROWS = {name: (effect, sentence) for heading in table(BATON).values() for name, owner, _, effect, sentence in heading if not owner}
SMALL = {'BATON_COMPUTE_THREADS': '1', 'BATON_KV_CACHE_MEMORY': '0.4'}
NAMED = collections.defaultdict(set)  # (document, command): the lines that name it
for d, _ in documents():
    for at, command in commands(d):
        NAMED[d, command].add(at)
TAKEN = set()  # (document, line) that the running test took a block or a sentence from
CLAIMED = collections.defaultdict(set)  # (document, command): the lines of it that have been dealt with
RESULTS = []

# What stands before PATH: the documents' programs, which call `baton`. The script of the network devices and those that start a service are the project's own.
PROGRAMS = {
    'python': '''case "$2" in
fastdeploy.entrypoints.openai.api_server) shift 2; exec "$BATON_BIN" serve "$@" ;;
fastdeploy.entrypoints.openai.multi_api_server) shift 2; exec "$BATON_BIN" launch "$@" ;;
fastdeploy.router.launch) shift 2; exec "$BATON_BIN" router "$@" ;;
esac
case "$1" in
load_balance_proxy_server_example.py) shift; exec "$BATON_BIN" router "$@" ;;
download_model.py) shift; exec "$BATON_BIN" pull "$@" ;;
esac
exec "$BATON_BIN" "$@"''',
    'vllm': 'exec "$BATON_BIN" "$@"',
    # a host with two slots
    'mpirun': '''OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 "$@" & second=$!
OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 "$@" && wait $second''',
}


def make_workplace():
    """A folder with the programs, the script and a model for each of the documents' architectures, with room for their contexts."""
    at = tempfile.mkdtemp(prefix='baton-seeds-')
    atexit.register(shutil.rmtree, at, True)
    os.makedirs(os.path.join(at, 'bin'))
    os.makedirs(os.path.join(at, 'scripts'))
    for name, text in PROGRAMS.items():
        path = os.path.join(at, 'bin', name)
        with open(path, 'w') as f:
            f.write('#!/bin/sh\n' + text + '\n')
        os.chmod(path, 0o755)
    os.symlink(os.path.join(SOURCE, 'deploy', 'get_rdma_nics.sh'), os.path.join(at, 'scripts', 'get_rdma_nics.sh'))
    for name in ('start_server', 'stop_server'):
        os.symlink(os.path.join(SOURCE, 'deploy', name), os.path.join(at, 'bin', name))
    return at


def make_model(golden, changed=()):
    """A copy of a golden checkpoint whose config.json has other members."""
    to, source = tempfile.mkdtemp(dir=PLACE), os.path.join(DATA, 'goldens', golden, 'model')
    for name in os.listdir(source):
        os.symlink(os.path.join(source, name), os.path.join(to, name))
    with open(os.path.join(source, 'config.json'), encoding='utf-8') as f:
        config = {**json.load(f), 'max_position_embeddings': POSITIONS, **dict(changed)}
    os.unlink(os.path.join(to, 'config.json'))
    with open(os.path.join(to, 'config.json'), 'w', encoding='utf-8') as f:
        json.dump(config, f)
    return to


def make_dummy(golden, shape):
    to = tempfile.mkdtemp(dir=PLACE)
    dummy_checkpoint.make(os.path.join(DATA, 'goldens', golden, 'model'), to, max_position_embeddings=POSITIONS, **shape)
    return to


PLACE = make_workplace()
MODELS = {ERNIE_FP8: make_dummy('ernie_moe', dummy_checkpoint.ERNIE_300B), ERNIE: make_dummy('ernie_moe', dummy_checkpoint.ERNIE_21B), DEEPSEEK: make_dummy('deepseek_v3', dummy_checkpoint.DEEPSEEK_R1)}


class Ports:
    """Which port stands for each of the documents': itself, or a free one where something has it, or will have it: a program of `others`."""
    OWN = re.compile(r'(--(?:ports|port|metrics-ports?|engine-worker-queue-port|cache-queue-port|pd-comm-port|rdma-comm-ports)[ \u00a0]"?)([0-9,]+)')
    OTHERS = re.compile(r'(--(?:innode-prefill-ports|scheduler-port|router) "?(?:[0-9.]+:)?)([0-9]+)')

    def __init__(self, others=None, **known):
        self.map = {k.lstrip('_'): v for k, v in known.items()}
        self.others = others

    def take(self, port):
        if self.others and port in self.others.map.values():
            self.map[port] = str(free_ports(1)[0])
            return self.map[port]
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(('', int(port)))
                self.map[port] = port
            except OSError:
                self.map[port] = str(free_ports(1)[0])
        return self.map[port]

    def into(self, script):
        script = self.OTHERS.sub(lambda m: m[1] + self.map.get(m[2], m[2]), script)
        return self.OWN.sub(lambda m: m[1] + ','.join(self.take(p) for p in m[2].split(',')), script)

    def __getitem__(self, port):
        return int(self.map[str(port)])


def with_models(script):
    for name, path in MODELS.items():
        script = script.replace(name, path)
    return script


class Shell(Process):
    """A block of a document, run by bash; its group of processes ends with it."""

    def __init__(self, script, env=None, folder=None):
        self.folder = folder or tempfile.mkdtemp(dir=PLACE)
        if not os.path.exists(os.path.join(self.folder, 'scripts')):
            os.symlink(os.path.join(PLACE, 'scripts'), os.path.join(self.folder, 'scripts'))
        path = os.path.join(PLACE, 'bin') + ':' + os.environ['PATH']
        super().__init__(['bash', '-c', 'cd "$0" && ' + script, self.folder], {**SMALL, 'PATH': path, **(env or {})}, 'seeds')

    def kill(self, sig=signal.SIGKILL):
        try:
            os.killpg(self.p.pid, sig)
        except ProcessLookupError:
            pass


def ready(shell, *ports, beside=()):
    for port in ports:
        def is_ready():
            return not all(s.alive() for s in (shell, *beside)) or request(port, 'GET', '/ready', timeout=5)[0] == 200
        wait_until(f'port {port} is ready', is_ready, 60)
        assert all(s.alive() for s in (shell, *beside)), 'ended before it was ready'


def ask(port, **more):
    """A completion of four tokens from the node at this port. Returns the answer."""
    body = {'prompt': 'The capital of France is', 'max_tokens': 4, 'temperature': 0, 'ignore_eos': True, **more}
    status, _, answer = request(port, 'POST', '/v1/completions', body)
    assert status == 200 and answer['usage']['completion_tokens'] == 4, (status, answer)
    return answer


REQUESTS = [dict(prompt='The capital of France is' + ' and of another country' * i, max_tokens=6, temperature=0, ignore_eos=True, logprobs=2, return_token_ids=True) for i in range(4)]
ALONE = {}  # (model, options): what one process answers


def as_by_one(ports, model, *options):
    """The nodes at these ports answer as one process does that has these of their options, to the last bit."""
    if (model, options) not in ALONE:
        port = free_ports(1)[0]
        with closing(Shell(' '.join(['exec "$BATON_BIN" serve --model', MODELS[model], '--port', str(port), *options]))) as shell:
            ready(shell, port)
            ALONE[model, options] = [answer_of(request(port, 'POST', '/v1/completions', b)[2]) for b in REQUESTS]
    for i, (body, want) in enumerate(zip(REQUESTS, ALONE[model, options])):
        status, _, answer = request(ports[i % len(ports)], 'POST', '/v1/completions', body)
        assert status == 200 and answer_of(answer) == want, (ports[i % len(ports)], status, answer)


def sees(port, n):
    wait_until(f'{port} sees {n} nodes', lambda: len(request(port, 'GET', '/cluster')[2]['nodes']) == n, 30)


def is_split(port):
    trace = ask(port, return_trace=True, prompt='A prompt of its own for port %d' % port)['baton']
    assert trace['prefill_node'] != trace['decode_node'] and trace['transport'] == 'ipc', trace


def is_a_group(port, n):
    """The nodes that this one sees are the ranks of one group, together."""
    sees(port, n)
    groups = [request(node['http_port'], 'GET', '/cluster')[2]['group'] for node in request(port, 'GET', '/cluster')[2]['nodes']]
    assert sorted(g['rank'] for g in groups) == list(range(n)) and all(g['size'] == n and g['together'] for g in groups), groups


def is_a_pair(*nodes, n=2):
    """Prefill and decode node, or parent of n nodes together, each (shell, port, the folder that its FD_LOG_DIR names): requests at both are split, and both write their log."""
    for shell, port, _ in nodes:
        ready(shell, port, beside=[other for other, _, _ in nodes])
    for shell, port, folder in nodes:
        sees(port, n)
        is_split(port)
        assert os.path.getsize(os.path.join(shell.folder, folder, f'baton-{port}.log')) > 0


def refused(script, sentence, env=None):
    """The block ends at once with status 2 and the page's sentence, word for word."""
    shell = Shell(script, env)
    with closing(shell):
        status = shell.p.wait(30)
        assert status == 2 and sentence in shell.output(), (status, sentence, shell.output()[-2000:])


def block(number, first, last, nth=0):
    """Lines of a document, which `done` then claims."""
    TAKEN.update((number, at) for at in texts.lines_of(number, first, last, nth))
    return texts.block(number, first, last, nth)


def mentioned(number, part, n=1):
    """The n lines with this part name a command and cannot be run as they stand; what they say of it is what the test did."""
    found = {(number, i) for i, line in enumerate(document(number).split('\n'), 1) if part in line}
    assert len(found) == n, (part, found)
    TAKEN.update(found)


def done(number, name, effect, what, everywhere=False):
    """Says what became of a command, at the lines that the test took (or everywhere); it is called when that has been found out."""
    named = NAMED.get((number, name), set())
    lines = {at for at in named if everywhere or (number, at) in TAKEN}
    assert lines or not named, f'{number} names {name} in lines {sorted(named)}, and the test took none of them'
    CLAIMED[number, name] |= lines
    RESULTS.append((number, name, effect, what, sorted(lines)))


# ---- document 000, and what 001 has in common with it ----

def ends_with_eight(number, name, nth=0):
    script = block(number, 'export FD_ENABLE_MULTI_API_SERVER=1', '--enable-expert-parallel', nth)
    refused(script, ROWS[ERNIE_FP8][1])
    ports = Ports()
    with closing(Shell(ports.into(with_models(script)))) as shell:
        api = [ports[p] for p in (1811, 1822, 1833, 1844, 1855, 1866, 1877, 1888)]
        ready(shell, *api)
        for i, port in enumerate(api):
            ask(port)
            assert request(ports[3101 + 100 * i], 'GET', '/metrics')[0] == 200
        is_a_group(api[0], 8)
        as_by_one(api, ERNIE_FP8)
        at = f'127.0.0.1:{ports[25611]}'
        assert f'cluster view held by this launcher, {at}' in shell.output()
        socket.create_connection(at.split(':'), 5).close()
    done(number, name, 'works', 'eight nodes, each with its own API and metrics port, and the first control port; under its own name the model is refused')


def test_000_eight_servers():
    ends_with_eight('000', MULTI)


def nodes_of(port, n):
    """The nodes that computed n answers of this port, by their traces."""
    traces = [ask(port, return_trace=True, prompt='Prompt %d of port %d' % (i, port))['baton'] for i in range(n)]
    return {t[k] for t in traces for k in ('prefill_node', 'decode_node')}


def test_000_router_and_eight_servers():
    """Nothing listens there at first: each serves alone and says so. When the router does, all meet at it, and it shares requests among them."""
    script = block('000', 'export FD_ENABLE_MULTI_API_SERVER=1', '--router', 1)
    ports = Ports(_30000=str(free_ports(1)[0]))
    with closing(Shell(ports.into(with_models(script)))) as shell:
        api = [ports[p] for p in (1811, 1822, 1833, 1844, 1855, 1866, 1877, 1888)]
        ready(shell, *api)
        for port in api:
            ask(port)
        status, _, view = request(api[0], 'GET', '/cluster')
        assert status == 200 and '--router' in view['trouble']['text'] and not view['trouble']['blocks'], view
        front = ports[30000]
        script = block('000', 'export FD_LOG_DIR="log_router"', '--port 30000')
        with closing(Shell(re.sub(r'--port 30000\b', f'--port {front}', script))) as router:
            ready(router, front, beside=[shell])
            sees(front, 8)
            sees(api[7], 8)
            as_by_one([front], ERNIE_FP8)
            assert len(nodes_of(front, 8)) > 1, nodes_of(front, 8)
            wait_until('no trouble', lambda: not request(api[7], 'GET', '/cluster')[2].get('trouble'), 10)
            assert os.path.getsize(os.path.join(router.folder, 'log_router', f'baton-router-{front}.log')) > 0
    done('000', ROUTER, 'works', 'as it is written but for its port: eight servers register, and it shares requests among them')
    done('000', MULTI, 'works', 'with --router: eight nodes serve alone while nothing listens there, and are behind the router as soon as it does')


# ---- document 001 ----

def test_001_offline():
    snippet = block('001', 'prompts = [', 'outputs = llm.generate')
    calls = {n.func.id: n for n in ast.walk(ast.parse(snippet)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    prompts = next(ast.literal_eval(n.value) for n in ast.parse(snippet).body if isinstance(n, ast.Assign) and n.targets[0].id == 'prompts')
    options, sampling = [], {k.arg: ast.literal_eval(k.value) for k in calls['SamplingParams'].keywords}
    for k in calls['LLM'].keywords:
        value = ast.literal_eval(k.value)
        options += ['--' + k.arg.replace('_', '-')] + ([] if value is True else [with_models(str(value))])
    folder = tempfile.mkdtemp(dir=PLACE)
    with open(os.path.join(folder, 'requests.jsonl'), 'w', encoding='utf-8') as f:
        for i, prompt in enumerate(prompts):
            f.write(json.dumps(dict(custom_id=str(i), method='POST', url='/v1/completions', body=dict(prompt=prompt, **sampling))) + '\n')
    p = subprocess.run([BATON, 'generate', '--input', folder + '/requests.jsonl', '--output', folder + '/answers.jsonl', *options],
                       capture_output=True, text=True, timeout=120, env={**os.environ, **SMALL})
    assert p.returncode == 0, p.stderr[-3000:]
    with open(folder + '/answers.jsonl', encoding='utf-8') as f:
        answers = [json.loads(line) for line in f]
    assert len(answers) == len(prompts) == 5 and all(a['response']['status_code'] == 200 for a in answers), answers
    done('001', 'LLM(...).generate(prompts, sampling_params)', 'works', 'five prompts answered: the arguments of LLM are options, those of SamplingParams members of each request')


def test_001_online():
    with closing(Redis()) as redis:
        script, ports = block('001', API, '--scheduler-ttl 9000'), Ports(_6379=str(redis.port))
        refused(ports.into(script), ROWS[ERNIE_FP8][1])
        with closing(Shell(ports.into(with_models(script)))) as shell:
            ready(shell, ports[8184])
            ask(ports[8184])
            assert request(ports[8185], 'GET', '/metrics')[0] == 200
            is_a_group(ports[8184], 8)
            as_by_one([ports[8184]], ERNIE_FP8)
    done('001', API, 'works', 'one port before eight ranks that share the experts, in Redis; under its own name the model is refused')


def test_001_eight_servers():
    ends_with_eight('001', MULTI)


def test_001_prefill_and_decode():
    prefill, decode = block('001', 'export FD_LOG_DIR="log_prefill"', '--scheduler-ttl 9000'), block('001', 'export FD_LOG_DIR="log_decode"', '--splitwise-role "decode"')
    with closing(Redis()) as redis:
        p = Ports(_6379=str(redis.port))
        d = Ports(p, _6379=str(redis.port))
        with closing(Shell(p.into(with_models(prefill)))) as first:
            wait_until('the prefill node is there', lambda: request(p[8180], 'GET', '/live')[0] == 200)
            with closing(Shell(d.into(with_models(continued(decode))))) as second:
                is_a_pair((first, p[8180], 'log_prefill'), (second, d[8184], 'log_decode'), n=8)
                as_by_one((p[8180], d[8184]), ERNIE_FP8)
                for shell in (first, second):
                    assert 'set RDMA NICS\n' in shell.output() and '\nKVCACHE_RDMA_NICS \n' in shell.output() and 'PATH=' not in shell.output(), shell.output()[:500]
            # As a shell reads it, without the missing continuation, the last two options are a command of their own.
            with closing(Shell(d.into(with_models(decode)))) as alone:
                ready(alone, d[8184])
                ask(d[8184])
    done('001', API, 'works', 'prefill: KV goes to the decode node by ipc; decode: as written, with a missing continuation, it serves alone, with the continuation '
         'it decodes for the prefill node')
    mentioned('001', '`bash scripts/get_rdma_nics.sh <device>`')
    done('001', 'bash scripts/get_rdma_nics.sh', 'works', 'export $(...) sets KVCACHE_RDMA_NICS and prints nothing else')


# ---- document 002 ----

BODIES = {'if not': 2, 'def run': 2, 'for i': 6, 'for process': 1, 'for chunk': 2, 'for line': 1, 'if chunk': 1}  # lines below each line that ends with a colon


def indented(text):
    """Python whose indentation the document has lost."""
    out, open_bodies = [], []
    for line in text.split('\n'):
        out.append('    ' * len(open_bodies) + line.strip())
        open_bodies = [n - 1 for n in open_bodies if n > 1]
        begin = next((b for b in BODIES if line.strip().startswith(b) and line.rstrip().endswith(':')), None)
        if begin:
            open_bodies.append(BODIES[begin])
    return '\n'.join(out)


def write_template(nth, *changes):
    folder = tempfile.mkdtemp(dir=PLACE)
    script = block('002', '#!/bin/sh', '--additional-config', nth)
    for old, new in (('nic_name="xxxx"', 'nic_name="lo"'), ('local_ip="xxxx"', 'local_ip="127.0.0.1"'), *changes):
        assert old in script, old
        script = script.replace(old, new)
    with open(os.path.join(folder, 'run_dp_template.sh'), 'w', encoding='utf-8') as f:
        f.write(script)
    return folder


def in_a_row(n):
    """The first of n ports that nobody has, below those that ranks choose themselves."""
    def is_free(port):
        with socket.socket() as s:
            return s.connect_ex(('127.0.0.1', port)) != 0
    while True:
        port = free_ports(1)[0]
        if port + n <= 20000 and all(is_free(port + i) for i in range(1, n)):
            return port


def launcher(nth, port, size):
    """The document's Python launcher with a group of `size` data-parallel ranks at this port and the next ones, which meet on this host."""
    text = indented(block('002', 'import multiprocessing', 'process.join()', nth))
    for was, now in (r'dp_size_local = \d+', f'dp_size_local = {size}'), (r'dp_size = \d+', f'dp_size = {size}'), (r'dp_ip = "192.0.0.\d"', 'dp_ip = "127.0.0.1"'), \
                    (r'dp_port = 13395', f'dp_port = {in_a_row(2)}'), (r'engine_port = 9000', f'engine_port = {port}'):
        text, n = re.subn(was, now, text)
        assert n == 1, was
    return text


def start_launcher(nth, port, env, size=2):
    folder = write_template(nth, (DEEPSEEK + ' ', MODELS[DEEPSEEK] + ' '), ('--quantization ascend \\\n', ''))
    with open(os.path.join(folder, 'launcher.py'), 'w', encoding='utf-8') as f:
        f.write(launcher(nth, port, size))
    return Shell(f'exec {sys.executable} launcher.py', env, folder)


def test_002_template_is_refused_as_written():
    for nth in (0, 1):
        run = 'exec bash ./run_dp_template.sh 2 192.0.0.1 13395 0 0 9000 2'
        for changes, row in (((), DEEPSEEK), (((DEEPSEEK + ' ', MODELS[DEEPSEEK] + ' '),), '--quantization ascend')):
            with closing(Shell(run, None, write_template(nth, *changes))) as shell:
                assert shell.p.wait(30) == 2 and ROWS[row][1] in shell.output(), shell.output()


def proxy(front, prefill, decode, n):
    """The document's line with one host of each kind that has n nodes, in place of four: its flags, in its spelling."""
    script = block('002', PROXY, '--decoder-ports-inc') + '16 16 16 16 \\\n'
    for was, now in ((r'--port 8000', f'--port {front}'), (r'(192\.0\.0\.\d ?\\\n){4}', '127.0.0.1 \\\\\n'), (r'(?<=ports \\\n)9000( 9000){3}', str(prefill)),
                     (r'(192\.0\.0\.\d ?\\\n){4}', '127.0.0.1 \\\\\n'), (r'(?<=ports \\\n)9000( 9000){3}', str(decode)),
                     (r'\b(2|16)( \1){3}', str(n)), (r'\b(2|16)( \1){3}', str(n)), (r'\b(2|16)( \1){3}', str(n)), (r'\b(2|16)( \1){3}', str(n))):
        script, found = re.subn(was, now, script, count=1)
        assert found == 1, (was, script)
    return script


def test_002_ranks_that_know_nobody_and_the_proxy():
    """Without a place to meet, the prefill nodes of eight ranks each say what to give them, and the decode ranks serve. The proxy that lists them
    brings them together."""
    p, d, front = in_a_row(2), in_a_row(2), free_ports(1)[0]
    with closing(start_launcher(0, p, {}), start_launcher(1, d, {})) as (prefill, decode):
        ready(decode, d, d + 1)
        ask(d), ask(d + 1)
        missing = 'start one with: baton serve --splitwise-role decode --router 127.0.0.1:'
        for port in (p, p + 1):
            # The decode ranks are ready, but these may still be loading.
            wait_until('it says what is missing', lambda: missing in ((request(port, 'GET', '/ready')[2].get('error') or {}).get('message') or ''), 60)
        with closing(Shell(proxy(front, p, d, 2))) as shell:
            ready(shell, front, beside=(prefill, decode))
            sees(front, 4)
            is_split(front)
            as_by_one([front], DEEPSEEK)
            assert len(nodes_of(front, 4)) > 1
            known = {port: {n['role'] for n in request(port, 'GET', '/cluster')[2]['nodes']} for port in (p, d)}
            assert known == {p: {'prefill'}, d: {'decode'}}, known  # as before: the router alone knows both
    done('002', PROXY, 'works', 'with all of its flags: it lists a host of two prefill nodes and one of two decode nodes, which know nothing of each other')


def test_002_prefill_and_decode_ranks():
    with closing(Redis()) as redis:
        meet = {'BATON_SCHEDULER_NAME': 'splitwise', 'BATON_SCHEDULER_HOST': '127.0.0.1', 'BATON_SCHEDULER_PORT': str(redis.port)}
        p, d = in_a_row(2), in_a_row(2)
        with closing(start_launcher(0, p, meet), start_launcher(1, d, meet)) as (prefill, decode):
            ready(prefill, p, p + 1)
            ready(decode, d, d + 1)
            for port in (p, p + 1, d, d + 1):
                sees(port, 4)
                is_split(port)
            as_by_one((p, p + 1, d, d + 1), DEEPSEEK)
            # What the benchmark's configuration of the document has its client ask.
            status, _, text = request(d, 'POST', '/v1/chat/completions', dict(model='deepseek_r1', stream=True, max_tokens=10, temperature=0, seed=1024, ignore_eos=False,
                                                                              messages=[dict(role='user', content='What is 2 + 2?')]))
            assert status == 200 and text.rstrip().endswith('data: [DONE]'), text
    mentioned('002', "'vllm serve'")
    done('002', 'vllm serve', 'works', 'prefill and decode ranks meet in Redis and split; as written it is refused for its model and --quantization ascend')
    mentioned('002', '# run_dp_template.sh', 2)
    done('002', 'run_dp_template.sh', 'works', 'run with the arguments of the launcher')
    done('002', 'multiprocessing launcher of run_dp_template.sh', 'works', 'run as it is, with a group of two ranks each on one host')
    mentioned('002', 'ais_bench --models')
    done('002', 'ais_bench', 'works', 'a client; what its configuration asks for is answered')


def memory_of(words):
    """Bytes of the processes with all of these words in their command lines, each on its own: shared pages are divided among those that have them."""
    found = []
    for p in filter(str.isdigit, os.listdir('/proc')):
        try:
            with open(f'/proc/{p}/cmdline') as f:
                line = f.read()
            if all(w in line for w in words):
                with open(f'/proc/{p}/smaps_rollup') as f:
                    found.append(1024 * int(re.search(r'^Pss:\s+(\d+)', f.read(), re.M)[1]))
        except OSError:
            pass
    return found


def test_002_in_its_own_number_of_processes():
    """A prefill host (two nodes of eight ranks) and the decode group (64 ranks), all on this machine. Answers are those of one process."""
    if '--all' not in sys.argv:
        raise Skip('80 processes: with --all')
    bodies = [dict(prompt=[5 + (7 * i + k) % 300 for k in range(20 + i)], max_tokens=6, temperature=0, ignore_eos=True, logprobs=2, return_token_ids=True) for i in range(4)]
    alone = free_ports(1)[0]
    with closing(Shell(f'exec "$BATON_BIN" serve --model {MODELS[DEEPSEEK]} --port {alone}')) as shell:
        ready(shell, alone)
        want = [answer_of(request(alone, 'POST', '/v1/completions', b)[2]) for b in bodies]
    with closing(Redis()) as redis:
        meet = {'BATON_SCHEDULER_NAME': 'splitwise', 'BATON_SCHEDULER_HOST': '127.0.0.1', 'BATON_SCHEDULER_PORT': str(redis.port), 'BATON_KV_CACHE_MEMORY': '0.02', 'BATON_MAX_MODEL_LEN': '2048'}
        p, d, began = in_a_row(2), in_a_row(64), time.monotonic()
        with closing(start_launcher(0, p, meet), start_launcher(1, d, meet, 64)) as (prefill, decode):
            for shell, first, n in (prefill, p, 2), (decode, d, 64):
                for port in range(first, first + n):
                    wait_until(f'port {port} is ready', lambda: request(port, 'GET', '/ready', timeout=30)[0] == 200, 100)
            print(f'  80 ranks ready after {time.monotonic() - began:.0f} s', flush=True)
            for name, words in ('prefill', ['--tensor-parallel-rank']), ('decode', ['baton', 'kv_consumer']):
                each = memory_of(words)
                print(f'  memory of a {name} rank: {sum(each) / len(each) / 2**20:.0f} MiB ({len(each)} processes)', flush=True)
            sees(d, 66)
            for i, b in enumerate(bodies):
                status, _, answer = request((p, d, d + 63, p + 1)[i], 'POST', '/v1/completions', {**b, 'return_trace': True}, timeout=300)
                assert status == 200 and answer_of(answer) == want[i], (status, answer)
                assert answer['baton']['prefill_node'] != answer['baton']['decode_node'] and answer['baton']['recomputed_tokens'] == 0, answer['baton']


# ---- document 003 ----

def test_003_one_server():
    """With each of the options and variables that the document adds to it."""
    lines = document('003').split('\n')
    more = [line for line in lines if re.match(r'--(enable-prefix-caching|swap-space 50|enable-chunked-prefill|speculative-config .*|use-cudagraph)$', line)]
    exports = [line for line in lines if re.match(r'export (ENABLE_V1_KVCACHE_SCHEDULER|FD_SAMPLING_CLASS)=', line)]
    assert len(more) == 5 and len(exports) == 2, (more, exports)
    more = [line.replace('${path_to_mtp_model}', MODELS[ERNIE]) for line in more]  # the quotes show that it stands for a path
    script, port = block('003', API, '--max-num-seqs 128'), free_ports(1)[0]
    for add, before in (('', ''), (' '.join(more), '\n'.join(exports) + '\n')):
        with closing(Shell(f'{before}{with_models(script).rstrip()} {add} --port {port}\n')) as shell:
            ready(shell, port)
            ask(port)
    done('003', API, 'works', 'wint4, 32,768 tokens; the same with the options of chapter 2.2')


def test_003_prefill_and_decode():
    p = Ports()
    with closing(Shell(p.into(with_models(block('003', 'export CUDA_VISIBLE_DEVICES=0', '--splitwise-role "prefill"'))))) as first:
        wait_until('the prefill node is there', lambda: request(p[7012], 'GET', '/live')[0] == 200)
        d = Ports(p, _7013=str(p[7013]))
        with closing(Shell(d.into(with_models(block('003', 'export CUDA_VISIBLE_DEVICES=4', '--splitwise-role "decode"'))))) as second:
            is_a_pair((first, p[7012], 'prefill_log'), (second, d[9012], 'decode_log'))
            assert all('4 for each node' in shell.output() for shell in (first, second))
            as_by_one((p[7012], d[9012]), ERNIE, '--quantization', 'block_wise_fp8')
    done('003', API, 'works', 'prefill and decode on one host, without Redis: KV goes by ipc')


# ---- document 004 ----

class Service:
    """What start_server has started in the background, with a run folder of its own; closing it runs stop_server, as before a next start."""
    PORT = re.compile(r'(export (\w+_PORT)=")([0-9]+)"')

    def __init__(self, env=None):
        self.ports, self.folder = {}, tempfile.mkdtemp(dir=PLACE)
        self.env = {'BATON_RUN_DIR': os.path.join(self.folder, 'run'), 'BATON_KV_CACHE_MEMORY': '', **(env or {})}

    def with_ports(self, exports):
        """The document's ports where they are free, and which stands for which."""
        def take(m):
            self.ports[m[2]] = int(Ports().take(m[3]))
            return f'{m[1]}{self.ports[m[2]]}"'
        return self.PORT.sub(take, exports)

    def run(self, script, expect=0):
        """Runs a block that ends by itself, and returns what it printed."""
        with closing(Shell(script, self.env, self.folder)) as shell:
            status = shell.p.wait(120)
            assert status == expect, (status, shell.output(), self.console())
            return shell.output()

    def console(self):
        path = os.path.join(self.folder, 'log', 'console.log')
        return open(path, encoding='utf-8').read() if os.path.exists(path) else ''

    def is_healthy(self):
        return all(request(self.ports['HEALTH_HTTP_PORT'], 'GET', f'/v2/health/{path}', timeout=5)[::2] == (200, '') for path in ('live', 'ready'))

    def close(self):
        self.run('stop_server 10')


EXPORTS = ('export MP_NUM=1', 'export PUSH_MODE_HTTP_WORKERS')


def said_of_variables(exports, console):
    """Each variable that is exported gave an option, or the note of the page says what becomes of it."""
    for name in re.findall(r'^export (\w+)=', exports, re.M):
        effect, sentence = ROWS[name]
        assert effect == 'works' or f'note: {name}: {sentence}' in console, (name, sentence, console)


def test_004_one_host():
    """The document's variables, start_server, health, metrics, what its client asks for, and stop_server."""
    service = Service({'MODEL_DIR': MODELS[DEEPSEEK]})
    exports = service.with_ports(block('004', *EXPORTS))
    mentioned('004', '执行 stop_server', 2)
    with closing(service):
        service.run(exports + block('004', 'export MODEL_DIR=', 'start_server'))
        api, metrics = service.ports['SERVICE_HTTP_PORT'], service.ports['METRICS_HTTP_PORT']
        ask(api)
        console = service.console()
        said_of_variables(exports, console)
        for line in ('BATCH_SIZE is --max-num-seqs 48', 'MAX_SEQ_LEN is --max-model-len 8192', 'MAX_CACHED_TASK_NUM is --max-concurrency 176', 'BLOCK_BS is --num-gpu-blocks-override 640'):
            assert line in console, (line, console)
        for path in ('live', 'ready'):
            url = f'/v2/health/{path}'
            assert f'http://127.0.0.1:8110{url}' in document('004')
            assert request(service.ports['HEALTH_HTTP_PORT'], 'GET', url)[::2] == (200, '')
            done('004', 'GET ' + url, 'works', '200 with an empty body')
        status, _, text = request(metrics, 'GET', '/metrics')
        assert status == 200 and 'inference_server_metrics{max_batch_size="max_batch_size"} 48' in text and 'inference_server_metrics{max_block_num="max_block_num"} 640' in text, text
        assert 'a service runs already' in service.run('start_server', expect=1)
        assert 'ended after' in service.run('stop_server')
        assert 'no service runs' in service.run('stop_server')
    done('004', 'start_server', 'works', 'with the variables of the document: API, health and metrics at their ports')
    done('004', 'stop_server', 'works', 'all processes have ended; once more it says that none runs')


def test_004_a_model_by_its_name():
    """By the document's names: one is fetched from a hub that has a small checkpoint in its place, the other is below MODEL_DIR; both are quantised as they say."""
    script = block('004', 'model_name="deepseek', 'start_server $model_name')
    inner = re.search(r"-c -ex '(start_server \$model_name && tail -f /dev/null)'", document('004'))[1]
    mentioned('004', "-c -ex 'start_server $model_name && ")
    fetched, here = re.search(r'model_name="([^"]+)"', script)[1], 'deepseek-ai/DeepSeek-R1-Distill-Llama-8B/weight_only_int8'
    assert here in document('004')
    models, golden = tempfile.mkdtemp(dir=PLACE), os.path.join(DATA, 'goldens', 'llama', 'model')
    os.makedirs(os.path.dirname(os.path.join(models, here)))
    os.symlink(MODELS[DEEPSEEK], os.path.join(models, here))
    service = Service({'MODEL_DIR': models, 'HF_TOKEN': ''})
    exports = service.with_ports(block('004', *EXPORTS))

    def is_served(name):
        assert [m['id'] for m in request(api, 'GET', '/v1/models')[2]['data']] == [name]
        assert 'model_name is --quantization wint8' in service.console(), service.console()
        ask(api, model=name)
    with Hub({n: open(os.path.join(golden, n), 'rb').read() for n in os.listdir(golden)}, repository='deepseek-ai/DeepSeek-R1') as hub, closing(service):
        service.run(f'export HF_ENDPOINT={hub.url}\n' + exports + script)
        api = service.ports['SERVICE_HTTP_PORT']
        assert os.path.exists(os.path.join(models, fetched, 'config.json'))
        is_served(fetched)
    with closing(service):
        with closing(Shell(f'{exports}export model_name="{here}"\nexec bash -c -ex \'{inner}\'', service.env, service.folder)) as container:  # in which docker runs it
            ready(container, api)
            is_served(here)
            assert container.alive()
    done('004', 'start_server', 'works', 'models by their names: fetched, and below MODEL_DIR')


def test_004_mpirun():
    service = Service({'MODEL_DIR': MODELS[DEEPSEEK]})
    exports = service.with_ports(block('004', *EXPORTS))
    with closing(service):
        said = service.run(exports + block('004', 'mpirun start_server', 'mpirun start_server'))
        assert 'the first process of this host starts its service' in said, said
        ask(service.ports['SERVICE_HTTP_PORT'])
        service.run(block('004', 'mpirun stop_server', 'mpirun stop_server'))
        assert 'no service runs' in service.run('stop_server')
    done('004', 'mpirun start_server', 'works', 'two processes of a host start one service')
    done('004', 'mpirun stop_server', 'works', 'both return when it has ended')


def test_004_two_hosts():
    """Sixteen ranks on two hosts, which are this one: each service has its own ports and HOST_IP. The hosts share the experts."""
    hosts, exports = [], []
    several = block('004', 'export POD_IPS', 'export CUDA_VISIBLE_DEVICES').replace('10.0.0.', '127.0.0.')
    assert 'POD_IPS=127.0.0.1,127.0.0.2\n' in several and 'MP_NUM=16' in several
    meet = {'BATON_CLUSTER_SECRET': '0123456789abcdef0123456789abcdef', 'BATON_DATA_PARALLEL_RPC_PORT': str(free_ports(1)[0]), 'BATON_KV_CACHE_MEMORY': '0.1'}
    for i in (1, 2):
        hosts.append(Service({'MODEL_DIR': MODELS[DEEPSEEK], 'HOST_IP': f'127.0.0.{i}', **meet}))
        exports.append(hosts[-1].with_ports(block('004', *EXPORTS)))
        if i == 1:  # what the second host would have at the same ports
            taken = [socket.create_server(('', port)) for port in hosts[0].ports.values()]
    for s in taken:
        s.close()
    inner = str(hosts[0].ports['INTER_PROC_PORT'])
    exports[1] = re.sub(r'(INTER_PROC_PORT=")[0-9]+', r'\g<1>' + inner, exports[1])
    start = block('004', 'export MODEL_DIR=', 'start_server')
    with closing(*hosts):
        for host, text in zip(hosts, exports):
            host.run(text + several + start)
        for host in hosts:
            wait_until('it is healthy', host.is_healthy, 100)
        sees(hosts[0].ports['SERVICE_HTTP_PORT'], 2)
        nodes = request(hosts[0].ports['SERVICE_HTTP_PORT'], 'GET', '/cluster')[2]['nodes']
        assert sorted(n['group_rank'] for n in nodes) == [0, 8] and all(n['group_size'] == 16 and n['group_whole'] for n in nodes), nodes
        as_by_one([h.ports['SERVICE_HTTP_PORT'] for h in hosts], DEEPSEEK)
        said_of_variables(several, hosts[0].console())
    done('004', 'start_server', 'works', 'two hosts of eight ranks, one after the other; answers are those of one process')


def test_004_download():
    """The document's four commands, against a hub that has a small checkpoint under DeepSeek-R1's name: each folder is one that a node loads."""
    name, golden = 'python download_model.py', os.path.join(DATA, 'goldens', 'llama', 'model')
    scripts = [block('004', name + ' \\', '--speculate_model_path')] + [block('004', 'export MODEL_PATH', name, n) for n in (1, 2, 3)]
    files = {n: open(os.path.join(golden, n), 'rb').read() for n in os.listdir(golden)}
    with Hub(files, repository='deepseek-ai/DeepSeek-R1') as hub:
        for script in scripts:
            folder = tempfile.mkdtemp(dir=PLACE)
            model = 'export model_name="deepseek-ai/DeepSeek-R1-2nodes/weight_only_int8"\n' if script is scripts[0] else ''
            with closing(Shell(model + script, {'HF_ENDPOINT': hub.url, 'HF_TOKEN': '', 'MODEL_PATH': folder})) as shell:
                assert shell.p.wait(60) == 0, shell.output()
                assert 'add --quantization wint' in shell.output() and ('all files, as on every host' in shell.output()) == ('--nnodes 2' in script), shell.output()
            p = subprocess.run([BATON, 'generate', folder, '--raw', '--prompt', 'a', '--max-tokens', '2'], capture_output=True, text=True, timeout=60, env={**os.environ, **SMALL})
            assert p.returncode == 0, p.stderr
    done('004', name, 'works', 'one host and two, master and slave: all files of the checkpoint are in MODEL_PATH, and what quantises it is said')


def python_with(package, *pythons):
    for python in pythons:
        if python and subprocess.run([python, '-c', f'import {package}'], capture_output=True).returncode == 0:
            return python
    return None


def client_of_004(first, end, port):
    """An example from its first line to before the line that begins with `end`; only the address is another."""
    lines = document('004').split('\n')
    begin = lines.index(first)
    until = next(i for i in range(begin, len(lines)) if lines[i].startswith(end))
    return indented('\n'.join(lines[begin:until])).replace('ip = 127.0.0.1', 'ip = "127.0.0.1"').replace('"9965"', f'"{port}"')


def printed(python, script):
    p = subprocess.run([python, '-c', script], capture_output=True, text=True, timeout=120)
    assert p.returncode == 0, (p.stdout[-2000:], p.stderr[-3000:])
    return p.stdout


def ask_over_http(port):
    names = [f'requests.post(url, json={{"{what}", "req_id", "max_dec_len"}})' for what in ('text', 'messages')]
    python = python_with('requests', os.environ.get('BATON_OPENAI_PYTHON'), sys.executable)
    if not python:
        for name in names:
            done('004', name, 'skipped', 'not run here: no Python has the package requests')
        return 'the package requests'
    items = [ast.literal_eval(line) for line in printed(python, client_of_004('import uuid', '更多请求参数', port)).splitlines()]
    ends = [i for i in items if i['is_end'] == 1]
    assert len(ends) == 2 and items[-1] is ends[1], items
    assert all(i['error_msg'] == '' and i['error_code'] == 0 for i in items) and all(1 <= i['tokens_all_num'] <= 64 for i in ends), items
    for name, end in zip(names, ends):
        done('004', name, 'works', f'{end["tokens_all_num"]} tokens, an item each')


def ask_as_openai(port):
    name = 'openai.Client(base_url=".../v1/chat/completions")'
    python = python_with('openai', os.environ.get('BATON_OPENAI_PYTHON'))
    if not python:
        done('004', name, 'skipped', 'not run here: BATON_OPENAI_PYTHON names no Python with the package openai')
        return 'the package openai'
    text = printed(python, client_of_004('import openai', '基于', port))
    assert 'ChatCompletion(' in text and 'Completion(' in text, text
    done('004', name, 'works', 'the example prints four answers')


GRPC_CLIENT = '''
import json, queue, uuid
import numpy, tritonclient.grpc as grpcclient
results, client = queue.Queue(), grpcclient.InferenceServerClient("127.0.0.1:8811")
client.start_stream(callback=lambda result, error: results.put((result, error)))
data = {"text": "Hello, how are you?", "req_id": str(uuid.uuid1()), "max_dec_len": 64}
tensor = grpcclient.InferInput("IN", [1], "BYTES")
tensor.set_data_from_numpy(numpy.array([json.dumps([data])], dtype=numpy.object_))
client.async_stream_infer(model_name="model", inputs=[tensor], request_id=data["req_id"])
while True:
    result, error = results.get(timeout=60)
    assert error is None, error
    answer = json.loads(result.as_numpy("OUT")[0])
    answer = answer[0] if isinstance(answer, list) else answer
    print(json.dumps(answer))
    if answer.get("is_end") or answer.get("error_msg"):
        break
client.stop_stream()
'''


def ask_over_grpc(port):
    """As clients of that service do: one JSON object in a list, in the tensor IN of the model `model`; what comes back is in OUT."""
    python = python_with('tritonclient.grpc', os.environ.get('BATON_GRPC_PYTHON'))
    if not python:
        print('  not run here: BATON_GRPC_PYTHON names no Python with the package tritonclient[grpc]', flush=True)
        return 'the package tritonclient[grpc]'
    items = [json.loads(line) for line in printed(python, GRPC_CLIENT.replace(':8811', f':{port}')).splitlines()]
    assert all(not i.get('error_msg') for i in items) and items[-1]['is_end'] == 1 and 1 <= items[-1]['tokens_all_num'] <= 64, items
    return None


def test_004_clients():
    """Of a service that was started as the document says: its HTTP example, its OpenAI example, and Triton's client at SERVICE_GRPC_PORT."""
    service = Service({'MODEL_DIR': MODELS[DEEPSEEK]})
    exports = service.with_ports(block('004', *EXPORTS))
    with closing(service):
        service.run(exports + block('004', 'export MODEL_DIR=', 'start_server'))
        api = service.ports['SERVICE_HTTP_PORT']
        missing = [m for m in (ask_over_http(api), ask_as_openai(api), ask_over_grpc(service.ports['SERVICE_GRPC_PORT'])) if m]
    if missing:
        raise Skip('not all were asked, for lack of ' + ', '.join(missing))


# ---- models that cannot be read ----

def test_models_are_refused_by_name_with_the_pages_sentence():
    models = [(name, sentence) for name, (effect, sentence) in ROWS.items() if effect == 'refused' and re.match(r'ERNIE|[a-z-]+/DeepSeek', name)]
    assert len(models) == 2, models
    for name, sentence in models:
        refused(f'exec "$BATON_BIN" serve --model {name} --port 0', sentence)


def test_models_are_refused_by_their_files_with_the_pages_sentence():
    static = tempfile.mkdtemp(dir=PLACE)  # the layout of document 004
    os.mkdir(os.path.join(static, 'rank_0'))
    for name in ('config.json', 'llama.model', 'special_tokens_map.json', 'tokenizer_config.json', 'rank_0/model.pdiparams', 'rank_0/model.pdmodel'):
        with open(os.path.join(static, name), 'w') as f:
            f.write('{}')
    ascend = make_model('deepseek_v2_lite')
    with open(os.path.join(ascend, 'quant_model_description_w8a8_dynamic.json'), 'w') as f:
        f.write('{}')
    fp8 = make_model('ernie_moe', [('quantization_config', {'dense_quant_type': 'block_wise_fp8', 'moe_quant_type': 'block_wise_fp8'})])
    for path, sentence in ((static, 'static-graph exports (.pdmodel, .pdiparams) are not read'), (ascend, ROWS[DEEPSEEK][1]), (fp8, ROWS[ERNIE_FP8][1])):
        with closing(Shell(f'exec "$BATON_BIN" serve --model {path} --port 0')) as shell:
            assert shell.p.wait(30) != 0 and sentence in shell.output(), shell.output()


# ---- the rest: programs of others, and whether every command has been dealt with ----

OTHERS = [('000', 'Nginx'), ('002', 'hccn_tool'), ('002', 'npu-smi info'), ('002', 'cat /etc/hccn.conf'), ('002', 'ifconfig'),
          ('002', 'git clone https://gitee.com/aisbench/benchmark.git'), ('002', 'pip3 install -e ./'), ('004', 'docker run'), ('004', 'docker exec'),
          ('004', 'docker build'), ('004', 'git clone https://github.com/PaddlePaddle/PaddleNLP.git'), ('004', 'nvidia-smi')]


def test_programs_of_others_are_on_the_page():
    for number, name in OTHERS:
        assert name in document(number), name
        done(number, name, 'not a command of Baton', ROWS[name][1], everywhere=True)


def test_zz_every_command_of_the_documents_is_dealt_with():
    left = {key: sorted(lines - CLAIMED[key]) for key, lines in NAMED.items() if lines - CLAIMED[key]}
    assert not left, f'lines that no test has dealt with: {left}'
    listed = {(d, name) for name, _, numbers, _, _ in table(BATON)['Commands'] for d in numbers}
    assert set(CLAIMED) == listed, set(CLAIMED) ^ listed


def main():
    failed = passed = skipped = 0
    end_in_order()
    only = [a for a in sys.argv[3:] if a != '--all']
    for name, test in [(n, t) for n, t in globals().items() if n.startswith('test_') and (not only or n in only)]:
        begin = time.monotonic()
        TAKEN.clear()
        try:
            test()
            passed += 1
            print(f'ok    {name} ({time.monotonic() - begin:.1f} s)', flush=True)
        except Skip as e:
            skipped += 1
            print(f'SKIP  {name}: {e}', flush=True)
        except Exception as e:
            failed += 1
            print(f'FAIL  {name}: {type(e).__name__}: {e}', flush=True)
    print('\nwhat became of each command:')
    for number, name, effect, what, lines in sorted(RESULTS, key=lambda r: r[0]):
        at = f' (line {", ".join(map(str, lines))})' if lines else ''
        print(f'{number} {effect:<23} {name}{at}: {what}')
    print(f'{passed} passed, {failed} failed, {skipped} skipped')
    return failed > 0


if __name__ == '__main__':
    sys.exit(main())
