#!/usr/bin/env python3
"""ask.py - asks a node one question, streams the answer and prints where the time went.

usage: ask.py [--max-tokens N] [--expect WORD] URL QUESTION     URL is http://host:port
       ask.py --resume [...] URL[,URL...] QUESTION              when a node is lost, goes on at the
                                                                next URL
       ask.py --free-ports N [PREFERRED...]                     prints N free ports of this host,
                                                                preferred ones first

The times come from the node's own trace, which it adds to the answer of a request with the header
`x-baton-trace: 1`. BATON_API_KEY is sent when it is set. Uses only the standard library.
"""
import argparse
import http.client
import json
import os
import socket
import sys
import time
import urllib.parse

RESUME_PAUSE_S = 0.2
RESUME_GIVE_UP_S = 30  # without a new event


def connect(url, timeout):
    try:
        u = urllib.parse.urlsplit(url if "//" in url else "http://" + url)
        host, port = u.hostname, u.port or 80
    except ValueError:
        host = None
    if not host:
        sys.exit(f"ask.py: {url} is not http://host:port")
    return http.client.HTTPConnection(host, port, timeout=timeout)


def headers():
    h = {"Content-Type": "application/json", "x-baton-trace": "1"}
    key = os.environ.get("BATON_API_KEY", "").split(",")[0]
    if key:
        h["Authorization"] = "Bearer " + key
    return h


def free_ports(n, preferred):
    """Return n free ports. The sockets stay open meanwhile, so that no port is returned twice."""
    held, ports = [], []
    for port in preferred + [0] * (n + len(preferred)):
        if len(ports) == n:
            break
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("0.0.0.0", port))
            s.listen(1)
        except OSError:
            s.close()
            continue
        held.append(s)
        ports.append(s.getsockname()[1])
    for s in held:
        s.close()
    return ports


class Refused(RuntimeError):
    """The answer of a node that asking again does not change."""


class Later(RuntimeError):
    """What is asked for is over a limit, at every node: it may be had after some seconds."""

    def __init__(self, text, after_s):
        super().__init__(text)
        self.after_s = after_s


def events(response):
    """Yield (id, JSON) of each server-sent event, up to [DONE]; id is None where there is none.

    An event counts when its empty line has come: what a connection cut off before it was not
    delivered, and comes again."""
    event_id = data = None
    for line in response:
        line = line.decode("utf-8").rstrip("\r\n")
        if line.startswith("id:"):
            event_id = line[3:].strip()
        elif line.startswith("data:"):
            data = line[5:].strip()
        elif not line and data is not None:
            if data == "[DONE]":
                return
            yield event_id, json.loads(data)
            event_id = data = None
    raise RuntimeError("the stream ended before [DONE]")


def post(url, body, more_headers):
    c = connect(url, 120)
    c.request("POST", "/v1/chat/completions", json.dumps(body), {**headers(), **more_headers})
    r = c.getresponse()
    if r.status == 200:
        return r
    text = f"status {r.status}: {r.read().decode('utf-8', 'replace').strip()}"
    after = r.getheader("Retry-After", "")
    if r.status == 429 and after.isdigit():
        raise Later(text, int(after))
    raise (RuntimeError if r.status in (429, 502, 503, 504) else Refused)(text)


def stream(url, body, more_headers=None):
    """Yield (id, JSON) of each event of the answer."""
    for event_id, event in events(post(url, body, more_headers or {})):
        if "error" in event:
            raise RuntimeError(event["error"].get("message", str(event["error"])))
        yield event_id, event


def stream_resumed(urls, body):
    """As stream, over as many connections as it takes: each event once, in order.

    The first request asks for ids. When its connection ends early, the same request goes to the
    next URL, with the id of the last event as Last-Event-ID; that node goes on after it. A node
    that says when to come back (429) is obeyed. What keeps a URL from answering is said once
    until there is a new event."""
    last_id, i, t_last, said = None, 0, time.monotonic(), set()
    while True:
        ask = {"Last-Event-ID": last_id} if last_id else {"x-baton-resume": "1"}
        try:
            for event_id, event in stream(urls[i % len(urls)], body, ask):
                last_id, t_last = event_id, time.monotonic()
                said.clear()
                yield event_id, event
            return
        except Refused:
            raise
        except (OSError, http.client.HTTPException, RuntimeError, ValueError) as e:
            if time.monotonic() - t_last > RESUME_GIVE_UP_S:
                raise
            pause_s = max(RESUME_PAUSE_S, getattr(e, "after_s", 0))
            t_last += pause_s  # what it is told to wait is no silence
            url, next_url = urls[i % len(urls)], urls[(i + 1) % len(urls)]
            why = f"ask.py: {url}: {str(e) or type(e).__name__}"
            if why not in said:
                again = "trying again" if next_url == url else f"going on at {next_url}"
                after = f" in {pause_s:g} s" if pause_s > RESUME_PAUSE_S else ""
                print(f"\n{why}; {again}{after}, until nothing new has come for "
                      f"{RESUME_GIVE_UP_S} s", file=sys.stderr)
            said.add(why)
        i += 1
        time.sleep(pause_s)


def ask(urls, question, max_tokens, resume):
    """Stream the answer to stdout; returns (text, trace, usage)."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, trace, usage = "", {}, {}
    for _, event in stream_resumed(urls, body) if resume else stream(urls[0], body):
        trace = event.get("baton") or trace
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            piece = choice.get("delta", {}).get("content") or ""
            text += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
    print()
    return text, trace, usage


def ms(value):
    if not isinstance(value, (int, float)):
        return "-"
    return f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms"


def size(n):
    if not isinstance(n, (int, float)):
        return "-"
    if n >= 1 << 20:
        return f"{n / (1 << 20):.2f} MiB"
    return f"{n / 1024:.1f} KiB" if n >= 1024 else f"{n} bytes"


def print_times(trace, usage):
    if not trace:
        print("  (the node sent no trace of its times)")
        return
    t = trace.get
    prefill, decode = t("prefill_node"), t("decode_node")
    moved = bool(t("kv_bytes"))
    kv = "not moved"
    if moved:
        kv = (f"{size(t('kv_bytes'))} over {t('transport')} during prefill, "
              f"the last {ms(t('kv_tail_ms'))} after it")
    prompt, answer = usage.get("prompt_tokens", "?"), usage.get("completion_tokens", "?")
    cached = t("cached_tokens", 0)
    computed = f"on {prefill}; {prompt} prompt tokens, {cached} of them cached"
    if not prefill:  # the decode node had kept the answer
        computed = f"before the connection was lost; {prompt} prompt tokens"
    rows = [
        ("queue", ms(t("queue_ms")), f"placing took {ms(t('place_ms'))}"),
        ("prefill", ms(t("prefill_ms") if prefill else None), computed),
        ("KV", ms(t("kv_ms")) if moved else "-", kv),
        ("first token", ms(t("first_token_ms")), "after the request came in"),
        ("decode", ms(t("decode_ms")), f"on {decode}; {answer} tokens"),
        ("total", ms(t("total_ms")), ""),
    ]
    for name, took, note in rows:
        print(f"  {name:<12}{took:>10}  {note}".rstrip())


def main():
    a = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--free-ports", nargs="+", type=int, metavar="N")
    a.add_argument("--max-tokens", type=int, default=64)
    a.add_argument("--resume", action="store_true",
                   help="URL may be a list with commas; when a node is lost, another one goes on")
    a.add_argument("--expect", metavar="WORD", help="fail when the answer does not contain it")
    a.add_argument("words", nargs="*", metavar="URL QUESTION")
    o = a.parse_args()
    if o.free_ports:
        print(*free_ports(o.free_ports[0], o.free_ports[1:]))
        return 0
    if len(o.words) < 2:
        a.error("a URL and a question are needed")
    url, question = o.words[0], " ".join(o.words[1:])
    if "," in url and not o.resume:
        a.error(f"{url} is several URLs, which are for --resume")
    try:
        text, trace, usage = ask(url.split(","), question, o.max_tokens, o.resume)
    except (OSError, http.client.HTTPException, RuntimeError, ValueError) as e:
        print(f"ask.py: {url}: {e}", file=sys.stderr)
        return 1
    print_times(trace, usage)
    if o.expect and o.expect not in text:
        print(f"ask.py: {url}: the answer does not contain {o.expect!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
