"""mode_rolling.py - every node, router and server of Redis is told to end and started again in turn, and roles change, under load: no request fails."""
import signal, time
from harness import wait_until
from .run import conclude
from .single import Run

ROLE_CHANGES = 20


def rolling(hosts, n, seed):
    """Every node, router and Redis server is told to end and started again in turn, and roles change, under load."""
    run = Run(hosts, n, seed)
    with run.fleet() as fleet:
        done, t = [], run.traffic(fleet, endless=True)
        try:
            restart_all(fleet, done)
            change_roles(fleet, done)
        finally:
            t.finish(n)
        status, _ = conclude(fleet, t, run.refs, run.watch)
        failed = sum(h.verdict not in ('complete', 'left') for h in t.histories)
        print(f'rolling: {", ".join(done)}; {len(t.histories)} requests, {failed} failed (limit 0)' + ('  OVER THE LIMIT' if failed else ''), flush=True)
        return status or int(failed > 0)


def restart_all(fleet, done):
    for m in fleet.members:
        with m.hit('rolling'):
            status = fleet.drain(m)
            assert status == 0, f'{m.name} ended with {status} after SIGTERM:\n{m.output()[-2000:]}'
            fleet.restart(m)
            fleet.wait_ready_again(m)
    for s in fleet.redis.all():
        s.kill(signal.SIGTERM)
        s.p.wait(20)
        s.start()
        wait_until('Redis has a master and a replica', fleet.redis.is_whole, 60)
    done.append(f'{len(fleet.members)} members and {len(fleet.redis.all())} of Redis ended and started')


def change_roles(fleet, done):
    roles = {m: m.role for m in fleet.nodes}
    for i in range(ROLE_CHANGES // 2):
        m = fleet.nodes[i % len(fleet.nodes)]
        for role in ('mixed' if i % 3 == 2 else 'decode' if m.role == 'prefill' else 'prefill', roles[m]):
            refused = fleet.set_role(m, role)
            assert not refused, refused
            time.sleep(1.5)
    done.append(f'{ROLE_CHANGES // 2 * 2} role changes')
