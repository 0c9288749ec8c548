"""start_server and stop_server: real services in the background, their ports, and what they say when something is wrong."""
from harness import *

DEPLOY = os.path.join(HERE, '..', '..', 'deploy')


class Service:
    """A service with ports and a run folder of its own; closing it stops it."""

    def __init__(self, model=TINY, **env):
        self.api, self.health, self.metrics, self.grpc = free_ports(4)
        self.folder = tempfile.mkdtemp(prefix='baton-service-')
        self.env = {**{k: v for k, v in os.environ.items() if not k.startswith(('BATON_CLUSTER', 'BATON_API'))}, 'BATON_BIN': BIN, 'BATON_RUN_DIR': f'{self.folder}/run',
                    'BATON_COMPUTE_THREADS': '1', 'BATON_KV_CACHE_MEMORY': '0.1', 'BATON_HOST': '127.0.0.1', 'MODEL_DIR': model, 'SERVICE_HTTP_PORT': str(self.api),
                    'HEALTH_HTTP_PORT': str(self.health), 'METRICS_HTTP_PORT': str(self.metrics), 'SERVICE_GRPC_PORT': str(self.grpc), **env}
        self.env = {k: v for k, v in self.env.items() if v is not None}

    def run(self, name, *words, timeout=90, **env):
        """(status, what it printed)"""
        p = subprocess.run([os.path.join(DEPLOY, name), *words], cwd=self.folder, env={**self.env, **env}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
        return p.returncode, p.stdout + p.stderr

    def started(self, *words, **env):
        status, text = self.run('start_server', *words, **env)
        assert status == 0, (status, text, self.console())
        return text

    def refused(self, want, *words, status=(1, 2), **env):
        got, text = self.run('start_server', *words, **env)
        assert got in status and want in text, (got, text)

    def console(self):
        with contextlib.suppress(FileNotFoundError), open(f'{self.folder}/log/console.log') as f:
            return f.read()
        return ''

    def pid(self):
        with open(f'{self.folder}/run/start_server') as f:
            return int(f.read().split()[0])

    def close(self):
        try:
            status, text = self.run('stop_server', '5')
            assert status == 0, text
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def health(service, path='ready'):
    status, _, body = request(service.health, 'GET', f'/v2/health/{path}', timeout=5)
    return status, body


def complete(service, **more):
    status, _, answer = request(service.api, 'POST', '/v1/completions', dict(prompt=[5, 6, 7], max_tokens=4, temperature=0, ignore_eos=True, **more))
    assert status == 200 and answer['usage']['completion_tokens'] == 4, (status, answer)
    return answer


def test_a_service_is_ready_when_start_server_returns_and_gone_when_stop_server_does():
    with closing(Service()) as s:
        text = s.started()
        assert 'the service is ready' in text, text
        complete(s)
        assert health(s) == health(s, 'live') == (200, ''), (health(s), health(s, 'live'))
        assert request(s.health, 'GET', '/metrics')[0] == 404 and request(s.health, 'POST', '/v2/health/live', {})[0] == 405
        page = s.console()
        for line in (f'SERVICE_HTTP_PORT is --port {s.api}', f'HEALTH_HTTP_PORT is --health-port {s.health}', f'MODEL_DIR is --model {TINY}', "(start_server's default)"):
            assert line in page, (line, page)
        with open(f'{s.folder}/log/baton-{s.api}.log') as f:
            assert 'node ready' in f.read()
        assert 'node ready' not in page  # the log's lines are in the log
        s.refused('a service runs already (process ', status=(1,))
        s.refused('a service runs already (process ', 'no/such', HF_HUB_OFFLINE='1', status=(1,))  # and nothing is fetched
        status, text = s.run('stop_server')
        assert status == 0 and 'ended after' in text, (status, text)
        with contextlib.suppress(ConnectionError):
            raise AssertionError(f'it answers still: {request(s.api, "GET", "/live")}')
        status, text = s.run('stop_server')
        assert status == 0 and 'no service runs' in text, (status, text)
        s.started(OUTPUT_LOG_TO_CONSOLE='1')
        complete(s)
        assert 'node ready' in s.console()


def test_the_metrics_port_has_the_gauges_of_that_service():
    with closing(Service(BATCH_SIZE='6', BLOCK_BS='3', MAX_SEQ_LEN='100', MAX_DEC_LEN='50', BATON_KV_CACHE_MEMORY=None)) as s:
        s.started()
        complete(s)
        m = metrics(s.metrics)
        got = {name: m[f'inference_server_metrics{{{name}="{name}"}}'] for name in ('batch_size', 'block_num', 'max_batch_size', 'max_block_num', 'available_resource')}
        assert got == dict(batch_size=0, block_num=6, max_batch_size=6, max_block_num=6, available_resource=1), got  # three sequences of two blocks
        assert m['baton_ready'] == 1
        assert metrics(s.api)['inference_server_metrics{block_num="block_num"}'] == 6  # the same at the other port


def test_the_variables_of_speculation():
    with closing(Service(SPECULATE_METHOD='inference_with_reference', SPECULATE_MAX_DRAFT_TOKEN_NUM='3', SPECULATE_MAX_NGRAM_SIZE='4')) as s:
        s.started()
        complete(s)
        assert 'SPECULATE_METHOD is --speculative-config {"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4}' in s.console(), s.console()


def test_stop_server_waits_for_requests_that_run():
    with closing(Service(BATON_ENGINE_FAULT='hang@3:3000')) as s:
        s.started()
        got = []
        t = threading.Thread(target=lambda: got.append(complete(s)), daemon=True)
        t.start()
        wait_until('it runs', lambda: request(s.api, 'GET', '/load')[2]['running'] == 1)
        status, text = s.run('stop_server')
        assert status == 0 and 'finishes the requests that run' in text, (status, text)
        t.join(10)
        assert len(got) == 1


def test_stop_server_ends_requests_whose_time_is_over():
    with closing(Service(BATON_ENGINE_FAULT='hang@2')) as s:
        s.started()
        with socket.create_connection(('127.0.0.1', s.api)) as c:  # nobody waits for this answer
            body = json.dumps(dict(prompt=[5, 6, 7], max_tokens=9))
            c.sendall(f'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}'.encode())
            ends_at_once(s)


def ends_at_once(s):
    wait_until('it runs', lambda: request(s.api, 'GET', '/load')[2]['running'] == 1)
    status, text = s.run('stop_server', '1')
    assert status == 0 and 'they end now' in text, (status, text)


def test_the_health_port_says_loading_hanging_and_ending():
    with closing(Service(CHECK_HEALTH_INTERVAL='1', BATON_ENGINE_FAULT='hang@3:6000')) as s:
        s.started()
        assert health(s) == (200, '')
        t = threading.Thread(target=lambda: request(s.api, 'POST', '/v1/completions', dict(prompt=[5, 6, 7], max_tokens=8, ignore_eos=True)), daemon=True)
        t.start()
        wait_until('it hangs', lambda: health(s) == (500, dict(error_code=3, error_msg='infer engine hangs')), 10)
        assert health(s, 'live')[0] == 500
        wait_until('it goes on', lambda: health(s) == (200, ''), 20)
        t.join(20)
    with closing(Process([BIN, 'serve', '--model', TINY, '--port', '0', '--host', '127.0.0.1', '--health-port', str(s.health), '--router', '127.0.0.1:9', '--splitwise-role', 'prefill'],
                         name='no decode node')) as p:
        wait_until('it is not ready', lambda: health(s) == (500, dict(error_code=1, error_msg='server is not ready')), 10)
        assert p.alive()


def test_the_engine_behind_a_port_is_down_when_its_ranks_are():
    with closing(Service(MP_NUM='2')) as s:
        s.started()
        complete(s)
        m = metrics(s.metrics)
        assert m['inference_server_metrics{max_batch_size="max_batch_size"}'] == 50, m
        ranks = ranks_of(s, 2)
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        try:
            wait_until('it is down', lambda: health(s) == (500, dict(error_code=2, error_msg='infer engine is down')), 20)
        finally:
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_nothing_is_left_of_a_service_whose_first_process_was_killed():
    with closing(Service(MP_NUM='2')) as s:
        s.started()
        ranks = ranks_of(s, 2)
        os.kill(s.pid(), signal.SIGKILL)
        status, text = s.run('stop_server')
        assert status == 0 and ('ended after' in text or 'no service runs' in text), (status, text)
        assert not any(map(runs, ranks)), text
        s.started()
        complete(s)


def ranks_of(service, n):
    parent = service.pid()
    ranks = [int(p) for p in filter(str.isdigit, os.listdir('/proc')) if is_rank_of(p, parent)]
    assert len(ranks) == n, ranks
    return ranks


def runs(pid):
    """False also of one that has ended and that init has not waited for yet."""
    with contextlib.suppress(OSError), open(f'/proc/{pid}/stat') as f:
        return f.read().rsplit(')', 1)[1].split()[0] != 'Z'
    return False


def is_rank_of(pid, parent):
    with contextlib.suppress(OSError, IndexError), open(f'/proc/{pid}/stat') as f:
        return int(f.read().rsplit(')', 1)[1].split()[1]) == parent
    return False


def test_a_start_that_fails_says_why():
    with closing(Service()) as s, socket.create_server(('127.0.0.1', s.health)):
        s.refused('the port is in use by')
        s.refused('the service did not start (status 1)')
        free, = free_ports(1)
        more = dict(HEALTH_HTTP_PORT=str(free))
        for want, change in (('BATCH_SIZE is "0", but must be', dict(BATCH_SIZE='0')),
                             ('SERVICE_HTTP_PORT is -1, no HTTP API, and without --grpc-port (SERVICE_GRPC_PORT)', dict(SERVICE_HTTP_PORT='-1', SERVICE_GRPC_PORT='0')),
                             (f'HEALTH_HTTP_PORT and SERVICE_GRPC_PORT are both {free}', dict(SERVICE_GRPC_PORT=str(free))),
                             (f'HEALTH_HTTP_PORT and SERVICE_HTTP_PORT are both {s.api}', dict(HEALTH_HTTP_PORT=str(s.api))),
                             ("INTER_PROC_PORT: 'x' is not a port", dict(INTER_PROC_PORT='x')),
                             ('draft_model, which needs SPECULATE_MODEL_PATH', dict(SPECULATE_METHOD='draft_model')),
                             ('MP_NUM, for each host: --tensor-parallel-size 3 does not divide', dict(MP_NUM='3')),
                             ('there is room for 16; lower --max-model-len or raise BLOCK_BS', dict(BLOCK_BS='0.5', MAX_SEQ_LEN='2048', BATON_KV_CACHE_MEMORY='')),
                             ('BLOCK_BS: 16384000 KV blocks are ', dict(BLOCK_BS='1000', MAX_SEQ_LEN='1048576', BATON_KV_CACHE_MEMORY='')),
                             ('has no model: neither a config.json', dict(MODEL_DIR='/nonexistent'))):
            s.refused(want, **{**more, **change})
        s.refused('there is no option --nonsense', '--nonsense', **more)
        s.refused('model_name nowhere: MODEL_DIR', 'nowhere', **more)
        s.refused('HF_HUB_OFFLINE', 'no/such', HF_HUB_OFFLINE='1', **more)
        s.refused('BATCH_SIZE is "0", but must be', 'no/such', HF_HUB_OFFLINE='1', BATCH_SIZE='0', **more)  # before anything is fetched
        s.refused('the port is in use by', 'no/such', '--model', TINY, HF_HUB_OFFLINE='1')
        assert 'no service runs' in s.run('stop_server')[1]


def test_ctrl_c_ends_a_start():
    with closing(Service()) as s:
        control, = free_ports(1)
        # a rank of a group waits for its other host, so this start would not end
        p = Process(['env', '-C', s.folder, os.path.join(DEPLOY, 'start_server'), '--data-parallel-size', '2', '--data-parallel-size-local', '1', '--enable-expert-parallel',
                     '--data-parallel-address', '127.0.0.1', '--data-parallel-rpc-port', str(control)], env=s.env, name='start_server')
        try:
            wait_until('it runs', lambda: request(s.api, 'GET', '/live', timeout=2)[0] == 200, 30)
            pid = s.pid()
            p.kill(signal.SIGINT)
            assert p.p.wait(30) == 130, p.output()
            assert not os.path.exists(f'/proc/{pid}'), p.output()
        finally:
            p.close()


def test_mpirun_starts_one_service_on_a_host_and_on_all_of_its_cpus():
    with closing(Service()) as s:
        cpus = os.sched_getaffinity(0)
        status, text = s.run('start_server', OMPI_COMM_WORLD_LOCAL_RANK='1', OMPI_COMM_WORLD_RANK='1')
        assert status == 0 and 'the first process of this host starts its service' in text, (status, text)
        assert 'no service runs' in s.run('stop_server')[1]
        bound = ['taskset', '-c', str(min(cpus)), os.path.join(DEPLOY, 'start_server')]
        p = subprocess.run(bound, cwd=s.folder, env={**s.env, 'OMPI_COMM_WORLD_LOCAL_RANK': '0', 'OMPI_COMM_WORLD_RANK': '0'}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90)
        assert p.returncode == 0, p.stderr
        assert os.sched_getaffinity(s.pid()) == cpus, os.sched_getaffinity(s.pid())


def two_hosts(model, **env):
    """Two services of this machine, as those of two hosts, which are told apart by HOST_IP."""
    common = dict(POD_IPS='127.0.0.1,127.0.0.2', POD_0_IP='127.0.0.1', MP_NNODE='2', INTER_PROC_PORT=str(free_ports(1)[0]), BATON_HOST='0.0.0.0',
                  BATON_DATA_PARALLEL_RPC_PORT=str(free_ports(1)[0]), BATON_CLUSTER_SECRET='0123456789abcdef0123456789abcdef', **env)
    return [Service(model, HOST_IP=f'127.0.0.{i}', **common) for i in (1, 2)]


def hosts_ready(services):
    for s in services:
        text = s.started()
        assert 'waits for the other hosts' in text, text
    for s in services:
        wait_until('it is ready', lambda: health(s) == (200, ''), 60)


def test_hosts_with_a_whole_model_each_share_the_requests():
    first, second = services = two_hosts(TINY, MP_NUM='2', BATCH_SIZE='2')
    with closing(*services):
        hosts_ready(services)
        for s in services:
            wait_until('it sees both', lambda: len(request(s.api, 'GET', '/cluster')[2]['nodes']) == 2, 30)
        answers = parallel([lambda: complete(first, return_trace=True)] * 16, 16)
        assert len({a['baton']['decode_node'] for a in answers}) == 2, answers
        assert complete(first)['choices'][0]['text'] == complete(second)['choices'][0]['text']
        first.run('stop_server', '5')
        complete(second)


def test_hosts_of_a_model_with_experts_are_one_group():
    services = two_hosts(os.path.join(DATA, 'goldens', 'ernie_moe', 'model'), MP_NUM='2')
    with closing(*services):
        hosts_ready(services)
        for s in services:
            wait_until('it sees both', lambda: len(request(s.api, 'GET', '/cluster')[2]['nodes']) == 2, 30)
        nodes = request(services[0].api, 'GET', '/cluster')[2]['nodes']
        assert sorted(n['group_rank'] for n in nodes) == [0, 1] and all(n['group_size'] == 2 for n in nodes), nodes
        texts = {complete(s)['choices'][0]['text'] for s in services}
        assert len(texts) == 1, texts


def test_a_full_queue_refuses_at_once():
    """One sequence runs and MAX_CACHED_TASK_NUM wait: the next is told so and does not wait in line."""
    with closing(Service(MAX_CACHED_TASK_NUM='2', BATCH_SIZE='1', BATON_ENGINE_FAULT='hang@1:4000')) as s:
        s.started()

        def ask():
            begin = time.monotonic()
            status, headers, _ = request(s.api, 'POST', '/v1/completions', dict(prompt=[5, 6, 7], max_tokens=2, ignore_eos=True))
            return status, time.monotonic() - begin, headers
        first = threading.Thread(target=ask, daemon=True)
        first.start()
        wait_until('it runs', lambda: request(s.api, 'GET', '/load')[2]['server_load'] == 1)
        answers = parallel([ask] * 6, 6)
        first.join(20)
        refused = [a for a in answers if a[0] == 429]
        assert len(refused) == 4 and sum(a[0] == 200 for a in answers) == 2, answers
        assert all('retry-after' in a[2] for a in refused), refused


def native(service, **more):
    """The items of a streamed answer in the native form."""
    c = http.client.HTTPConnection('127.0.0.1', service.api, timeout=30)
    with contextlib.closing(c):
        c.request('POST', '/v1/chat/completions', json.dumps({**dict(text='Hello, how are you?', req_id='one', max_dec_len=4, stream=True), **more}), {'Content-Type': 'application/json'})
        r = c.getresponse()
        return r.status, [json.loads(line) for line in r.read().splitlines() if line]


def test_streams_of_the_native_form_have_one_item_where_that_is_asked():
    with closing(Service(MAX_DEC_LEN='8')) as s:
        s.started()
        status, items = native(s)
        assert status == 200 and len(items) > 1 and items[-1]['is_end'] == 1, items
        status, items = native(s, max_dec_len=9)
        assert status == 400 and 'max_dec_len is 9, but this server gives answers of at most 8 tokens' in items[0]['error_msg'], (status, items)
        s.run('stop_server')
        s.started(DISABLE_STREAMING='1')
        status, one = native(s)
        assert status == 200 and len(one) == 1 and one[0]['is_end'] == 1 and one[0]['tokens_all_num'] == 4, one
        events = list(stream(s.api, '/v1/completions', dict(prompt=[5, 6, 7], max_tokens=4, ignore_eos=True)))
        assert len(events) >= 4, events


def test_a_service_without_http_answers_over_grpc_and_ends_in_order():
    without_http('gRPC alone   (SERVICE_HTTP_PORT)')


def test_so_does_one_before_ranks():
    without_http('ready: gRPC at 127.0.0.1:', MP_NUM='2')


def without_http(said, **env):
    with closing(Service(SERVICE_HTTP_PORT='-1', **env)) as s:
        text = s.started()
        assert 'the service is ready' in text, text
        assert health(s) == (200, '') and metrics(s.metrics)['baton_ready'] == 1
        with contextlib.suppress(ConnectionRefusedError):
            raise AssertionError(request(s.api, 'GET', '/live'))
        socket.create_connection(('127.0.0.1', s.grpc), 5).close()
        assert said in s.console(), s.console()
        status, text = s.run('stop_server')
        assert status == 0 and 'ended after' in text and 'without freeing' not in s.console(), (status, text, s.console())
