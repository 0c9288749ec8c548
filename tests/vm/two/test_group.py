"""Ranks that share experts on two hosts, and the network between them fails for a while: each side goes on with all experts, both become one again, and no
request fails or is answered wrongly."""
import errno

from hosts import *

SIZE_OF_GROUP, MEET = 4, 7013


def rank(model, r):
    """Ranks 0 and 1 are on host 1, 2 and 3 on host 2."""
    args = ['--data-parallel-size', str(SIZE_OF_GROUP), '--enable-expert-parallel', '--data-parallel-address', ADDRESS[1], '--data-parallel-rpc-port', str(MEET),
            '--data-parallel-rank', str(r)]
    return HostNode(1 + r // 2, model, 'mixed', [*SIZE, *args], {'UCX_TLS': 'tcp'}, 8180 + r)


def are_together(nodes, members):
    for n in nodes:
        status, _, body = n.request('GET', '/cluster', timeout=5)
        group = body.get('group') if status == 200 else None  # a node that loads has none
        if not group or not group['together'] or group['members'] != members:
            return False
    return True


def link(up):
    on(1, 'ip', 'link', 'set', 'eth0', 'up' if up else 'down')


class Load:
    """Asks every rank one request after the other until it is stopped. The answers of the other host come late when the network fails."""

    def __init__(self, nodes, prompts, want):
        self.prompts, self.want, self.stop = prompts, want, threading.Event()
        self.right, self.wrong = {n: 0 for n in nodes}, []
        self.threads = [threading.Thread(target=self.ask, args=(n,), daemon=True) for n in nodes]
        for t in self.threads:
            t.start()

    def ask(self, node):
        i = 0
        while not self.stop.is_set():
            try:
                status, _, body = node.request('POST', '/v1/completions', self.prompts[i % len(self.prompts)])
                good = status == 200 and json.loads(json.dumps(answer_of(body))) == self.want[i % len(self.prompts)]
                self.right[node] += good
                if not good:
                    self.wrong.append((node.name, i, status, body))
            except Exception as e:  # the test reports it
                if isinstance(e, OSError) and e.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):  # nothing was asked: this is the host without a wire
                    time.sleep(0.2)
                    continue
                self.wrong.append((node.name, i, repr(e)))
                return
            i += 1

    def end(self):
        self.stop.set()
        for t in self.threads:
            t.join(300)
        assert not any(t.is_alive() for t in self.threads) and not self.wrong, self.wrong[:2]


def cut(nodes, load, seconds):
    """Takes the wire away for a while; returns when both sides are one again."""
    here, began = nodes[:2], time.monotonic()
    link(False)
    try:
        if seconds > 5:  # later than links notice
            wait_until('the ranks of host 1 go on', lambda: are_together(here, [0, 1]), 60)
            print(f'  host 1 goes on after {time.monotonic() - began:.1f} s', flush=True)
            before = [load.right[n] for n in here]
            wait_until('they answer', lambda: all(load.right[n] > b for n, b in zip(here, before)), 60)
            print(f'  and answers after {time.monotonic() - began:.1f} s', flush=True)
        time.sleep(max(0, began + seconds - time.monotonic()))
    finally:
        link(True)
    back = time.monotonic()
    wait_until('all are one group', lambda: are_together(nodes, list(range(SIZE_OF_GROUP))), 120)
    whole, before = time.monotonic(), dict(load.right)
    wait_until('all answer', lambda: load.wrong or all(load.right[n] > before[n] for n in nodes), 120)
    assert not load.wrong, load.wrong[:2]
    print(f'  cut for {back - began:.1f} s, one group {whole - back:.1f} s later, and {time.monotonic() - whole:.1f} s later each has answered a whole request', flush=True)


def test_a_group_whose_hosts_cannot_reach_each_other():
    model, prompts, want, _ = load('group')
    wait_for_far_side()
    nodes = []
    try:
        for r in range(SIZE_OF_GROUP):
            nodes.append(rank(model, r))
        wait_until('all are one group', lambda: are_together(nodes, list(range(SIZE_OF_GROUP))), 120)
        asked = Load(nodes, prompts, want)
        for seconds in (10, 1, 12):
            wait_until('all answer', lambda: all(asked.right.values()), 120)
            cut(nodes, asked, seconds)
        asked.end()
        print(f'  right answers: {list(asked.right.values())}', flush=True)
    except BaseException:
        for n in nodes:
            print(f'--- {n.name}, port {n.port} ---\n{n.state()[1][-4000:]}', flush=True)
        raise
    finally:
        for n in nodes:
            n.close()
