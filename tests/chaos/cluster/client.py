"""client.py - one client: it sends a planned request, reads the answer, comes back where it asked to resume, and writes down all that happened.

Clients try again where no connection was made, and nowhere else, unless they asked to resume: then they come back to any member when a connection ends before
the answer does, or is silent for RETURN_S. Thread: each client has its own; a History belongs to it until it is done."""
import dataclasses, http.client, json, random, socket, time
from harness import sse_events
from .traffic import Answers

CONNECT_S, RETURN_S, HANG_S = 3.0, 8.0, 75.0    # HANG_S: longer than a stopped node stands still, and than a request waits for one
GIVE_UP_S = 120.0                               # a client that comes back does so for so long without an event
SLOW_BUFFER = 32768


@dataclasses.dataclass
class Attempt:
    entry: object           # the member
    begin: float
    end: float = 0.0
    how: str = ''           # 'complete' 'left' 'refused' 'cut' 'silent' 'told', the last with what it was told
    text: str = ''
    n_events: int = 0
    in_stream: bool = False     # what it was told was an event: a client that asked to resume comes back


class History:
    """verdict: complete, left, failed, hung. times: of events, by the wall clock."""

    def __init__(self, plan):
        self.plan, self.attempts, self.times, self.answers, self.last_id = plan, [], [], Answers(), None
        self.verdict, self.begin, self.end = None, 0.0, 0.0

    def says(self):
        return ' -> '.join(f'{a.entry.name} {a.how}{" " + a.text if a.text else ""}' for a in self.attempts)


class Ended(Exception):
    """An attempt is over: how, text."""


class Client:
    def __init__(self, members, plan, path, body, hang_s=HANG_S):
        self.members, self.h, self.path, self.hang_s = members, History(plan), path, hang_s
        self.body = {**body, 'stream': True} if plan.streams else body
        self.rng = random.Random(plan.name)

    def run(self):
        h, plan = self.h, self.h.plan
        entries = self.entries()
        h.begin = time.time()
        while h.verdict is None:
            a = Attempt(next(entries), time.time())
            h.attempts.append(a)
            try:
                self.attempt(a)
            except Ended as e:
                a.how, a.text = e.args
            a.end = time.time()
            self.decide(a)
        h.end = time.time()
        return h

    def entries(self):
        """Every member again and again, from its first one on."""
        members = self.members
        at = int(self.h.plan.first * len(members))
        while True:
            yield members[at % len(members)]
            at += self.rng.randrange(1, max(2, len(members)))

    def decide(self, a):
        h, late = self.h, time.time() - (self.h.times[-1] if self.h.times else self.h.begin)
        if a.how in ('complete', 'left'):
            h.verdict = a.how
        elif a.how == 'silent' and not h.plan.resumes:
            h.verdict = 'hung'
        elif late > (GIVE_UP_S if h.plan.resumes else self.hang_s):
            h.verdict = 'hung' if a.how == 'silent' else 'failed'
        elif a.how == 'refused':
            time.sleep(0.05)
        elif not h.plan.resumes or (a.how == 'told' and not a.in_stream):
            h.verdict = 'failed'
        else:
            time.sleep(0.02)

    # ---- one attempt ----

    def attempt(self, a):
        c = self.connect(a)
        try:
            c.request('POST', self.path, json.dumps(self.body), self.headers())
            r = c.getresponse()
            if r.status != 200:
                raise Ended('told', f'{r.status} {r.read()[:300].decode("utf-8", "replace")}')
            if self.h.plan.streams:
                self.read_stream(a, r)
            else:
                self.read_whole(a, r)
        except TimeoutError:
            raise Ended('silent', f'after {a.n_events} events') from None
        except (OSError, http.client.HTTPException) as e:
            raise Ended('cut', f'{type(e).__name__} after {a.n_events} events') from None
        finally:
            c.close()

    def connect(self, a):
        address, port = a.entry.front if self.h.plan.proxied else a.entry.address, a.entry.port
        c = http.client.HTTPConnection(address, port, timeout=CONNECT_S)
        try:
            c.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            if self.h.plan.slow_s:
                c.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
            c.sock.settimeout(CONNECT_S)
            c.sock.connect((address, port))
        except OSError as e:
            c.close()
            raise Ended('refused', type(e).__name__) from None
        c.sock.settimeout(RETURN_S if self.h.plan.resumes else self.hang_s)
        return c

    def headers(self):
        h = {'Content-Type': 'application/json', 'x-request-id': self.h.plan.name}
        if self.h.plan.resumes:
            h['x-baton-resume'] = '1'
        if self.h.plan.hedge_ms:
            h['x-baton-hedge-ms'] = str(self.h.plan.hedge_ms)
        if self.h.last_id:
            h['Last-Event-ID'] = self.h.last_id
        return h

    def read_whole(self, a, r):
        body = json.loads(r.read())
        self.h.times.append(time.time())
        self.h.answers.add(body)
        raise Ended('complete', '')

    def read_stream(self, a, r):
        for event_id, data in sse_events(r):
            self.take(a, event_id, data)
        raise Ended('cut', f'the stream ended after {a.n_events} events')

    def take(self, a, event_id, data):
        h = self.h
        if data == '[DONE]':
            raise Ended('complete', '')
        event = json.loads(data)
        if 'error' in event:
            a.in_stream = True
            raise Ended('told', event['error']['message'])
        a.n_events += 1
        h.times.append(time.time())
        h.answers.add(event)
        h.last_id = event_id or h.last_id
        if h.plan.leaves and len(h.times) >= h.plan.leaves:
            raise Ended('left', '')
        if h.plan.slow_s:
            time.sleep(h.plan.slow_s)
