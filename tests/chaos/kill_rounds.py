#!/usr/bin/env python3
"""kill_rounds.py - kills (SIGKILL) or stops (SIGSTOP, then SIGCONT) one side of a KV transfer at
each of its steps, and checks the other side.

usage: kill_rounds.py --peer PATH [--transports ipc,tcp] [--rounds N] [--jobs N] [--stop SECONDS]
                      [--only TEXT] [--seed N]

A round is two or three processes (kvt_peer): a sender and a receiver with a few transfers in
flight. The victim has a fault plan with which it kills or stops itself at one step. The table is
steps x signals x sides x transports; --rounds repeats it with other block tables.
What must hold in every round
  - pages of the survivor: a page that was handed back (RECEIVED, FENCED) and filled with a canary
    never changes, nor does a page that was never granted
  - each transfer ends exactly once on each living side; RECEIVED ones hold the sent bytes
  - resources are free, or in quarantine, within 3 s of the signal; quarantine is empty within 1 s
    after the stopped side ends or continues
  - afterwards nothing is in flight, the number of descriptors is as before, a new peer works over
    the same pages, and /dev/shm has no new file
The worst figure of each kind is printed, in seconds. A deadline counts as missed at three times its
value, because the test machine may be busy."""
import argparse, collections, concurrent.futures, os, queue, random, signal, subprocess, sys
import threading, time

N_BLOCKS, PER_BLOCK = 96, 16
FREE_S, EMPTY_S, MARGIN = 3.0, 1.0, 3
TOLERANT = FREE_S * MARGIN


class Gone(Exception):
    """The process has ended."""


class Peer:
    def __init__(self, argv):
        self.p = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL, text=True, bufsize=1)
        self.answers, self.events, self.lock, self.owed = queue.Queue(), [], threading.Lock(), 1
        threading.Thread(target=self.read, daemon=True).start()
        self.take(30)

    def read(self):
        for line in self.p.stdout:
            if line.startswith('event '):
                words = line.split(None, 4)
                with self.lock:
                    self.events.append((words[1], int(words[2]), words[3], time.monotonic()))
            else:
                self.answers.put(line.strip())
        self.answers.put(None)

    def take(self, timeout, given_up=lambda: False):
        """The answer to the last command; unread earlier answers are skipped."""
        line, end = None, time.monotonic() + timeout
        while self.owed:
            try:
                line = self.answers.get(timeout=0.01)
            except queue.Empty:
                if given_up():
                    raise Gone()
                assert time.monotonic() < end, 'a process does not answer'
                continue
            if line is None:
                raise Gone()
            self.owed -= 1
        if not line.startswith('ok'):
            raise AssertionError(line)
        return line[3:]

    def do(self, *words, given_up=lambda: False):
        try:
            self.p.stdin.write(' '.join(str(w) for w in words) + '\n')
        except (BrokenPipeError, OSError):
            raise Gone()
        self.owed += 1
        return self.take(30, given_up)

    def find(self, kinds, who):
        with self.lock:
            return [e for e in self.events if e[0] in kinds and e[1] == who]

    def wait(self, kinds, who, timeout):
        """The first such event; None if it does not come in time."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            found = self.find(kinds, who)
            if found:
                return found[0]
            time.sleep(0.004)
        return None

    def state(self):
        return {k: int(v) for k, v in (w.split('=') for w in self.do('state').split())}

    def stopped(self):
        with open(f'/proc/{self.p.pid}/stat') as f:
            return f.read().rsplit(')', 1)[1].split()[0] == 'T'

    def hit(self):
        """Whether the plan's signal has arrived."""
        try:
            return self.p.poll() is not None or self.stopped()
        except FileNotFoundError:
            return True

    def close(self):
        try:
            self.p.send_signal(signal.SIGCONT)
            self.p.stdin.close()
        except OSError:
            pass
        try:
            return self.p.wait(20)
        except subprocess.TimeoutExpired:
            self.p.kill()
            self.p.wait()
            return 'hangs'


# (side that is hit, step with its count, what happens in the round).
# whole: everything is sent; cancel: the receiver cancels half-way; leave: the sender disconnects
# half-way.
STEPS = [('sender', s, 'whole') for s in (
    'connect:1', 'up:1', 'open:1', 'opened:1', 'put:1', 'put:3', 'put_done:1', 'put_done:4',
    'note:1', 'note:3', 'finish:1', 'done:1')]
STEPS += [('sender', s, 'cancel') for s in ('stop:1', 'stopped:1')]
STEPS += [('sender', 'disconnect:1', 'leave')]
STEPS += [('receiver', s, 'whole') for s in (
    'up:1', 'open:1', 'opened:1', 'put:2', 'note:1', 'note:3', 'finish:1', 'done:1')]
STEPS += [('receiver', s, 'cancel') for s in ('stop:1', 'stopped:1')]
STEPS += [('receiver', s, 'leave') for s in ('fence:1', 'disconnect:1')]
STEPS += [('sender', 'any', 'whole'), ('receiver', 'any', 'whole')]
SCATTERS = ('tcp',)           # the receiver sees each put
# The receiver ends the writer's access itself: a stopped writer holds nothing longer than FREE_S.
TAKES_AWAY = ('rdma', 'ucx')


def table(transports):
    for transport in transports:
        for side, step, flow in STEPS:
            if side == 'receiver' and step.startswith('put') and transport not in SCATTERS:
                continue
            for sig in ('sigkill', 'sigstop'):
                yield transport, side, step, flow, sig


class Round:
    def __init__(self, a, row, seed):
        self.a, (self.transport, self.side, self.step, self.flow, self.sig) = a, row
        self.rng, self.times, self.held = random.Random(seed), {}, []
        argv = [a.peer, self.transport]
        plan = [] if self.step == 'any' else [f'at={self.step}:{self.sig}']
        self.sender = Peer(argv + (plan if self.side == 'sender' else []))
        self.receiver = Peer(argv + (plan if self.side == 'receiver' else []))
        self.victim, self.survivor = self.sender, self.receiver
        if self.side == 'receiver':
            self.victim, self.survivor = self.receiver, self.sender
        self.handle = None
        self.transfers = {}     # id: (tokens, blocks) of grants made
        self.sent = set()       # ids that the sender has accepted

    # ---- until the signal ----

    def ask(self, p, *words):
        return p.do(*words, given_up=self.victim.hit) if p is self.victim else p.do(*words)

    def begin(self):
        """Connects and starts transfers, as far as the victim gets."""
        blocks = self.rng.sample(range(N_BLOCKS), 60)
        answer = self.ask(self.receiver, 'answer', self.ask(self.sender, 'hello'))
        self.handle = int(self.ask(self.sender, 'connect', answer))
        while not self.sender.find(('connected', 'peer_lost'), self.handle):
            if self.victim.hit():
                raise Gone()
            time.sleep(0.002)
        for i in (1, 2, 3):
            tokens = self.rng.randrange(200, 20 * PER_BLOCK)
            used = blocks[(i - 1) * 20:i * 20][:-(-tokens // PER_BLOCK)]
            grant = self.ask(self.receiver, 'expect', i, tokens, *used)
            self.transfers[i] = (tokens, used)
            upto = tokens if self.flow == 'whole' else tokens // 2
            self.ask(self.sender, 'send', i, self.handle, grant, tokens, upto, *used)
            self.sent.add(i)
        if self.flow == 'cancel':
            self.ask(self.receiver, 'cancel', 1)
        if self.flow == 'leave':
            self.ask(self.sender, 'disconnect', self.handle)

    def strike(self):
        """Runs until the victim is hit; returns the time of it."""
        try:
            self.begin()
        except Gone:
            pass            # hit meanwhile
        if self.step == 'any':
            time.sleep(self.rng.random() * 0.01)
            self.victim.p.send_signal(getattr(signal, self.sig.upper()))
        end = time.monotonic() + 20
        while not self.victim.hit():
            assert time.monotonic() < end, 'the step was not passed'
            time.sleep(0.002)
        return time.monotonic()

    # ---- checks of the survivor ----

    def deadline(self, name, limit, seconds):
        self.times[name] = max(self.times.get(name, 0), seconds)
        assert seconds <= limit * MARGIN, f'{name} took {seconds:.1f} s, {limit} s are allowed'

    def ends(self, p):
        return ('received', 'receive_failed') if p is self.receiver else ('sent', 'send_failed')

    def of(self, p):
        """The transfers that this side has accepted."""
        return self.transfers if p is self.receiver else self.sent

    def give_up(self, p):
        """Ends transfers whose peer is silent or dead, as the node above would."""
        # The victim may have accepted more transfers than it could report.
        for i in self.of(p) if p is self.survivor else (1, 2, 3):
            if not p.find(self.ends(p), i):
                p.do('cancel' if p is self.receiver else 'unsend', i)

    def reclaim(self, i):
        """Checks an ended transfer's pages (RECEIVED: the sent bytes); fills in the canary."""
        tokens, used = self.transfers[i]
        if self.receiver.find(('received',), i):
            self.receiver.do('holds', i, tokens, *used)
        self.receiver.do('canary', *used)

    def canaries(self, but=()):
        """Checks the canary in all pages of the receiver, except in those of transfers `but`."""
        live = {b for i in but for b in self.transfers[i][1]}
        self.receiver.do('canaries', *[b for b in range(N_BLOCKS) if b not in live])

    def survivor_frees(self, t0):
        """Checks that every transfer of the survivor ends within FREE_S of the signal: its pages
        are free, or held while the peer may still touch them."""
        p, stopped = self.survivor, self.sig == 'sigstop'
        time.sleep(0.2)         # the node above needs a moment to notice
        self.give_up(p)
        patience = 0.4 if stopped else TOLERANT
        for i in self.of(p):
            e = p.wait(self.ends(p), i, patience if p is self.sender else TOLERANT)
            if e is None and p is self.sender and stopped:
                self.held.append(i)     # its sources are still read
                continue
            assert e, f'transfer {i} of the survivor does not end'
            self.deadline('ended', FREE_S, e[3] - t0)
            if p is self.sender:
                continue
            fenced = e
            if e[0] != 'received':
                fenced = p.wait(('fenced',), i,
                                TOLERANT if self.transport in TAKES_AWAY else patience)
            if fenced:
                self.deadline('pages back', FREE_S, fenced[3] - t0)
                self.reclaim(i)
            else:
                assert stopped and self.transport not in TAKES_AWAY, \
                    f'transfer {i}: its writer is dead or fenced, but its pages are not released'
                self.held.append(i)
        if p is self.receiver:
            self.times['transfers held while stopped'] = len(self.held)
            self.canaries(self.held)
            wait_for(lambda: p.state()['quarantined'] == len(self.held), TOLERANT,
                     lambda: f'{len(self.held)} transfers wait for their fence, '
                             f'and the metric says {p.state()}')

    def go_on(self):
        """Sends SIGCONT: held transfers end, and the stopped side ends its own transfers."""
        p, v, t1 = self.survivor, self.victim, time.monotonic()
        v.p.send_signal(signal.SIGCONT)
        for i in self.held:
            e = p.wait(('fenced',) if p is self.receiver else self.ends(p), i, TOLERANT)
            assert e, f'transfer {i} stays held though the peer continues'
            self.deadline('pages back after going on', EMPTY_S, e[3] - t1)
            if p is self.receiver:
                self.reclaim(i)
        self.give_up(v)
        wait_for(lambda: not any(v.state()[k] for k in ('send', 'receive', 'quarantined')),
                 TOLERANT, lambda: f'the stopped side keeps {v.state()}')
        if v is self.receiver:
            v.do('canary', *range(N_BLOCKS))

    def anew(self):
        """Checks that the survivor works with a new peer over nearly all of its pages."""
        p = self.survivor
        other = Peer([self.a.peer, self.transport])
        sender, receiver = (other, p) if p is self.receiver else (p, other)
        try:
            handle = int(sender.do('connect', receiver.do('answer', sender.do('hello'))))
            assert sender.wait(('connected',), handle, TOLERANT), 'no connection to a new peer'
            blocks = self.rng.sample(range(N_BLOCKS), N_BLOCKS)
            tokens = 90 * PER_BLOCK - 5
            grant = receiver.do('expect', 99, tokens, *blocks[:90])
            sender.do('send', 99, handle, grant, tokens, tokens, *blocks[:90])
            assert receiver.wait(('received',), 99, TOLERANT), 'a transfer with a new peer fails'
            assert sender.wait(('sent',), 99, TOLERANT), 'a transfer with a new peer fails'
            receiver.do('holds', 99, tokens, *blocks[:90])
            receiver.do('canaries', *blocks[90:])
            sender.do('disconnect', handle)
        finally:
            assert other.close() == 0, 'the new peer does not end orderly'

    def run(self):
        p, v = self.survivor, self.victim
        try:
            fds = p.state()['fds']
            t0 = self.strike()
            self.survivor_frees(t0)
            if self.sig == 'sigstop':
                time.sleep(max(0, self.a.stop - (time.monotonic() - t0)))
                self.go_on()
                if self.handle:
                    self.sender.do('disconnect', self.handle)
            for i in self.of(p):
                ends, fences = len(p.find(self.ends(p), i)), len(p.find(('fenced',), i))
                assert ends == 1 and fences <= 1, \
                    f'transfer {i} ended {ends} times and was fenced {fences} times'
            if self.receiver.p.poll() is None:
                time.sleep(0.05)
                self.canaries()     # every page is back, and no late write changed it
            self.anew()
            if v.p.poll() is None:
                assert v.close() == 0, 'the stopped side does not end orderly'
            clean = {'fds': fds, 'send': 0, 'receive': 0, 'quarantined': 0}
            wait_for(lambda: p.state() == clean, TOLERANT,
                     lambda: f'{p.state()}, and {fds} descriptors before')
            assert p.close() == 0, 'the survivor does not end orderly'
        finally:
            for q in (self.sender, self.receiver):
                if q.p.poll() is None:
                    q.p.kill()
                    q.p.wait()
        return self.times


def wait_for(fn, timeout, text):
    end = time.monotonic() + timeout
    while not fn():
        assert time.monotonic() < end, text()
        time.sleep(0.01)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument('--peer', required=True)
    ap.add_argument('--transports', default='ipc,tcp')
    ap.add_argument('--rounds', type=int, default=0, help='0: the table once')
    ap.add_argument('--jobs', type=int, default=8)
    ap.add_argument('--stop', type=float, default=1.5)
    ap.add_argument('--long', action='store_true', help='stop for 10 s')
    ap.add_argument('--only', default='')
    ap.add_argument('--seed', type=int, default=1)
    a = ap.parse_args()
    if a.long:
        a.stop = 10
    rows = [r for r in table(a.transports.split(',')) if a.only in ' '.join(r)]
    random.Random(a.seed).shuffle(rows)
    n = a.rounds or len(rows)
    shm = set(os.listdir('/dev/shm'))
    worst, failed, t0 = collections.defaultdict(lambda: (0, '')), [], time.monotonic()

    def one(k):
        row = rows[k % len(rows)]
        try:
            return row, Round(a, row, a.seed * 100003 + k).run(), None
        except Exception as e:
            return row, {}, f'{type(e).__name__}: {e}'
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        for k, (row, times, error) in enumerate(pool.map(one, range(n))):
            if error:
                failed.append((k, row, error))
                print(f'  round {k} {" ".join(row)}: {error}', flush=True)
            for name, seconds in times.items():
                worst[name] = max(worst[name], (seconds, ' '.join(row)))
    left = set(os.listdir('/dev/shm')) - shm
    print(f'{n} rounds over {len(rows)} rows of the table in {time.monotonic() - t0:.0f} s, '
          f'stopped for {a.stop:g} s each')
    for name, (most, row) in sorted(worst.items()):
        print(f'  worst {name:28} {most:6.3f}  ({row})')
    if left:
        print(f'  left in /dev/shm: {sorted(left)}')
    print(f'{n - len(failed)} passed, {len(failed)} failed, 0 skipped')
    return bool(failed or left)


sys.exit(main())
