"""cases.py - the requests that the virtual machines answer, and the answers of one mixed node to compare with.

This host computes the reference answers itself, 10 to 30 times faster than a virtual machine, with the CPU backend that the virtual
machines have too (so the same bits). run.py writes them to a file before a machine starts; tests read it with load().
"""
import json, os, sys

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'e2e'))   # last: tests there may have the names of tests here
from harness import *
from moved import check, kv_bytes_per_token

ISA = 'avx2'
BLOCK = 16  # small, because a block is pushed when it is full and 64 tokens of SmolLM2 take an emulated CPU too long
# An emulated CPU computes some fifty prompt tokens a second: 24 requests at once are a line of half a minute, which a test of answers must not refuse.
SIZE = ['--max-model-len', '1024', '--max-num-seqs', '8', '--num-gpu-blocks-override', '256', '--block-size', str(BLOCK), '--cpu-isa', ISA,
        '--max-queue-time', '600']
TINY_BYTES = 3 * 1 * 2 * 16 * 2   # per token: layers x KV heads x (k, v) x head_dim x bf16
PAIRED = 'qwen3_moe', 'llama', 'deepseek_v3'  # fewer KV heads than ranks, one KV head, a latent


def golden(name):
    return os.path.join(DATA, 'goldens', name, 'model')


def few(name, longest, max_tokens):
    """A few requests to nodes of several ranks, which are slow on an emulated CPU."""
    with open(os.path.join(golden(name), 'config.json')) as f:
        vocab = json.load(f)['vocab_size']
    return dict(path=lambda: golden(name), vocab=vocab, n=4, longest=longest, max_tokens=max_tokens, bytes_per_token=kv_bytes_per_token(golden(name), 1))


MODELS = {'smollm2': dict(path=smollm2, vocab=49152, n=2, longest=66, max_tokens=(2, 3), bytes_per_token=30 * 3 * 2 * 64 * 2),
          'tiny': dict(path=lambda: TINY, vocab=512, n=12, longest=300, max_tokens=(1, 8), bytes_per_token=TINY_BYTES),
          'tiny_long': dict(path=lambda: TINY, vocab=512, n=24, longest=900, max_tokens=(1, 12), bytes_per_token=TINY_BYTES),
          **{f'pair_{name}': few(name, 120, (2, 6)) for name in PAIRED}, 'group': few('qwen3_moe', 40, (20, 40))}


def bodies(name):
    """Completion requests: the shortest prompts are below one block, the longest end with a partly filled one."""
    m = MODELS[name]
    return mixed_requests(m['n'], 4, m['vocab'], m['longest'], m['max_tokens'])


def make(path):
    """Writes the answers of a mixed node for every model at hand. A missing model is left out: its tests skip in load()."""
    answers = {}
    for name, m in MODELS.items():
        try:
            model = m['path']()
        except Skip:
            continue
        with closing(Node(model, 'mixed', SIZE)) as node:
            wait_ready(node)
            answers[name] = [answer_of(request(node.port, 'POST', '/v1/completions', b, timeout=600)[2]) for b in bodies(name)]
    with open(path, 'w') as f:
        json.dump(answers, f)


def load(name):
    """(path of the model, requests, answers of one mixed node, KV bytes of a prompt position)"""
    with open(os.environ['BATON_VM_ANSWERS']) as f:
        answers = json.load(f)
    if name not in answers:
        raise Skip(f'no answers of a mixed node for {name}: BATON_TEST_GGUF does not name the SmolLM2 file')
    m = MODELS[name]
    return m['path'](), bodies(name), answers[name], m['bytes_per_token']
