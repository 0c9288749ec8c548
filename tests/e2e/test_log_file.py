"""The file of --log-dir: a full disk is not silent, and what ends a node is in it."""
from harness import *


def log_of(folder, port):
    with open(f'{folder}/baton-{port}.log', encoding='utf-8', errors='replace') as f:
        return f.read()


@alone
def test_a_full_disk_is_said_and_counted():
    """stderr says it once; the file says how many lines it lacks as soon as there is room."""
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=128k', 'tmpfs', folder], capture_output=True).returncode != 0:
            raise Skip('a tmpfs cannot be mounted')
        try:
            with closing(Node(TINY, args=['--log-dir', folder, '--log-requests'])) as node:
                wait_ready(node)
                ask = lambda: request(node.port, 'POST', '/v1/completions', dict(model='m', prompt=[5, 6, 7], max_tokens=1))
                with open(f'{folder}/filler', 'wb', buffering=0) as f, contextlib.suppress(OSError):
                    while True:
                        f.write(bytes(512))
                before = node.output().count('request end')
                for _ in range(100): # more than the rest of a page
                    assert ask()[0] == 200
                wait_until('stderr has the lines', lambda: node.output().count('request end') >= before + 100, 5)
                said = [x for x in node.output().splitlines() if 'log file not written' in x]
                assert len(said) == 1 and ' error ' in said[0] and 'No space left on device' in said[0] and folder in said[0], said
                os.unlink(f'{folder}/filler')
                assert ask()[0] == 200
                wait_until('the file goes on', lambda: 'lines were lost: No space left on device' in log_of(folder, node.port), 5)
                text = log_of(folder, node.port)
                lost = int(text.split('log lines lost n=')[1].split()[0])
                missing = sum(node.output().count(line) - text.count(line) for line in ('request begin', 'request end'))
                assert 0 < missing <= lost <= missing + 2, (missing, lost) # the one that was cut is lost as well
        finally:
            subprocess.run(['umount', '-l', folder], check=True)


def test_what_ends_a_node_is_on_stderr_and_in_its_log_file():
    with tempfile.TemporaryDirectory() as folder, socket.create_server(('127.0.0.1', 0)) as taken:
        broken = f'{folder}/model'
        shutil.copytree(TINY, broken)
        for name in os.listdir(broken):
            if name.startswith('tokenizer'):
                os.unlink(f'{broken}/{name}')
        for i, (args, says) in enumerate(((['--model', TINY, '--port', str(taken.getsockname()[1])], 'the port is in use by'),
                                          (['--model', f'{folder}/nowhere', '--port', '0'], 'nowhere'),
                                          (['--model', broken, '--port', '0'], 'tokenizer'))):
            logs = f'{folder}/{i}'
            p = Process([BIN, 'serve', '--host', '127.0.0.1', '--log-dir', logs, *args], name='serve')
            with closing(p):
                assert p.p.wait(20) in (1, 2), p.output()
                sentence = [x for x in p.output().splitlines() if x.startswith('baton') and ': ' in x and says in x]
                assert len(sentence) == 1, p.output()
                name, = os.listdir(logs)
                with open(f'{logs}/{name}') as f:
                    last = f.read().splitlines()[-1]
                assert ' error ' in last and 'process ends why="' + sentence[0].split(': ', 1)[1] + '"' in last, (last, sentence)
        logs = f'{folder}/launch'
        p = Process([BIN, 'launch', '--model', broken, '--num-servers', '1', '--ports', str(free_ports(1)[0]), '--log-dir', logs], name='launch')
        with closing(p):
            assert p.p.wait(20) == 1, p.output()
            with open(f'{logs}/baton-launch.log') as f:
                assert 'process ends why="stopped, because the mixed node of port' in f.read()


def test_no_two_processes_share_a_log_file():
    """Nodes of any free port are named by process, and generate writes into none of theirs."""
    with tempfile.TemporaryDirectory() as folder:
        args = [BIN, 'serve', '--model', TINY, '--host', '127.0.0.1', '--port', '0', '--log-dir', folder]
        with closing(Process(args), Process(args)) as nodes:
            wait_until('both are ready', lambda: all('node ready' in n.output() for n in nodes), 30)
            g = subprocess.run([BIN, 'generate', '--model', TINY, '--prompt', 'hello', '--raw', '--max-tokens', '2', '--log-dir', folder, '--log-level', 'info'],
                               capture_output=True, text=True, timeout=60)
            assert g.returncode == 0, g.stderr
            assert sorted(os.listdir(folder)) == sorted(['baton-generate.log', *(f'baton-process-{n.p.pid}.log' for n in nodes)]), os.listdir(folder)
            for name in os.listdir(folder):
                with open(f'{folder}/{name}') as f:
                    assert f.read().count('node ready') == 1, name
