"""redis_servers.py - Redis as it is run for good: replicas and sentinels, TLS with certificates made here, an ACL user. Beside harness.py."""
from harness import *


def certificates(folder, hosts=('127.0.0.1',)):
    """ca.pem signs server.pem, which is for these addresses and localhost; other_ca.pem signs nothing."""
    if not shutil.which('openssl'):
        raise Skip('the openssl command is not installed: TLS with Redis was NOT tested')
    key = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes']

    def run(*words):
        subprocess.run(['openssl', *words], cwd=folder, check=True, capture_output=True)
    for ca in ('ca', 'other_ca'):
        run('req', '-x509', *key, '-keyout', f'{ca}.key', '-out', f'{ca}.pem', '-subj', f'/CN={ca}', '-days', '2')
    run('req', *key, '-keyout', 'server.key', '-out', 'server.csr', '-subj', '/CN=server')
    with open(f'{folder}/names', 'w') as f:
        f.write('subjectAltName=' + ','.join(f'IP:{h}' for h in sorted({'127.0.0.1', *hosts})) + ',DNS:localhost\n')
    run('x509', '-req', '-in', 'server.csr', '-CA', 'ca.pem', '-CAkey', 'ca.key', '-CAcreateserial', '-out', 'server.pem', '-days', '2', '-extfile', 'names')


def tls_lines(folder, port):
    return [f'port 0\ntls-port {port}', f'tls-cert-file {folder}/server.pem', f'tls-key-file {folder}/server.key', f'tls-ca-cert-file {folder}/ca.pem', 'tls-auth-clients no',
            'tls-replication yes']


def rights_of_the_documents(password):
    """The user that docs/security.md shows, as one line of redis.conf."""
    with open(os.path.join(HERE, '..', '..', 'docs', 'security.md'), encoding='utf-8') as f:
        text = f.read()
    start = text.index('    user baton on >PASSWORD')
    return ' '.join(text[start:text.index('\n\n', start)].split()).replace('PASSWORD', password)


class Server(Process):
    """A redis-server, or a sentinel, with a file of its own. `inside` is how redis-cli gets in."""

    def __init__(self, lines, port=None, tls=None, inside=(), sentinel=False):
        if not shutil.which('redis-server') or not shutil.which('redis-cli'):
            raise Skip('redis-server is not installed')
        self.port, self.dir = port or free_ports(1)[0], tempfile.mkdtemp(prefix='baton-redis-')
        self.inside = [*(['--tls', '--cacert', f'{tls}/ca.pem'] if tls else []), *inside]
        conf = f'{self.dir}/redis.conf'
        with open(conf, 'w') as f:
            f.write('\n'.join([f'dir {self.dir}', 'bind 127.0.0.1', *([] if sentinel else ['save ""', 'repl-diskless-sync-delay 0']),
                               *(tls_lines(tls, self.port) if tls else [f'port {self.port}']), *lines]) + '\n')
        super().__init__(['redis-server', conf, *(['--sentinel'] if sentinel else [])], name='sentinel' if sentinel else 'redis')
        wait_until(f'{self.name} up', lambda: self.ask('PING') == 'PONG', 10)

    def ask(self, *words):
        return subprocess.run(['redis-cli', '-p', str(self.port), *self.inside, *words], capture_output=True, text=True, timeout=10).stdout.strip()

    def close(self):
        super().close()
        shutil.rmtree(self.dir, ignore_errors=True)


@contextlib.contextmanager
def failover_pair(down_after_ms=500):
    """A master, its replica, and the sentinel that watches them: (master, replica, sentinel)."""
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(closing(Server([])))
        replica = stack.enter_context(closing(Server([f'replicaof 127.0.0.1 {master.port}'])))
        wait_until('the replica follows', lambda: 'master_link_status:up' in replica.ask('INFO', 'replication'), 15)
        sentinel = stack.enter_context(closing(Server(
            [f'sentinel monitor mymaster 127.0.0.1 {master.port} 1', f'sentinel down-after-milliseconds mymaster {down_after_ms}', 'sentinel failover-timeout mymaster 4000'],
            sentinel=True)))
        wait_until('the sentinel knows the replica', lambda: 'slaves=1' in sentinel.ask('INFO', 'sentinel'), 15)
        yield master, replica, sentinel
