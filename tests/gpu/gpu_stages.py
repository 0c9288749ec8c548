"""The stages that run.sh runs, in order. The most important come first: a stage for which no time is left is not reached."""
import os, re, subprocess, sys
from dataclasses import dataclass, field
from typing import Optional

from gpu_programs import ROOT, sanitizer

HERE = os.path.dirname(os.path.abspath(__file__))
CONFIGS, GOLDENS = os.path.join(ROOT, 'tests', 'data', 'configs'), os.path.join(ROOT, 'tests', 'data', 'goldens')
JOBS = 4  # cases of a test program that run at the same time: most of their time is the CPU's, for the expected results
LIMITS = {'test_models': 180, 'test_attention_cuda': 120, 'test_attention_kv': 120, 'test_ep': 150, 'test_engine_gpu': 120, 'test_dummy_weights': 120}  # in seconds; 60 of the others
# Those that run beside nothing else, and how many cases at a time: test_device compares what memory is left; a case of test_ep runs up to eight processes whose
# kernels wait for each other on the same GPU.
ALONE = {'test_device': 1, 'test_ep': 2}
# Cases that run on a GPU say so in their names, but for these programs.
ALL_CASES = ('test_gpu_jobs', 'test_kv_gpu', 'test_model_experts', 'test_weight_load')

# They take one group of cases each time: a stage for each, or a fault of the GPU in one would fail those after it.
BY_GROUP = ('test_attention_append', 'test_attention_cuda', 'test_attention_kv')


@dataclass
class Stage:
    name: str
    argv: list                   # empty if it cannot run; `why` then says why
    limit_s: int                 # 0: it cannot run, and that is no failure
    kind: str = 'results'        # lines of JSON (bench_gpu, gpu_split.py); 'tests': the last line says how many passed; 'sanitizer': tests under compute-sanitizer
    why: str = ''
    env: dict = field(default_factory=dict)
    found: Optional[str] = None  # matches the line in which compute-sanitizer says, for each process, how much it found
    judges: bool = True          # whether what compute-sanitizer found is a failure
    together: bool = False       # runs beside the other such stages that follow it: it measures nothing


def test_arguments(name, path):
    """The cases for a GPU, for programs that have others too. None: the program cannot list its cases."""
    r = subprocess.run([path, '--list'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    names = r.stdout.split()
    if not names or any(not re.fullmatch(r'\w+', n) for n in names):
        return None
    own = [n for n in names if re.search(r'cuda|gpu|peer|nccl', n)]
    return names if name in (*ALL_CASES, *BY_GROUP) or not own else own


def conformance(programs, emulated):
    """On an emulated GPU, which is thousands of times slower, only a few programs: ctest runs the others in every build with one."""
    few = ['test_prepare_inputs', 'test_device']
    listed = [(name, env) for name, env in programs.gpu_tests() if not emulated or name in few]
    # Those that take longest begin first, those that run alone come last.
    for name, env in sorted(listed, key=lambda t: (t[0] in ALONE, -LIMITS.get(t[0], 0))):
        title, path = ' '.join([f'conformance: {name}', *env.values()]), programs.start(name)
        if not path:
            yield Stage(title, [], 1, 'tests', why=f'{programs.home} has no {name}', together=name not in ALONE)
            continue
        cases = test_arguments(name, path)
        if name in BY_GROUP and cases:
            yield from (Stage(f'{title} {c}', [path, c], LIMITS.get(name, 60), 'tests', env=env, together=True) for c in cases)
            continue
        argv = [path] + (['--jobs', str(ALONE.get(name, JOBS)), *cases] if cases else [])
        yield Stage(title, argv, LIMITS.get(name, 60), 'tests', env=env, together=name not in ALONE)


# Short cases through every kind of kernel: (program, cases, seconds).
MEMCHECK = [('test_prepare_inputs', ['inputs_equal_a_plain_loop'], 25), ('test_gemm', ['gemm_groups', 'gemm_every_stored_number'], 40),
            ('test_attention_cuda', ['lengths'], 40), ('test_attention_append', ['norms'], 25), ('test_route', ['cuda_route'], 25), ('test_experts', ['cuda_experts'], 30),
            ('test_kernels', ['cuda_rms_norm', 'cuda_rope', 'cuda_combine'], 25), ('test_sample', ['five_tokens_as_the_host'], 30),
            ('test_gemm_sm90', ['gemm_sm90_rows_have_the_same_bits_among_others'], 30)]
RACECHECK = [('test_prepare_inputs', ['inputs_equal_a_plain_loop'], 25), ('test_gemm', ['gemm_groups'], 40), ('test_attention_cuda', ['lengths'], 40), ('test_attention_append', ['norms'], 25),
             ('test_route', ['cuda_route'], 25), ('test_sample', ['one_token_as_the_host'], 30),
             ('test_gemm_sm90', ['gemm_sm90_nan_stays_in_its_row'], 30)]


def sanitized(programs):
    """What racecheck finds is printed and does not judge: of kernels that wait by mbarrier and wgmma it may report what is no race."""
    tool = sanitizer()
    kinds = (('memcheck', MEMCHECK, r'ERROR SUMMARY: (\d+) error', []),
             ('racecheck', RACECHECK, r'RACECHECK SUMMARY: (\d+) hazard', ['--racecheck-report', 'analysis']))
    for kind, chosen, found, options in kinds:
        for name, cases, limit in chosen:
            title, path = f'{kind}: {name}', programs.start(name)
            if not path:
                yield Stage(title, [], 1, 'sanitizer', why=f'{programs.home} has no {name}')
            elif not tool:
                yield Stage(title, [], 0, 'sanitizer', why='there is no compute-sanitizer on this machine')
            else:
                yield Stage(title, [tool, '--tool', kind, *options, '--target-processes', 'all', path, *cases], limit, 'sanitizer',
                            env={'BATON_CUBLASLT': 'off'}, found=found, judges=kind == 'memcheck')


MODELS = [('ernie-4.5-21b-a3b', 'ERNIE-4.5-21B-A3B'), ('qwen3-30b-a3b', 'Qwen3-30B-A3B')]
QUANTIZATIONS = [('none', 'bf16'), ('wint4', 'wint4'), ('block_wise_fp8', 'fp8')]
DECODE = '1x1024,8x1024,64x1024,128x1024,256x1024,1x32768,8x32768,64x32768'
QUANTIZED = '1x1024,8x1024,64x1024,256x1024,1x32768'


def models(programs, emulated):
    bench = programs.start('bench_gpu')
    if emulated:
        for folder, quantization, load in (('qwen3_moe', 'none', 'auto'), ('deepseek_v3_fp8', 'none', 'auto'), ('ernie_moe', 'wint4', 'dummy')):
            yield Stage(f'model: {folder} {quantization}', [bench, '--tiny', 'model', os.path.join(GOLDENS, folder, 'model'), '--load-format', load, '--label', folder,
                                                    '--quantization', quantization, '--decode', '1x100,2x40', '--prefill', '20,70'], 60)
        return
    for quantization, short in QUANTIZATIONS:
        for folder, name in MODELS:
            decode = QUANTIZED if quantization != 'none' else DECODE + (',1x131072' if folder.startswith('ernie') else '')
            yield Stage(f'model: {name} {short}', [bench, 'model', os.path.join(CONFIGS, folder), '--load-format', 'dummy', '--label', f'{name} {short}',
                                                   '--quantization', quantization, '--decode', decode, '--prefill', '8192'], 45)


def overlap(programs):
    """Measures once more without overlapping launches."""
    folder, name = MODELS[1]
    yield Stage(f'model: {name} bf16, launches one after the other', [programs.start('bench_gpu'), 'model', os.path.join(CONFIGS, folder), '--load-format', 'dummy',
                '--label', f'{name} bf16, BATON_CUDA_OVERLAP=off', '--quantization', 'none', '--decode', '1x1024,8x1024', '--prefill', '512'], 30,
                env={'BATON_CUDA_OVERLAP': 'off'})


def multicast(programs):
    """Measures prompts once more with experts' weights that blocks of a cluster share, which is off by default."""
    for quantization, short in (QUANTIZATIONS[0], QUANTIZATIONS[2]):
        folder, name = MODELS[1]
        yield Stage(f'model: {name} {short}, shared weights', [programs.start('bench_gpu'), 'model', os.path.join(CONFIGS, folder), '--load-format', 'dummy',
                    '--label', f'{name} {short}, BATON_CUDA_MULTICAST=on', '--quantization', quantization, '--decode', '1x1024', '--prefill', '8192'], 45,
                    env={'BATON_CUDA_MULTICAST': 'on'})


def split(emulated):
    script = [sys.executable, '-u', os.path.join(HERE, 'gpu_split.py'), *(['--emulated'] if emulated else [])]
    yield Stage('split: answers', [*script, 'answers'], 90)
    yield Stage('split: time to first token', [*script, 'ttft'], 60)


def ranks(programs, emulated):
    script = [sys.executable, '-u', os.path.join(HERE, 'gpu_ranks.py'), *(['--emulated'] if emulated else [])]
    yield Stage('ranks: answers', [*script, 'answers'], 90)
    yield Stage('ranks: two nodes of two', [*script, 'pair'], 60)
    yield Stage('ranks: a node of two', [*script, 'node'], 120)
    bench = programs.start('bench_ep')
    if emulated and not bench:
        return  # builds with a sanitizer have no benchmarks
    yield Stage('ranks: a layer', [*script, 'layers'] if bench else [], 60, why=f'{programs.home} has no bench_ep', env={'BATON_BENCH_EP': bench or ''})


def stages(programs, emulated):
    bench, tiny = programs.start('bench_gpu'), ['--tiny'] if emulated else []
    if not bench:
        return [Stage('limits', [], 1, why=f'{programs.home} has no bench_gpu')]
    out = [Stage('limits', [bench, *tiny, 'limits'], 40), *conformance(programs, emulated)]
    answers, ttft = split(emulated)
    out += [answers, Stage('attention', [bench, *tiny, 'attention'], 40), Stage('push', [bench, *tiny, 'push'], 30),
            Stage('push, checksums', [bench, *tiny, 'push', 'checksum'], 30), *models(programs, emulated), ttft, *ranks(programs, emulated)]
    return out if emulated else out + list(overlap(programs)) + list(multicast(programs)) + list(sanitized(programs))
