"""source.py - what the checks of this folder share: the tree's files, and C text split into code, strings and comments."""
import os
import re
import subprocess

PRODUCT = ("decode", "deploy", "kernels", "kvtransfer", "prefill", "scheduler", "shared")
C_ENDINGS = (".c", ".h", ".cu", ".cuh", ".cc")
NOT_OURS = ("tests/data/", "tests/seeds/data/", "tests/fuzz/corpus/", "LICENSE", "build")


def tracked(root):
    """Paths of the files under `root` that belong to the project, sorted."""
    try:
        out = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard"],
                             capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        out = [os.path.relpath(os.path.join(d, f), root) for d, _, names in os.walk(root) for f in names]
        out = [f for f in out if not f.startswith(".git/")]
    return sorted(f for f in out if f and not f.startswith(NOT_OURS) and os.path.isfile(os.path.join(root, f)))


def is_product(path):
    return path.split("/")[0] in PRODUCT or path == "CMakeLists.txt"


def is_c(path):
    return path.endswith(C_ENDINGS)


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8", errors="replace") as f:
        return f.read()


TOKEN = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'", re.S)


def comments(text):
    """(line number, text) of each comment of C text."""
    return [(text.count("\n", 0, m.start()) + 1, m.group()) for m in TOKEN.finditer(text) if m.group()[0] == "/"]


def strings(text):
    """(line number, text) of each string literal of C text."""
    return [(text.count("\n", 0, m.start()) + 1, m.group()) for m in TOKEN.finditer(text) if m.group()[0] == '"']


def code(text):
    """C text with comments and literals blanked out; lines and columns stay where they are."""
    def blank(m):
        s = m.group()
        if s[0] == "/":
            return re.sub(r"[^\n]", " ", s)
        return s[0] + " " * (len(s) - 2) + s[-1]
    return TOKEN.sub(blank, text)
