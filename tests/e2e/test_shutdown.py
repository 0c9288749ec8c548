"""A node that stops: what it still answers, what it says to clients that it cuts, and that it resets nobody."""
from harness import *

ASK = dict(model='m', prompt=[5, 6, 7], max_tokens=1, temperature=0, ignore_eos=True)


class Client:
    """Sends requests without a pause on one connection, as long as the answers keep it; a new one otherwise, until nobody listens."""

    def __init__(self, port):
        body = json.dumps(ASK).encode()
        self.port, self.statuses, self.lost, self.wrong = port, {}, [], []
        self.bytes = b'POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n' % len(body) + body
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def ask(self, s):
        """Returns (status, lower-case head); raises OSError or EOFError without an answer."""
        s.sendall(self.bytes)
        got = b''
        while b'\r\n\r\n' not in got:
            piece = s.recv(65536)
            if not piece:
                raise EOFError(got)
            got += piece
        head, rest = got.split(b'\r\n\r\n', 1)
        head = head.decode().lower()
        left = int(head.split('content-length: ')[1].split('\r')[0]) - len(rest)
        while left > 0:
            piece = s.recv(left)
            if not piece:
                raise EOFError(got)
            left -= len(piece)
        return int(head.split()[1]), head

    def run(self):
        s = None
        while True:
            if not s:
                try:
                    s = socket.create_connection(('127.0.0.1', self.port), timeout=20)
                except ConnectionRefusedError:
                    return
            try:
                status, head = self.ask(s)
            except (OSError, EOFError) as e:
                self.lost.append(repr(e))
                s = None
                continue
            self.statuses[status] = self.statuses.get(status, 0) + 1
            if status == 503 and ('retry-after: ' not in head or 'connection: close' not in head):
                self.wrong.append(head)
            if 'connection: close' in head:
                s.close()
                s = None


@alone
def test_no_request_is_reset_while_a_node_stops():
    """Clients at full speed on kept connections, several times: each request has its answer or a 503."""
    total = {}
    for i in range(3):
        node = Node(TINY, args=['--max-model-len', '64', '--max-num-seqs', '16'])
        with closing(node):
            wait_ready(node)
            clients = [Client(node.port) for _ in range(16)]
            time.sleep(0.5 + 0.27 * i)
            assert node.stop() == 0, node.output()[-2000:]
            for c in clients:
                c.thread.join(30)
                assert not c.thread.is_alive()
                assert not c.lost and not c.wrong, (c.lost, c.wrong)
                assert set(c.statuses) <= {200, 503}, c.statuses
                for status, n in c.statuses.items():
                    total[status] = total.get(status, 0) + n
            assert 'without freeing everything' not in node.output(), node.output()[-2000:]
    print(f'  answers: {total}')
    assert total[200] > 100 and total[503] > 0, total


def test_while_it_drains_a_node_answers_everybody_and_says_close():
    with closing(Node(smollm2(), args=['--max-model-len', '4096'])) as node:
        wait_ready(node)
        events = stream(node.port, '/v1/completions', {**ASK, 'max_tokens': 200})
        next(events)
        kept = http.client.HTTPConnection('127.0.0.1', node.port, timeout=20)
        kept.request('GET', '/live')
        r = kept.getresponse()
        assert r.read() == b'' and r.getheader('Connection') is None
        node.kill(signal.SIGTERM)
        wait_until('it drains', lambda: request(node.port, 'GET', '/ready')[0] == 503, 5)
        kept.request('POST', '/v1/completions', json.dumps(ASK), {'Content-Type': 'application/json'})
        r = kept.getresponse()
        assert r.status == 503 and r.getheader('Connection') == 'close' and r.getheader('Retry-After'), r.getheaders()
        assert 'shutting down' in r.read().decode()
        status, headers, _ = request(node.port, 'GET', '/live')
        assert status == 200 and headers['connection'] == 'close', headers
        rest = list(events)
        assert rest[-1]['choices'][0]['finish_reason'] == 'length', rest[-1]
        assert node.p.wait(20) == 0


def test_what_the_shutdown_timeout_cuts_ends_with_an_error():
    """In a stream as its last event, before [DONE]; otherwise as 503. The same on both nodes of a pair and at a second signal."""
    long = {**ASK, 'max_tokens': 3000}
    for second_signal in (False, True):
        args = ['--max-model-len', '4096', '--shutdown-timeout', '30' if second_signal else '1']
        with closing(Node(smollm2(), args=args)) as node:
            wait_ready(node)
            events = stream(node.port, '/v1/completions', long)
            next(events)
            whole = []
            t = threading.Thread(target=lambda: whole.append(request(node.port, 'POST', '/v1/completions', long)))
            t.start()
            wait_until('both run', lambda: metrics(node.port)['baton_requests_live'] == 2, 10)
            node.kill(signal.SIGTERM)
            if second_signal:
                time.sleep(0.3)
                node.kill(signal.SIGTERM)
            *_, last = events # stream() wants a [DONE]
            assert last['error']['code'] == 'unavailable' and 'shutting down' in last['error']['message'], last
            t.join(20)
            status, headers, body = whole[0]
            assert status == 503 and headers['connection'] == 'close' and 'retry-after' in headers and 'shutting down' in body['error']['message'], whole
            assert node.p.wait(20) == 0, node.output()[-2000:]
