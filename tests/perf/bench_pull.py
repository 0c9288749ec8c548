#!/usr/bin/env python3
"""bench_pull.py - how fast `baton pull` fetches and checks a file from a server of this host, next to curl, which does not check, and to curl and then sha256sum.

usage: bench_pull.py [--mib 1024] [--rounds 3] [--dir DIR] [--ms 0]
The server sends from the page cache (sendfile); --ms is a delay before each answer, as of a server far away. Prints the best of the rounds."""
import argparse, hashlib, http.server, json, os, subprocess, sys, tempfile, threading, time

BIN = os.environ.get('BATON_BIN') or os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'build', 'baton')


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *_):
        pass

    def do_GET(self):
        time.sleep(self.server.delay_s)
        if self.path.startswith('/api/'):
            body = json.dumps({'sha': 'c0ffee', 'siblings': [{'rfilename': 'm.gguf', 'size': self.server.size, 'lfs': {'sha256': self.server.sum, 'size': self.server.size}}]}).encode()
            self.send_response(200)
            self.send_header('Content-Length', str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        first, last = 0, self.server.size
        if 'Range' in self.headers:
            a, _, b = self.headers['Range'][6:].partition('-')
            first, last = int(a), int(b) + 1 if b else last
        self.send_response(206 if 'Range' in self.headers else 200)
        self.send_header('Content-Range', f'bytes {first}-{last - 1}/{self.server.size}')
        self.send_header('Content-Length', str(last - first))
        self.end_headers()
        self.wfile.flush()
        while first < last:
            first += os.sendfile(self.connection.fileno(), self.server.file, first, min(last - first, 1 << 20))


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass


def timed(work):
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def main():
    a = argparse.ArgumentParser()
    a.add_argument('--mib', type=int, default=1024)
    a.add_argument('--rounds', type=int, default=3)
    a.add_argument('--dir')
    a.add_argument('--ms', type=float, default=0)
    a = a.parse_args()
    with tempfile.TemporaryDirectory(dir=a.dir) as folder:
        source = os.path.join(folder, 'source')
        digest = hashlib.sha256()
        with open(source, 'wb') as f:
            for _ in range(a.mib):
                block = os.urandom(1 << 20)
                digest.update(block)
                f.write(block)
        server = Server(('127.0.0.1', 0), Handler)
        server.size, server.sum, server.file, server.delay_s = a.mib << 20, digest.hexdigest(), os.open(source, os.O_RDONLY), a.ms / 1000
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, to = f'http://127.0.0.1:{server.server_port}', os.path.join(folder, 'to')
        curl = lambda: subprocess.run(['curl', '-sfo', to, f'{url}/m.gguf'], check=True)
        ways = {'curl (no check)': curl, 'curl, then sha256sum': lambda: (curl(), subprocess.run(['sha256sum', to], check=True, stdout=subprocess.DEVNULL)),
                'sha256sum alone': lambda: subprocess.run(['sha256sum', source], check=True, stdout=subprocess.DEVNULL)}
        env = {**os.environ, 'HF_ENDPOINT': url, 'HF_TOKEN': '', 'HOME': folder}
        for n in 1, 8:
            ways[f'baton pull, {n} connections'] = lambda n=n: subprocess.run([BIN, 'pull', 'org/name', '--dir', to + '.d', '--connections', str(n)], check=True, env=env, capture_output=True)
        best = {}
        for _ in range(a.rounds):
            for name, work in ways.items():
                subprocess.run(['rm', '-rf', to, to + '.d'])
                best[name] = min(best.get(name, 1e9), timed(work))
    limit = a.mib / best['curl (no check)']
    print(f'{a.mib} MiB, {os.cpu_count()} CPUs, {a.ms:g} ms before each answer, best of {a.rounds}')
    for name, s in best.items():
        print(f'{name:26} {a.mib / s:7.0f} MiB/s   {a.mib / s / limit:5.2f} x curl')


sys.exit(main())
