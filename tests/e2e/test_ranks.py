"""`serve` with several ranks: a parent with the port and its ranks as processes, on one host and on several (which are this one here)."""
from harness import *
import re
from test_parallel import SIZE, answers_alone, ask_all, experts_of, golden, vocab_of


def children_of(pid):
    """The living processes whose parent this is."""
    found = []
    for p in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError), open(f'/proc/{p}/stat', 'rb') as f:
            fields = f.read().rsplit(b')', 1)[1].split()
            if int(fields[1]) == pid and fields[0] != b'Z':
                found.append(int(p))
    return sorted(found)


def words_of(pid):
    with contextlib.suppress(OSError), open(f'/proc/{pid}/cmdline', 'rb') as f:
        return f.read().decode().split('\0')
    return []


def rank_of(pid):
    """-1: it has not begun to be one."""
    return next((int(w.split('=')[1]) for w in words_of(pid) if w.startswith('--data-parallel-rank=')), -1)


def is_gone(pid):
    return not words_of(pid)


def listens_at(pid):
    """The addresses of the TCP sockets on which it listens."""
    inodes = set()
    for fd in os.listdir(f'/proc/{pid}/fd'):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f'/proc/{pid}/fd/{fd}'))
    found = []
    for name, family in (('tcp', socket.AF_INET), ('tcp6', socket.AF_INET6)):
        with open(f'/proc/{pid}/net/{name}') as f:
            for fields in map(str.split, f.readlines()[1:]):
                if fields[3] == '0A' and f'socket:[{fields[9]}]' in inodes:
                    words = bytes.fromhex(fields[1].split(':')[0])
                    found.append(socket.inet_ntop(family, b''.join(words[i:i + 4][::-1] for i in range(0, len(words), 4))))
    return found


class Parent(Process):
    """`baton serve` with ranks; without a port when headless."""

    def __init__(self, model, size, args=(), env=None, headless=False):
        self.port = None if headless else free_ports(1)[0]
        where = ['--headless'] if headless else ['--port', str(self.port)]
        super().__init__([BIN, 'serve', '--model', model, '--served-model-name', 'm', '--host', '127.0.0.1', *where, '--data-parallel-size', str(size), '--enable-expert-parallel',
                          '--compute-threads', '1', *SIZE, *args], env, 'headless' if headless else f'parent-{self.port}')

    def ranks(self):
        return {rank_of(pid): pid for pid in children_of(self.p.pid)}


def bodies_for(model, n=16, max_tokens=None):
    return [{**b, **({'max_tokens': max_tokens} if max_tokens else {})} for b in mixed_requests(n, 5, vocab_of(model), 120)]


def test_a_parent_answers_as_one_node():
    model = golden('ernie_moe')
    bodies = bodies_for(model)
    want = answers_alone(model, bodies)
    with tempfile.TemporaryDirectory() as logs, closing(Parent(model, 2, ['--log-dir', logs])) as parent:
        wait_ready(parent)
        assert ask_all([parent.port], bodies) == want
        status, _, view = request(parent.port, 'GET', '/cluster')
        assert status == 200 and len(view['nodes']) == 2, view
        used = {n['http_port']: metrics(n['http_port'])['baton_group_epoch{of="experts"}'] for n in view['nodes']}
        assert len(used) == 2 and set(used.values()) == {1}, used
        groups = sorted(request(port, 'GET', '/cluster')[2]['group']['rank'] for port in used)
        assert groups == [0, 1] == sorted(parent.ranks()), groups
        listened = {a for pid in [parent.p.pid, *parent.ranks().values()] for a in listens_at(pid)}
        assert listened == {'127.0.0.1'}, listened
        assert sorted(os.listdir(logs)) == [f'baton-{parent.port}{s}.log' for s in ('-rank-0', '-rank-1', '')], os.listdir(logs)
        assert f'ready: http://127.0.0.1:{parent.port}/v1, 2 ranks' in parent.output() and 'share the experts' in parent.output()
        pids = parent.ranks().values()
        assert parent.stop() == 0
        assert all(is_gone(p) for p in pids)


def test_what_has_no_effect_is_said_once():
    model, vain = golden('ernie_moe'), ['--gpu-memory-utilization', '0.5']
    said = 'note: --gpu-memory-utilization has no effect with --device cpu'
    with closing(Parent(model, 2, vain)) as parent:
        wait_ready(parent)
        assert parent.output().count(said) == 1, parent.output()
    ports = free_ports(2)
    with closing(Process([BIN, 'launch', '--model', model, '--num-servers', '2', '--ports', f'{ports[0]},{ports[1]}', '--compute-threads', '1', *SIZE, *vain], name='launch')) as nodes:
        wait_until('both are ready', lambda: 'ready: all 2 nodes' in nodes.output(), 30)
        assert nodes.output().count(said) == 1, nodes.output()


def status(port):
    p = subprocess.run([BIN, 'status', '--url', f'http://127.0.0.1:{port}'], capture_output=True, text=True, timeout=30)
    assert p.returncode == 0, p.stderr
    return p.stdout


def test_status_draws_groups():
    model, meet = golden('ernie_moe'), free_ports(1)[0]
    with closing(Parent(model, 2)) as parent:
        wait_ready(parent)
        lines = status(parent.port).splitlines()
        at = next(i for i, x in enumerate(lines) if x.startswith('group at 127.0.0.1:'))
        assert lines[at].endswith(': 2 ranks, epoch 1, together'), lines
        assert lines[at + 1].startswith('  rank 0    127.0.0.1:') and lines[at + 2].startswith('  rank 1    127.0.0.1:') and len(lines) == at + 3, lines
        assert re.search(r'[1-9]\d* experts, leads$', lines[at + 1]) and re.search(r'[1-9]\d* experts$', lines[at + 2]), lines
    args = ['--data-parallel-size', '2', '--enable-expert-parallel', '--data-parallel-address', '127.0.0.1', '--data-parallel-rpc-port', str(meet), *SIZE]
    with closing(Node(model, args=[*args, '--data-parallel-rank', '0']), Node(model, args=[*args, '--data-parallel-rank', '1'])) as (first, second):
        wait_ready(first, second)
        text = status(first.port)       # each has a directory of its own
        assert f'group at 127.0.0.1:{meet}: 2 ranks, epoch 1, together' in text and 'rank 1    -' in text and 'not in the directory' in text, text
        second.kill()
        text = wait_until('it goes on', lambda: (lambda t: 'rank 1 of 2 is not there, others have its experts' in t and t)(status(first.port)))
        assert f'group at 127.0.0.1:{meet}: 1 of 2 ranks, epoch 2, together' in text and f'{experts_of(model)} experts, leads' in text, text


def test_both_ranks_of_a_parent_get_requests():
    """Without a free sequence on one the other takes them, so the port has the room of both."""
    model = golden('ernie_moe')
    with closing(Parent(model, 2, ['--max-num-seqs', '2'])) as parent:
        wait_ready(parent)
        bodies = [dict(model='m', prompt=[7 + i, 9, 11], max_tokens=120, temperature=0, ignore_eos=True, return_trace=True) for i in range(8)]
        got = parallel([lambda b=b: request(parent.port, 'POST', '/v1/completions', b) for b in bodies], 8)
        assert all(g[0] == 200 for g in got), got
        assert len({g[2]['baton']['decode_node'] for g in got}) == 2


def is_whole(port, n):
    nodes = request(port, 'GET', '/cluster')[2]['nodes']
    groups = [request(node['http_port'], 'GET', '/cluster', timeout=2)[2].get('group') for node in nodes]
    return len(groups) == n and all(g and g['together'] and len(g['members']) == n for g in groups)


def test_a_killed_rank_of_a_parent_comes_back():
    model = golden('qwen3_moe')
    bodies = bodies_for(model, 12)
    want = answers_alone(model, bodies)
    with closing(Parent(model, 3)) as parent:
        wait_ready(parent)
        for victim in (1, 0):
            before = parent.ranks()
            os.kill(before[victim], signal.SIGKILL)
            wait_until('it is back', lambda: parent.ranks().get(victim, before[victim]) != before[victim] and len(parent.ranks()) == 3)
            after = parent.ranks()
            assert all(after[r] == before[r] for r in before if r != victim), (before, after)
            wait_until('the group is whole', lambda: is_whole(parent.port, 3))
            assert ask_all([parent.port], bodies) == want
        assert parent.stop() == 0


def in_flight(parent, n=6, max_tokens=300):
    """Streams that have begun; what each thread appends tells how it ended."""
    ends, begun = [], threading.Semaphore(0)

    def one(i):
        try:
            for k, _ in enumerate(stream(parent.port, '/v1/completions', dict(model='m', prompt=[5 + i, 6], max_tokens=max_tokens, temperature=0, ignore_eos=True))):
                if k == 0:
                    begun.release()
            ends.append('whole')
        except Exception as e:
            ends.append(repr(e)[:200])
            begun.release()
    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(n)]
    for t in threads:
        t.start()
    for _ in threads:
        assert begun.acquire(timeout=30)
    return threads, ends


def test_one_signal_finishes_requests_and_leaves_nothing():
    with closing(Parent(golden('ernie_moe'), 2)) as parent:
        wait_ready(parent)
        threads, ends = in_flight(parent)
        pids = parent.ranks().values()
        parent.kill(signal.SIGINT)
        for t in threads:
            t.join(30)
        assert ends == ['whole'] * 6, ends
        assert parent.p.wait(20) == 0 and 'requests that run are finished' in parent.output()
        assert all(is_gone(p) for p in pids)


def test_two_signals_end_at_once_and_leave_nothing():
    with closing(Parent(golden('ernie_moe'), 2)) as parent:
        wait_ready(parent)
        threads, ends = in_flight(parent, 24, 1900)
        pids = parent.ranks().values()
        parent.kill(signal.SIGINT)
        wait_until('it drains', lambda: 'requests that run are finished' in parent.output())
        parent.kill(signal.SIGINT)
        t0 = time.monotonic()
        assert parent.p.wait(20) == 0
        print(f'  ended {time.monotonic() - t0:.2f} s after the second signal')
        for t in threads:
            t.join(10)
        assert len(ends) == 24 and 'whole' not in ends, ends
        assert all(is_gone(p) for p in pids)


def test_ranks_end_with_a_killed_parent():
    with closing(Parent(golden('ernie_moe'), 2)) as parent:
        wait_ready(parent)
        pids = list(parent.ranks().values())
        parent.kill()
        wait_until('nothing is left', lambda: all(is_gone(p) for p in pids), 10)


def test_a_signal_before_it_is_ready_leaves_nothing():
    parent = Parent(golden('ernie_moe'), 4, ['--data-parallel-size-local', '2', '--data-parallel-address', '127.0.0.1', '--data-parallel-rpc-port', str(free_ports(1)[0])])
    with closing(parent):
        missing = 'ranks 2 and 3 of 4 are not there (--data-parallel-start-rank 2 starts the first)'
        for rank in (0, 1):
            line = rf' info \S+ rank waits for others .*rank={rank} of=4 why="{re.escape(missing)}"'
            wait_until(f'rank {rank} logs whom it waits for', lambda: re.search(line, parent.output()), 20)
        assert request(parent.port, 'GET', '/ready')[0] == 503
        status, _, said = request(parent.port, 'GET', '/cluster')
        assert status == 200 and said['loading'] is True and missing in said['why'] and said['nodes'] == [] and said['trouble'] is None, said
        table = subprocess.run([BIN, 'status', '--url', f'http://127.0.0.1:{parent.port}'], capture_output=True, text=True, timeout=20)
        assert table.returncode == 0 and 'NOT READY: its ranks are starting' in table.stdout and missing in table.stdout, table
        pids = parent.ranks().values()
        ports = [int(w.split('=')[1]) for p in pids for w in words_of(p) if w.startswith('--port=')]
        groups = [request(port, 'GET', '/cluster')[2]['group'] for port in ports]
        assert sorted((g['rank'], g['together'], g['why']) for g in groups) == [(r, False, missing) for r in (0, 1)], groups
        assert len(pids) == 2 and parent.stop(10) == 130
        assert all(is_gone(p) for p in pids)


def two_in_a_row():
    while True:
        port = free_ports(1)[0]
        with socket.socket() as s:
            if s.connect_ex(('127.0.0.1', port + 1)) != 0:
                return port


def test_ranks_of_two_hosts():
    """The head has the port, the other host none; the second order is that of a cluster that starts all at once."""
    model = golden('ernie_moe')
    bodies = bodies_for(model)
    want = answers_alone(model, bodies)
    meet = ['--data-parallel-size-local', '2', '--data-parallel-address', '127.0.0.1', '--data-parallel-rpc-port', str(two_in_a_row())]
    with closing(Parent(model, 4, [*meet, '--data-parallel-start-rank', '2'], headless=True)) as second:
        wait_until('it says whom it waits for', lambda: 'rank 0 of the group is not reached' in second.output(), 20)
        with closing(Parent(model, 4, meet)) as head:
            wait_ready(head)
            wait_until('all ranks of the other host', lambda: 'ready: all 2 ranks of this host' in second.output())
            wait_until('four nodes', lambda: len(request(head.port, 'GET', '/cluster')[2]['nodes']) == 4)
            assert sorted(head.ranks()) == [0, 1] and sorted(second.ranks()) == [2, 3]
            assert ask_all([head.port], bodies) == want
            pids = second.ranks().values()
            assert head.stop() == 0 and second.alive()
            assert second.stop(20) == 0 and all(is_gone(p) for p in pids)


def test_variables_of_vllm_make_one_rank():
    """As run_dp_template.sh sets them: each process is one rank with its own port, which somebody else starts."""
    model, port = golden('qwen3_moe'), free_ports(1)[0]
    bodies = bodies_for(model, 8)
    want = answers_alone(model, bodies)

    def rank(i):
        return Node(model, args=['--enable-expert-parallel', *SIZE], env=dict(VLLM_DP_SIZE='2', VLLM_DP_SIZE_LOCAL='2', VLLM_DP_MASTER_IP='127.0.0.1', VLLM_DP_MASTER_PORT=str(port),
                                                                           VLLM_DP_RANK=str(i), VLLM_DP_RANK_LOCAL=str(i)))
    with closing(rank(0), rank(1)) as nodes:
        wait_ready(*nodes)
        assert ask_all([n.port for n in nodes], bodies) == want
        assert [request(n.port, 'GET', '/cluster')[2]['group']['rank'] for n in nodes] == [0, 1]


def refused(args, said, env=None):
    p = subprocess.run([BIN, 'serve', golden('qwen3_moe'), '--enable-expert-parallel', *args], capture_output=True, text=True, timeout=30, env={**os.environ, **(env or {})})
    assert p.returncode == 2 and said in p.stderr, (args, p.stderr)


def test_numbers_that_contradict_are_named():
    refused(['--data-parallel-size', '2', '--data-parallel-size-local', '4'], '4 ranks on this host (--data-parallel-size-local) are more than the 2 of --data-parallel-size')
    refused(['--data-parallel-size', '4', '--data-parallel-size-local', '2', '--data-parallel-start-rank', '3', '--data-parallel-address', '127.0.0.1'],
            '--data-parallel-start-rank 3 with 2 ranks on this host: --data-parallel-size 4 has ranks 0 to 3')
    refused(['--data-parallel-size', '4', '--data-parallel-size-local', '2'], '2 of --data-parallel-size 4 ranks are here, the others on other hosts; give --data-parallel-address')
    refused(['--data-parallel-size', '4', '--data-parallel-size-local', '2', '--data-parallel-address', '192.0.2.1'], 'give all hosts the same BATON_CLUSTER_SECRET')
    refused(['--data-parallel-size', '4', '--ips', '127.0.0.1,192.0.2.7', '--nnodes', '3'], '--nnodes 3, but --ips lists 2 addresses')
    refused(['--data-parallel-size', '4'], 'POD_IPS: none of its 2 addresses is one of this host', dict(POD_IPS='192.0.2.6,192.0.2.7'))
    refused(['--data-parallel-size', '8', '--ips', '127.0.0.1,192.0.2.7', '--data-parallel-size-local', '2'], '2 hosts with 2 ranks each have 4, and --data-parallel-size is 8')
    refused(['--data-parallel-size', '3', '--ips', '127.0.0.1,192.0.2.7'], '--data-parallel-size 3 cannot be divided among 2 hosts')
    refused(['--data-parallel-size', '4'], 'POD_0_IP 192.0.2.1 is not one of the addresses of POD_IPS', dict(POD_IPS='127.0.0.1,192.0.2.7', POD_0_IP='192.0.2.1'))
    refused(['--data-parallel-size', '4', '--data-parallel-rank', '3', '--local-data-parallel-id', '0', '--data-parallel-start-rank', '2'], 'which are rank 2')
    refused(['--data-parallel-size', '4', '--data-parallel-rank', '1', '--headless'], 'leave --headless or --data-parallel-rank out')
    refused(['--headless'], 'give --data-parallel-size above 1')
    refused(['--data-parallel-size', '2', '--pd-comm-port', '7000', '--data-parallel-rpc-port', '7001'], '--pd-comm-port 7000 and --data-parallel-rpc-port 7001 must be the same')
    refused(['--data-parallel-rank', '1'], '--data-parallel-rank 1 with --enable-expert-parallel is not a rank of --data-parallel-size 1')
    refused([], 'VLLM_DP_RANK_LOCAL 2 is not one of the 2 ranks of this host', dict(VLLM_DP_SIZE='4', VLLM_DP_SIZE_LOCAL='2', VLLM_DP_RANK_LOCAL='2'))


def test_what_the_model_cannot_have_is_refused_once():
    """By the parent, before it starts anybody."""
    moe = golden('qwen3_moe')
    for command in (['serve', moe, '--data-parallel-size', '2', '--enable-expert-parallel'], ['serve', moe], ['launch', '--model', moe, '--num-servers', '2']):
        for args, said in ((['--tensor-parallel-size', '3'], '--tensor-parallel-size 3 does not divide the 4 query heads'), (['--tensor-parallel-size', '2', '--device', 'cuda'], '--device cuda: ')):
            if 'cuda' in args and os.path.exists('/dev/nvidiactl'):
                print('  skipped: this host has a GPU, so --device cuda is not refused')
                continue
            ports = [] if command[0] == 'launch' else ['--port', str(free_ports(1)[0])]
            p = subprocess.run([BIN, *command, *args, *ports], capture_output=True, text=True, timeout=30)
            assert p.returncode == 2 and p.stderr.count(said) == 1 and 'its own lines' not in p.stderr, (command, args, p)


def test_what_the_model_can_hardly_use_is_said_once():
    meet = ['--data-parallel-size-local', '1', '--data-parallel-address', '127.0.0.1', '--data-parallel-rpc-port']
    for model, size, args, said in (('qwen3_moe', 9, [], 'warning: 8 experts for 9 ranks: some ranks have none; give --data-parallel-size 8 or less'),
                                    ('qwen3_moe', 2, ['--num-redundant-experts', '100'], 'warning: --num-redundant-experts 100: 8 copies are one of each expert on every rank'),
                                    ('llama', 2, [], 'note: --enable-expert-parallel: the model has no experts to share; each of the 2 nodes computes alone')):
        with closing(Parent(golden(model), size, [*args, *meet, str(two_in_a_row())])) as parent:
            wait_until('its rank has its model', lambda: 'model loaded' in parent.output(), 20)
            assert parent.output().count(said) == 1, parent.output()


def test_ranks_of_another_size_hear_why():
    """Two hosts that were told different sizes: rank 0 refuses the other, which says so."""
    model, meet = golden('qwen3_moe'), ['--data-parallel-address', '127.0.0.1', '--data-parallel-rpc-port', str(two_in_a_row())]
    with closing(Parent(model, 3, ['--data-parallel-size-local', '2', *meet])) as head, closing(Parent(model, 4, ['--data-parallel-start-rank', '3', *meet], headless=True)) as second:
        said = 'this is a rank of 4, and rank 0 has 3 ranks'
        wait_until('it is named', lambda: said in second.output() and said in head.output(), 20)
        wait_until('/ready names it', lambda: (lambda r: r[0] == 503 and said in r[2]['error']['message'])(request(head.port, 'GET', '/ready')), 5)


def test_two_hosts_with_one_rank_hear_why():
    model, meet = golden('qwen3_moe'), ['--data-parallel-address', '127.0.0.1', '--data-parallel-rpc-port', str(two_in_a_row())]
    with closing(Parent(model, 3, ['--data-parallel-size-local', '2', *meet])) as head, closing(Parent(model, 3, ['--data-parallel-start-rank', '1', '--data-parallel-size-local', '2', *meet], headless=True)) as second:
        wait_until('it is named', lambda: 'there is a rank 1 already' in head.output() + second.output(), 20)


def test_a_model_that_cannot_be_read_ends_the_parent():
    p = subprocess.run([BIN, 'serve', '/no/such/model', '--data-parallel-size', '2', '--enable-expert-parallel'], capture_output=True, text=True, timeout=30)
    assert p.returncode == 2 and '/no/such/model' in p.stderr, p.stderr
    model = golden('qwen3_moe')
    p = subprocess.run([BIN, 'serve', model, '--port', str(free_ports(1)[0]), '--data-parallel-size', '2', '--enable-expert-parallel', '--max-model-len', '99999999'],
                       capture_output=True, text=True, timeout=30)
    assert p.returncode in (1, 2) and '--max-model-len' in p.stderr, p.stderr
