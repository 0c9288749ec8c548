"""documents.py - the five documents that users have in hand (data/*.txt), the blocks of commands in them, and what docs/compatibility.md says of each."""
import os, re, shlex, subprocess

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
COMMAND = [
    re.compile(r"\bpython3? -m [a-z_.]+"),
    re.compile(r"\bpython3? [a-z_]+\.py"),
    re.compile(r"\bbash [a-z_./]+\.sh"),
    re.compile(r"\brun_dp_template\.sh"),
    re.compile(r"\bdocker (?:run|exec|build)\b"),
    re.compile(r"\b(?:mpirun )?(?:start|stop)_server\b"),
    re.compile(r"\b(?:hccn_tool|npu-smi info|nvidia-smi|ifconfig|vllm serve|cat /etc/hccn\.conf)\b"),
    re.compile(r"^(?:git clone|pip3 install) .*$", re.M),
    re.compile(r"\bais_bench(?= --)"),
]
NOT_COMMAND = {"bash ./run_dp_template.sh"}  # counted without the shell


def document(number):
    with open(os.path.join(DATA, number + ".txt"), encoding="utf-8") as f:
        return f.read()


def documents():
    for name in sorted(os.listdir(DATA)):
        yield name.split(".")[0], document(name.split(".")[0])


def commands(number):
    """[(line, name)] of every command that a document names, in its order."""
    text = document(number)
    found = {(m.start(), m.group(0).strip()) for p in COMMAND for m in p.finditer(text)}
    return [(text.count("\n", 0, at) + 1, name) for at, name in sorted(found) if name not in NOT_COMMAND]


def lines_of(number, first, last, nth=0):
    """The numbers of a document's lines from the nth that begins with `first` to the next that begins with `last`, both included."""
    lines = document(number).split("\n")
    at = [i for i, line in enumerate(lines) if line.strip().startswith(first)][nth]
    end = next(i for i in range(at, len(lines)) if lines[i].strip().startswith(last))
    return range(at + 1, end + 2)


def block(number, first, last, nth=0):
    """Those lines as they are."""
    lines, numbers = document(number).split("\n"), lines_of(number, first, last, nth)
    return "\n".join(lines[i - 1] for i in numbers) + "\n"


def server_commands(number):
    """{role: options} of every `python -m ...api_server` in the document that has a role."""
    text = re.sub(r" \\\n", " ", continued(document(number)))
    found = {}
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("python -m fastdeploy.entrypoints.openai.api_server") and "--splitwise-role" in line:
            words = shlex.split(line.replace("${quant_type}", "block_wise_fp8"), comments=True)[3:]
            found[words[words.index("--splitwise-role") + 1]] = words
    return found


def command_flags(number):
    """[(line, name, flags)] of every command that a document starts with flags of its own, over all its continued lines."""
    lines = document(number).split("\n")
    found = []
    for at, name in commands(number):
        block, i = [], at - 1
        if not re.match(rf"(?:[^\x00-\x7f]|.*[;&|])?\s*{re.escape(name)}(?:$|[\s\u00a0])", lines[i]):
            continue  # mentioned in a sentence
        while True:
            block.append(lines[i])
            ends = lines[i].rstrip().endswith("\\")
            # document 001 lacks one line continuation
            if not (ends or lines[i].strip() == "--scheduler-ttl 9000") or i + 1 == len(lines):
                break
            i += 1
        flags = re.findall(r"(?<!\S)--[A-Za-z][A-Za-z0-9_-]*", "\n".join(block).replace("\u00a0", " "))
        if flags:
            found.append((at, name, list(dict.fromkeys(flags))))
    return found


def continued(text):
    """Document 001 lacks one line continuation, so that a shell would not see the options after it."""
    return re.sub(r"--scheduler-ttl 9000\n(?= *--)", "--scheduler-ttl 9000 \\\n", text)


def page(baton, name):
    return subprocess.run([baton, "docs", name], check=True, capture_output=True, text=True).stdout


def table(baton):
    """{heading: [(name, owner, documents, effect, sentence)]} of the compatibility page."""
    rows, heading = {}, None
    for line in page(baton, "compatibility").splitlines():
        if line.startswith("## "):
            heading = line[3:]
            rows[heading] = []
        m = re.match(r"\| `(.*?)`(?: of (\S+))? \| ([^|]*) \| (works|accepted without effect|refused) \| (.*) \|$", line)
        if m and heading:
            rows[heading].append((m[1], m[2], m[3].split(), m[4], m[5]))
        elif heading and line.startswith("| `"):
            raise AssertionError("a row that is not understood: " + line)
    return rows
