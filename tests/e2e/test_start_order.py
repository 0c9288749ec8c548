"""Nodes, a router and what holds their view, started in every order: each waits for the others, and then requests are split. test_kv_faults.py has the orders of nodes alone."""
import itertools

from harness import *
from test_kv_faults import SIZE
from test_router import Router, both_roles, up


def serves(router, nodes):
    wait_ready(*nodes, router)
    both_roles(router.port, len(nodes))
    assert [x.stop() for x in (*nodes, router)] == [0] * (1 + len(nodes))


def nodes_with(*args):
    return [Node(TINY, role, ['--cache-transfer-protocol', 'tcp', *SIZE, *args]) for role in ('prefill', 'decode')]


ALL = set(itertools.permutations(('redis', 'router', 'nodes')))
SOME = {('nodes', 'router', 'redis'), ('router', 'redis', 'nodes')}


def started_in(orders):
    for order in sorted(orders):
        port = free_ports(1)[0]
        where = ['--scheduler-name', 'splitwise', '--scheduler-host', '127.0.0.1', '--scheduler-port', str(port)]
        with contextlib.ExitStack() as stack:
            for what in order:
                if what == 'redis':
                    stack.enter_context(closing(Redis(port)))
                elif what == 'router':
                    router = stack.enter_context(closing(Router(*where)))
                    up(router)
                else:
                    nodes = nodes_with(*where)
                    stack.enter_context(closing(*nodes))
                    for n in nodes:
                        wait_until(f'{n.name} lives', lambda: request(n.port, 'GET', '/live', timeout=2)[0] == 200)
                time.sleep(0.3)
            t0 = time.monotonic()
            serves(router, nodes)
            print(f'  {", ".join(order)}: served {time.monotonic() - t0:.1f} s after the last', flush=True)


def test_redis_router_and_nodes_in_two_orders():
    started_in(SOME)


def test_redis_router_and_nodes_in_the_other_orders_long():
    started_in(ALL - SOME)


def test_a_router_that_holds_the_view_may_come_last():
    port = free_ports(1)[0]
    nodes = nodes_with('--router', f'127.0.0.1:{port}')
    with closing(*nodes):
        for n in nodes:
            wait_until(f'{n.name} lives', lambda: request(n.port, 'GET', '/live', timeout=2)[0] == 200)
        time.sleep(0.5)
        with closing(Router(port=port)) as router:
            serves(router, nodes)
