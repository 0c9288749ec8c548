"""Compares a prefill and a decode node on one GPU, over CUDA IPC, with one mixed node. usage: gpu_split.py [--emulated] answers|ttft   (BATON_BIN)

answers  200 requests, greedy and seeded, of two small models: tokens and log-probabilities must be the same split and mixed; also the memory that the
         mixed node takes while it serves
ttft     time to first token of long prompts, the three nodes in turns, of Llama-3-8B with dummy weights; also the KV capacity of a node
Prints lines of JSON as bench_gpu does (gpu.h); ends with a sentence if something is wrong."""
import argparse, json, os, re, shutil, signal, statistics, subprocess, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'e2e'))
from harness import *
from test_split import check_equal, run

SMALL = [os.path.join(DATA, 'goldens', m, 'model') for m in ('qwen3_moe', 'deepseek_v3')]
LLAMA = os.path.join(DATA, 'configs', 'llama-3-8b')
STEP = '16'  # tokens per step on an emulated GPU: a node whose step takes 2.5 s counts as lost, and the machine may be busy


def print_line(kind, **members):
    print(json.dumps({'kind': kind, **members}), flush=True)


def figure(name, value, unit, limit, limit_is, wanted=None, wanted_is='at most'):
    goal = {} if wanted is None else dict(wanted=wanted, wanted_is=wanted_is)
    print_line('figure', name=name, value=value, unit=unit, limit=limit, limit_is=limit_is, ratio=round(value / limit, 4) if limit else 0, **goal)


def optional(*flags):
    """Those of the flags that this build has."""
    r = subprocess.run([BIN, 'serve', '--help'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30)
    return [f for f in flags if re.search(rf'^\s*{f}\b', r.stdout, re.M)]


def memory_mib():
    """(used, total) memory of the GPU; None if nvidia-smi does not say."""
    if not shutil.which('nvidia-smi'):
        return None
    r = subprocess.run(['nvidia-smi', '--query-gpu=memory.used,memory.total', '--format=csv,noheader,nounits'], stdout=subprocess.PIPE, text=True, timeout=30)
    first = r.stdout.strip().splitlines()[0].split(',') if r.returncode == 0 and r.stdout.strip() else []
    return (int(first[0]), int(first[1])) if len(first) == 2 and all(x.strip().isdigit() for x in first) else None


def check_trace(answer):
    t = answer['baton']
    assert t['transport'] == 'ipc' and t['prefill_node'] != t['decode_node'] and t['recomputed_tokens'] == 0 and t['kv_bytes'] > 0, t


def answers(emulated):
    n, longest, tokens, at_once = (6, 60, (1, 4), 3) if emulated else (200, 400, (1, 24), 16)
    cuda = ['--device', 'cuda', '--max-model-len', '512', '--max-num-seqs', '16', '--num-gpu-blocks-override', '160',
            '--max-num-batched-tokens', STEP if emulated else '512', *optional('--deterministic')]
    for model in SMALL[:1] if emulated else SMALL:
        name = os.path.basename(os.path.dirname(model))
        bodies = mixed_requests(n, 6, 512, longest, tokens)
        with closing(Node(model, 'mixed', cuda)) as mixed:
            wait_ready(mixed, timeout=120)
            want = run([mixed.port], bodies[:at_once], at_once)  # warms up: the first step of a kind may allocate
            before = memory_mib()
            want = run([mixed.port], bodies, 1 if emulated else at_once)
            after = memory_mib()
        if before and after:
            figure(f'{name}: memory taken while {n} requests were served', (after[0] - before[0]) * 2**20, 'bytes', 2 << 20,
                   'the smallest unit that the driver allocates', 0.5)
        else:
            print_line('note', text='memory taken while serving was not measured: there is no nvidia-smi')
        with pair(model, 'ipc', cuda) as nodes:
            got = run([x.port for x in nodes], bodies, at_once)
        check_equal(want, got, f'{name} split over two nodes')
        for a in got:
            check_trace(a)
        figure(f'{name}: answers split over CUDA IPC equal to mixed', len(got), 'requests', len(bodies), 'all', 1, 'at least')


def ask(port, prompt):
    body = dict(model='m', prompt=prompt, max_tokens=2, temperature=0, ignore_eos=True, return_trace=True)
    s, _, b = request(port, 'POST', '/v1/completions', body, timeout=120)
    assert s == 200, b
    return b['baton']


def capacity(mixed, emulated, share, idle):
    """Compares the number of blocks of the node with how many fit into the memory of the GPU."""
    found = re.search(r'kv_blocks=(\d+) kv_tokens=\d+ kv_gib=([\d.]+)', mixed.output())
    assert found, 'the node does not say its KV capacity'
    blocks, gib = int(found[1]), float(found[2])
    print_line('fact', name='KV capacity of the node', value=f'{blocks} blocks, {gib:.2f} GiB')
    used = memory_mib()
    if emulated or not used or not idle:
        print_line('note', text='KV capacity was not compared with memory: there is no nvidia-smi')
        return
    room = used[1] * share - (used[0] - idle[0] - gib * 1024)  # in MiB: the share less all that is not KV
    figure(f'KV capacity with --gpu-memory-utilization {share}', blocks, 'blocks', room / (gib * 1024 / blocks),
           "the GPU's share less weights and everything else", 0.98, 'at least')


def ttft(emulated):
    rounds, lengths = (1, (20, 50)) if emulated else (6, (1024, 8128))
    model, longest = (SMALL[0], '512') if emulated else (LLAMA, '8192')
    cuda = ['--device', 'cuda', '--load-format', 'dummy', '--max-model-len', longest, '--enable-prefix-caching=false',
            '--max-num-batched-tokens', STEP if emulated else '8192']
    blocks = ['--max-num-seqs', '8', '--num-gpu-blocks-override', '64' if emulated else '400']
    idle, got = memory_mib(), {}
    vocab = 512 if emulated else 128000
    with closing(Node(model, 'mixed', [*cuda, *blocks])) as mixed, pair(model, 'ipc', [*cuda, *blocks]) as nodes:
        wait_ready(mixed, timeout=120)
        for i in range(rounds + 1):
            for n in lengths:
                prompt = [(i * 131 + k * 7919 + n) % (vocab - 8) + 4 for k in range(n)]
                one, two = ask(mixed.port, prompt), ask(nodes[0].port, prompt)
                check_trace({'baton': two})
                if i or emulated:
                    got.setdefault(n, []).append((one['first_token_ms'], two['first_token_ms'], two['kv_bytes'], two['kv_tail_ms']))
    for n, rows in got.items():
        one, two, moved, tail = (statistics.median(r[i] for r in rows) for i in range(4))
        figure(f'time to first token, {n} tokens, split', two, 'ms', one, 'mixed, in turns', 1.05)
        figure(f'KV moved after the last layer, {n} tokens, {moved / 2**20:.0f} MiB', tail, 'ms', one, 'time to first token, mixed')
    share = 0.9
    with closing(Node(model, 'mixed', [*cuda, *(blocks if emulated else ['--gpu-memory-utilization', str(share), '--max-num-seqs', '1024'])])) as node:
        wait_ready(node, timeout=120)
        capacity(node, emulated, share, idle)


def main():
    a = argparse.ArgumentParser()
    a.add_argument('--emulated', action='store_true')
    a.add_argument('what', choices=['answers', 'ttft'])
    a = a.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('gpu_split.py: asked to end'))  # so that the nodes are ended on the way out
    {'answers': answers, 'ttft': ttft}[a.what](a.emulated)


if __name__ == '__main__':
    main()
