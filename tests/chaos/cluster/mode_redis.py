"""mode_redis.py - one thing happens to Redis under requests: killed for 30 s, stopped, flushed, or failed over without the tail of its writes."""
import threading, time
from harness import wait_until
from .redis_site import faketime
from .run import conclude
from .single import Run, cannot

def kill30(site, ending):
    for s in site.servers:
        site.kill(s)
    ending.wait(30)
    for s in site.servers:
        site.start(s)


def pause(site, ending):
    for s in site.servers:
        site.pause(s)
    ending.wait(10)
    for s in site.servers:
        site.go_on(s)


def flush(site, ending):
    for _ in range(5):
        site.flush()
        ending.wait(2)


def failover(site, ending):
    s = site.lose_tail()
    wait_until('another master', lambda: site.master() is not s, 60)
    site.start(s)


REDIS_WAYS = dict(kill30=kill30, pause=pause, flush=flush, failover=failover)


def redis(hosts, way, n, seed, tls=False, clock=False):
    """One thing happens to Redis under requests."""
    if clock and not faketime():
        return cannot('a wall clock that jumps', 'libfaketime is not installed')
    run = Run(hosts, n, seed, dict(tls=tls, clock=clock))
    ending = threading.Event()
    with run.fleet() as fleet:
        t = run.traffic(fleet, endless=True)
        wait_until('a tenth is answered', lambda: t.n_done() >= n // 10, 300)
        begin = time.time()
        if clock:
            fleet.redis.move_clock(3600)
        REDIS_WAYS[way](fleet.redis, ending)
        wait_until('Redis has a master and a replica', fleet.redis.is_whole, 90)
        if clock:   # not while the replica synchronises: Redis counts the time of that by the wall clock
            fleet.redis.move_clock(-3600)
            ending.wait(5)
            fleet.redis.move_clock(0)
        end = time.time()
        t.finish(max(n, t.n_done() + 50))
        status, _ = conclude(fleet, t, run.refs, run.watch)
        n_served = print_redis(way, t.histories, begin, end, tls, clock)
        return status or int(n_served == 0)


def print_redis(way, histories, begin, end, tls, clock):
    """New requests are served all the while: the longest time in which none that had begun meanwhile was answered. Returns how many were answered meanwhile."""
    began = [h for h in histories if begin <= h.begin <= end]
    served = sorted(h.end for h in began if h.verdict == 'complete' and h.end <= end)
    marks = [begin, *served, end]
    gap = max(b - a for a, b in zip(marks, marks[1:]))
    print(f'redis {way}{", TLS and an ACL user" if tls else ""}{", its clock moved by an hour to and fro" if clock else ""}: {end - begin:.1f} s in which {len(began)} requests '
          f'began and {len(served)} of them were answered; {gap:.2f} s at most without one' + ('' if served else '  NONE WAS SERVED'), flush=True)
    return len(served)
