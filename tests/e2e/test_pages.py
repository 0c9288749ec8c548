"""The first commands of the pages, run as a user pastes them: with other ports, a small model, and nothing else changed."""
import json, re, shutil, subprocess, tempfile
from harness import BIN, HERE, Node, Process, Skip, TINY, closing, free_ports, request, wait_ready, wait_sees, wait_until


def pasted(page, heading):
    """The first indented block of a page after a line that begins with `heading`."""
    with open(f'{HERE}/../../{page}', encoding='utf-8') as f:
        lines = f.read().split('\n')
    at = next(i for i, line in enumerate(lines) if line.startswith(heading))
    first = next(i for i in range(at, len(lines)) if lines[i].startswith('    '))
    end = next(i for i in range(first, len(lines)) if not lines[i].startswith('    '))
    return '\n'.join(line[4:] for line in lines[first:end])


class Paste(Process):
    """A shell that runs a block, whose last command in front ends; at its end those behind it are ended."""

    def __init__(self, block, ports):
        for tool in ('curl', 'redis-server'):
            if not shutil.which(tool):
                raise Skip(f'{tool} is not installed')
        given = self.given = dict(zip(ports, free_ports(len(ports))))
        for was, now in given.items():
            block, n = re.subn(rf'\b{was}\b', str(now), block)
            assert n, (was, block)
        script = f"trap 'kill $(jobs -p); wait; exit 0' TERM\nbaton() {{ exec \"$BATON_BIN\" \"$@\"; }}\n{block}\necho pasted: $?\nwait\n"
        # exec would end the shell where a command is in front
        script = script.replace('baton() { exec', 'baton() { [ "$1" = serve ] || [ "$1" = router ] || { "$BATON_BIN" "$@"; return; }; exec')
        redis = {'BATON_SCHEDULER_PORT': str(given[6379])} if 6379 in given else {} # that is the default, which the block does not name to nodes
        super().__init__(['bash', '-c', script], {'BATON_BIN': BIN, 'M': TINY, **redis}, 'paste')


def check_splits(page, heading, ports):
    p = Paste(pasted(page, heading), ports)
    with closing(p):
        wait_until('the block has run', lambda: 'pasted: ' in p.output() or not p.alive(), 60)
        said = p.output()
        assert 'pasted: 0' in said, said
        nodes = re.search(r'"prefill_node":"([^"]+)","decode_node":"([^"]+)"', said)
        assert nodes and nodes[1] != nodes[2], said
        moved = re.search(r'"kv_bytes":(\d+)', said)
        assert moved and int(moved[1]) > 0, said
    return said


def test_the_readmes_cluster_with_redis_splits_its_request():
    said = check_splits('README.md', '## A cluster with Redis', (6379, 8180, 8184))
    assert 'requests that came here: 1, 100 % of them split over two nodes' in said, said


def test_the_routers_first_commands_split_their_request():
    check_splits('docs/router.md', '# The router', (30000, 8180, 8184))


def test_the_page_on_admission_makes_a_file_that_works():
    p = Paste(f'cd {tempfile.mkdtemp()}\n' + pasted('docs/admission.md', '## Tenants'), (30000,))
    port = p.given[30000]
    node = Node(TINY, 'mixed', ['--router', f'127.0.0.1:{port}'])
    with closing(p, node):
        wait_until('the router is ready', lambda: p.alive() and request(port, 'GET', '/ready')[0] == 200, 30)
        for key, want in (('sk-alice-1', 200), ('sk-alice-2', 200), ('sk-nightly-1', 200), ('sk-nobody', 401)):
            assert request(port, 'GET', '/v1/models', headers={'Authorization': f'Bearer {key}'})[0] == want, key
        curl = pasted('docs/admission.md', 'With nodes behind it').replace('30000', str(port))
        said = subprocess.run(['bash', '-c', curl], capture_output=True, text=True, timeout=30).stdout
        assert '"text_completion"' in said, said


def texts_of(lines):
    """The text of a stream's events."""
    events = [json.loads(line[6:]) for line in lines if line.startswith('data: {')]
    return ''.join(e['choices'][0]['text'] for e in events if e.get('choices'))


def test_the_page_on_resuming_goes_on_where_it_stopped():
    control = free_ports(1)[0]
    nodes = [Node(TINY, 'mixed', where) for where in (['--engine-worker-queue-port', str(control)], ['--innode-prefill-ports', str(control)])]
    with closing(*nodes) as (a, b):
        wait_ready(a, b)
        wait_sees(nodes, 2)
        folder = tempfile.mkdtemp()
        block = pasted('docs/resume.md', 'With curl').replace(':8000/', f':{a.port}/').replace(':8001/', f':{b.port}/')
        rest = subprocess.run(['bash', '-c', f'cd {folder}\n{block}'], capture_output=True, text=True, timeout=60).stdout.split('\n')
        with open(f'{folder}/events', encoding='utf-8') as f:
            first = f.read().rsplit('\n\n', 1)[0].split('\n')  # whole events
        body = json.loads(re.search(r"BODY='(.*)'", block)[1])
        whole = request(a.port, 'POST', '/v1/completions', {**body, 'stream': False})[2]['choices'][0]['text']
        assert texts_of(first) and 'data: [DONE]' in rest, (first, rest)
        assert texts_of(first) + texts_of(rest) == whole, (first, rest, whole)
