"""faults.py - how each thing of the script is done to a cluster, and undone. A fault returns what it did, in words, or None where it cannot be done here (that is
said once). Thread: the lanes of the adversary; a member belongs to one lane, the network and Redis to a lock each."""
import contextlib, os, resource, signal, threading
from harness import closing, wait_until
from . import liar
from .adversary import KV_PLANS

RESTART_S, FAILOVER_S = 60.0, 10.0
HANG_STEPS, SLOW_BY = (20, 200), 8
DESCRIPTORS_LEFT = 2
OTHER_ROLE = dict(prefill='decode', decode='prefill')
DELAYS_S = 0.01, 0.2
LIES_S = 8.0


class Faults:
    def __init__(self, fleet, watch, traffic, say=print):
        self.fleet, self.watch, self.traffic, self.say = fleet, watch, traffic, say
        self.network, self.said, self.liars_host = threading.Lock(), set(), []
        self.redis = fleet.redis

    def do(self, lane, step, ending):
        return getattr(self, step.kind.replace(' ', '_'))(lane, step, ending)

    def cannot(self, what, why):
        if what not in self.said:
            self.said.add(what)
            self.say(f'LEFT OUT: {what}: {why}')

    def members(self, lane):
        return {'prefill': self.fleet.prefill, 'decode': self.fleet.decode, 'edge': self.fleet.routers}[lane]

    # ---- one process ----

    def back(self, m, extra=None):
        """Starts a member that has ended, and waits until it serves."""
        self.fleet.restart(m, extra)
        self.fleet.wait_ready_again(m, RESTART_S)

    @contextlib.contextmanager
    def dead(self, m, kind='kill'):
        """The member is dead inside; how it comes back is up to the caller, in the same hit."""
        self.watch.look(m)
        with m.hit(kind):
            m.kill()
            m.p.wait()
            yield

    def kill(self, lane, step, ending):
        m = step.pick(self.members(lane))
        with self.dead(m):
            ending.wait(min(step.seconds, 3.0))
            self.back(m)
        return f'{m.name} killed'

    def stop(self, lane, step, ending):
        m = step.pick(self.members(lane))
        with m.hit('stop'):
            m.kill(signal.SIGSTOP)
            ending.wait(step.seconds)
            m.kill(signal.SIGCONT)
        return f'{m.name} stopped for {step.seconds:.1f} s'

    def with_env(self, m, extra, seconds, ending, kind):
        """Kills a member and starts it with a fault that it injects into itself; kills it again afterwards."""
        with self.dead(m):
            self.back(m, extra)
        with m.hit(kind):
            ending.wait(seconds)
            with self.dead(m):
                self.back(m)

    def hang(self, lane, step, ending):
        m, at = step.pick(self.members(lane)), HANG_STEPS[0] + int(step.choice * HANG_STEPS[1])
        self.with_env(m, {'BATON_ENGINE_FAULT': f'hang@{at}'}, step.seconds + 4, ending, 'sick')
        return f'{m.name} with an engine that hangs in step {at}'

    def slow(self, lane, step, ending):
        m = step.pick(self.members(lane))
        self.with_env(m, {'BATON_ENGINE_FAULT': f'slow@{HANG_STEPS[0]}:{SLOW_BY}'}, step.seconds, ending, 'sick')
        return f'{m.name} with an engine {SLOW_BY} times as slow'

    def kv(self, lane, step, ending):
        m, plan = step.pick(self.members(lane)), step.choose(KV_PLANS)
        self.with_env(m, {'BATON_KV_FAULT': plan}, step.seconds, ending, 'sick')
        return f'{m.name} with BATON_KV_FAULT={plan}'

    def drain(self, lane, step, ending):
        m = step.pick(self.members(lane))
        self.watch.look(m)
        with m.hit('drain'):
            status = self.fleet.drain(m)
            self.back(m)
        assert status == 0, f'{m.name} ended with {status} after SIGTERM:\n{m.output()[-2000:]}'
        return f'{m.name} told to end, and started again'

    def role(self, lane, step, ending):
        """Another role for a while, as an operator would; the node's work goes on."""
        m = step.pick(self.members(lane))
        refused = self.fleet.set_role(m, step.choose(('mixed', OTHER_ROLE[m.role])))
        if refused:     # the others are down, or out of the directory
            return f'{m.name} was refused another role: {refused}'
        ending.wait(min(step.seconds, 5.0))
        back = wait_until('the role of before', lambda: not self.fleet.set_role(m, m.role) and 'back', RESTART_S)
        return f'{m.name} had another role, and is {back}'

    def descriptors(self, lane, step, ending):
        m = step.pick(self.members(lane))
        before = resource.prlimit(m.p.pid, resource.RLIMIT_NOFILE)
        few = len(os.listdir(f'/proc/{m.p.pid}/fd')) + DESCRIPTORS_LEFT
        with m.hit('descriptors'):
            resource.prlimit(m.p.pid, resource.RLIMIT_NOFILE, (few, before[1]))
            ending.wait(min(step.seconds, 8.0))
            resource.prlimit(m.p.pid, resource.RLIMIT_NOFILE, before)
        return f'{m.name} without descriptors'

    def disk(self, lane, step, ending):
        m = step.pick(self.members(lane))
        if not m.log_folder:
            return self.cannot('a full disk under the log', 'without namespaces no disk can be mounted')
        filler = f'{m.log_folder}/filler'
        with open(filler, 'wb', buffering=0) as f, contextlib.suppress(OSError):
            while True:
                f.write(bytes(512))
        ending.wait(step.seconds)
        os.unlink(filler)
        return f'the disk under the log of {m.name} full'

    # ---- the network ----

    def cut(self, lane, step, ending):
        m = step.pick(self.members(lane))
        if not self.fleet.hosts.separate:
            return self.cannot('a node without a network', self.fleet.hosts.why)
        with self.network:
            way = step.choose(('silent', 'carrier'))
            with m.hit('cut'):
                m.host.cut(way)
                ending.wait(min(step.seconds, 12.0))
                m.host.join()
        return f'{m.name} without a network, {way}'

    def pair(self, lane, step, ending):
        a, b = step.pick(self.fleet.prefill), step.choose(self.fleet.decode)
        if not self.fleet.hosts.separate:
            return self.cannot('a pair of nodes that do not reach each other', self.fleet.hosts.why)
        with self.network:
            with a.hit('pair'), b.hit('pair'):
                a.host.cut_from(b.host)
                b.host.cut_from(a.host)
                ending.wait(min(step.seconds, 15.0))
                a.host.cut_from(b.host, False)
                b.host.cut_from(a.host, False)
        return f'{a.name} and {b.name} apart'

    def half(self, lane, step, ending):
        """Every other member, with the replica, on one side, the rest on the other."""
        if not self.fleet.hosts.separate:
            return self.cannot('two halves of a cluster', self.fleet.hosts.why)
        odd = int(step.choice * 2)
        away = [m for i, m in enumerate(self.fleet.members) if i % 2 == odd]
        with self.network, contextlib.ExitStack() as hits:
            for m in away:
                hits.enter_context(m.hit('half'))
                m.host.move_to('other')
            ending.wait(min(step.seconds, 8.0))
            for m in away:
                m.host.move_to('switch')
        return f'{len(away)} members cut off from the others'

    # ---- Redis ----

    def redis_whole(self):
        wait_until('Redis has a master and a replica', self.redis.is_whole, RESTART_S)

    def redis_kill(self, lane, step, ending):
        s = self.redis.master()
        self.redis.kill(s)
        ending.wait(step.seconds)
        self.redis.start(s)
        self.redis_whole()
        return f'{s.name} killed, back after {step.seconds:.1f} s'

    def redis_pause(self, lane, step, ending):
        s = self.redis.master()
        self.redis.pause(s)
        ending.wait(step.seconds)
        self.redis.go_on(s)
        self.redis_whole()
        return f'{s.name} stopped for {step.seconds:.1f} s'

    def redis_flush(self, lane, step, ending):
        self.redis.flush()
        return 'Redis flushed'

    def redis_failover(self, lane, step, ending):
        s = self.redis.master()

        def is_another():   # a sentinel refuses while it knows of no good replica, as after a jump of its clock
            self.redis.sentinels[0].ask('SENTINEL', 'failover', 'mymaster')
            return wait_until('another master', lambda: self.redis.master() is not s, FAILOVER_S)
        wait_until('another master', is_another, RESTART_S)
        self.redis_whole()
        return f'failed over from {s.name}'

    def redis_lose_tail(self, lane, step, ending):
        s = self.redis.lose_tail(min(step.seconds, 3.0))
        wait_until('another master', lambda: self.redis.master() is not s, RESTART_S)
        self.redis.start(s)
        self.redis_whole()
        return f'failed over from {s.name} without its tail'

    def redis_clock(self, lane, step, ending):
        if not self.redis.clock:
            return self.cannot("a wall clock of Redis' host that jumps", 'libfaketime is not installed')
        hour = 3600 if step.choice < 0.5 else -3600
        self.redis.move_clock(hour)
        ending.wait(step.seconds)
        self.redis.move_clock(0)
        return f"the clock of Redis' host off by {hour} s"

    # ---- clients ----

    def storm(self, lane, step, ending):
        n = self.traffic.storm(step)
        return f'{n} clients left at once'

    def proxy(self, lane, step, ending):
        if not self.fleet.proxies:
            return self.cannot('a proxy before a node', self.fleet.hosts.why)
        m = step.pick(sorted(self.fleet.proxies, key=lambda m: m.name))
        p, what = self.fleet.proxies[m], step.choose(('delay', 'stall', 'cut'))
        with m.hit('proxy'):
            if what == 'cut':
                p.cut()
            else:
                p.set((what, DELAYS_S[0] + step.choice * (DELAYS_S[1] - DELAYS_S[0])))
                ending.wait(min(step.seconds, 8.0))
                p.set(None)
        return f'what goes to {m.name}: {what}'

    def lies(self, lane, step, ending):
        if liar.why_not():
            return self.cannot('a node that lies', liar.why_not())
        if not self.liars_host:
            self.liars_host.append(self.fleet.hosts.host())
        role = step.choose(list(liar.LIES))
        with closing(liar.Liar(self.liars_host[0], self.redis, role, step.target)) as node:
            n, of = node.wait(max(step.seconds, LIES_S), ending, lambda: self.traffic.bait(step))
        return f'a liar of role {role} told {n} of {of} lies'
