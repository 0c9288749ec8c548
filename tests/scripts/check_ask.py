"""check_ask.py - what deploy/ask.py says when no node answers, and of an answer that was resumed.

usage: check_ask.py ROOT     exit status 0: all is as it should be
"""
import contextlib
import importlib.util
import io
import os
import subprocess
import sys

PATH = os.path.join(sys.argv[1], "deploy", "ask.py")
spec = importlib.util.spec_from_file_location("ask", PATH)
ask = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ask)


def test_a_dead_node_is_told_of_once():
    dead = f"127.0.0.1:{ask.free_ports(1, [])[0]}"
    ask.RESUME_GIVE_UP_S, ask.RESUME_PAUSE_S = 0.2, 0.01
    for urls, says in (([dead], "trying again"), ([dead, dead + "/"], f"going on at {dead}")):
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            try:
                list(ask.stream_resumed(urls, {}))
                raise AssertionError("somebody answered")
            except ConnectionRefusedError:
                pass
        lines = err.getvalue().split("\n")
        told = [line for line in lines if line]
        assert len(told) == len(urls) and says in told[0], told


def test_an_answer_that_a_node_had_kept_has_no_prefill_node():
    def said(trace):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            ask.print_times(trace, {"prompt_tokens": 39, "completion_tokens": 5})
        return next(line for line in out.getvalue().split("\n") if "prefill" in line)
    assert said({"prefill_node": "", "decode_node": "b", "prefill_ms": 0}).split(None, 2) == ["prefill", "-", "before the connection was lost; 39 prompt tokens"]
    assert "on a; 39 prompt tokens, 7 of them cached" in said({"prefill_node": "a", "decode_node": "b", "prefill_ms": 3.5, "cached_tokens": 7})


def test_several_urls_are_for_resume():
    p = subprocess.run([sys.executable, PATH, "127.0.0.1:1,127.0.0.1:2", "Hello?"], capture_output=True, text=True, timeout=30)
    assert p.returncode == 2 and "127.0.0.1:1,127.0.0.1:2 is several URLs, which are for --resume" in p.stderr, p


for name, test in list(globals().items()):
    if name.startswith("test_"):
        test()
        print("ok", name)
