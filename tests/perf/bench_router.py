#!/usr/bin/env python3
"""bench_router.py - `baton router` beside nginx as reverse proxy, before the same nodes, in turn: streams through each, and none of them.

usage: bench_router.py [--streams 5000] [--tokens 64] [--nodes 2] [--step-ms 250] [--rounds 3] [--steer] [--print-only]
                       [--nginx PATH] [--baton PATH]

The nodes are paced (docs/pace.md): a step of a tiny model lasts --step-ms, so that tokens come at a rate of many streams and the nodes leave the
CPUs to what is measured. In each round all streams go to the nodes themselves, through nginx, and through the router. Printed of each: tokens per
second, CPU seconds of the process in the middle per million tokens (and its inverse, tokens per second and core), the time to the first token and
the p99 of the gap between two tokens of a stream, as more than without anything in the middle; the limit is one bare write for each token. Medians
over the rounds; the p99 of the time to the first token is compared with nginx's of the same round. Then the router with two processes against one,
on hosts with four CPUs or more. The exit status is 1 if a bar is missed, unless --print-only. Standard library only; nginx is looked for in PATH,
Debian has it as nginx-light."""
import argparse, contextlib, json, os, resource, select, shutil, signal, socket, statistics, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'e2e'))


def arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in ('streams', 5000), ('tokens', 64), ('nodes', 2), ('step-ms', 250), ('rounds', 3):
        p.add_argument('--' + name, type=int, default=value)
    p.add_argument('--print-only', action='store_true', help='the exit status is 0 whatever is missed')
    p.add_argument('--steer', action='store_true', help="the first CPU is that of the process in the middle alone, and loopback's receiving half is on the others (root)")
    p.add_argument('--nginx', default=shutil.which('nginx') or '/usr/sbin/nginx')
    p.add_argument('--baton', default=os.environ.get('BATON_BIN') or os.path.join(HERE, '..', '..', 'build', 'baton'))
    return p.parse_args()


ARGS = arguments()
os.environ['BATON_BIN'] = ARGS.baton
from harness import Node, Process, TINY, closing, end_in_order, free_ports, request, wait_ready, wait_until

BARS = {'tokens per second and core': 60000, 'CPU against nginx': 1.2, 'added p99 against nginx': 1.2, 'p99 of the first token against nginx': 1.2,
        'two processes against one': 1.7}
FIRST_FLOOR_MS = 5  # so much later than through nginx is no difference: a thread that is not run for a moment
MISSED = []
NGINX = '''daemon off;
master_process off;
pid %(dir)s/pid;
error_log stderr warn;
worker_rlimit_nofile 65536;
events { worker_connections 32768; }
http {
  access_log off;
  client_body_temp_path %(dir)s/b; proxy_temp_path %(dir)s/p; fastcgi_temp_path %(dir)s/f; uwsgi_temp_path %(dir)s/u; scgi_temp_path %(dir)s/s;
  upstream nodes { least_conn; %(nodes)s keepalive 64; }
  server {
    listen 127.0.0.1:%(port)d backlog=4096;
    location / { proxy_pass http://nodes; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; proxy_read_timeout 600s; }
  }
}
'''


def cpu_seconds(pids):
    """What the processes and their threads have used."""
    total = 0
    for pid in pids:
        with open(f'/proc/{pid}/stat') as f:
            fields = f.read().rsplit(')', 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf('SC_CLK_TCK')


STEERED = '/sys/class/net/lo/queues/rx-0/rps_cpus'


def stay_on(pid, cpus):
    for thread in os.listdir(f'/proc/{pid}/task'):
        os.sched_setaffinity(int(thread), cpus)


@contextlib.contextmanager
def steered(middle, others):
    """With --steer: what another host would do is done by other CPUs, as far as one host can. Over loopback whoever writes also does the TCP of who receives,
    unless the kernel steers packets (RPS) to another CPU."""
    if not ARGS.steer:
        yield
        return
    rest = set(range(1, os.cpu_count()))
    if not rest:
        raise SystemExit('--steer needs two CPUs')
    with open(STEERED) as f:
        before = f.read()
    for pid in [os.getpid(), *others]:
        stay_on(pid, rest)
    for pid in middle:
        stay_on(pid, {0})
    try:
        with open(STEERED, 'w') as f:
            f.write(f'{sum(1 << c for c in rest):x}')
        yield
    finally:
        with open(STEERED, 'w') as f:
            f.write(before)


def tree(pid):
    """A process and its children."""
    found = [pid]
    for p in filter(str.isdigit, os.listdir('/proc')):
        try:
            with open(f'/proc/{p}/stat') as f:
                if int(f.read().rsplit(')', 1)[1].split()[1]) == pid:
                    found.append(int(p))
        except OSError:
            pass
    return found


class Stream:
    def __init__(self, port, i):
        body = json.dumps(dict(prompt=[5 + (i + k) % 300 for k in range(8)], max_tokens=ARGS.tokens, temperature=0, ignore_eos=True, stream=True)).encode()
        self.out = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n' % len(body) + body
        self.s = socket.create_connection(('127.0.0.1', port), 30)
        self.s.sendall(self.out)
        self.s.setblocking(False)
        self.t_sent = self.t_last = time.perf_counter()
        self.n, self.tail, self.done, self.first, self.gaps, self.n_bytes = 0, b'', False, None, [], 0

    def read(self):
        """False: it has ended."""
        try:
            data = self.s.recv(262144)
        except BlockingIOError:
            return True
        now = time.perf_counter()
        if not data:
            return False
        if not self.tail and not data.startswith(b'HTTP/1.1 200'):
            raise SystemExit(f'a stream was refused: {data[:300]!r}')
        self.n_bytes += len(data)
        text = self.tail + data
        n = text.count(b'"finish_reason"') - self.tail.count(b'"finish_reason"')
        self.done = self.done or b'data: [DONE]' in text
        self.tail = data[-16:]
        if n:
            if self.first is None:
                self.first = now - self.t_sent
            else:
                self.gaps.append(now - self.t_last)
            self.t_last = now
            self.n += n
        return not self.done


def run(ports, pids):
    """All streams, spread over these ports. Returns the figures."""
    poll, streams = select.epoll(), {}
    before, begin = cpu_seconds(pids), time.perf_counter()
    every = []
    for i in range(ARGS.streams):
        s = Stream(ports[i % len(ports)], i)
        every.append(s)
        streams[s.s.fileno()] = s
        poll.register(s.s, select.EPOLLIN)
    while streams:
        events = poll.poll(120)
        if not events:
            raise SystemExit(f'{len(streams)} streams have been silent for two minutes')
        for fd, _ in events:
            if not streams[fd].read():
                s = streams.pop(fd)
                poll.unregister(fd)
                s.s.close()
                if not s.done or s.n < ARGS.tokens:
                    raise SystemExit(f'a stream ended with {s.n} of {ARGS.tokens} tokens')
    seconds, cpu, tokens = time.perf_counter() - begin, cpu_seconds(pids) - before, ARGS.streams * ARGS.tokens
    gaps, firsts = sorted(g for s in every for g in s.gaps), sorted(s.first for s in every)
    return {'tokens per second': tokens / seconds, 'CPU s per million': cpu / tokens * 1e6, 'gap p99 ms': gaps[len(gaps) * 99 // 100] * 1e3,
            'bytes per token': sum(s.n_bytes for s in every) / tokens, 'first token p50 ms': firsts[len(firsts) // 2] * 1e3, 'first token p99 ms': firsts[len(firsts) * 99 // 100] * 1e3}


def read_all(ends):
    """What the clients of bare_writes do, in a process of its own."""
    poll = select.epoll()
    for s in ends:
        poll.register(s, select.EPOLLIN)
    by_fd, n_open = {s.fileno(): s for s in ends}, len(ends)
    while n_open:
        for fd, _ in poll.poll():
            if not by_fd[fd].recv(65536):
                poll.unregister(fd)
                n_open -= 1


def bare_writes(n_bytes, rounds=12):
    """The limit: CPU seconds of this process for a million writes of an event, each to another connection, and nothing else. Over loopback a
    write is also the TCP of who receives it."""
    ends = []
    with socket.create_server(('127.0.0.1', 0), backlog=4096) as listener:
        for _ in range(ARGS.streams):
            client = socket.create_connection(listener.getsockname())
            ends.append((listener.accept()[0], client))
    pid = os.fork()
    if pid == 0:
        for s, _ in ends:
            s.close()
        read_all([c for _, c in ends])
        os._exit(0)
    for s, c in ends:
        c.close()
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    event, cpu, mine = b'x' * n_bytes, 0, os.sched_getaffinity(0)
    if ARGS.steer:
        os.sched_setaffinity(0, {0})
    for _ in range(rounds):
        begin = time.process_time()
        for s, _ in ends:
            s.send(event)
        cpu += time.process_time() - begin
        time.sleep(ARGS.step_ms / 1000)
    os.sched_setaffinity(0, mine)
    for s, _ in ends:
        s.close()
    os.waitpid(pid, 0)
    return cpu / (rounds * len(ends)) * 1e6


def medians(rounds):
    return {k: statistics.median(r[k] for r in rounds) for k in rounds[0]}


def start_nodes(folder):
    curve = os.path.join(folder, 'curve.json')
    with open(curve, 'w') as f:
        json.dump({'about': 'steps of one length, for bench_router.py', 'fixed_us': ARGS.step_ms * 1000, 'prompt': {}, 'decode': {}}, f)
    places = ARGS.streams // ARGS.nodes + 64
    size = ['--max-num-seqs', str(places), '--max-num-batched-tokens', str(max(2 * places, 512)), '--max-waiting', str(places), '--max-model-len', '512', '--block-size', '16',
            '--num-gpu-blocks-override', str(places * ((8 + ARGS.tokens) // 16 + 2)), '--max-concurrency', '20000', '--max-connections', '20000', '--pace', curve]
    return [Node(TINY, 'mixed', size) for _ in range(ARGS.nodes)]


def start_router(nodes, *args):
    port = free_ports(1)[0]
    r = Process([ARGS.baton, 'router', '--host', '127.0.0.1', '--port', str(port), '--max-concurrency', '20000', '--max-connections', '20000', '--decoder-hosts',
                 *['127.0.0.1'] * len(nodes), '--decoder-ports', *[str(n.port) for n in nodes], *args], name='router')
    r.port = port
    return r


def start_nginx(nodes, folder):
    if not os.path.exists(ARGS.nginx):
        print('SKIP  nginx is not here, so there is nothing beside the router: apt-get install nginx-light, or --nginx PATH', flush=True)
        return None
    port, conf = free_ports(1)[0], os.path.join(folder, 'nginx.conf')
    with open(conf, 'w') as f:
        f.write(NGINX % dict(dir=folder, port=port, nodes=' '.join(f'server 127.0.0.1:{n.port};' for n in nodes)))
    p = Process([ARGS.nginx, '-p', folder, '-c', conf], name='nginx')
    p.port = port
    return p


def ready(*processes):
    for p in processes:
        wait_until(f'{p.name} is ready', lambda: not p.alive() or request(p.port, 'GET', '/ready', timeout=5)[0] == 200, 60)
        if not p.alive():
            raise SystemExit(f'{p.name} ended: {p.output()[-2000:]}')


def say(name, figures, direct):
    cpu = figures['CPU s per million']
    print(f'{name:<8} ' + '  '.join(f'{k} {v:,.1f}' for k, v in figures.items()) + (f'  tokens per second and core {1e6 / cpu:,.0f}' if cpu else '') +
          (f'  added p99 ms {added(figures, direct):.1f}' if direct else ''), flush=True)


def added(figures, direct):
    return figures['gap p99 ms'] - direct['gap p99 ms']


def judge(name, value):
    good = value >= BARS[name] if name in ('tokens per second and core', 'two processes against one') else value <= BARS[name]
    if not good:
        MISSED.append(name)
    print(f'{"within" if good else "MISSES"}  {name}: {value:,.2f}, the bar is {BARS[name]:,}', flush=True)


def first_against_nginx(rounds):
    """The median over the rounds of the router's p99 against that of nginx in the same round."""
    pairs = [(r['first token p99 ms'], n['first token p99 ms']) for r, n in zip(rounds['router'], rounds['nginx'])]
    return statistics.median(1.0 if r - n <= FIRST_FLOOR_MS else r / n for r, n in pairs)


def compare(of, rounds):
    """The bars of the router, as far as they were measured."""
    router, nginx, direct = (of.get(k) for k in ('router', 'nginx', 'direct'))
    found = {'tokens per second and core': 1e6 / router['CPU s per million'] if router['CPU s per million'] else float('inf')}
    if nginx:
        found['CPU against nginx'] = router['CPU s per million'] / nginx['CPU s per million'] if nginx['CPU s per million'] else float('inf')
        most = max(added(nginx, direct), 0.1)
        found['added p99 against nginx'] = max(added(router, direct), 0) / most
        found['p99 of the first token against nginx'] = first_against_nginx(rounds)
    for name, value in found.items():
        judge(name, value)


def compare_workers(nodes):
    if os.cpu_count() < 4:
        print(f'SKIP  two processes against one: this host has {os.cpu_count()} CPUs, and the nodes and the client need two', flush=True)
        return
    rate = {}
    for n in 1, 2:
        with closing(start_router(nodes, '--workers', str(n))) as r:
            ready(r)
            rate[n] = medians([run([r.port], tree(r.p.pid)) for _ in range(ARGS.rounds)])['tokens per second']
    judge('two processes against one', rate[2] / rate[1])


def main():
    end_in_order()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f'{ARGS.streams} streams of {ARGS.tokens} tokens, {ARGS.nodes} nodes with steps of {ARGS.step_ms} ms, {ARGS.rounds} rounds, {os.cpu_count()} CPUs', flush=True)
    with tempfile.TemporaryDirectory() as folder, closing(*start_nodes(folder)) as nodes:
        nodes = nodes if isinstance(nodes, tuple) else (nodes,)
        wait_ready(*nodes)
        nginx, router = start_nginx(nodes, folder), start_router(nodes)
        with closing(router, *([nginx] if nginx else [])):
            ready(router, *([nginx] if nginx else []))
            ways = [('direct', [n.port for n in nodes], []), *([('nginx', [nginx.port], tree(nginx.p.pid))] if nginx else []), ('router', [router.port], [router.p.pid])]
            rounds, bare = {name: [] for name, _, _ in ways}, []
            with steered([p for _, _, pids in ways for p in pids], [n.p.pid for n in nodes]):
                for _ in range(ARGS.rounds):
                    for name, ports, pids in ways:
                        rounds[name].append(run(ports, pids))
                    bare.append(bare_writes(round(rounds['direct'][-1]['bytes per token'])))
            of = {name: medians(r) for name, r in rounds.items()}
        for name, figures in of.items():
            say(name, figures, None if name == 'direct' else of['direct'])
        limit = statistics.median(bare)
        print(f'limit    bare writes of as many bytes: CPU s per million {limit:.1f}  tokens per second and core {1e6 / limit:,.0f}  '
              f'the router reaches {limit / max(of["router"]["CPU s per million"], 1e-9):.2f} of them', flush=True)
        compare(of, rounds)
        compare_workers(nodes)
    if MISSED:
        print(f'missed: {"; ".join(MISSED)}')
    return 1 if MISSED and not ARGS.print_only else 0


if __name__ == '__main__':
    sys.exit(main())
