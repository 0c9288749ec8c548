"""mode_quiet.py - nothing happens to the nodes but that both cores are busy; or nothing but that an engine hangs."""
import os, subprocess, sys, time
from harness import wait_until
from .checker import DETECT_S
from .logs import Logs
from .run import conclude
from .single import Run, say


def calm(hosts, seconds, seed):
    """Both cores are busy for so long, and nobody is lost."""
    burners = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(os.cpu_count())]
    try:
        run = Run(hosts, 100, seed)
        with run.fleet() as fleet:
            t = run.traffic(fleet, clients=4, endless=True)
            time.sleep(seconds)
            t.finish()
            status, _ = conclude(fleet, t, run.refs, run.watch)
            logs = Logs(fleet.members)
            lost = sum(len(lines) for m in fleet.members for lines in logs.losses_of(m).values())
            print(f'calm: {seconds:.0f} s with {len(burners)} burners on {os.cpu_count()} cores: {lost} peers lost (limit 0)' + ('  OVER THE LIMIT' if lost else ''), flush=True)
            return status or int(lost > 0)
    finally:
        for b in burners:
            b.kill()
            b.wait()


def hang(hosts, n, seed):
    """The engine of each node in turn hangs while its loop lives."""
    run = Run(hosts, n, seed)
    with run.fleet() as fleet:
        t = run.traffic(fleet, endless=True)
        for m in fleet.nodes:
            with m.hit('kill'):
                m.kill()
                fleet.restart(m, {'BATON_ENGINE_FAULT': 'hang@30'})
                fleet.wait_ready_again(m)
            with m.hit('sick'):
                hangs = wait_until(f'the engine of {m.name} hangs', lambda m=m: hung_at(m), 60)
                wait_until('another one notices', lambda m=m, hangs=hangs: found_at(fleet, m, hangs), 20)
                run.watch.look(m)
            with m.hit('kill'):
                m.kill()
                fleet.restart(m)
                fleet.wait_ready_again(m)
        t.finish(n)
        status, _ = conclude(fleet, t, run.refs, run.watch)
        times = [found_at(fleet, m, hung_at(m)) - hung_at(m) for m in fleet.nodes]
        say('hang: an engine that hangs under a living loop is noticed after at most', max(times), DETECT_S)
        print('  ' + ', '.join(f'{m.name} {s:.2f} s' for m, s in zip(fleet.nodes, times)))
        return status


def hung_at(m):
    return next((l.at for l in Logs([m]).of[m] if l.text.startswith('engine hangs')), None)


def found_at(fleet, m, since):
    """When the first of the others said that its engine makes no progress."""
    found = [l.at for lines in Logs([o for o in fleet.members if o is not m]).of.values() for l in lines
             if l.text.startswith('peer lost') and 'made no progress' in l.text and f'peer={m.known_as()} ' in l.text and l.at >= since]
    return min(found, default=None)
