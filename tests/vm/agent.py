#!/usr/bin/env python3
"""agent.py - runs programs on host 2 for the tests on host 1. Only for virtual machines: anyone on the wire may run anything.

One request per connection, a line of JSON each way: {"start": argv, "env": {...}} -> {"pid": N}; {"signal": N, "pid": N};
{"poll": N} -> {"status": null or N, "output": "..."}; {"run": argv} -> {"status": N, "output": "..."}. A failure is {"error": text}.
"""
import json, os, socketserver, subprocess, tempfile

PORT = 7078
children = {}


def log_of(log):
    with open(log.name, encoding='utf-8', errors='replace') as f:
        return f.read()


def serve(q):
    if 'start' in q:
        log = tempfile.NamedTemporaryFile('w+', prefix='baton-agent-', suffix='.log', delete=False)
        p = subprocess.Popen(q['start'], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **q.get('env', {})}, start_new_session=True)
        children[p.pid] = p, log
        return {'pid': p.pid}
    if 'signal' in q:
        p = children[q['pid']][0]
        if p.poll() is None:
            p.send_signal(q['signal'])
        return {}
    if 'poll' in q:
        p, log = children[q['poll']]
        return {'status': p.poll(), 'output': log_of(log)}
    done = subprocess.run(q['run'], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace')
    return {'status': done.returncode, 'output': done.stdout}


class Connection(socketserver.StreamRequestHandler):
    def handle(self):
        try:
            answer = serve(json.loads(self.rfile.readline()))
        except Exception as e:  # the client raises it
            answer = {'error': f'{type(e).__name__}: {e}'}
        self.wfile.write(json.dumps(answer).encode() + b'\n')


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


if __name__ == '__main__':
    Server(('', PORT), Connection).serve_forever()
