"""Experts of a group are placed by their load, and have copies; answers stay the same, and nothing fails meanwhile."""
from harness import *
from test_parallel import answers_alone, ask_all, golden, group_of, launched, rank_nodes, under_load, vocab_of


def taken(node):
    """How many experts this rank packed, each time that it took a set."""
    return [int(line.split('new=')[1].split()[0]) for line in node.output().splitlines() if ' experts taken ' in line]


def test_copies_answer_as_one_and_their_ranks_need_not_read_what_is_lost():
    model, meet = golden('qwen3_moe'), free_ports(1)[0]
    n_experts = json.load(open(f'{model}/config.json'))['num_experts']
    bodies = mixed_requests(12, 29, vocab_of(model), 100)
    want = answers_alone(model, bodies)
    nodes = rank_nodes(model, 3, meet, ['--num-redundant-experts', str(n_experts)])
    with closing(*nodes):
        wait_ready(*nodes)
        assert ask_all([n.port for n in nodes], bodies) == want
        before = [len(taken(n)) for n in nodes]
        with under_load([nodes[0].port, nodes[2].port], bodies, want):
            time.sleep(0.2)
            nodes[1].kill()
            wait_until('the others go on', lambda: group_of(nodes[0])['members'] == [0, 2], 5)
        for i in (0, 2):
            assert len(taken(nodes[i])) > before[i] and not any(taken(nodes[i])[before[i]:]), nodes[i].output()[-1500:]


def test_experts_are_placed_by_load_while_requests_run():
    for model in map(golden, ('ernie_moe', 'deepseek_v3')):
        bodies = [{**b, 'max_tokens': 40} for b in mixed_requests(10, 31, vocab_of(model), 150)]
        want = answers_alone(model, bodies)
        config = json.dumps({'step_interval': 20, 'num_redundant_experts': 2, 'log_balancedness': True})
        with launched(model, 3, ['--enable-eplb', '--eplb-config', config]) as (l, ports):
            with under_load(ports, bodies, want):
                wait_until('experts were placed anew', lambda: request(ports[0], 'GET', '/cluster')[2]['group']['epoch'] >= 2, 30)
                time.sleep(1)
            figures = [(float(line.split('imbalance=')[1].split()[0]), float(line.split('becomes=')[1].split()[0])) for line in l.output().splitlines() if 'experts are placed anew' in line]
            print(f'  {os.path.basename(os.path.dirname(model))}: imbalance {figures[:3]}', flush=True)
            assert all(after < before for before, after in figures) and figures, figures
            for p in ports:
                assert metrics(p)['baton_group_lost_total{of="experts"}'] == 0
                assert metrics(p)['baton_group_epochs_total{of="experts",reason="rebalance"}'] >= 1
            assert l.stop() == 0, l.output()[-2000:]


def test_wrong_settings_are_named():
    for args, said in ((['--eplb-config', '{"steps": 3}'], "there is no member 'steps'"), (['--eplb-config', '[]'], 'it is not a JSON object'),
                       (['--eplb-config', '{"step_interval": 0}'], 'step_interval'), (['--num-redundant-experts', '-1'], 'num-redundant-experts'),
                       (['--num-redundant-experts', '1020'], "--num-redundant-experts 1020 and the model's 8 experts are more than the 1024 that can be placed")):
        p = subprocess.run([BIN, 'serve', golden('qwen3_moe'), '--enable-expert-parallel', '--data-parallel-size', '2', '--enable-eplb', *args], capture_output=True, text=True, timeout=30)
        assert p.returncode in (1, 2) and said in p.stderr, (args, p.returncode, p.stderr)
