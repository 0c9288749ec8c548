"""baton generate against the reference answers, judged by tests/data/goldens/compare.py."""
import json, os, re, subprocess, sys, tempfile

from harness import BIN, DATA, HERE, Skip, smollm2

GOLDENS = os.path.join(DATA, 'goldens')
FIXTURES = os.path.join(HERE, '..', 'fixtures')


def generate(model, name, *args, goldens=GOLDENS):
    out = os.path.join(tempfile.mkdtemp(prefix='baton-golden-'), 'answers.jsonl')
    r = subprocess.run([BIN, 'generate', '--model', model, '--served-model-name', name, '--input', os.path.join(goldens, name, 'requests.jsonl'), '--output', out,
                        *args], capture_output=True, text=True, timeout=600)
    assert r.returncode == 0, r.stderr[-2000:]
    return out


def compare(name, answers, tolerance, what='', goldens=GOLDENS):
    r = subprocess.run([sys.executable, os.path.join(GOLDENS, 'compare.py'), os.path.join(goldens, name, 'expected.jsonl'), answers, '--tolerance', str(tolerance)],
                       capture_output=True, text=True)
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-1000:]
    print(f'  {name}{what}: {r.stdout.splitlines()[-2]}')


def kernel_backends():
    """Every --cpu-isa backend that this CPU supports, taken from the error sentence for an unknown one."""
    r = subprocess.run([BIN, 'generate', '--help'], capture_output=True, text=True)
    choices = re.search(r'--cpu-isa\s+\S*?((?:[a-z0-9-]+\|)+[a-z0-9-]+)', r.stdout)
    assert choices, r.stdout
    backends = []
    for backend in choices.group(1).split('|'):
        probe = subprocess.run([BIN, 'generate', '--model', os.path.join(GOLDENS, 'llama', 'model'), '--cpu-isa', backend, '--input', os.devnull,
                                '--output', os.devnull], capture_output=True, text=True)
        if backend != 'auto' and 'this CPU' not in probe.stderr:
            backends.append(backend)
    assert 'ref' in backends, backends
    return backends


def tiny(name, goldens=GOLDENS, backends=None):
    for isa in backends or kernel_backends():
        answers = generate(os.path.join(goldens, name, 'model'), name, '--cpu-isa', isa, '--activations', 'f32', goldens=goldens)
        compare(name, answers, 1e-3, f' on {isa}', goldens)


def torch_python():
    """A Python that can compute reference answers: this one, or the one that BATON_TORCH_PYTHON names."""
    python = os.environ.get('BATON_TORCH_PYTHON', sys.executable)
    if subprocess.run([python, '-c', 'import numpy, torch, transformers'], capture_output=True).returncode:
        raise Skip(f'{python} has no torch, transformers and numpy (BATON_TORCH_PYTHON names a Python that has): no other weights were tested')
    return python


def other_seeds(names, seeds):
    """Checkpoints of the goldens' shapes with other weights and prompts, on every CPU backend, against answers computed here."""
    python, backends = torch_python(), kernel_backends()
    with tempfile.TemporaryDirectory(prefix='baton-seeds-') as folder:
        for seed in seeds:
            goldens = os.path.join(folder, str(seed))
            for name in names:
                source, fp8 = (name[:-len('_fp8')], ['--fp8']) if name.endswith('_fp8') else (name, [])
                r = subprocess.run([python, os.path.join(FIXTURES, 'reseed.py'), os.path.join(GOLDENS, source), os.path.join(goldens, name), str(seed), *fp8],
                                   capture_output=True, text=True)
                assert r.returncode == 0, r.stderr[-3000:]
                print(f'  {name}: {r.stdout.strip()}', flush=True)
                tiny(name, goldens, backends)


def paddle(name, *args):
    """The same weights in the layout of "-Paddle" checkpoints."""
    folder = tempfile.mkdtemp(prefix='baton-paddle-')
    r = subprocess.run([sys.executable, os.path.join(FIXTURES, 'paddle_layout.py'), os.path.join(GOLDENS, name, 'model'), folder, *args],
                       capture_output=True, text=True)
    if 'numpy' in r.stderr:
        raise Skip('numpy is not installed: the -Paddle layout is tested by conformance/test_checkpoint_layouts alone')
    assert r.returncode == 0, r.stderr
    compare(name, generate(folder, name, '--activations', 'f32'), 1e-3, ' in the -Paddle layout')


def test_llama():
    tiny('llama')


def test_llama_bias():
    tiny('llama_bias')


def test_qwen2():
    tiny('qwen2')


def test_qwen3():
    tiny('qwen3')


def test_qwen3_moe():
    tiny('qwen3_moe')


def test_qwen3_moe_nonorm():
    tiny('qwen3_moe_nonorm')


def test_mixtral():
    tiny('mixtral')


def test_ernie():
    tiny('ernie')


def test_ernie_moe():
    tiny('ernie_moe')


def test_ernie_moe_untied():
    tiny('ernie_moe_untied')


def test_ernie_moe_interval():
    tiny('ernie_moe_interval')


def test_deepseek_v3():
    tiny('deepseek_v3')


def test_deepseek_v3_fp8():
    tiny('deepseek_v3_fp8')


def test_deepseek_v2_lite():
    tiny('deepseek_v2_lite')


def test_deepseek_v2_grouped():
    tiny('deepseek_v2_grouped')


def test_other_seeds_long():
    other_seeds(sorted(n for n in os.listdir(GOLDENS) if os.path.isdir(os.path.join(GOLDENS, n, 'model'))), (1, 2))


def test_ernie_in_the_paddle_layout():
    for name in ('ernie', 'ernie_moe', 'ernie_moe_untied', 'ernie_moe_interval'):
        paddle(name)
    paddle('ernie_moe', '--u16')


def test_smollm2():
    answers = generate(smollm2(), 'smollm2', '--activations', 'f32')
    compare('smollm2', answers, 5e-3)


def test_batch_lines_that_are_wrong():
    """A malformed line produces an error line and does not stop the others; the order is kept."""
    lines = ['{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5, 6], "max_tokens": 2}}', 'not json',
             '{"custom_id": "c", "method": "GET", "url": "/v1/completions", "body": {}}',
             '{"custom_id": "d", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5], "max_tokens": -1}}']
    d = tempfile.mkdtemp(prefix='baton-batch-')
    with open(os.path.join(d, 'in'), 'w') as f:
        f.write('\n'.join(lines) + '\n')
    r = subprocess.run([BIN, 'generate', '--model', os.path.join(GOLDENS, 'llama', 'model'), '--input', os.path.join(d, 'in'), '--output', os.path.join(d, 'out')],
                       capture_output=True, text=True, timeout=60)
    assert r.returncode == 1, r
    out = [json.loads(l) for l in open(os.path.join(d, 'out'))]
    assert [o.get('custom_id') for o in out][0::2] == ['a', 'c'], out
    assert out[0]['response']['status_code'] == 200 and out[0]['error'] is None
    assert out[1]['error'] and out[2]['error'], out
    assert out[3]['response']['status_code'] == 400, out[3]


def test_weights_cache():
    """--weights-cache: the first run writes the cache, the second maps it; both answer as the reference does."""
    name, folder = 'qwen2', tempfile.mkdtemp(prefix='baton-packed-')
    written = []
    for what in (' with a copy to be written', ' from a copy'):
        compare(name, generate(os.path.join(GOLDENS, name, 'model'), name, '--activations', 'f32', '--weights-cache', folder), 1e-3, what)
        copies = [f for f in os.listdir(folder) if f.endswith('.packed')]
        assert len(copies) == 1, copies
        written.append(os.stat(os.path.join(folder, copies[0])).st_ino)
    assert written[0] == written[1], 'the second run wrote the copy again'
