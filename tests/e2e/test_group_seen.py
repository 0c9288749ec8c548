"""Groups of ranks as others see them: in records, /cluster, `baton status` and metrics, whole, without a rank, and whole again."""
from harness import *
import itertools, re
from test_parallel import SIZE, ask_all, experts_of, golden, group_args, group_of, rank_nodes, vocab_of
from test_ranks import status

RATES = re.compile(r', (\d+) rows/s, waits (\d+) %')


def ranks_with_a_view(model, size, meet, control, args=()):
    """The first has the directory, where the others are, too."""
    where = [['--router', f'127.0.0.1:{control}'] if r else ['--engine-worker-queue-port', str(control)] for r in range(size)]
    return [Node(model, args=[*group_args(size, meet), '--data-parallel-rank', str(r), *where[r], *args]) for r in range(size)]


def view_of(port):
    """What its records say of the ranks: {rank: (epoch, whole)}."""
    nodes = [n for n in request(port, 'GET', '/cluster')[2]['nodes'] if 'group' in n]
    assert len({(n['group'], n['group_size']) for n in nodes}) <= 1, nodes
    return {n['group_rank']: (n['group_epoch'], n['group_whole']) for n in nodes}


def epochs_of(node):
    return {r: metrics(node.port)[f'baton_group_epochs_total{{of="experts",reason="{r}"}}'] for r in ('start', 'loss', 'return', 'drain', 'rebalance')}


def counts(**some):
    return {**dict.fromkeys(('start', 'loss', 'return', 'drain', 'rebalance'), 0), **some}


def group_lines(port, n=4):
    lines = status(port).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith('group at '))
    return lines[at:at + n]


@contextlib.contextmanager
def asking(port, bodies):
    """Requests until the block ends, all of which must be answered."""
    stop, failed = threading.Event(), []

    def ask(i):
        while not stop.is_set():
            try:
                ask_all([port], bodies[i::2])
            except BaseException as e:
                failed.append(e)
                return
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    try:
        yield
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert not failed, failed


def series_of(ports, name):
    return [{k: v for k, v in metrics(p).items() if k.split('{')[0] == name} for p in ports]


def test_status_and_metrics_show_what_ranks_do():
    """Rows, waits and bytes are seen while requests run, and the counts add up over the ranks."""
    for way in 'shm', 'ucx':
        look_at_ranks(way)


def look_at_ranks(way):
    model, meet, control = golden('ernie_moe'), *free_ports(2)
    bodies = [{**b, 'max_tokens': 60} for b in mixed_requests(12, 41, vocab_of(model), 120)]
    nodes = ranks_with_a_view(model, 3, meet, control, ['--all2all-backend', way])
    with closing(*nodes):
        wait_ready(*nodes)
        ports = [n.port for n in nodes]
        wait_until('all know all', lambda: all(view_of(p) == dict.fromkeys(range(3), (1, True)) for p in ports))
        assert not any(RATES.search(line) for line in group_lines(ports[0]))     # nobody computes
        with asking(ports[0], bodies):
            lines = wait_until('status has rates', lambda: (lambda g: all(RATES.search(x) for x in g[1:]) and g)(group_lines(ports[1])), 20)
            groups = wait_until('each rank has looked', lambda: (lambda all_of: all(g['imbalance'] and g['rows_per_s'] for g in all_of) and all_of)([group_of(n) for n in nodes]), 20)
        found = re.fullmatch(rf"group at 127.0.0.1:{meet}: 3 ranks, epoch 1, together, (\d+) rows/s by {way}, the busiest rank's (\d\.\d\d) times the mean", lines[0])
        assert found and int(found[1]) > 0 and 1 <= float(found[2]) <= 3, lines
        assert sum(int(RATES.search(x)[1]) for x in lines[1:]) - int(found[1]) in range(-3, 4), lines
        for g in groups:
            assert g['whole'] and g['reason'] == 'start' and 1 <= g['imbalance'] <= 3 and [r['rank'] for r in g['ranks']] == [0, 1, 2], g
            assert all(0 <= r['waits'] <= 1 for r in g['ranks']) and g['waits_for'] in (None, 0, 1, 2) and g['waits_for'] != g['rank'], g
        assert any(r['waits'] > 0 for g in groups for r in g['ranks']), groups

        def add_up():
            rows = series_of(ports, 'baton_expert_rows_total')
            computed = [metrics(p)['baton_moe_rows_total'] for p in ports]
            return [sum(r.values()) for r in rows] == computed and all(computed) and rows
        rows = wait_until('each rank has told of its experts', add_up)
        assert len(set().union(*rows)) <= experts_of(model) and not any(set(a) & set(b) for a, b in itertools.combinations(rows, 2)), rows
        moved = [metrics(p) for p in ports]
        assert sum(m['baton_ep_bytes_total{direction="sent"}'] for m in moved) == sum(m['baton_ep_bytes_total{direction="received"}'] for m in moved) > 0
        assert all(m['baton_group_wait_microseconds_total'] > 0 and 1 <= m['baton_group_imbalance'] <= 3 for m in moved)
        late = series_of(ports, 'baton_group_late_microseconds_total')
        assert any(late) and not any(f'baton_group_late_microseconds_total{{rank="{r}"}}' in late[r] for r in range(3)), late


def decoders(port, bodies):
    got = parallel([lambda b=b: request(port, 'POST', '/v1/completions', {**b, 'return_trace': True}) for b in bodies], 4)
    assert all(not isinstance(g, Exception) and g[0] == 200 for g in got), got
    return {g[2]['baton']['decode_node'] for g in got}


def test_a_group_is_whole_not_whole_and_whole_again():
    """And requests go elsewhere while it is not, if there is another node. Each epoch is counted by its reason."""
    model, meet, control = golden('qwen3_moe'), *free_ports(2)
    bodies = [{**b, 'max_tokens': 10} for b in mixed_requests(16, 43, vocab_of(model), 60)]
    other = Node(model, args=['--engine-worker-queue-port', str(control), *SIZE])
    nodes = rank_nodes(model, 3, meet, ['--router', f'127.0.0.1:{control}'])
    with closing(other, *nodes):
        wait_ready(other, *nodes)
        wait_until('it is whole', lambda: view_of(other.port) == dict.fromkeys(range(3), (1, True)))
        assert [epochs_of(n) for n in nodes] == [counts(start=1)] * 3
        assert len(decoders(other.port, bodies)) > 1

        nodes[2].kill()
        wait_until('it is not whole', lambda: view_of(other.port) == {0: (2, False), 1: (2, False)}, 15)
        assert group_of(nodes[0])['reason'] == 'loss' and not group_of(nodes[0])['whole']
        lines = group_lines(other.port, 5)
        assert lines[0].startswith(f'group at 127.0.0.1:{meet}: 2 of 3 ranks, epoch 2, together (after a loss)') and lines[4].endswith('not in the directory'), lines
        assert lines[1] == '  rank 2 of 3 is not there, others have its experts' and not any('is not there' in line or 'for rank 2' in line for line in lines[2:]), lines
        assert [epochs_of(n) for n in nodes[:2]] == [counts(start=1, loss=1)] * 2
        assert decoders(other.port, bodies) == {f'127.0.0.1:{other.port}'}
        ask_all([n.port for n in nodes[:2]], bodies)      # nothing is refused where they are asked themselves

        nodes[2].start()
        wait_ready(nodes[2])
        wait_until('it is whole again', lambda: view_of(other.port) == dict.fromkeys(range(3), (3, True)), 15)
        assert group_lines(other.port)[0].startswith(f'group at 127.0.0.1:{meet}: 3 ranks, epoch 3, together (after a return)')
        assert [epochs_of(n) for n in nodes] == [counts(start=1, loss=1, **{'return': 1})] * 2 + [counts(**{'return': 1})]
        assert len(decoders(other.port, bodies)) > 1

        assert nodes[1].stop() == 0
        wait_until('it has left', lambda: view_of(other.port) == {0: (4, False), 2: (4, False)}, 15)
        assert epochs_of(nodes[0]) == counts(start=1, loss=1, drain=1, **{'return': 1}) and group_of(nodes[0])['reason'] == 'drain'
        assert metrics(nodes[0].port)['baton_group_lost_total{of="experts"}'] == 1


def test_without_another_node_a_group_without_a_rank_serves():
    model, meet, control = golden('ernie_moe'), *free_ports(2)
    bodies = [{**b, 'max_tokens': 10} for b in mixed_requests(8, 47, vocab_of(model), 60)]
    nodes = ranks_with_a_view(model, 2, meet, control)
    with closing(*nodes):
        wait_ready(*nodes)
        nodes[1].kill()
        wait_until('it is not whole', lambda: view_of(nodes[0].port) == {0: (2, False)}, 15)
        ask_all([nodes[0].port], bodies)
