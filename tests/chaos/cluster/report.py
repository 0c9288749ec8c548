"""report.py - what a run says at its end: counts, times beside their limits, cells and transitions; the exit status is made of the counts."""
import collections
from . import cells
from .checker import DETECT_S, GO_ON_S, quantile


def over(value, limit):
    return '' if value <= limit else f'  OVER THE LIMIT of {limit:g} s'


def spread(values):
    return f'p50 {quantile(values, 0.5):.3f}, p99 {quantile(values, 0.99):.3f}, max {max(values, default=0):.3f} s of {len(values)}'


def print_verdicts(v, n):
    print(f'{n} requests: ' + ', '.join(f'{c} {k}' for k, c in sorted(v.counts.items())), flush=True)
    for why, c in v.allowed.items():
        print(f'  {c} failed, allowed: {why}')
    for kind in ('wrong', 'repeated', 'lost', 'hung', 'failed', 'leaked'):
        print(f'  {kind}: {v.counts[kind]}')
    print(f'  descriptors and memory compared with those when it was ready: {v.compared[0]} members, {v.compared[1]} of them started again in between')
    for kind, text in v.bad[:20]:
        print(f'BAD {kind}: {text}')


def print_times(found, unnoticed, n_unknown, going, done):
    """Returns whether a loss was noticed too late, or by nobody."""
    times = [s for s, *_ in found]
    print(f'noticed (limit {DETECT_S:g} s): {spread(times)}{over(max(times, default=0), DETECT_S)}')
    for kind in sorted({k for _, k, *_ in found}):
        print(f'  {kind}: {spread([s for s, k, *_ in found if k == kind])}')
    for s, kind, m, o in sorted(found, reverse=True)[:3]:
        if s > DETECT_S:
            print(f'  late: {kind} of {m}, noticed by {o} after {s:.2f} s')
    print(f'  noticed by nobody, though others had a link to it and were well: {len(unnoticed)}')
    for kind, m, able, _ in sorted(unnoticed, key=lambda u: u[3]):
        print(f'    {kind} of {m}, by {", ".join(able)}')
    print(f'  not known, since their logs had said the same within a minute: {n_unknown}')
    alone = [s for s, _, _, broken, _ in going if broken <= 1]
    print(f'gone on elsewhere after it was noticed, with all other nodes and Redis well (limit {GO_ON_S:g} s): {spread(alone)}{over(max(alone, default=0), GO_ON_S)}')
    print(f'  with several broken at a time: {spread([s for s, _, _, broken, _ in going if broken > 1])}')
    for s, name, state, broken, at in sorted(going, reverse=True):
        if s > GO_ON_S and broken <= 1:
            meanwhile = [f'{what} from {begin - at:+.1f} to {end - at:+.1f} s' for begin, end, _, _, what in done if begin < at + s and end > at - 4]
            print(f'  late: {name} in {state} after {s:.2f} s; beside it: {"; ".join(meanwhile) or "nothing"}')
    return bool(unnoticed) or max(times, default=0) > DETECT_S


def print_cells(watch, needs_all):
    """Cells taken. Returns those that were not, where all are needed."""
    losses = watch.losses()
    print('cells of the recovery table taken (state, loss, action: how often):' + ('' if losses else ' none'))
    by_state = collections.defaultdict(list)
    for (state, loss, action), n in sorted(losses.items()):
        by_state[state].append(f'{loss} {action} {n}')
    for state, what in by_state.items():
        print(f'  {state}: ' + ', '.join(what))
    print('  transitions of breakers: ' + (', '.join(f'{scope} to {to} {n}' for (scope, to), n in sorted(watch.breakers().items())) or 'none'))
    if not needs_all:
        return []
    missing = cells.not_taken(losses)
    print(f'  not taken, of {len(cells.table())} cells that are not "ignore": ' + (', '.join(f'{s}/{l}' for s, l in missing) or 'none'), flush=True)
    return missing


def append_cells(path, watch):
    with open(path, 'a', encoding='utf-8') as f:
        f.writelines(f'{state} {loss} {action}\n' for state, loss, action in watch.losses())


def print_file(path):
    """Which cells several runs together have not taken. Returns the exit status."""
    with open(path, encoding='utf-8') as f:
        missing = cells.not_taken(tuple(line.split()) for line in f)
    print(f'{len(cells.table()) - len(missing)} of {len(cells.table())} cells that are not "ignore" were taken; not: ' + (', '.join(f'{s}/{l}' for s, l in missing) or 'none'), flush=True)
    return int(bool(missing))


def print_script(adversary):
    n = collections.Counter(kind for *_, kind, _ in adversary.done)
    print('done to it: ' + ', '.join(f'{k} {c}' for k, c in sorted(n.items())), flush=True)


def print_history(adversary, since):
    """All that was done, when."""
    for begin, end, lane, kind, what in sorted(adversary.done):
        print(f'  {begin - since:6.1f} to {end - since:6.1f} s, {lane}: {what}')
