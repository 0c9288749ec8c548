"""liar.py - a node that tells entry nodes of every kind of failure (liar.c), for a while. Thread: one lane of the adversary."""
import os, time
from harness import BIN, Process
from .fleet import SECRET
from .redis_site import MASTER

PROGRAM = os.path.join(os.path.dirname(BIN), 'tests', 'chaos', 'liar')
FAILURES = 'busy', 'peer', 'request', 'node', 'pair', 'handed_back'
# By the liar's role: what it says to requests in which state.
LIES = dict(prefill=[*(f'credit:{w}' for w in FAILURES), *(f'prefill:{w}' for w in FAILURES), 'reserve:vanish'],
            decode=[*(f'reserve:{w}' for w in (*FAILURES, 'silent')), *(f'decode:{w}' for w in FAILURES)],
            mixed=[*(f'run:{w}' for w in FAILURES if w != 'pair'), 'run:vanish'])

STUCK_S = 6.0     # longer than a request waits for an answer to its reservation


def why_not():
    return None if os.access(PROGRAM, os.X_OK) else f'{PROGRAM} is not built'


class Liar(Process):
    def __init__(self, host, redis, role, first):
        """`first`: 0..1, where in its list of lies it begins."""
        self.host, lies = host, LIES[role]
        at = int(first * len(lies))
        self.lies = [*lies[at:], *lies[:at]]
        where = ','.join(f'{s.host.address}:{s.port}' for s in redis.sentinels)
        super().__init__([*host.enter, PROGRAM, host.address, where, MASTER, role, ','.join(self.lies)], SECRET, f'liar-{role}')

    def start(self):
        with self.host.processes():
            super().start()

    def told(self):
        return [line for line in self.output().splitlines() if line in self.lies]

    def wait(self, seconds, ending, bait):
        """Until every lie was told, or the time is over; calls bait() each second, for requests whose answers it knows."""
        end, baited = time.monotonic() + seconds, 0.0
        while time.monotonic() < end and not set(self.lies) <= set(self.told()):
            if time.monotonic() - baited >= 1:
                bait()
                baited = time.monotonic()
            if ending.wait(0.1):
                break
            assert self.alive(), self.output()
        if any(lie.endswith(':silent') for lie in self.told()):
            ending.wait(STUCK_S)
        return len(set(self.told())), len(self.lies)
