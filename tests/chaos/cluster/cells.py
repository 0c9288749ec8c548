"""cells.py - the cells of the recovery table and the breakers' transitions that a cluster has taken, against the table that the program acts by.

Counters die with their process: Watch reads them every second, and before a member is killed. Thread: Watch has its own; look() may be called by any."""
import collections, http.client, re, subprocess, threading
from harness import BIN

LOSS = re.compile(r'baton_request_losses_total\{state="(\w+)",loss="(\w+)",action="(\w+)"\}')
BREAKER = re.compile(r'baton_breaker_transitions_total\{scope="(\w+)",to="(\w+)"\}')
OTHERS = ('baton_request_moves_total', 'baton_request_waits_total', 'baton_decode_attached_total', 'baton_resumes_total', 'baton_kv_fault_injected_total', 'baton_engine_recomputed',
          'baton_engine_preempt')
WATCH_S = 1.0


def table():
    """{(state, loss): action} of `baton docs recovery`, without what is ignored."""
    page = subprocess.run([BIN, 'docs', 'recovery'], capture_output=True, text=True, check=True).stdout
    lines = page[page.index('| state | prefill_node'):].split('\n\n')[0].splitlines()
    losses = [w.strip() for w in lines[0].strip('|').split('|')][1:]
    out = {}
    for line in lines[2:]:
        state, *actions = [w.strip() for w in line.strip('|').split('|')]
        out.update({(state, loss): action for loss, action in zip(losses, actions) if action != '-'})
    return out


class Watch:
    """The counters of all lives of all members."""

    def __init__(self, members):
        self.members, self.last, self.lock, self.stop = members, {}, threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self.go, daemon=True)
        self.thread.start()

    def go(self):
        while not self.stop.wait(WATCH_S):
            for m in self.members:
                self.look(m, 0.3)

    def look(self, member, timeout=1.0):
        """Reads one member's counters; of one that does not answer those read before stand."""
        life = (member, len(member.started))
        try:
            values = {k: v for k, v in member.metrics(timeout).items() if v and (LOSS.match(k) or BREAKER.match(k) or k.startswith(OTHERS))}
        except (OSError, http.client.HTTPException):
            return
        with self.lock:
            self.last[life] = values

    def end(self):
        self.stop.set()
        self.thread.join(30)
        for m in self.members:
            self.look(m, 5)

    def sums(self):
        out = collections.Counter()
        with self.lock:
            for values in self.last.values():
                out.update(values)
        return out

    def losses(self):
        """{(state, loss, action): how often}"""
        return {LOSS.match(k).groups(): int(v) for k, v in self.sums().items() if LOSS.match(k)}

    def breakers(self):
        """{(scope, to): how often}"""
        return {BREAKER.match(k).groups(): int(v) for k, v in self.sums().items() if BREAKER.match(k)}

    def total(self, name):
        return int(sum(v for k, v in self.sums().items() if k.startswith(name)))


def not_taken(losses):
    """Cells of the table that were not taken. An action that the table does not have there (`end`, or `fail` when all moves are used up) takes its cell, too."""
    taken = {(state, loss) for state, loss, _ in losses}
    return sorted(set(table()) - taken)
