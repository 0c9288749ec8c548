"""adversary.py - what is done to the cluster: a script that is a pure function of its seed, and the threads that carry it out.

The script has lanes that run side by side: prefill nodes, decode nodes, Redis, and the edge (routers, clients). A lane does one thing at a time and waits until
what it broke serves again, so that never all of a kind are gone: a cluster that loses nothing still needs somebody to lose nothing on. Every lane goes through
its kinds in shuffled rounds, so that a run of some minutes has done each. Replaying a seed does the same things in the same order; how far it gets depends on how
long the run takes."""
import dataclasses, random, threading, time, traceback

LANES = 'prefill', 'decode', 'redis', 'edge'
NODE_KINDS = 'kill', 'kill', 'stop', 'hang', 'slow', 'kv', 'cut', 'pair', 'descriptors', 'disk', 'drain', 'role'
KINDS = dict(prefill=NODE_KINDS, decode=NODE_KINDS,
             redis=('redis kill', 'redis pause', 'redis flush', 'redis failover', 'redis lose tail', 'redis clock', 'half'),
             edge=('kill', 'stop', 'drain', 'storm', 'proxy', 'lies', 'lies', 'cut', 'descriptors'))
KV_PLANS = ('flip=0.2', 'drop=0.1', 'truncate=0.2', 'at=opened:1:drop,at=opened:3:disconnect', 'delay=0.3:400', 'at=put:5:disconnect,at=finish:2:disconnect', 'duplicate=0.3,stale=0.1')
LIES = ('credit', 'reserve', 'prefill', 'decode', 'run')


@dataclasses.dataclass(frozen=True)
class Step:
    pause_s: float      # before it
    kind: str
    target: float       # 0..1: which of those that it can be done to
    seconds: float      # how long it lasts
    choice: float       # 0..1: what else there is to choose

    def pick(self, things):
        return things[min(len(things) - 1, int(self.target * len(things)))]

    def choose(self, things):
        return things[min(len(things) - 1, int(self.choice * len(things)))]


@dataclasses.dataclass(frozen=True)
class How:
    """What a script is made of. kinds: only these; None: all. hurry divides the pauses between steps."""
    seed: int
    lanes: tuple = LANES
    kinds: tuple | None = None
    longest_s: float = 30.0
    hurry: float = 1.0


def script(how, lane):
    """The steps of a lane, without an end."""
    r, longest_s = random.Random(f'script {how.seed} {lane}'), how.longest_s
    mine = [k for k in KINDS[lane] if how.kinds is None or k in how.kinds]
    while mine:
        deck = mine[:]
        r.shuffle(deck)
        for kind in deck:
            short = r.random() < 0.7
            seconds = r.uniform(1, min(6.0, longest_s)) if short else r.uniform(min(6.0, longest_s), longest_s)
            yield Step(r.uniform(0.3, 3.0) / how.hurry, kind, r.random(), seconds, r.random())


class Adversary:
    """Carries out the script until stop(); then everything is given back. `faults` knows how (faults.py)."""

    def __init__(self, faults, how):
        self.faults, self.ending, self.done, self.errors, self.lock = faults, threading.Event(), [], [], threading.Lock()
        self.threads = [threading.Thread(target=self.go, args=(lane, script(how, lane)), daemon=True) for lane in how.lanes]

    def start(self):
        for t in self.threads:
            t.start()

    def go(self, lane, steps):
        for step in steps:
            if self.ending.wait(step.pause_s):
                return
            begin = time.time()
            try:
                what = self.faults.do(lane, step, self.ending)
            except Exception as e:  # the run is told at its end: it has proven nothing then
                with self.lock:
                    self.errors.append(f'{lane} {step}: {e!r}\n{traceback.format_exc()}')
                return
            if what:
                with self.lock:
                    self.done.append((begin, time.time(), lane, step.kind, what))

    def stop(self):
        self.ending.set()
        for t in self.threads:
            t.join(180)
            assert not t.is_alive(), 'the adversary does not come to an end'
