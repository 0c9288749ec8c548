"""single.py - a run in which one thing is done to a cluster on purpose: what the modes of cluster.py share. Each mode returns its exit status: 1 where an answer was
wrong, repeated, lost, or failed, somebody hung or something leaked, or a count of its own misses its limit; 77 where it cannot be run here. Times are printed beside
their limits, and decide nothing."""
import contextlib
from . import cells
from .run import CLIENTS, Traffic, fleet_of, references
from .traffic import bodies, plans

CANNOT = 77


class Run:
    """A fleet under traffic without an adversary: what one mode needs."""

    def __init__(self, hosts, n, seed, redis=None, n_bodies=200, longest=200, **options):
        self.hosts, self.seed, self.n, self.redis_options, self.options = hosts, seed, n, redis, options
        self.asked = bodies(min(n, n_bodies), seed, longest)
        self.refs = references(self.asked)

    @contextlib.contextmanager
    def fleet(self):
        with fleet_of(self.hosts, self.redis_options, **self.options) as f:
            self.watch = cells.Watch(f.members)
            yield f

    def traffic(self, fleet, n=None, clients=CLIENTS, salt='', entries=None, endless=False):
        """Starts n clients' requests, all of which want their whole answers. endless: others follow them until the traffic's finish()."""
        def more(k):
            return plans(n or self.n, len(self.asked), f'{self.seed}{salt}' + (f'-{k}' if k else ''), leaving=0, slow=0)
        t = Traffic(fleet, more(0), self.asked, clients, entries=entries, more=more if endless else None)
        t.start()
        return t


def say(what, value, limit, unit='s'):
    print(f'{what}: {value:.3f} {unit} (limit {limit:g} {unit})' + ('' if value <= limit else '  OVER THE LIMIT'), flush=True)


def append(before, after):
    """`after`, with the histories of both."""
    after.histories += before.histories
    return after


def cannot(what, why):
    print(f'SKIP: {what}: {why}', flush=True)
    return CANNOT
