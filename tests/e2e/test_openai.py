"""openai-python against each node of a pair. The client has its own environment (BATON_OPENAI_PYTHON, created by tests/run.sh)."""
import subprocess

from harness import *

SIZE = ['--max-model-len', '1024', '--max-num-seqs', '32', '--num-gpu-blocks-override', '300']


def run_client(script, nodes, *args):
    python = os.environ.get('BATON_OPENAI_PYTHON')
    for n in nodes:
        r = subprocess.run([python, os.path.join(HERE, script), f'http://127.0.0.1:{n.port}', *map(str, args)], capture_output=True, text=True, timeout=600)
        assert r.returncode == 0, f'{n.name}:\n{r.stdout[-3000:]}\n{r.stderr[-3000:]}'
        print(f'  {n.name}: {r.stdout.splitlines()[-1]}')


def need_client():
    python = os.environ.get('BATON_OPENAI_PYTHON')
    if not python or not os.path.exists(python):
        raise Skip('BATON_OPENAI_PYTHON does not name a Python with the openai package')


def test_openai_python():
    need_client()
    with pair(smollm2(), 'ipc', SIZE) as nodes:
        run_client('openai_client.py', nodes[:1], 8)
        run_client('openai_client.py', nodes[1:], 2)


def test_openai_python_long():
    need_client()
    with pair(smollm2(), 'ipc', SIZE) as nodes:
        run_client('openai_client.py', nodes, 32)


def test_tools_and_reasoning():
    """The template tells the formats of reasoning and tools; SmolLM2's own has neither."""
    need_client()
    with pair(smollm2(), 'ipc', [*SIZE, '--chat-template', os.path.join(DATA, 'text', 'chat_tools.jinja')]) as nodes:
        run_client('openai_tools.py', nodes[1:])    # test_openai_python asks both: their API is the same code


def test_tools_without_a_template_for_them():
    """With a template that has no tools, a request with tools is refused with a sentence that says what to do."""
    with pair(smollm2(), 'ipc', SIZE) as nodes:
        status, _, body = request(nodes[0].port, 'POST', '/v1/chat/completions', dict(messages=[dict(role='user', content='x')], tools=[dict(type='function', function=dict(name='f'))]))
        assert status == 400 and body['error']['param'] == 'tools' and '--tool-call-parser' in body['error']['message'], body
