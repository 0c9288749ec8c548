"""run.py - one run: references by a quiet node, a fleet, clients, the adversary, and the verdict."""
import contextlib, random, threading, time
from harness import TINY, Node, closing, parallel, request, wait_ready, wait_until
from . import report
from .adversary import Adversary
from .cells import Watch
from .checker import check_answers, check_left, detections, going_on, read_logs
from .client import HANG_S, Client
from .faults import Faults
from .fleet import TEMPLATE, Fleet
from .redis_site import RedisSite, faketime
from .traffic import Answers, Plan, bodies, plans

CLIENTS, STORM, BAITS, TELL_S = 24, (10, 30), 8, 60.0
REFERENCE_SIZE = ['--max-model-len', '2048', '--max-num-seqs', '16', '--num-gpu-blocks-override', '800']


BAIT = '/v1/completions', dict(model='m', prompt=list(range(5, 60)), max_tokens=40, temperature=0, ignore_eos=True, return_token_ids=True, logit_bias={'77': 100})


def references(asked):
    """The answers of one node that nothing happens to."""
    def one(path, body):
        status, _, answer = request(node.port, 'POST', path, body)
        if status != 200:
            raise AssertionError(f'the reference of {str(body)[:200]} is {status} {str(answer)[:300]}')
        a = Answers()
        a.add(answer)
        return a
    with closing(Node(TINY, 'mixed', [*REFERENCE_SIZE, *TEMPLATE])) as node:
        wait_ready(node)
        out = parallel([lambda p=p, b=b: one(p, b) for p, b in asked], 8)
    for a in out:
        if isinstance(a, Exception):
            raise a
    return out


class Traffic:
    """Clients that carry out plans, so many at a time. Thread: one per client."""

    def __init__(self, fleet, todo, asked, clients=CLIENTS, hang_s=HANG_S, entries=None, more=None):
        """more(k): the plans that follow when those before are all being carried out, until finish()."""
        self.entries, self.asked, self.hang_s = entries or fleet.members, asked, hang_s
        self.todo, self.histories, self.lock, self.running = list(todo)[::-1], [], threading.Lock(), {}
        self.errors, self.extra, self.n_bursts = [], [], 0
        self.more, self.n_more = more, 0
        self.threads = [threading.Thread(target=self.go, daemon=True) for _ in range(clients)]

    def start(self):
        for t in self.threads:
            t.start()

    def go(self):
        while True:
            with self.lock:
                if not self.todo and self.more:
                    self.n_more += 1
                    self.todo = self.more(self.n_more)[::-1]
                if not self.todo:
                    return
                plan = self.todo.pop()
            self.ask(plan)

    def ask(self, plan):
        path, body = self.asked[plan.body]
        try:
            h = Client(self.entries, plan, path, body, self.hang_s).run()
        except Exception as e:  # a fault of this program; the run is told
            with self.lock:
                self.errors.append(f'{plan.name}: {e!r}')
            return
        with self.lock:
            self.histories.append(h)

    def storm(self, step):
        """A burst of clients that all leave in the middle of their answers. Returns how many."""
        n = STORM[0] + int(step.choice * (STORM[1] - STORM[0]))
        self.burst(f'storm {step.target} {step.choice}', n, lambda i, name, r: Plan(-1, name, r.randrange(len(self.asked)), True, False, r.random(), r.randint(1, 8), 0, False))
        return n

    def burst(self, what, n, plan):
        """n requests at once, beside all others."""
        r = random.Random(what)
        with self.lock:
            self.n_bursts += 1
            first = [plan(i, f'{what.replace(" ", "-")}-{self.n_bursts}-{i}', r) for i in range(n)]
        for p in first:
            t = threading.Thread(target=self.ask, args=(p,), daemon=True)
            self.extra.append(t)
            t.start()

    def bait(self, step):
        """Requests whose next tokens a liar knows: the last body, whose only bias decides every token."""
        self.burst(f'bait {step.target} {step.choice}', BAITS, lambda i, name, r: Plan(-1, name, len(self.asked) - 1, True, i % 2 == 0, r.random(), None, 0, False))

    def n_done(self):
        with self.lock:
            return len(self.histories)

    def finish(self, least=0):
        """Waits until at least so many were answered, then asks no more."""
        wait_until(f'{least} requests are answered', lambda: self.n_done() >= least or self.errors, 3600, 0.1)
        with self.lock:
            self.more, self.todo = None, []
        self.wait()

    def wait_for_plans(self, n):
        """Says every minute how far it is."""
        told = time.monotonic()
        for t in self.threads:
            while t.is_alive():
                t.join(1)
                if time.monotonic() - told > TELL_S:
                    told = time.monotonic()
                    print(f'  {self.n_done()} of {n} answered', flush=True)

    def wait(self):
        for t in [*self.threads, *self.extra]:
            t.join()


@contextlib.contextmanager
def fleet_of(hosts, redis_options=None, **options):
    redis = RedisSite(hosts, **(redis_options or {}))
    with closing(redis):
        fleet = Fleet(hosts, redis, **options)
        with closing(fleet):
            try:
                fleet.wait_ready()
                for m in fleet.members:
                    m.note_footprint()
                yield fleet
            except BaseException:
                fleet.keep = True
                raise


def conclude(fleet, traffic, refs, watch, adversary=None, history=False, needs_cells=False):
    """Waits until all is quiet and prints the verdict. Returns the exit status and the cells that were not taken."""
    watch.end()
    v = check_answers(fleet, traffic.histories, refs)
    for text in [*traffic.errors, *(adversary.errors if adversary else [])]:
        v.add_bad('of the harness', text)
    check_left(fleet, v)
    logs = read_logs(fleet)
    if adversary:
        report.print_script(adversary)
        if history or v.bad:
            report.print_history(adversary, min(h.begin for h in traffic.histories))
    report.print_verdicts(v, len(traffic.histories))
    done = adversary.done if adversary else []
    is_late = report.print_times(*detections(fleet, logs), going_on(fleet, traffic.histories, logs, done), done)
    missing = report.print_cells(watch, needs_cells)
    fleet.keep = bool(v.bad) or is_late
    return int(bool(v.bad)), missing


def chaos(hosts, n, how, history=False, cells_file=None):
    """n requests while the script is carried out."""
    asked = [*bodies(min(n, max(200, n // 10)), how.seed), BAIT]
    t0 = time.monotonic()
    refs = references(asked)
    print(f'{len(asked)} references in {time.monotonic() - t0:.1f} s', flush=True)
    with fleet_of(hosts, dict(clock=bool(faketime())), fronts=int(hosts.separate)) as fleet:
        print(f'{len(fleet.members)} members up after {time.monotonic() - t0:.1f} s', flush=True)
        watch, traffic = Watch(fleet.members), Traffic(fleet, plans(n, len(asked) - 1, how.seed), asked)
        adversary = Adversary(Faults(fleet, watch, traffic), how)
        traffic.start()
        adversary.start()
        traffic.wait_for_plans(n)
        adversary.stop()
        traffic.wait()
        print(f'all answered after {time.monotonic() - t0:.1f} s', flush=True)
        status, _ = conclude(fleet, traffic, refs, watch, adversary, history, True)
        if cells_file:
            report.append_cells(cells_file, watch)
        return status
