"""Ranks that share a model, and a GPU or as many as there are. usage: gpu_ranks.py [--emulated] answers|pair|node|layers   (BATON_BIN, BATON_BENCH_EP)

answers  2 and 4 ranks with the shape of ERNIE-4.5-21B-A3B and dummy weights: tokens and log-probabilities of one process that has all experts
pair     a prefill and a decode node of 2 ranks each, KV over CUDA IPC: the same
node     2 ranks that share the attention of Llama-3-8B's shape (--tensor-parallel-size), dummy weights, exact arithmetic: tokens of one process, log-probabilities
         within the bound of test_models; recorded, launched kernel by kernel, and as a prefill and a decode node of 2 ranks each, each rank's heads over CUDA IPC
layers   the time that a sparse layer's dispatch and combine take, of `peer` and, with as many GPUs, of `nccl`, beside a copy of as many bytes
Prints lines of JSON as bench_gpu does (gpu.h); ends with a sentence if something is wrong."""
import argparse, os, re, signal, subprocess, sys

from gpu_split import LLAMA, STEP, check_trace, figure, print_line
from harness import *
from test_gpu import LLAMA as LLAMA_TINY
from test_ranks import Parent
from test_split import check_equal, run

ERNIE, ERNIE_TINY = os.path.join(DATA, 'configs', 'ernie-4.5-21b-a3b'), os.path.join(DATA, 'goldens', 'ernie_moe', 'model')
PAIR_SECRET = {'BATON_CLUSTER_SECRET': 'ranks that share a GPU'}


class Sizes:
    """What is asked of which model. A GPU has to hold the attention, the buffers and the KV of each rank, and the experts once for each node."""

    def __init__(self, emulated):
        self.emulated = emulated
        self.model, self.sizes = (ERNIE_TINY, (2,)) if emulated else (ERNIE, (2, 4))
        # few steps: ranks that share a GPU wait for each other by turns of milliseconds, two or three times in each layer
        n, longest, tokens = (4, 40, (1, 4)) if emulated else (16, 200, (1, 8))
        self.bodies, self.at_once = mixed_requests(n, 9, 512 if emulated else 100000, longest, tokens), 4 if emulated else 16
        self.args = ['--device', 'cuda', '--deterministic', '--load-format', 'dummy', '--max-num-batched-tokens', STEP if emulated else '512']


def ranks(s, size, args=(), env=None):
    return Parent(s.model, size, [*s.args, *args], env)


def of_one(s):
    with closing(ranks(s, 1)) as one:
        wait_ready(one, timeout=180)
        return run([one.port], s.bodies, s.at_once)


def answers(s):
    want = of_one(s)
    for size in s.sizes:
        for way, args in (('recorded', ()), ('eager', ('--enforce-eager',))):
            with closing(ranks(s, size, args)) as parent:
                wait_ready(parent, timeout=180)
                since = time.monotonic()
                got = run([parent.port], s.bodies, s.at_once)
                seconds = time.monotonic() - since
                steps, recorded, ahead = steps_of(parent)
            check_equal(want, got, f'{size} ranks, {way}')
            assert (recorded > 0) == (way == 'recorded') and ahead > 0, (way, steps, recorded, ahead)
            figure(f'answers of {size} ranks, {way}, equal to one', len(got), 'requests', len(s.bodies), 'all', 1, 'at least')
            print_line('note', text=f'{size} ranks, {way}: {steps:.0f} steps of all ranks in {seconds:.1f} s, {recorded:.0f} recorded, {ahead:.0f} ahead of the host')


def steps_of(parent):
    """Of all ranks: steps, those that replayed a CUDA graph, and those submitted while the one before ran."""
    ports = [n['http_port'] for n in request(parent.port, 'GET', '/cluster')[2]['nodes']]
    return [sum(metrics(p)[f'baton_engine_{name}_total'] for p in ports) for name in ('steps', 'steps_recorded', 'steps_ahead')]


def asked_of_pair(s, size, args=()):
    control = free_ports(1)[0]
    ends = [('prefill', ['--engine-worker-queue-port', str(control)]), ('decode', ['--router', f'127.0.0.1:{control}'])]
    nodes = [ranks(s, size, ['--splitwise-role', role, '--cache-transfer-protocol', 'ipc', *view, *args], PAIR_SECRET) for role, view in ends]
    with closing(*nodes):
        wait_ready(*nodes, timeout=180)
        wait_sees(nodes, 2 * size, timeout=60)
        got = run([n.port for n in nodes], s.bodies, s.at_once)
    for a in got:
        check_trace(a)
    return got


def pair_of_ranks(s):
    want = of_one(s)
    got = asked_of_pair(s, 2)
    check_equal(want, got, 'two nodes of two ranks')
    figure('answers of two nodes of two ranks, KV over CUDA IPC, equal to one', len(got), 'requests', len(s.bodies), 'all', 1, 'at least')


BOUND = 1e-3


def apart(want, got, what):
    """The largest difference of log-probabilities of the same tokens. After the first other token there is nothing to compare; it must have been as likely."""
    worst = 0.0
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        (ids, _, p, *_), (other_ids, _, q, *_) = answer_of(a), answer_of(b)
        assert len(ids) == len(other_ids), (what, i, ids, other_ids)
        n = next((k + 1 for k, (x, y) in enumerate(zip(ids, other_ids)) if x != y), len(ids))
        worst = max(worst, *(abs(x - y) for x, y in zip(p[:n], q[:n])))
    return worst


def node(s):
    s.model, s.args = (LLAMA_TINY if s.emulated else LLAMA), [*s.args, '--activations', 'f32', '--max-model-len', '512', '--num-gpu-blocks-override', '160']
    s.bodies = [{**b, 'temperature': 0} for b in s.bodies[:8]]
    want, two = of_one(s), ['--tensor-parallel-size', '2']
    for way, args in (('recorded', ()), ('eager', ('--enforce-eager',))):
        with closing(ranks(s, 1, [*two, *args])) as parent:
            wait_ready(parent, timeout=180)
            since = time.monotonic()
            got = run([parent.port], s.bodies, s.at_once)
            seconds = time.monotonic() - since
            steps, recorded, _ = steps_of(parent)
        assert (recorded > 0) == (way == 'recorded'), (way, steps, recorded)
        figure(f'answers of a node of 2 ranks, {way}: log-probabilities differ by', apart(want, got, way), '', BOUND, 'the bound of test_models', 1)
        print_line('note', text=f'a node of 2 ranks, {way}: {steps:.0f} steps in {seconds:.1f} s, {recorded:.0f} recorded')
    got = asked_of_pair(s, 1, two)
    figure('answers of two nodes of 2 ranks, KV over CUDA IPC: log-probabilities differ by', apart(want, got, 'a pair'), '', BOUND, 'the bound of test_models', 1)


def n_gpus():
    tool = shutil.which('nvidia-smi')
    r = tool and subprocess.run([tool, '-L'], stdout=subprocess.PIPE, text=True, timeout=30)
    return r.stdout.count('GPU ') if r else 0


LAYER = re.compile(r'^dispatch and combine +([\d.]+) us +([\d.]+) MB a rank .* a copy of as much +([\d.]+) us', re.M)


def layers(s):
    hidden, experts, used, rows = (256, 8, 2, (4,)) if s.emulated else (2560, 64, 6, (1, 128))
    sizes = [size for size in s.sizes if size <= max(2, n_gpus())]  # more ranks on one GPU take minutes, by turns of its driver
    backends = [('peer', size) for size in sizes] + [('nccl', size) for size in s.sizes if size <= n_gpus()]
    for backend, size in backends:
        for n in rows:
            argv = [os.environ['BATON_BENCH_EP'], backend, str(size), str(n), str(hidden), str(experts), str(used), 'f32']
            r = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
            found = LAYER.search(r.stdout)
            assert r.returncode == 0 and found, f'{argv} ended with {r.returncode}: {r.stdout[-1000:]}'
            us, megabytes, copy_us = map(float, found.groups())
            figure(f'{backend}, {size} ranks of {n} rows, {megabytes:g} MB a rank: dispatch and combine of a layer', us, 'us', copy_us, 'a copy of as much')
    if len(backends) == len(sizes):
        print_line('note', text=f'nccl was not run: it wants a GPU for each rank, there are {n_gpus()}')


def main():
    a = argparse.ArgumentParser()
    a.add_argument('--emulated', action='store_true')
    what = {'answers': answers, 'pair': pair_of_ranks, 'node': node, 'layers': layers}
    a.add_argument('what', choices=what)
    a = a.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('gpu_ranks.py: asked to end'))  # so that the nodes are ended on the way out
    what[a.what](Sizes(a.emulated))


if __name__ == '__main__':
    main()
