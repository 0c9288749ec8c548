"""proxy.py - a TCP proxy in front of a member: other nodes, and some clients, reach it there, and it delays, stalls or cuts what passes.

One address per member, at the member's own ports. Thread: its own; the modes are set by the adversary."""
import contextlib, heapq, selectors, socket, subprocess, threading, time

CHUNK, FULL = 65536, 1 << 20        # bytes waiting for one side before the other is not read any more


class Half:
    """One direction of a connection."""

    def __init__(self, source, sink, way):
        """way: (address that connected, port)."""
        self.source, self.sink, self.way, self.waiting, self.ended = source, sink, way, bytearray(), False
        self.n_delayed, self.due = 0, 0.0


class Proxy:
    """mode: None (passes), ('delay', seconds), ('stall',). cut() ends all connections."""

    def __init__(self, address, target, ports):
        self.address, self.target, self.mode, self.halves, self.later, self.n = address, target, None, {}, [], 0
        self.denied = None, 0
        subprocess.run(['ip', 'addr', 'add', f'{address}/24', 'dev', 'switch'], check=True)
        self.selector, self.lock, self.ending = selectors.DefaultSelector(), threading.Lock(), False
        for port in ports:
            s = socket.create_server((address, port), backlog=128)
            s.setblocking(False)
            self.selector.register(s, selectors.EVENT_READ, port)
        self.thread = threading.Thread(target=self.go, daemon=True)
        self.thread.start()

    def set(self, mode):
        with self.lock:
            self.mode = mode

    def cut(self):
        with self.lock:
            for half in list(self.halves.values()):
                self.drop(half)

    def deny(self, source, port, ends=False):
        """From now on what comes from `source` to this port is swallowed: connections stay open and nothing passes. None: nothing is denied.
        ends: those that are there end now."""
        with self.lock:
            self.denied = source, port
            for half in list(self.halves.values()):
                if ends and half.way == self.denied:
                    self.drop(half)

    # ---- inside: the lock is held ----

    def go(self):
        while not self.ending:
            ready = self.selector.select(0.01)
            with self.lock:
                for key, mask in ready:
                    if isinstance(key.data, int):
                        self.accept(key.fileobj, key.data)
                    else:
                        self.move(key.fileobj, mask)
                self.pass_on()
            if self.mode or self.denied[0]:     # what is not read stays readable
                time.sleep(0.002)

    def accept(self, listener, port):
        with contextlib.suppress(OSError):
            a, peer = listener.accept()
            b = socket.socket()
            b.settimeout(1.0)
            try:
                b.connect((self.target, port))
            except OSError:
                a.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\1\0\0\0\0\0\0\0')  # a reset, as the member's own host would answer
                a.close()
                b.close()
                return
            for s, t in ((a, b), (b, a)):
                s.setblocking(False)
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.halves[s] = Half(s, t, (peer[0], port))
                self.selector.register(s, selectors.EVENT_READ, self)

    def move(self, s, mask):
        half = self.halves.get(s)
        if not half or half.way == self.denied or (self.mode and self.mode[0] == 'stall') or len(half.waiting) >= FULL:
            return
        try:
            data = s.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self.drop(half)
            return
        if not data:
            half.ended = True
            self.selector.unregister(s)
        if data and (half.n_delayed or (self.mode and self.mode[0] == 'delay')):
            self.n += 1
            half.n_delayed += 1
            half.due = max(half.due, time.monotonic() + (self.mode[1] if self.mode else 0))     # in order
            heapq.heappush(self.later, (half.due, self.n, half, data))
        else:
            half.waiting += data
            self.send(half)

    def pass_on(self):
        while self.later and (self.later[0][0] <= time.monotonic() or not self.mode):
            _, _, half, data = heapq.heappop(self.later)
            half.n_delayed -= 1
            half.waiting += data
        for half in list(self.halves.values()):
            if half.waiting or half.ended:
                self.send(half)

    def send(self, half):
        try:
            while half.waiting:
                n = half.sink.send(half.waiting)
                del half.waiting[:n]
        except BlockingIOError:
            return
        except OSError:
            self.drop(half)
            return
        if half.ended and not half.n_delayed:
            self.drop(half)

    def drop(self, half):
        """Ends a connection: both of its directions."""
        for s in (half.source, half.sink):
            if self.halves.pop(s, None):
                with contextlib.suppress(KeyError):
                    self.selector.unregister(s)
                s.close()

    def close(self):
        self.ending = True
        self.thread.join(10)
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()
        self.selector.close()
