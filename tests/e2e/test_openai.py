"""openai-python against each node of a pair. The client lives in an environment of its own (BATON_OPENAI_PYTHON, made by tests/run.sh)."""
import subprocess

from harness import *

SIZE = ['--max-model-len', '1024', '--max-num-seqs', '32', '--num-gpu-blocks-override', '300']


def test_openai_python():
    python = os.environ.get('BATON_OPENAI_PYTHON')
    if not python or not os.path.exists(python):
        raise Skip('BATON_OPENAI_PYTHON does not name a Python with the openai package')
    with pair(smollm2(), 'ipc', SIZE) as nodes:
        for n in nodes:
            r = subprocess.run([python, os.path.join(HERE, 'openai_client.py'), f'http://127.0.0.1:{n.port}'], capture_output=True, text=True, timeout=600)
            assert r.returncode == 0, f'{n.name}:\n{r.stdout[-3000:]}\n{r.stderr[-3000:]}'
            print(f'  {n.name}: {r.stdout.splitlines()[-1]}')
