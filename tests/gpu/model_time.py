"""model_time.py - the time that the kernels of a step should take, from what they read and compute and how they are launched, beside the limits.

usage: tests/gpu/model_time.py [--gpu h200|h100] [--measured GPU.JSON] [--only TEXT] [--kernels] [--blocks]
  --measured   a result file of tests/gpu/run.sh: its limits replace the constants that it measured, and its steps are printed beside the model's
  --only       models and steps whose name contains this: "Qwen3-30B-A3B wint4, decode of 1"
  --kernels    every kernel of these steps
  --blocks     blocks with work of blocks launched, for every shape of a product, of steps with more numbers of rows

Nothing here is a measurement unless it says so. The constants below are one table; model_launches.py mirrors the launch formulas."""
import argparse, json, math, sys

from model_launches import Step, ends, layers
from model_shapes import MODELS, QUANTIZATIONS, Model

GPUS = {'h200': {}, 'h100': {'read': (3.0e12, 'estimated: 0.90 of the data sheet\'s 3.35 TB/s')}}
# name: (value, source); times in us, rates per second
CONSTANTS = {
    'n_sms': (132, 'data sheet'),
    'read': (4.6e12, 'measured on an H200 (tests/data/gpu/h200.json): 4.53 to 4.66 TB/s'),
    'l2': (6.5e12, 'estimated: what SMs together read from L2'),
    'bf16': (785e12, 'measured on an H200 (tests/data/gpu/h200.json): cuBLAS, 8192 cubed'),
    'fp8': (1400e12, 'estimated: DeepGEMM on an H100'),
    'f32': (45e12, 'estimated: 0.67 of the data sheet'),
    'wgmma_share': (0.75, 'measured on an H200: 619 and 609 TFLOP/s of Qwen3\'s and ERNIE\'s gate and up, of cuBLAS\'s 789'),
    'upconvert_share': (0.55, 'measured on an H200: 280 (8 bits) and 460 (4 bits) TFLOP/s'),
    'fp8_share': (0.53, 'measured on an H200: 757 and 720 TFLOP/s of Qwen3\'s and ERNIE\'s gate and up, beside the line above'),
    'mma_share': (0.55, 'estimated: mma.sync tiles of 128 x 128, of cuBLAS'),
    'small_tile_share': (0.15, 'measured on an H200: 0.61 us of an SM for 32 x 128 by 64 k, experts of 64 rows in bf16 and e4m3; 0.14 for 32 x 32 in 4 bits'),
    'w4_tile_share': (0.20, 'measured on an H200: 0.44 us of an SM for 32 x 128 by 64 k, experts of 256 rows in 4 bits'),
    'issue': (2.0e9, 'measured on an H200: warp instructions of an SM in a second, decode of 8 in 4 bits (1.7) and e4m3 (2.0)'),
    'attention_share': (0.53, 'measured on an H200: in prompts of 8k; alone 464 to 482 TFLOP/s of cuBLAS\'s 797'),
    'logits_share': (0.27, 'measured on an H200: the router of a prompt of 8k, 182 us a layer with its norm and its sort'),
    'latent_share': (0.42, 'estimated: mma.sync, as FlashAttention-2\'s 0.35 of an H100\'s peak'),
    'gap_us': (0.6, 'measured on an H200: in a graph, from one empty kernel to the next'),
    'floor_us': (2.4, 'measured on an H200: the shortest kernel, 3 to 5 us with the gap'),
    'prefetch_us': (0.6, 'estimated: what prefetched weights hide of the gap'),
    'ring_us': (3.6, 'measured on an H200: a decode kernel beyond its bytes: 55 us of a layer of Qwen3, less attention 10, router 4 and 24.6 of bytes, by 4'),
    'combine_us': (0.5, 'estimated: the sums of experts\' results'),
    'latency_us': (0.8, 'estimated: memory, loaded'),
    'block_us': (1.5, 'estimated: a block of 16 rows of W: search, x, first load, end'),
    'block_read': (80e9, 'estimated: 64 KiB in flight per block, 800 ns away'),
    'empty_us': (1.0, 'estimated: a block that finds no work'),
    'tile_us': (1.0, 'estimated: a wgmma tile\'s pipeline fill and store'),
    'unit_us': (7.0, 'measured on an H200: attention, a block\'s beginning and end: one sequence at 1k takes 10 us'),
    'unit_read': (73e9, 'estimated: attention, 64 KiB in flight per block, 900 ns away'),
    'ramp_us': (2.0, 'estimated: attention, until all blocks read and after the first ends'),
    'merge_us': (1.5, 'estimated: the last block of a row: a counter, its segments\' parts'),
    'library_us': (3.5, 'measured on an H200: cublasLt\'s kernels do not overlap the one before; q, k and v of 64 rows take 17 us'),
    'merge_round_us': (0.6, 'estimated: 32 segments, one round of loads'),
    'router_us': (4.0, 'estimated: norm, product, a counter, top-k by the last block'),
    'route_us': (2.0, 'estimated: top-k by one warp, ordered keys'),
}
# figures of a result file that replace constants: constant -> (name of the figure, factor)
FIGURES = {'read': ('memory read by a kernel', 1e9), 'bf16': ('cuBLAS bf16, random numbers', 1e12),
           'gap_us': ('in a graph, from one empty kernel to the next', 1)}
DECODE = [(1, 1024), (8, 1024), (64, 1024), (128, 1024), (256, 1024), (1, 32768), (8, 32768)]
PREFILL = [8192]
# rows of the steps whose blocks are counted: captured steps have up to 512
BLOCK_DECODE, BLOCK_PREFILL = [1, 2, 4, 6, 8, 12, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512], [64, 512, 1024, 2048, 8192]


class Gpu:
    """The constants, each an attribute; `source` says where each comes from."""

    def __init__(self, name='h200', measured=None):
        table, self.source, self.has_library = {**CONSTANTS, **GPUS[name]}, {}, True
        for f in figures_of(measured) if measured else []:
            for constant, (figure, factor) in FIGURES.items():
                if f['name'] == figure and f['value'] > 0:
                    table[constant] = (f['value'] * factor, f'measured on {measured.get("gpu", "a GPU").splitlines()[-1]}')
        for constant, (value, source) in table.items():
            setattr(self, constant, value)
            self.source[constant] = source


def results_of(measured, kind):
    return [r for stage in measured['stages'] for r in stage['results'] if r['kind'] == kind]


def figures_of(measured):
    return results_of(measured, 'figure')


class Predicted:
    """A step's launches and sums. share: of reading weights and KV once (decode), or of the products at cuBLAS's rate (prefill)."""

    def __init__(self, g, model, step):
        self.label, self.step = f'{model.name} {model.quantization}', step
        self.parts = [(n, x) for n, part in layers(g, step) for x in part] + [(1, x) for x in ends(g, step)]
        self.us = self.sum('us')
        self.must, self.flops, self.bytes = self.sum('must'), self.sum('flops'), self.sum('bytes')
        self.limit_us = (self.flops / g.bf16 if step.prefill else self.must / g.read) * 1e6
        self.share = self.limit_us / self.us
        n, part = layers(g, step)[-1]
        self.launches = sum(x.n for x in part)

    def sum(self, what):
        return sum(n * x.n * getattr(x, what) for n, x in self.parts)

    def name(self):
        return f'{self.label}, {self.step.name()}'

    def by_op(self):
        """{(op, shape): [calls, us]} as gpu_ops.c adds them up: ops with the same name and, for products, the same shapes."""
        out = {}
        for n, x in self.parts:
            key = (x.op, x.what if x.op == 'matmul' else '')
            out.setdefault(key, [0, 0.0])
            out[key][0] += n * x.n
            out[key][1] += n * x.n * x.us
        return out


def predict(g, only='', decode=DECODE, prefill=PREFILL):
    for quantization in QUANTIZATIONS:
        for name in MODELS:
            m = Model(name, quantization)
            for step in [Step(m, b, c) for b, c in decode] + [Step(m, 1, c, True) for c in prefill]:
                p = Predicted(g, m, step)
                if only in p.name():
                    yield p


def print_constants(g):
    print(f'{"constant":<16} {"value":>10}  source')
    for name, source in g.source.items():
        print(f'{name:<16} {getattr(g, name):>10.4g}  {source}')


def print_steps(steps, measured):
    beside = {f['name']: f['value'] for f in figures_of(measured)} if measured else {}
    off = []
    print(f'\n{"step":<52} {"us":>9} {"limit us":>9} {"share":>6} {"tokens/s":>9} {"must GB":>8} {"TFLOP":>7} {"launches a layer":>17}' +
          ('  measured us   share' if measured else ''))
    for p in steps:
        s = p.step
        line = (f'{p.name():<52} {p.us:>9.0f} {p.limit_us:>9.0f} {p.share:>6.2f} {s.rows / p.us * 1e6:>9.0f} {p.must / 1e9:>8.2f} {p.flops / 1e12:>7.2f} '
                f'{p.launches:>17.0f}')
        us = beside.get(f'{p.name()}: the GPU\'s part of a step', beside.get(f'{p.name()}: the GPU\'s part'))
        off += [abs(math.log(p.us / us))] if us else []
        print(line + (f'  {us:>11.0f} {p.limit_us / us:>7.2f}' if us else ''))
    if off:
        print(f'{len(off)} measured steps: the model is off by a factor of {math.exp(sum(off) / len(off)):.2f} in the mean, {math.exp(max(off)):.2f} at most')


def print_kernels(p, measured):
    print(f'\n{p.name()}: {p.us:.0f} us\n  {"kernel":<16} {"what":<44} {"n":>6} {"us each":>8} {"us":>9} {"share":>6} {"MB":>8} {"GFLOP":>8}  bound by')
    for n, x in sorted(p.parts, key=lambda part: -part[0] * part[1].n * part[1].us):
        us = n * x.n * x.us
        print(f'  {x.kernel:<16} {x.what[:44]:<44} {n * x.n:>6.0f} {x.us:>8.2f} {us:>9.1f} {us / p.us:>6.1%} {x.bytes / 1e6:>8.2f} {x.flops / 1e9:>8.2f}  {x.bound}')
    if measured:
        print_ops(p, [o for o in results_of(measured, 'op') if o['of'] == p.name()])


def print_ops(p, ops):
    """Measured ops beside predicted ones. A product's `what` begins with its shapes."""
    mine, seen = p.by_op(), set()
    for o in sorted(ops, key=lambda o: -o['us']):
        key = (o['op'], o['what'].split(', ')[0] if o['op'] == 'matmul' else '')
        seen.add(key)
        predicted = f'{mine[key][1]:>10.1f} {o["us"] / mine[key][1]:>6.2f}' if key in mine else f'{"-":>10} {"-":>6}'
        print(f'    {o["op"]:<16} {o["what"][:60]:<60} measured {o["us"]:>10.1f} predicted {predicted}')
    for key in mine.keys() - seen if ops else []:
        print(f'    {key[0]:<16} {key[1][:60]:<60} measured          - predicted {mine[key][1]:>10.1f}')


def shapes_with_blocks(p):
    """{(kernel, shape): (launched, with work)} of a step's products."""
    out = {}
    for n, x in p.parts:
        if x.op in ('matmul', 'experts') and x.blocks and x.kernel not in ('prepare_inputs',):
            out[(x.kernel, x.what)] = (x.blocks, x.working)
    return out


def steps_with_blocks(g, only=''):
    return predict(g, only, [(b, 1024) for b in BLOCK_DECODE], BLOCK_PREFILL)


def print_blocks(steps, wanted=0.9):
    n = n_short = 0
    print(f'\n{"step":<52} {"kernel":<14} {"product":<36} {"launched":>9} {"with work":>10} {"share":>6}')
    for p in steps:
        for (kernel, what), (launched, working) in shapes_with_blocks(p).items():
            short = working < wanted * launched
            n, n_short = n + 1, n_short + short
            print(f'{p.name():<52} {kernel:<14} {what[:36]:<36} {launched:>9.0f} {working:>10.1f} {working / launched:>6.2f}{"  SHORT" if short else ""}')
    print(f'{n_short} of {n} launches of products have work for fewer than {wanted:g} of their blocks')


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--gpu', choices=GPUS, default='h200')
    a.add_argument('--measured')
    a.add_argument('--only', default='')
    a.add_argument('--kernels', action='store_true')
    a.add_argument('--blocks', action='store_true')
    a = a.parse_args()
    measured = None
    if a.measured:
        with open(a.measured, encoding='utf-8') as f:
            measured = json.load(f)
    g = Gpu(a.gpu, measured)
    steps = list(predict(g, a.only))
    if not steps:
        sys.exit(f'model_time.py: no step has "{a.only}" in its name')
    print_constants(g)
    print_steps(steps, measured)
    for p in steps if a.kernels else []:
        print_kernels(p, measured)
    if a.blocks:
        print_blocks(steps_with_blocks(g, a.only))


if __name__ == '__main__':
    main()
