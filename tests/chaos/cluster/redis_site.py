"""redis_site.py - Redis as it is run for good: a master, its replica and three sentinels, each on its own host; plain or with TLS and an ACL user.

Servers keep their files when they are killed, so that one comes back at its address; it has no data then, for nothing is saved.
Thread: one thread changes the site at a time; ask() may be called by any."""
import glob, os, shutil, signal, subprocess, tempfile, time
from harness import Process, Skip, wait_until
from redis_servers import certificates, rights_of_the_documents

MASTER, DOWN_AFTER_MS, QUORUM = 'mymaster', 1000, 2
PASSWORD = 's3cret'


def faketime():
    """The library that gives a process a wall clock of its own; None: it is not installed."""
    found = glob.glob('/usr/lib/*/faketime/libfaketimeMT.so.1')
    return found[0] if found else None


class RedisProcess(Process):
    def __init__(self, host, name, lines, site, sentinel=False, clock=None):
        self.host, self.site, self.port = host, site, host.redis
        self.dir = tempfile.mkdtemp(prefix='baton-redis-')
        conf = f'{self.dir}/redis.conf'
        with open(conf, 'w') as f:
            f.write('\n'.join([f'dir {self.dir}', 'bind 0.0.0.0', 'protected-mode no', *([] if sentinel else ['save ""', 'repl-diskless-sync-delay 0']),
                               *site.tls_lines(self.port), *lines]) + '\n')
        env = {}
        if clock:
            env = dict(LD_PRELOAD=f'{faketime()}:libc.so.6', FAKETIME_TIMESTAMP_FILE=clock, FAKETIME_NO_CACHE='1', FAKETIME_DONT_FAKE_MONOTONIC='1')
        self.sentinel = sentinel
        super().__init__([*host.enter, *(['env', *[f'{k}={v}' for k, v in env.items()]] if env else []), 'redis-server', conf, *(['--sentinel'] if sentinel else [])], name=name)
        wait_until(f'{name} up', lambda: self.ask('PING') == 'PONG', 15)

    def start(self):
        with self.host.processes():
            super().start()

    def ask(self, *words, timeout=3):
        """The answer's text; '' where there is none."""
        inside = self.site.inside[:3] if self.sentinel else self.site.inside
        try:
            p = subprocess.run(['redis-cli', '-h', self.host.address, '-p', str(self.port), *inside, *words], capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return ''
        return p.stdout.strip()

    def close(self):
        super().close()
        shutil.rmtree(self.dir, ignore_errors=True)


class RedisSite:
    """`clock`: the wall clock of the master's and the replica's host can be moved (faketime)."""

    def __init__(self, hosts, tls=False, clock=False):
        for program in ('redis-server', 'redis-cli'):
            if not shutil.which(program):
                raise Skip(f'{program} is not installed')
        self.tls = tempfile.mkdtemp(prefix='baton-tls-') if tls else None
        self.clock = self.make_clock() if clock else None
        places = [hosts.host() for _ in range(5)]
        if tls:
            certificates(self.tls, [p.address for p in places])
        self.inside = ['--tls', '--cacert', f'{self.tls}/ca.pem', '--user', 'admin', '--pass', 'admin', '--no-auth-warning'] if tls else []
        users = [rights_of_the_documents(PASSWORD), 'user default off', 'user admin on >admin ~* &* +@all', 'masteruser admin', 'masterauth admin'] if tls else []
        self.first = RedisProcess(places[0], 'redis-a', users, self, clock=self.clock)
        self.second = RedisProcess(places[1], 'redis-b', [*users, f'replicaof {places[0].address} {places[0].redis}'], self, clock=self.clock)
        wait_until('the replica follows', self.follows, 20)
        watch = [f'sentinel monitor {MASTER} {places[0].address} {places[0].redis} {QUORUM}', f'sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}',
                 f'sentinel failover-timeout {MASTER} 4000', *([f'sentinel auth-user {MASTER} admin', f'sentinel auth-pass {MASTER} admin'] if tls else [])]
        self.sentinels = [RedisProcess(p, f'sentinel-{i}', watch, self, sentinel=True) for i, p in enumerate(places[2:])]
        wait_until('the sentinels know each other and the replica', lambda: all('slaves=1,sentinels=3' in s.ask('INFO', 'sentinel') for s in self.sentinels), 30)
        self.servers = [self.first, self.second]

    # ---- how it is reached ----

    def make_clock(self):
        if not faketime():
            raise Skip('libfaketime is not installed: a wall clock that jumps was NOT tested')
        fd, path = tempfile.mkstemp(prefix='baton-clock-')
        os.write(fd, b'+0')
        os.close(fd)
        return path

    def tls_lines(self, port):
        if not self.tls:
            return [f'port {port}']
        return ['port 0', f'tls-port {port}', f'tls-cert-file {self.tls}/server.pem', f'tls-key-file {self.tls}/server.key', f'tls-ca-cert-file {self.tls}/ca.pem',
                'tls-auth-clients no', 'tls-replication yes']

    def args(self):
        """The options of a node that uses this site."""
        where = ','.join(f'{s.host.address}:{s.port}' for s in self.sentinels)
        return ['--scheduler-name', 'splitwise', '--scheduler-sentinels', where, '--scheduler-master', MASTER,
                *(['--scheduler-tls', '--scheduler-tls-ca', f'{self.tls}/ca.pem'] if self.tls else [])]

    def env(self):
        return dict(BATON_REDIS_USERNAME='baton', BATON_REDIS_PASSWORD=PASSWORD) if self.tls else {}

    # ---- what it is now ----

    def all(self):
        return [*self.servers, *self.sentinels]

    def follows(self):
        return 'master_link_status:up' in self.second.ask('INFO', 'replication')

    def master(self):
        """The server that the sentinels name."""
        for s in self.sentinels:
            if not s.alive():
                continue
            words = s.ask('SENTINEL', 'get-master-addr-by-name', MASTER).split()
            found = [r for r in self.servers if words == [r.host.address, str(r.port)]]
            if found:
                return found[0]
        raise AssertionError('no sentinel names a master')

    def replica(self):
        master = self.master()  # asked once: it may change between two questions
        return next(r for r in self.servers if r is not master)

    def ask(self, *words):
        return self.master().ask(*words)

    def is_whole(self):
        """A master that the sentinels name, which is one, and a replica that follows it."""
        m = self.master()
        return m.alive() and 'role:master' in m.ask('INFO', 'replication') and 'master_link_status:up' in self.replica().ask('INFO', 'replication')

    # ---- what is done to it ----

    def kill(self, server):
        server.kill()
        server.p.wait()

    def start(self, server):
        if not server.alive():
            server.start()

    def pause(self, server):
        server.kill(signal.SIGSTOP)

    def go_on(self, server):
        server.kill(signal.SIGCONT)

    def flush(self):
        self.master().ask('FLUSHALL')

    def lose_tail(self, seconds=2.0):
        """The replica does not get what is written from now on, and after `seconds` the master dies: its replica becomes the master without them."""
        master, replica = self.master(), self.replica()
        replica.ask('REPLICAOF', replica.host.address, '1')     # nobody listens there
        time.sleep(seconds)
        self.kill(master)
        return master

    def move_clock(self, seconds):
        with open(self.clock, 'w') as f:
            f.write(f'{seconds:+d}')

    def close(self):
        for p in reversed(self.all()):
            p.close()
        if self.tls:
            shutil.rmtree(self.tls, ignore_errors=True)
        if self.clock:
            os.unlink(self.clock)
