"""checker.py - what is right: each answer is its reference, nobody is left waiting, nothing is left behind, and losses are noticed and got over in time.

Counts decide about a run (Verdicts.bad); times are told with their limits. Thread: one, after the clients are done."""
import collections, http.client, time
from harness import wait_until
from .logs import Logs, lines_of
from .traffic import is_beginning, judge

DETECT_S, GO_ON_S = 3.0, 1.0
# What a member may have beyond its footprint when it was ready: for each other member a link and connections for KV, which it may not have had yet, and a few files;
# memory that it had reserved and not touched. Connections of clients that it had then already only make it stricter by less: some dozens at most.
FDS_SLACK, FDS_PER_MEMBER, MEMORY_MIB, IDLE_S = 24, 6, 96, 60
# What may be done to a member so that a request ends with its connection. Nothing else may: one that is told to end lets its requests end, and one without
# descriptors keeps the connections that it has.
ENDS_CONNECTIONS = dict(kill='killed', cut='cut off')
STILL = ('kill', 'drain', 'stop', 'sick', 'cut', 'pair', 'half', 'descriptors', 'proxy')     # a member that notices late
REDIS_AWAY = 'redis kill', 'redis pause', 'redis failover', 'redis lose tail'
NOTICED = ('kill', 'stop', 'cut', 'half', 'hang')


def quantile(values, q):
    values = sorted(values)
    return values[min(len(values) - 1, int(q * len(values)))] if values else 0.0


class Verdicts:
    """counts: of every kind of ending; bad: (kind, sentence) of those that must not be; compared: members whose footprint at the end was compared, and how many of
    them were started again in between."""

    def __init__(self):
        self.counts, self.bad, self.allowed, self.compared = collections.Counter(), [], collections.Counter(), (0, 0)

    def add_bad(self, kind, text):
        self.counts[kind] += 1
        self.bad.append((kind, text))


PASSED_AWAY = 'the one to which the request was passed, is gone'


def what_ended(m, attempt):
    """Which of ENDS_CONNECTIONS was done to this member while it had the attempt; None: none of them. A member that was killed serves others when it is back: only
    the moment of its death counts."""
    for kind, words in ENDS_CONNECTIONS.items():
        if m.was_hit((kind,), attempt.begin - 0.5, attempt.end + 0.5, only_begin=kind == 'kill'):
            return words
    return None


def passed_to(fleet, h):
    """The members to which the last entry says that it had passed this request when their answers broke off."""
    names = [l.fields()['to'] for l in lines_of(h.attempts[-1].entry)
             if l.text.startswith('request passed') and f'api_request={h.plan.name} ' in l.text and 'outcome=broken' in l.text]
    return [m for m in fleet.members if m.known_as() in names]


def why_allowed(fleet, h):
    """Why this request may have failed; None: it may not."""
    last = h.attempts[-1]
    if 'told by the adversary' in last.text:
        return 'refused as the script says'
    if h.plan.resumes:
        return None
    if last.how == 'cut':
        words = what_ended(last.entry, last)
        return words and f'its entry was {words}, and it did not ask to resume'
    if last.how == 'told' and PASSED_AWAY in last.text:
        words = next(filter(None, (what_ended(m, last) for m in passed_to(fleet, h))), None)
        return words and f'the node to which its entry had passed it was {words}, and it did not ask to resume'
    return None


def beside(fleet, h):
    """What was done to the last entry, and to the one it was passed to, meanwhile."""
    last = h.attempts[-1]
    hits = [f'{m.name} {kind} from {begin - last.begin:+.1f} to {end - last.begin if end else float("inf"):+.1f} s' for m in {last.entry, *passed_to(fleet, h)}
            for kind, begin, end in m.hits if begin <= last.end + 0.5 and (end is None or end >= last.begin - 0.5)]
    return f' [from its {last.begin - h.begin:.1f} s on, for {last.end - last.begin:.1f} s; meanwhile: {"; ".join(hits) or "nothing"}]'


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
        elif why := why_allowed(fleet, h):
            v.counts['failed, allowed'] += 1
            v.allowed[why] += 1
        else:
            v.add_bad('failed', f'{about}{beside(fleet, h)}')
    return v


# ---- times ----

SEEN_AS = dict(kill=('closed the connection', 'reset by peer', 'nothing heard'), hang=('made no progress',))     # others: silence
SILENCE = 'nothing heard', 'made no progress', 'Connection timed out'
NOTICED_IN_S = 15.0
REPEATS_S = 60.0    # LOG_REPEATS_MS


def to_be_noticed(m):
    """[(kind, begin, until)] of what was done to a member and is not over before anybody could notice; until the next thing was done to it."""
    out, hits = [], sorted(m.hits, key=lambda h: h[1])
    for i, (kind, begin, end) in enumerate(hits):
        if kind not in NOTICED or (kind != 'kill' and (end or time.time()) - begin < DETECT_S + 0.5):
            continue
        if any(b < begin and (e is None or e > begin - 1) for k, b, e in hits[:i] if k in STILL):
            continue    # it was broken already
        out.append((kind, begin, min([begin + NOTICED_IN_S, *[b for _, b, _ in hits[i + 1:] if b > begin + 0.1]])))
    return out


def detections(fleet, logs):
    """[(seconds, kind, member, observer)] from what was done to a member until another one said that its link was lost. Observers that were hit themselves at
    the time are left out. A log leaves out, or counts in a later line, what it has said within REPEATS_S: who had, and says nothing in time, may have noticed. And
    [(kind, member, observers, when)] of what nobody noticed, though these observers had a link to it, were well all the while and would have said so. And how many
    observers may have noticed."""
    out, unnoticed, n_unknown = [], [], 0
    for m in fleet.members:
        found = logs.losses_of(m)
        for kind, begin, until in to_be_noticed(m):
            seen, able = [], []
            for o, lines in found.items():
                alike = [l for l in lines if any(w in l.text for w in SEEN_AS.get(kind, SILENCE))]
                first = next((l.at for l in alike if begin - 0.05 <= l.at <= until), until)
                if o.was_hit(STILL, begin - 1, min(first + 1, until)):
                    continue
                if first > begin + DETECT_S and logs.is_linked(o, m, begin) and any(begin - REPEATS_S <= l.at < begin - 0.05 for l in alike):
                    n_unknown += 1
                elif first < until:
                    seen.append((max(0.0, first - begin), kind, m.name, o.name))
                elif logs.is_linked(o, m, begin):
                    able.append(o.name)
            out += seen
            if able and not seen and until - begin > DETECT_S + 0.5:
                unnoticed.append((kind, m.name, able, begin))
    return out, unnoticed, n_unknown


def n_broken(fleet, done, begin, end):
    """How many nodes were not well between the two times. One that lies is a node like the others, which the fleet does not know, and a master of Redis that does
    not answer keeps up a request that moves for its time limit."""
    others = {kind for a, b, _, kind, _ in done if kind in ('lies', *REDIS_AWAY) and a <= end and b >= begin}
    return sum(m.was_hit(STILL, begin, end) for m in fleet.nodes) + len(others)


def going_on(fleet, histories, logs, done):
    """[(seconds, name, state, how many nodes were broken then, when)] from a loss until the request's next event, for requests that were moved while their client
    listened. done: the adversary's."""
    by_name = {h.plan.name: h for h in histories}
    out = []
    for at, entry, name, state, action in logs.moves():
        h = by_name.get(name)
        if not h or action != 'move' or state not in ('decode', 'run') or entry.was_hit(STILL, at - 1, at + 2):
            continue
        if not any(a.entry is entry and a.begin <= at <= a.end for a in h.attempts) or h.plan.slow_s or not h.plan.streams:
            continue    # of a whole answer only the end is seen
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
    compared = [m for m in fleet.members if check_footprint(fleet, m, v)]
    v.compared = len(compared), sum(len(m.started) > 1 for m in compared)
    check_redis(fleet, v)


def check_footprint(fleet, m, v):
    """Against that of the same process when it was ready. Returns whether there was one."""
    if not m.base or m.base[0] != len(m.started):
        v.add_bad('of the harness', f'{m.name}: what it held when it was ready was not noted after its start number {len(m.started)}')
        return False
    fds, mib = m.footprint()
    if fds > m.base[1] + FDS_SLACK + FDS_PER_MEMBER * len(fleet.members):
        v.add_bad('leaked', f'{m.name}: {fds} descriptors, {m.base[1]} when it was ready')
    if mib > m.base[2] + MEMORY_MIB:
        v.add_bad('leaked', f'{m.name}: {mib} MiB, {m.base[2]} when it was ready')
    return True


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
