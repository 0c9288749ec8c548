"""hosts.py - two virtual machines on one wire, seen from host 1: programs on both, requests to both, the wire's counters."""
import contextlib, http.client, json, os, socket, subprocess, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from agent import PORT
from cases import *

ADDRESS = {1: '10.78.0.1', 2: '10.78.0.2'}
SECRET = 'the secret of two machines'


def far_side(**question):
    """Sends one request to agent.py on host 2."""
    with socket.create_connection((ADDRESS[2], PORT), timeout=120) as s:
        s.sendall(json.dumps(question).encode() + b'\n')
        answer = json.loads(s.makefile('rb').readline())
    if 'error' in answer:
        raise RuntimeError(answer['error'])
    return answer


def wait_for_far_side():
    wait_until('host 2 is up', lambda: far_side(run=['true'])['status'] == 0, 120, 0.5)


def on(host, *argv):
    """The output of a command on that host; it must succeed."""
    if host == 2:
        done = far_side(run=argv)
        status, output = done['status'], done['output']
    else:
        p = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        status, output = p.returncode, p.stdout
    assert status == 0, (host, argv, status, output)
    return output


class HostNode:
    """A baton node on one of the two hosts. as_given: args are the whole command line, and port only says where its API is."""

    def __init__(self, host, model, role, args=(), env=None, port=8180, as_given=False):
        self.host, self.port, self.name = host, port, f'{role} on host {host}'
        own = [] if as_given else ['--model', model, '--served-model-name', 'm', '--host', '0.0.0.0', '--port', str(port), '--splitwise-role', role]
        if not as_given and '--data-parallel-address' not in args:  # ranks find it out
            own += ['--advertise-host', ADDRESS[host]]
        argv = [BIN, 'serve', *own, '--compute-threads', '1', *args]
        env = {'BATON_CLUSTER_SECRET': SECRET, 'KVCACHE_RDMA_NICS': 'rxe_w', **(env or {})}
        if host == 2:
            self.pid, self.p = far_side(start=argv, env=env)['pid'], None
        else:
            self.log = tempfile.NamedTemporaryFile('w+', prefix='baton-', suffix='.log', delete=False)
            self.p = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env={**os.environ, **env}, start_new_session=True)

    def state(self):
        """(status or None, output)"""
        if self.host == 2:
            seen = far_side(poll=self.pid)
            return seen['status'], seen['output']
        with open(self.log.name, encoding='utf-8', errors='replace') as f:
            return self.p.poll(), f.read()

    def signal(self, number):
        if self.host == 2:
            far_side(signal=number, pid=self.pid)
        elif self.p.poll() is None:
            self.p.send_signal(number)

    def close(self):
        self.signal(signal.SIGTERM)
        try:
            wait_until(f'{self.name} ended', lambda: self.state()[0] is not None, 30)
        except AssertionError:
            self.signal(signal.SIGKILL)
            raise

    def request(self, method, path, body=None, timeout=900):
        c = http.client.HTTPConnection(ADDRESS[self.host], self.port, timeout=timeout)
        try:
            c.request(method, path, None if body is None else json.dumps(body), {'Content-Type': 'application/json'})
            r = c.getresponse()
            raw = r.read()
            try:
                return r.status, r.headers, json.loads(raw)
            except ValueError:
                return r.status, r.headers, raw.decode('utf-8', 'replace')
        finally:
            c.close()


def wait_pair(nodes, timeout=120):
    """Waits until both are ready and each sees both."""
    for n in nodes:
        def good():
            status, output = n.state()
            if status is not None:
                raise RuntimeError(f'{n.name} ended with {status}:\n{output[-3000:]}')
            return n.request('GET', '/ready', timeout=5)[0] == 200 and len(n.request('GET', '/cluster', timeout=5)[2]['nodes']) == len(nodes)
        wait_until(f'{n.name} is ready and sees {len(nodes)} nodes', good, timeout, 0.2)


def connect(node, protocol, in_a_row, timeout):
    """Waits until so many requests in a row went over `protocol`. The first ones make the KV connections; as long as those take longer than the nodes
    wait, which is possible on an emulated CPU, the decode node computes alone."""
    good, asked = 0, 0

    def one_more():
        nonlocal good, asked
        asked += 1
        body = dict(model='m', prompt=[5 + asked % 400, 6], max_tokens=1, temperature=0, return_trace=True)
        status, _, answer = node.request('POST', '/v1/completions', body)
        assert status == 200, answer
        good = good + 1 if answer['baton']['transport'] else 0
        return good == in_a_row
    wait_until(f'KV goes over {protocol}', one_more, timeout)


@contextlib.contextmanager
def two_nodes(model, protocol, args=(), prefill_args=(), decode_args=(), more_env=None, in_a_row=1, connect_s=120):
    """Prefill on host 1, which serves the directory at its control port, decode on host 2."""
    env = dict(BATON_UCX_TLS='rc_verbs', UCX_NET_DEVICES='rxe_w:1') if protocol == 'ucx' else {}
    env.update(more_env or {})
    common, nodes = ['--cache-transfer-protocol', protocol, *SIZE, *args], []
    try:
        nodes.append(HostNode(1, model, 'prefill', [*common, *prefill_args, '--engine-worker-queue-port', '7013'], env))
        nodes.append(HostNode(2, model, 'decode', [*common, *decode_args, '--router', f'{ADDRESS[1]}:7013'], env))
        wait_pair(nodes, connect_s)
        connect(nodes[0], protocol, in_a_row, connect_s)
        yield nodes
    except BaseException:
        for n in nodes:
            status, output = n.state()
            print(f'--- {n.name} ({"alive" if status is None else status}) ---\n{output[-4000:]}', flush=True)
        raise
    finally:
        for n in nodes:
            n.close()


def counters(host):
    """Counters of that host's devices on the wire: bytes of eth0, packets of rxe_w."""
    stats, hw = '/sys/class/net/eth0/statistics/', '/sys/class/infiniband/rxe_w/ports/1/hw_counters/'
    tx, rx, sent, received = (int(x) for x in on(host, 'cat', stats + 'tx_bytes', stats + 'rx_bytes', hw + 'sent_pkts', hw + 'rcvd_pkts').split())
    return dict(tx=tx, rx=rx, sent=sent, received=received)


def ask_over_the_wire(nodes, protocol, prompts, want, per_token, concurrency):
    """Asks both nodes in turn and checks the answers, and that the KV bytes of the traces crossed the wire."""
    before = counters(1), counters(2)
    jobs = [lambda b=b, n=nodes[i % 2]: n.request('POST', '/v1/completions', {**b, 'return_trace': True}) for i, b in enumerate(prompts)]
    moved = check(want, prompts, parallel(jobs, concurrency), per_token, protocol, BLOCK)
    after = counters(1), counters(2)
    here, there = ({k: a[k] - b[k] for k in a} for a, b in zip(after, before))
    print(f'  {protocol}: {moved} KV bytes; host 1 sent {here["tx"]} bytes, {here["sent"]} RoCE packets; host 2 took {there["rx"]} bytes, {there["received"]} RoCE packets', flush=True)
    assert moved > 0 and here['tx'] >= moved and there['rx'] >= moved, (here, there, moved)
    if protocol == 'tcp':
        assert here['sent'] * 4096 < moved, here
    else:  # a RoCE packet has at most 4,096 bytes of payload
        assert here['sent'] * 4096 >= moved and there['received'] * 4096 >= moved, (here, there, moved)
