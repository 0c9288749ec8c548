"""checker.py - what is right: each answer is its reference, nobody is left waiting, nothing is left behind, and losses are noticed and got over in time.

Counts decide about a run (Verdicts.bad); times are told with their limits. Thread: one, after the clients are done."""
import collections, http.client, time
from harness import wait_until
from .logs import Logs
from .traffic import is_beginning, judge

DETECT_S, GO_ON_S = 3.0, 1.0
FDS_SLACK, MEMORY_MIB, IDLE_S = 24, 96, 60
# What may be done to a member so that a request ends with its connection.
ENDS_CONNECTIONS = ('kill', 'drain', 'descriptors', 'cut')
STILL = ('kill', 'drain', 'stop', 'sick', 'cut', 'pair', 'half', 'descriptors', 'proxy')     # a member that notices late
NOTICED = ('kill', 'stop', 'cut', 'half', 'hang')


def quantile(values, q):
    values = sorted(values)
    return values[min(len(values) - 1, int(q * len(values)))] if values else 0.0


class Verdicts:
    """counts: of every kind of ending; bad: (kind, sentence) of those that must not be."""

    def __init__(self):
        self.counts, self.bad, self.allowed = collections.Counter(), [], collections.Counter()

    def add_bad(self, kind, text):
        self.counts[kind] += 1
        self.bad.append((kind, text))


PASSED_AWAY = 'the one to which the request was passed, is gone'


def some_was_killed(fleet, attempt):
    return any(m.was_hit(ENDS_CONNECTIONS, attempt.begin - 0.5, attempt.end + 0.5) for m in fleet.members)


def why_allowed(fleet, h):
    """Why this request may have failed; None: it may not."""
    last = h.attempts[-1]
    entry_hit = last.entry.was_hit(ENDS_CONNECTIONS, last.begin - 0.5, last.end + 0.5)
    if 'told by the adversary' in last.text:
        return 'refused as the script says'
    if not h.plan.resumes and last.how == 'told' and PASSED_AWAY in last.text and some_was_killed(fleet, last):
        return 'the node to which its entry had passed it was killed, and it did not ask to resume'
    if not h.plan.resumes and last.how == 'cut' and entry_hit:
        return 'its entry was killed, and it did not ask to resume'
    return None


def check_answers(fleet, histories, references):
    v = Verdicts()
    for h in histories:
        want, about = references[h.plan.body], f'{h.plan.name} (body {h.plan.body}): {h.says()[-400:]}'
        if h.verdict == 'complete':
            wrong = judge(h.answers, want)
            if wrong:
                v.add_bad(wrong[0], f'{about}: {wrong[1]}')
            else:
                v.counts['complete'] += 1
            continue
        if not is_beginning(h.answers, want):
            v.add_bad('wrong', f'{about}: what came before its end is not what its reference begins with')
        elif h.verdict == 'hung':
            v.add_bad('hung', about)
        elif h.verdict == 'left':
            v.counts['left'] += 1
        elif why_allowed(fleet, h):
            v.counts['failed, allowed'] += 1
            v.allowed[why_allowed(fleet, h)] += 1
        else:
            v.add_bad('failed', about)
    return v


# ---- times ----

SEEN_AS = dict(kill=('closed the connection', 'reset by peer', 'nothing heard'), hang=('made no progress',))     # others: silence
SILENCE = 'nothing heard', 'made no progress', 'Connection timed out'
NOTICED_IN_S = 15.0


def detections(fleet, logs):
    """[(seconds, kind, member, observer)] from what was done to a member until another one said that its link was lost. Observers that were hit themselves at
    the time are left out, as are stops and cuts that ended before anybody could notice. A loss that a log does not repeat is not seen here."""
    out = []
    for m in fleet.members:
        found, hits = logs.losses_of(m), sorted(m.hits, key=lambda h: h[1])
        for i, (kind, begin, end) in enumerate(hits):
            if kind not in NOTICED or (kind != 'kill' and (end or time.time()) - begin < DETECT_S + 0.5):
                continue
            until = min([begin + NOTICED_IN_S, *[b for _, b, _ in hits[i + 1:] if b > begin + 0.1]])
            if any(b < begin and (e is None or e > begin - 1) for k, b, e in hits[:i] if k in STILL):
                continue    # it was broken already
            for o, lines in found.items():
                first = next((l.at for l in lines if begin - 0.05 <= l.at <= until and any(w in l.text for w in SEEN_AS.get(kind, SILENCE))), None)
                if first is not None and not o.was_hit(STILL, begin - 1, first + 1):
                    out.append((max(0.0, first - begin), kind, m.name, o.name))
    return out


def n_broken(fleet, done, begin, end):
    """How many nodes were not well between the two times. One that lies is a node like the others, which the fleet does not know."""
    liars = any(kind == 'lies' and a <= end and b >= begin for a, b, _, kind, _ in done)
    return sum(m.was_hit(STILL, begin, end) for m in fleet.nodes) + liars


def going_on(fleet, histories, logs, done):
    """[(seconds, name, state, how many nodes were broken then, when)] from a loss until the request's next event, for requests that were moved while their client
    listened. done: the adversary's."""
    by_name = {h.plan.name: h for h in histories}
    out = []
    for at, entry, name, state, action in logs.moves():
        h = by_name.get(name)
        if not h or action != 'move' or state not in ('decode', 'run') or entry.was_hit(STILL, at - 1, at + 2):
            continue
        if not any(a.entry is entry and a.begin <= at <= a.end for a in h.attempts) or h.plan.slow_s:
            continue
        later = next((t for t in h.times if t > at), None)
        if later is not None:
            out.append((later - at, name, state, n_broken(fleet, done, at - 4, later), at))
    return out


# ---- what is left ----

def is_idle(m):
    """None, or what it still holds."""
    values = m.metrics(5)
    for name in ('baton_kv_blocks{state="held"}', 'baton_kv_blocks{state="quarantine"}', 'baton_requests_live', 'baton_kv_transfers_quarantined', 'baton_decode_parked'):
        if values.get(name):
            return f'{m.name}: {name} is {values[name]:.0f}'
    return None


def check_left(fleet, v):
    """Blocks, descriptors, memory and keys when all requests are over."""
    def idle():
        busy = [b for b in (is_idle(m) for m in fleet.members) if b]
        leaks[:] = busy
        return not busy
    leaks = []
    try:
        wait_until('nothing is held', idle, IDLE_S, 0.5)
    except AssertionError as e:
        for text in leaks or [str(e)]:
            v.add_bad('leaked', text)
    for m in fleet.members:
        fds, mib = m.footprint()
        if m.base and m.base[0] == len(m.started):      # the same process
            most_fds, most_mib = m.base[1] + FDS_SLACK + 6 * len(fleet.members), m.base[2] + MEMORY_MIB
            if fds > most_fds:
                v.add_bad('leaked', f'{m.name}: {fds} descriptors, {m.base[1]} at first')
            if mib > most_mib:
                v.add_bad('leaked', f'{m.name}: {mib} MiB, {m.base[2]} at first')
    check_redis(fleet, v)


def check_redis(fleet, v):
    def clean():
        left = fleet.redis.ask('HLEN', 'baton:{default}:res'), fleet.redis.ask('ZCARD', 'baton:{default}:alive')
        state[:] = left
        return left == ('0', str(len(fleet.nodes)))
    state = []
    try:
        wait_until('Redis has the nodes and nothing placed', clean, 30, 0.5)
    except (AssertionError, http.client.HTTPException):
        v.add_bad('leaked', f'Redis: {state[0]} placements, {state[1]} of {len(fleet.nodes)} nodes')
    keys = fleet.redis.ask('KEYS', '*').split()
    most = 12 + 2 * len(fleet.nodes)
    if len(keys) > most:
        v.add_bad('leaked', f'Redis: {len(keys)} keys, at most {most} are expected: {keys[:20]}')


def read_logs(fleet):
    return Logs(fleet.members)
