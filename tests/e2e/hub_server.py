"""hub_server.py - a hub of models for tests: Hugging Face's and ModelScope's addresses, plain files, and everything that goes wrong on the way.

A Hub has files (bytes by name) and a second port, the place where the bytes of large files lie, to which the first redirects as Hugging Face does.
`hub.fault(request)` is asked before each answer and may return a dict:
    status, headers, body   this answer instead
    endless                 with `status`: a body without an end
    drop_after N            the connection is cut after N bytes of the body
    stall_after N           no byte comes after the first N, and the connection stays open
    corrupt_at N            the byte at position N of the file is another one
    no_ranges               the whole file, whatever was asked for
    bytes_per_s N           not faster
    redirect URL            there
"""
import collections, hashlib, http.server, json, random, socket, ssl, struct, threading, time, urllib.parse

COMMIT = 'c0ffee' * 6 + 'c0ff'
Request = collections.namedtuple('Request', 'port path query begin end headers name')


def git_sum(data):
    return hashlib.sha1(b'blob %d\0' % len(data) + data).hexdigest()


def sha256(data):
    return hashlib.sha256(data).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *_):
        pass

    def setup(self):
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def answer(self, status, body=b'', headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def cut(self):
        """Ends the connection at once, with a reset."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        self.connection.close()

    def do_GET(self):
        try:
            self.get()
        except (ConnectionError, ssl.SSLError, OSError):
            self.close_connection = True

    def get(self):
        hub, url = self.server.hub, urllib.parse.urlsplit(self.path)
        path, query = urllib.parse.unquote(url.path), dict(urllib.parse.parse_qsl(url.query))
        begin, end = None, None
        asked = self.headers.get('Range', '')
        if asked.startswith('bytes='):
            first, _, last = asked[6:].partition('-')
            begin, end = int(first), int(last) + 1 if last else None
        name, kind = hub.name_of(path, query)
        request = Request(self.server.server_port, path, query, begin, end, dict(self.headers), name)
        with hub.lock:
            hub.requests.append(request)
        fault = hub.fault(request) or {}
        if 'endless' in fault:
            self.send_response(fault['status'])
            self.end_headers()
            while not hub.closing.is_set():
                self.wfile.write(b'no' * 5000)
        if 'status' in fault:
            return self.answer(fault['status'], fault.get('body', b'no'), fault.get('headers', {}))
        if 'redirect' in fault:
            return self.answer(302, headers={'Location': fault['redirect']})
        if kind == 'list':
            return self.answer(200, hub.list(path), {'Content-Type': 'application/json'})
        if name not in hub.files:
            return self.answer(404, b'Entry not found', {'X-Error-Code': 'EntryNotFound'})
        if kind == 'resolve' and hub.is_large(name) and self.server.server_port == hub.port and hub.redirects:
            return self.answer(302, headers={'Location': f'{hub.bytes_url}/bytes/{urllib.parse.quote(name)}?key={len(hub.requests)}',
                                             'X-Linked-Etag': f'"{sha256(hub.files[name])}"', 'X-Linked-Size': str(len(hub.files[name])), 'X-Repo-Commit': hub.commit})
        self.send_file(hub, name, begin, end, fault)

    def send_file(self, hub, name, begin, end, fault):
        data = hub.files[name]
        if 'corrupt_at' in fault and fault['corrupt_at'] < len(data):
            at = fault['corrupt_at']
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1:]
        ranged = begin is not None and not fault.get('no_ranges')
        first, last = (begin, min(end or len(data), len(data))) if ranged else (0, len(data))
        self.send_response(206 if ranged else 200)
        if ranged:
            self.send_header('Content-Range', f'bytes {first}-{last - 1}/{len(data)}')
        self.send_header('Content-Length', str(last - first))
        if hub.tags:
            self.send_header('ETag', f'"{hub.tag(name)}"')
        if hub.modified:
            self.send_header('Last-Modified', hub.modified)
        self.end_headers()
        body, sent = memoryview(data)[first:last], 0
        step = max(1, fault['bytes_per_s'] // 20) if 'bytes_per_s' in fault else 1 << 16
        stop = min(fault.get('drop_after', len(body)), fault.get('stall_after', len(body)), len(body))
        while sent < stop:
            n = min(step, stop - sent)
            self.wfile.write(body[sent:sent + n])
            sent += n
            with hub.lock:
                hub.n_sent += n
                hub.sent[name] += n
            if 'bytes_per_s' in fault:
                time.sleep(0.05)
        if sent < len(body):
            if 'stall_after' in fault:
                self.wfile.flush()
                hub.closing.wait(60)
            self.cut()


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, *_):
        pass


class Hub:
    """`tls`: (certificate file, key file)."""

    def __init__(self, files, repository='org/name', tls=None, fault=None):
        self.files, self.repository, self.commit = dict(files), repository, COMMIT
        self.fault = fault or (lambda request: None)
        self.redirects, self.sizes = True, True    # large files lie elsewhere; lists have sizes and sums
        self.tags, self.modified = True, None      # answers with a file have its ETag; its Last-Modified
        self.lock, self.closing = threading.Lock(), threading.Event()
        self.requests, self.n_sent, self.sent = [], 0, collections.Counter()
        self.servers, scheme = [], 'https' if tls else 'http'
        for host in '127.0.0.1', '127.0.0.1', '127.0.0.2':
            s = Server((host, 0), Handler)
            s.hub = self
            if tls:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(*tls)
                s.socket = context.wrap_socket(s.socket, server_side=True, do_handshake_on_connect=False)
            self.servers.append(s)
            threading.Thread(target=s.serve_forever, args=(0.05,), daemon=True).start()
        self.port, self.bytes_port, other = [s.server_port for s in self.servers]
        self.url, self.bytes_url, self.other_url = f'{scheme}://127.0.0.1:{self.port}', f'{scheme}://localhost:{self.bytes_port}', f'{scheme}://127.0.0.2:{other}'

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closing.set()
        for s in self.servers:
            s.shutdown()
            s.server_close()

    def is_large(self, name):
        return name.endswith(('.safetensors', '.gguf', 'tokenizer.json'))

    def tag(self, name):
        return sha256(self.files[name]) if self.is_large(name) else git_sum(self.files[name])

    def name_of(self, path, query):
        """(file, kind) that an address is about; kind: list, resolve, bytes."""
        for prefix in f'/api/models/{self.repository}/revision/', f'/api/v1/models/{self.repository}/repo/files':
            if path.startswith(prefix):
                return None, 'list'
        if path == f'/api/v1/models/{self.repository}/repo':
            return query.get('FilePath'), 'bytes'
        if path.startswith(f'/{self.repository}/resolve/'):
            return path.split('/', 5)[5], 'resolve'
        return (path[len('/bytes/'):], 'bytes') if path.startswith('/bytes/') else (None, 'bytes')

    def list(self, path):
        if path.startswith('/api/v1/'):
            return json.dumps({'Code': 200, 'Data': {'Files': [self.modelscope(n) for n in self.files] + [{'Path': 'folder', 'Type': 'tree', 'Size': 0}]}, 'Success': True}).encode()
        return json.dumps({'id': self.repository, 'sha': self.commit, 'gated': False, 'siblings': [self.sibling(n) for n in self.files]}).encode()

    def modelscope(self, name):
        data = self.files[name]
        return {'Name': name.split('/')[-1], 'Path': name, 'Type': 'blob', 'Size': len(data), 'Sha256': sha256(data), 'Revision': git_sum(data), 'IsLFS': self.is_large(name)}

    def sibling(self, name):
        data, out = self.files[name], {'rfilename': name}
        if not self.sizes:
            return out
        out.update(size=len(data), blobId=git_sum(data))
        if self.is_large(name):
            out.update(blobId=git_sum(b'a pointer'), lfs={'sha256': sha256(data), 'size': len(data), 'pointerSize': 130})
        return out

    def asked(self, name=None):
        """The requests for a file's bytes, or for any file's."""
        return [r for r in self.requests if r.name and name in (None, r.name)]


def checkpoint(n_shards=3, bytes_each=300000, seed=1):
    """The files of a repository as a hub has them: those that a model needs, and others beside them."""
    rng = random.Random(seed)
    shards = {f'model-{i + 1:05}-of-{n_shards:05}.safetensors': rng.randbytes(bytes_each + i) for i in range(n_shards)}
    index = {'metadata': {}, 'weight_map': {f'layer.{i}.{part}': name for i, name in enumerate(shards) for part in 'ab'}}
    needed = {'config.json': b'{"architectures": ["LlamaForCausalLM"]}', 'generation_config.json': b'{}', 'tokenizer.json': rng.randbytes(70000),
              'tokenizer_config.json': b'{"a": 1}', 'special_tokens_map.json': b'{}', 'model.safetensors.index.json': json.dumps(index).encode(), **shards}
    others = {'README.md': b'# a model', '.gitattributes': b'x', 'pytorch_model.bin': rng.randbytes(1000), 'consolidated.safetensors': rng.randbytes(2000),
              'onnx/model.onnx': b'o', 'original/params.json': b'{}', 'tokenizer.model': b'spm', 'modeling.py': b'import os'}
    return needed, others
