"""baton generate against the reference answers, judged by tests/data/goldens/compare.py."""
import json, os, subprocess, sys, tempfile

from harness import BIN, DATA, smollm2

GOLDENS = os.path.join(DATA, 'goldens')


def generate(model, name, *args):
    out = os.path.join(tempfile.mkdtemp(prefix='baton-golden-'), 'answers.jsonl')
    r = subprocess.run([BIN, 'generate', '--model', model, '--served-model-name', name, '--input', os.path.join(GOLDENS, name, 'requests.jsonl'), '--output', out,
                        *args], capture_output=True, text=True, timeout=600)
    assert r.returncode == 0, r.stderr[-2000:]
    return out


def compare(name, answers, tolerance):
    r = subprocess.run([sys.executable, os.path.join(GOLDENS, 'compare.py'), os.path.join(GOLDENS, name, 'expected.jsonl'), answers, '--tolerance', str(tolerance)],
                       capture_output=True, text=True)
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-1000:]
    print(f'  {name}: {r.stdout.splitlines()[-2]}')


def tiny(name):
    for isa in ['auto', 'ref']:
        compare(name, generate(os.path.join(GOLDENS, name, 'model'), name, '--cpu-isa', isa), 1e-3)


def test_llama():
    tiny('llama')


def test_llama_bias():
    tiny('llama_bias')


def test_smollm2():
    answers = generate(smollm2(), 'smollm2', '--activations', 'f32')
    compare('smollm2', answers, 5e-3)


def test_batch_lines_that_are_wrong():
    """A malformed line gives an error line of its own and stops nothing; order is kept."""
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
