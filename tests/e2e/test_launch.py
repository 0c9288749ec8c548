"""What `launch` and the nodes it starts promise whatever the size of things: ready in a topic of thousands, descriptors for all connections."""
import re, resource
from harness import *

SIZE = ['--max-model-len', '512', '--max-num-seqs', '4', '--num-gpu-blocks-override', '40']

# Copies a node's record until the topic has 2,500 of them, each under an id of its own.
CROWD = '''
local P, n = 'baton:{default}:', 0
local id, lease = unpack(redis.call('ZRANGE', P .. 'alive', 0, 0, 'WITHSCORES'))
local key = P .. 'node:' .. id
local record = redis.call('HGET', key, 'record')
for i = 1, 2500 do
  local other = string.format('%016x', 0xabc000000 + i)
  redis.call('HSET', P .. 'node:' .. other, 'record', (record:gsub(id, other)), 'role', redis.call('HGET', key, 'role'),
             'max_seqs', redis.call('HGET', key, 'max_seqs'), 'n_blocks', redis.call('HGET', key, 'n_blocks'))
  redis.call('PEXPIRE', P .. 'node:' .. other, 120000)
  n = n + redis.call('ZADD', P .. 'alive', lease + 120000, other)
end
return n
'''


def test_launch_says_ready_in_a_topic_of_thousands():
    with closing(Redis()) as redis:
        meet = ['--scheduler-name', 'splitwise', '--scheduler-port', str(redis.port), *SIZE]
        with closing(Node(TINY, 'prefill', meet)) as first:
            wait_until('the first node is registered', lambda: redis.command('ZCARD', 'baton:{default}:alive') == b':1', 30)
            assert redis.command('EVAL', CROWD, '0') == b':2500'
            wait_until('a large view', lambda: request(first.port, 'GET', '/cluster/self')[2].get('n_nodes', 0) > 2500)
            body = request(first.port, 'GET', '/cluster')[2]
            assert len(json.dumps(body)) > 1 << 20 and body['n_nodes'] == len(body['nodes'])
            port = free_ports(1)[0]
            l = Process([BIN, 'launch', '--model', TINY, '--served-model-name', 'm', '--decode', '1', '--ports', str(port), *meet], name='launch')
            with closing(l):
                wait_until('launch ready', lambda: 'ready: all 1 nodes' in l.output() or not l.alive(), 60)
                assert l.alive(), l.output()
                told = request(port, 'GET', '/cluster/self')[2]
                assert 'nodes' not in told and told['role'] == 'decode' and len(json.dumps(told)) < 4096, told


def limits_of(pid):
    with open(f'/proc/{pid}/limits') as f:
        return [int(n) for n in re.search(r'^Max open files\s+(\d+)\s+(\d+)', f.read(), re.M).groups()]


def with_limits(soft, hard, argv, name):
    return Process(['bash', '-c', f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$0" "$@"', *argv], name=name)


def test_nodes_raise_their_limit_of_descriptors_and_say_if_it_is_too_low():
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 12000)
    if hard < 1000:
        raise Skip(f'the hard limit of open files is {hard} here; it takes 1000')
    ports = free_ports(3)
    serve = [BIN, 'serve', '--model', TINY, '--host', '127.0.0.1', '--compute-threads', '1', *SIZE]
    well = with_limits(64, hard, [*serve, '--port', str(ports[0]), '--max-connections', str(hard - 256)], 'enough')
    few = with_limits(64, 500, [*serve, '--port', str(ports[1]), '--max-connections', '300'], 'few')
    l = with_limits(64, hard, [BIN, 'launch', '--model', TINY, '--num-servers', '1', '--ports', str(ports[2]), *SIZE], 'launch')
    well.port, few.port, l.port = ports
    with closing(well, few, l):
        wait_ready(well, few, l)
        for node, limit in (well, hard), (few, 500), (l, hard):
            pids = {node.p.pid, pid_of_port(node.port) or node.p.pid}
            assert [limits_of(pid) for pid in pids] == [[limit, limit]] * len(pids), node.name
        says = 'too few open files allowed=500 wanted=556 why="--max-connections 300 promises more connections'
        assert says in few.output() and 'too few open files' not in well.output(), few.output()
        # More clients at once than the soft limit that it was started with.
        clients = [socket.create_connection(('127.0.0.1', well.port), timeout=10) for _ in range(200)]
        for c in clients:
            c.sendall(b'GET /live HTTP/1.1\r\nHost: x\r\n\r\n')
        assert all(c.recv(100).startswith(b'HTTP/1.1 200') for c in clients)
        for c in clients:
            c.close()
