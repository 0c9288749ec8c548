"""rails.py - the rails inside the virtual machine: counters, disturbances, and a prefill and a decode node at their two ends.

The prefill node uses the RDMA devices rxe<i> and the decode node far<i>, so every packet between them crosses a rail (guest.sh).
"""
import contextlib, os, re, subprocess, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from cases import *

NEAR, FAR = 'rxe{}', 'far{}'


def command(*argv):
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, (argv, done.returncode, done.stderr)
    return done.stdout


def devices():
    """The RDMA devices; a test that needs them skips and says what is missing."""
    try:
        return sorted(os.listdir('/sys/class/infiniband'))
    except FileNotFoundError:
        return []


def nics(pattern, rails=2):
    return ','.join(pattern.format(i) for i in range(rails))


def number(path):
    with open(path) as f:
        return int(f.read())


def sent_bytes(*interfaces):
    return sum(number(f'/sys/class/net/{i}/statistics/tx_bytes') for i in interfaces)


def sent_packets(*rdma):
    return sum(number(f'/sys/class/infiniband/{d}/ports/1/hw_counters/sent_pkts') for d in rdma)


class Traffic:
    """Counts what was sent through the rails' ends and the loopback since it was created."""

    def __init__(self, rails=2):
        self.rails = range(rails)
        self.start = self.now()

    def now(self):
        return dict(near=sent_bytes(*(f'near{i}' for i in self.rails)), far=sent_bytes(*(f'far{i}n' for i in self.rails)), lo=sent_bytes('lo'),
                    packets=sent_packets(*(NEAR.format(i) for i in self.rails)))

    def since(self):
        now = self.now()
        return {k: now[k] - self.start[k] for k in now}


def lost_packets(rails=(0, 1)):
    """How many packets netem has dropped since its rule was set."""
    ends = [end for i in rails for end in (f'near{i}', f'far{i}n')]
    return sum(int(n) for end in ends for n in re.findall(r'dropped (\d+)', command('tc', '-s', 'qdisc', 'show', 'dev', end)))


@contextlib.contextmanager
def netem(rule, rails=(0, 1)):
    """Sets `rule` (tc-netem(8)) on both ends of these rails."""
    ends = [end for i in rails for end in (f'near{i}', f'far{i}n')]
    for end in ends:
        command('tc', 'qdisc', 'replace', 'dev', end, 'root', 'netem', 'limit', '10000', *rule.split())
    try:
        yield
    finally:
        for end in ends:
            command('tc', 'qdisc', 'del', 'dev', end, 'root')


def rail(i, up):
    if up:
        command('ip', '-batch', f'/run/vm/rail{i}')
    else:
        command('ip', 'link', 'set', f'near{i}', 'down')


def role_env(role, protocol, rails=2):
    names = nics(NEAR if role == 'prefill' else FAR, rails)
    env = {'KVCACHE_RDMA_NICS': names}
    if protocol == 'ucx':
        env.update(BATON_UCX_TLS='rc_verbs', UCX_NET_DEVICES=','.join(n + ':1' for n in names.split(',')))
    return env


def first_transport(port):
    """The transport of a request of two tokens. The first request makes the KV connection; if an emulated CPU takes longer than the nodes wait,
    the decode node computes that request alone and a later request uses the connection."""
    status, _, body = request(port, 'POST', '/v1/completions', dict(model='m', prompt=[5, 6], max_tokens=1, temperature=0, return_trace=True), timeout=300)
    assert status == 200, (status, body)
    return body['baton']['transport']


@contextlib.contextmanager
def split(model, protocol, args=(), rails=2, env=None):
    """A prefill and a decode node on one machine, each at its end of the rails; the prefill node serves the directory."""
    control = free_ports(1)[0]
    common = ['--cache-transfer-protocol', protocol, *SIZE, *args]
    p = Node(model, 'prefill', [*common, '--engine-worker-queue-port', str(control)], {**role_env('prefill', protocol, rails), **(env or {})})
    d = Node(model, 'decode', [*common, '--innode-prefill-ports', str(control)], {**role_env('decode', protocol, rails), **(env or {})})
    with closing(p, d) as nodes:
        wait_ready(*nodes, timeout=120)
        wait_sees(nodes, 2, timeout=60)
        wait_until(f'KV goes over {protocol}', lambda: first_transport(nodes[0].port), 120)
        yield nodes


def ask(ports, prompts, concurrency=1):
    """Sends the requests to the ports in turn. Returns the answers in order, exceptions as values."""
    return parallel([lambda b=b, p=ports[i % len(ports)]: request(p, 'POST', '/v1/completions', {**b, 'return_trace': True}, timeout=900)
                     for i, b in enumerate(prompts)], concurrency)
