#!/usr/bin/env python3
"""overload.py - admission under five times the load that a cluster can bear: goodput, waits, refusals, and what each tenant gets.

usage: overload.py [--seconds 600] [--times 5] [--ttft-ms 4000] [--print-only] [--baton PATH]

Six nodes are paced (docs/pace.md): three that prefill and three that decode, with a curve so slow that two cores are no limit, before them a
router with three tenants of weights 1, 2 and 4. First the peak: the load rises step by step, and goodput is what was served of requests whose
first token came in time. Then --times the load of the peak for --seconds, from each tenant a third of it; clients that are refused come back
when they are told, with what the refusal gave them. What is in flight at the end is cut off and counted; what has taken longer than any that is
treated as promised has failed. Then two tenants at rest and one of them at ten times its rate. Every figure is printed beside
its limit; the exit status is 1 if one is missed, unless --print-only. Times depend on the machine: a busy one misses them. Standard library only."""
import argparse, asyncio, json, os, random, resource, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'e2e'))


def arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--seconds', type=float, default=600)
    p.add_argument('--times', type=float, default=5)
    p.add_argument('--ttft-ms', type=int, default=4000)
    p.add_argument('--seed', type=int, default=1)
    p.add_argument('--peak', type=float, nargs=2, metavar=('TOKENS', 'REQUESTS'), help='of an earlier run, instead of finding it')
    p.add_argument('--print-only', action='store_true', help='the exit status is 0 whatever is missed')
    p.add_argument('--verbose', action='store_true', help='what the cluster says every ten seconds')
    p.add_argument('--baton', default=os.environ.get('BATON_BIN') or os.path.join(HERE, '..', '..', 'build', 'baton'))
    return p.parse_args()


ARGS = arguments()
os.environ['BATON_BIN'] = ARGS.baton
from harness import BIN, Node, Process, TINY, closing, end_in_order, free_ports, metrics, request, wait_until

PROMPT, OUTPUT = (60, 140), (20, 60)  # tokens, uniform
# A prompt of 100 tokens takes 100 ms and a token 40 ms: 3 nodes compute 30 prompts a second, and 3 * 24 answers take 1.6 s each.
CURVE = dict(about='overload.py: a slow machine', fixed_us=2000, prompt=dict(row_us=980), decode=dict(row_us=20, points=[[1, 100, 40000], [64, 100, 42000]]))
NOMINAL = 30
FLOODS = 3
STEP_S = 0.042  # the longest of the curve's for a token
WEIGHTS = {'gold': 4, 'silver': 2, 'bronze': 1}
SIZE = ['--max-model-len', '512', '--max-num-seqs', '24', '--num-gpu-blocks-override', '400', '--compute-threads', '1', '--no-enable-prefix-caching']


def percentile(values, p):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * p / 100))] if values else float('nan')


class Count:
    """What one tenant's requests came to; only those that ended in the time that is measured."""
    def __init__(self):
        self.offered = self.refused = self.returned = self.returned_taken = self.failed = self.ended = self.in_time = 0
        self.tokens = self.good_tokens = 0
        self.ttft, self.refusal, self.told, self.errors = [], [], [], {}
        self.cut, self.waiting = [], 0  # how old each try was that the end cut off; how many were in none

    def add(self, o):
        for name, value in vars(o).items():
            if name == 'errors':
                for k, v in value.items():
                    self.errors[k] = self.errors.get(k, 0) + v
            else:
                setattr(self, name, getattr(self, name) + value)
        return self


class Load:
    def __init__(self, port, seed=1):
        self.port, self.random, self.tasks, self.measures, self.count = port, random.Random(seed), set(), False, {}
        self.trying = {}    # task → (tenant, since when its try is in flight)
        self.outside = {}   # task → tenant, of clients that wait to come back
        self.from_first_try = False  # the time to the first token is that of the client, who also waits outside

    def of(self, tenant):
        return self.count.setdefault(tenant, Count())

    async def ask(self, tenant, prompt, n, retry):
        """One try: (status, ttft, seconds, headers)."""
        body = json.dumps(dict(prompt=prompt, max_tokens=n, temperature=0, ignore_eos=True, stream=True)).encode()
        head = f'POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer key-{tenant}\r\nContent-Type: application/json\r\n' \
               f'x-baton-ttft-ms: {ARGS.ttft_ms}\r\nContent-Length: {len(body)}\r\n' + (f'x-baton-retry: {retry}\r\n' if retry else '') + '\r\n'
        begin = time.monotonic()
        reader, writer = await asyncio.open_connection('127.0.0.1', self.port, limit=1 << 20)
        try:
            writer.write(head.encode() + body)
            lines = (await reader.readuntil(b'\r\n\r\n')).decode().split('\r\n')
            status = int(lines[0].split()[1])
            headers = {k.lower(): v.strip() for k, v in (l.split(':', 1) for l in lines[1:] if ':' in l)}
            first, tail = None, b''
            while data := await reader.read(65536):
                if first is None and (status != 200 or b'data: ' in data):
                    first = time.monotonic() - begin
                tail = (tail + data)[-2000:]
            if status == 200 and b'data: [DONE]' not in tail:
                status, headers['error'] = 0, tail.decode(errors='replace')[-300:]
            elif status not in (200, 429):
                headers['error'] = tail.decode(errors='replace')[-300:]
            return status, first or time.monotonic() - begin, headers
        finally:
            writer.close()

    async def client(self, tenant):
        """Asks, and comes back as often as it is told to."""
        c, prompt, n = self.of(tenant), [5 + self.random.randrange(300) for _ in range(self.random.randint(*PROMPT))], self.random.randint(*OUTPUT)
        retry, tries, begin = None, 0, time.monotonic()
        while True:
            waited = time.monotonic() - begin if self.from_first_try else 0
            c.offered += self.measures and tries == 0
            self.trying[asyncio.current_task()] = tenant, time.monotonic()
            try:
                status, first, headers = await self.ask(tenant, prompt, n, retry)
            except (OSError, asyncio.IncompleteReadError) as e:
                status, first, headers = 0, 0, {'error': repr(e)}
            finally:
                self.trying.pop(asyncio.current_task())
            if self.measures and tries == 1:
                c.returned += 1
                c.returned_taken += status == 200
            if status == 429:
                after = int(headers['retry-after'])
                if self.measures:
                    c.refused += 1
                    c.refusal.append(first)
                    c.told.append(after)
                retry, tries = headers.get('x-baton-retry'), tries + 1
                self.outside[asyncio.current_task()] = tenant
                await asyncio.sleep(after)
                self.outside.pop(asyncio.current_task())
                continue
            if not self.measures:
                return
            if status != 200:
                c.failed += 1
                c.errors[headers.get('error', status)] = c.errors.get(headers.get('error', status), 0) + 1
                return
            c.ended += 1
            first += waited
            c.ttft.append(first)
            c.tokens += len(prompt) + n
            if first * 1e3 <= ARGS.ttft_ms:
                c.in_time += 1
                c.good_tokens += len(prompt) + n
            return

    async def arrivals(self, tenant, per_s, seconds):
        at, end = time.monotonic(), time.monotonic() + seconds
        while (at := at + self.random.expovariate(per_s)) < end:
            await asyncio.sleep(at - time.monotonic())
            t = asyncio.create_task(self.client(tenant))
            self.tasks.add(t)
            t.add_done_callback(self.tasks.discard)

    async def run(self, rates, seconds, warm=0, after=0, all_end=False):
        """Requests at these rates; measured from `warm` seconds on. Returns the counts and for how long was measured. With all_end those that were
        told to come back still do: if they went away, the router would learn that few keep to what they are told, and tell the next ones less."""
        self.count = {}
        running = [asyncio.create_task(self.arrivals(t, r, warm + seconds)) for t, r in rates.items()]
        await asyncio.sleep(warm)
        self.measures = True
        begin = time.monotonic()
        if ARGS.verbose:
            running.append(asyncio.create_task(self.say()))
        await asyncio.gather(*running[:len(rates)])
        took = time.monotonic() - begin
        self.measures = False
        for tenant, since in self.trying.values():
            self.of(tenant).cut.append(time.monotonic() - since)
        for tenant in self.outside.values():
            self.of(tenant).waiting += 1
        if all_end and self.tasks:
            await asyncio.wait(self.tasks, timeout=60)
        self.outside = {}
        for t in running[len(rates):] + list(self.tasks):
            t.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.sleep(after)
        return self.count, took

    async def say(self):
        while True:
            await asyncio.sleep(10)
            tenants = await asyncio.to_thread(lambda: request(self.port, 'GET', '/cluster/self', headers={'Authorization': 'Bearer key-gold'})[2]['tenants'])
            print('   ', ' | '.join(f"{t['name']} {t['waiting']} wait {t['wait_s']:.1f} s, {t['running']} run" for t in tenants[1:]),
                  '|', ' '.join(f'{n} {c.ended}/{c.refused}' for n, c in self.count.items()), flush=True)


def total(count):
    return Count() if not count else [sum_ for sum_ in [Count()] for c in count.values() for sum_ in [sum_.add(c)]][-1]


MISSED = []


def line(what, value, limit, good, unit=''):
    if not good:
        MISSED.append(what)
    print(f'  {what:58} {value:10.3f}{unit:3} {limit:>14}  {"ok" if good else "MISSED"}', flush=True)


def find_peak(load):
    """Raises the load until goodput falls."""
    best, best_rate = 0, 0
    print('the peak: requests per second, of them in time; tokens of those per second')
    for rate in [NOMINAL * f for f in (0.6, 0.8, 0.9, 1.0, 1.1, 1.2)]:
        count, took = asyncio.run(load.run({t: rate / 3 for t in WEIGHTS}, 12, warm=5, after=2, all_end=True))
        c = total(count)
        print(f'  {rate:6.1f}/s offered {c.ended / took:6.1f}/s served {c.good_tokens / took:8.0f} tokens/s  ttft p99 {percentile(c.ttft, 99) * 1e3:6.0f} ms  refused {c.refused}', flush=True)
        if c.good_tokens / took > best:
            best, best_rate = c.good_tokens / took, c.ended / took
    return best, best_rate


def longest():
    """How old a try may be at the end: twice the limit of the first token, and the generation. What a client was told to wait is over before its try begins."""
    return 2 * ARGS.ttft_ms / 1e3 + OUTPUT[1] * STEP_S


def line_failed(what, c):
    """Those that the end cut off have failed, too, where they were too old."""
    too_old = sum(s > longest() for s in c.cut)
    print(f'  {len(c.cut)} requests were in flight at the end and cut off, {too_old} of them for more than {longest():.1f} s, which is failed; the oldest for '
          f'{max(c.cut, default=0):.1f} s; {c.waiting} more waited to come back')
    line(what, c.failed + too_old, '0', c.failed + too_old == 0)


def overload(load, peak, rate):
    print(f'{ARGS.times:g} times {rate:.1f} requests/s for {ARGS.seconds:g} s')
    count, took = asyncio.run(load.run({t: ARGS.times * rate / 3 for t in WEIGHTS}, ARGS.seconds, warm=15, after=3))
    c = total(count)
    for t, n in count.items():
        print(f'  {t:8} offered {n.offered} served {n.ended} refused {n.refused} came back {n.returned}, taken {n.returned_taken / max(1, n.returned):.3f}'
              f'  told p50 {percentile(n.told, 50)} s max {max(n.told, default=0)} s  ttft p50 {percentile(n.ttft, 50) * 1e3:.0f} p99 {percentile(n.ttft, 99) * 1e3:.0f} ms  tokens/s {n.tokens / took:.0f}')
    for e, n in sorted(c.errors.items(), key=lambda x: -x[1])[:5]:
        print(f'  failed {n}: {e}')
    line('goodput, of its peak', c.good_tokens / took / peak, '>= 0.90', c.good_tokens / took / peak >= 0.9)
    line('ttft of those served, p99', percentile(c.ttft, 99) * 1e3, f'<= {ARGS.ttft_ms}', percentile(c.ttft, 99) * 1e3 <= ARGS.ttft_ms, ' ms')
    print(f'  refusals p50 {percentile(c.refusal, 50) * 1e3:.1f} p90 {percentile(c.refusal, 90) * 1e3:.1f} ms of {len(c.refusal)}')
    line('refusals, p99', percentile(c.refusal, 99) * 1e3, '<= 50', percentile(c.refusal, 99) * 1e3 <= 50, ' ms')
    share = c.returned_taken / max(1, c.returned)
    line('of those that came back as told, taken at once', share, '>= 0.80', share >= 0.8)
    for t, n in count.items():
        part = n.tokens / max(1, c.tokens) / (WEIGHTS[t] / sum(WEIGHTS.values()))
        line(f'tokens of {t}, of its weight\'s share', part, '0.90 .. 1.10', 0.9 <= part <= 1.1)
    line_failed('failed', c)


def flood(load, rate):
    """At rest and flooded in turn: a p99 of some hundred requests depends on how they happen to come, by more than the limit leaves."""
    seconds = max(20, min(60, ARGS.seconds / 4))
    print(f'two tenants of equal weight: one at {rate * 0.3:.1f} requests/s, the other at as much, then at ten times that, {FLOODS} times each')
    load.from_first_try = True
    rest, flooded = Count(), Count()
    for _ in range(FLOODS):
        for sum_, of_two, warm in ((rest, 0.3, 5), (flooded, 3, 10)):
            counts, _ = asyncio.run(load.run({'one': rate * 0.3, 'two': rate * of_two}, seconds, warm=warm, after=3))
            sum_.add(counts['one'])
    before, after = percentile(rest.ttft, 99) * 1e3, percentile(flooded.ttft, 99) * 1e3
    for name, c in (('at rest', rest), ('flooded', flooded)):
        print(f'  {name}: ttft p50 {percentile(c.ttft, 50) * 1e3:.0f} p90 {percentile(c.ttft, 90) * 1e3:.0f} p99 {percentile(c.ttft, 99) * 1e3:.0f} ms of {len(c.ttft)}, refused {c.refused}')
    line('refused of the one', flooded.refused, '0', flooded.refused == 0)
    line_failed('failed of the one', flooded)
    line('p99 ttft of the one, of what it was', after / before, '<= 1.20', after / before <= 1.2)


def main():
    end_in_order()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    folder = tempfile.mkdtemp(prefix='overload-')
    keys, curve = os.path.join(folder, 'keys'), os.path.join(folder, 'curve.json')
    with open(keys, 'w') as f:
        f.write(''.join(f'{t} key-{t} weight={w}\n' for t, w in WEIGHTS.items()) + 'one key-one\ntwo key-two\n')
    with open(curve, 'w') as f:
        json.dump(CURVE, f)
    port = free_ports(1)[0]
    router = Process([BIN, 'router', '--host', '127.0.0.1', '--port', str(port), '--api-keys-file', keys, '--max-concurrency', '4096'], name='router')
    nodes = [Node(TINY, role, [*SIZE, '--pace', curve, '--router', f'127.0.0.1:{port}']) for role in ['prefill'] * 3 + ['decode'] * 3]
    key = {'Authorization': 'Bearer key-gold'}
    with closing(router, *nodes):
        wait_until('six nodes', lambda: len(request(port, 'GET', '/cluster', headers=key, timeout=5)[2].get('nodes', [])) == 6, 120, 0.3)
        wait_until('ready', lambda: request(port, 'GET', '/ready', timeout=5)[0] == 200, 60)
        load = Load(port, ARGS.seed)
        asyncio.run(load.run({t: 3 for t in WEIGHTS}, 4))  # the nodes' speeds are measured
        peak, rate = ARGS.peak or find_peak(load)
        overload(load, peak, rate)
        flood(load, rate)
        for n in nodes:
            late = metrics(n.port).get('baton_engine_paced_late_steps_total', 0)
            if late:
                print(f'  {n.name}: {late:.0f} steps took longer than the curve says: the machine was busy')
    if MISSED:
        print(f'missed: {"; ".join(MISSED)}')
    return 1 if MISSED and not ARGS.print_only else 0


if __name__ == '__main__':
    sys.exit(main())
