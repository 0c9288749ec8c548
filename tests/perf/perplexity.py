#!/usr/bin/env python3
"""perplexity.py - perplexity of a text under several options, compared with the first. Standard library only.

usage: perplexity.py --model MODEL [--text FILE] [--characters 3600] NAME="OPTIONS" NAME="OPTIONS" …      runs BATON_BIN generate once per option set
       perplexity.py --answers NAME=FILE.jsonl NAME=FILE.jsonl …                                            from existing batch answers
       perplexity.py --requests OUT.jsonl [--text FILE] [--characters 3600]                                 only writes the batch
                     [--limit PERCENT] with the first two: exit 1 if any perplexity is further than that from the first

An option set may begin with another model: NAME="@FOLDER OPTIONS". Example, with --model of a bf16 folder:
    perplexity.py --model smollm2-bf16 bf16="--activations f32" wint8="--quantization wint8 --activations f32" default=""

The text (tests/data/text/darwin_instinct.txt) is cut at ends of sentences into pieces of about that many characters (SmolLM2 has 4.4 per token here). Each
piece is one prompt. The perplexity is exp of minus the mean logprob of all prompt tokens except the first of each piece. All option sets see the same
pieces; different tokenizers are not comparable and are refused (the number of tokens must agree).

"% of the first" has a standard error: the differences of logprobs are added up per piece, and the pieces count as independent. It estimates how far another
text of the same kind may lie, not a text of another kind. --text may be given several times: the pieces of all texts are one sample."""
import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
BIN = os.environ.get("BATON_BIN") or os.path.join(HERE, "..", "..", "build", "baton")
TEXT = os.path.join(HERE, "..", "data", "text", "darwin_instinct.txt")


def pieces(text, characters):
    """Pieces of whole sentences, each of at least `characters` characters if as many are left."""
    out, piece = [], ""
    for sentence in re.findall(r".*?(?:[.!?]\s+|\Z)", text, re.S):
        piece += sentence
        if len(piece) >= characters:
            out.append(piece)
            piece = ""
    return out + [piece] if piece.strip() else out


def write_requests(path, a):
    cut = []
    for name in a.text or [TEXT]:
        with open(name, encoding="utf-8") as f:
            cut += pieces(f.read(), a.characters)
    with open(path, "w", encoding="utf-8") as f:
        for i, piece in enumerate(cut):
            body = {"model": "m", "prompt": piece, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0, "return_token_ids": True}
            f.write(json.dumps({"custom_id": f"piece-{i}", "method": "POST", "url": "/v1/completions", "body": body}) + "\n")


def logprobs_of(path):
    """For each answer, the logprobs of every prompt token that has one."""
    out = {}
    with open(path, encoding="utf-8") as f:
        for line in f:
            d = json.loads(line)
            if (d.get("response") or {}).get("status_code") != 200:
                sys.exit(f"{path}: {d.get('custom_id')} has no answer: {line[:300]}")
            choice = d["response"]["body"]["choices"][0]
            known = choice["logprobs"]["token_logprobs"]
            n_prompt = len(choice.get("prompt_token_ids") or d["response"]["body"].get("prompt_token_ids") or []) or len(known) - 1
            out[d["custom_id"]] = known[1:n_prompt]
    if not any(out.values()):
        sys.exit(f"{path}: no logprobs of prompt tokens")
    return [out[name] for name in sorted(out)]


def percent_apart(first, known):
    """How much larger the perplexity is than the first, and the standard error, both in percent."""
    n = sum(len(piece) for piece in first)
    apart = [(sum(first_piece) - sum(piece), len(piece)) for first_piece, piece in zip(first, known)]
    mean = sum(d for d, _ in apart) / n
    return 100 * math.expm1(mean), 100 * math.exp(mean) * math.sqrt(sum((d - mean * tokens) ** 2 for d, tokens in apart)) / n


def generate(model, options, requests, out):
    words = shlex.split(options)
    if words and words[0].startswith("@"):
        model = words.pop(0)[1:]
    r = subprocess.run([BIN, "generate", "--model", model, "--served-model-name", "m", "--input", requests, "--output", out, *words], capture_output=True, text=True)
    if r.returncode:
        sys.exit(f"baton generate {' '.join(words)}: status {r.returncode}\n{r.stderr[-1500:]}")


def named(words):
    for w in words:
        if "=" not in w:
            sys.exit(f"perplexity: {w} is not NAME=…")
    return [w.split("=", 1) for w in words]


def answers_of(a):
    if a.answers:
        return named(a.sets)
    if not a.model:
        sys.exit("perplexity: --model, --answers or --requests is needed (--help)")
    folder = tempfile.mkdtemp(prefix="baton-perplexity-")
    requests = os.path.join(folder, "requests.jsonl")
    write_requests(requests, a)
    out = []
    for i, (name, options) in enumerate(named(a.sets)):
        out.append((name, os.path.join(folder, f"{i}.jsonl")))
        generate(a.model, options, requests, out[-1][1])
    return out


def main():
    a = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].replace("%", "%%"))
    a.add_argument("--model")
    a.add_argument("--answers", action="store_true")
    a.add_argument("--requests")
    a.add_argument("--text", action="append")
    a.add_argument("--characters", type=int, default=3600)
    a.add_argument("--limit", type=float)
    a.add_argument("sets", nargs="*")
    a = a.parse_args()
    if a.requests:
        return write_requests(a.requests, a)
    first, far = None, []
    for name, path in answers_of(a):
        known = logprobs_of(path)
        first = first or known
        if [len(piece) for piece in known] != [len(piece) for piece in first]:
            sys.exit(f"perplexity: the pieces of {name} are not as many tokens as those of the first set")
        flat, n = [(x, y) for piece, other in zip(known, first) for x, y in zip(piece, other)], sum(len(piece) for piece in known)
        perplexity, (apart, error) = math.exp(-sum(x for x, _ in flat) / n), percent_apart(first, known)
        mean = sum(abs(x - y) for x, y in flat) / n
        print(f"{name:24} perplexity {perplexity:9.4f}   {apart:+8.3f} ± {error:.3f} % of the first   "
              f"mean |difference of logprob| {mean:.5f}   {n} tokens", flush=True)
        if a.limit is not None and abs(apart) > a.limit:
            far.append(name)
    if far:
        sys.exit(f"perplexity: further than {a.limit} %: {', '.join(far)}")


if __name__ == "__main__":
    main()
