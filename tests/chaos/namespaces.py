"""namespaces.py - several "hosts" on this one, each of which can be cut off from the others: namespaces of the kernel with a network, processes and a /proc of their own.

A host's eth0 (10.79.0.N) leads to a port of one switch. A process of a host shares nothing with those of others but files, so Baton takes them for two machines.
No root rights are needed: have_own() runs the program again in a user namespace, where it may do all this, and nothing of the machine it runs on is touched.
Everything started there ends with it."""
import contextlib, ctypes, os, subprocess, sys, threading

MARK, NOT_HERE = 'BATON_CHAOS_NAMESPACES', 77
WAYS = 'silent', 'carrier'      # the switch drops everything, as a broken one does; or the host sees that its cable is out
NEWNET, NEWPID = 0x40000000, 0x20000000     # clone(2)
libc = ctypes.CDLL(None, use_errno=True)


def start_again():
    """Returns in namespaces of this program's own; before, the program starts again. Where the kernel or a container allows no such thing it returns why."""
    if MARK in os.environ:
        ip('link', 'set', 'lo', 'up')
        return None
    inside = ['unshare', '--user', '--map-root-user', '--net', '--mount', '--pid', '--fork', '--kill-child', '--mount-proc']
    host = ['unshare', '--net', '--pid', '--fork', '--mount-proc']
    try:
        p = subprocess.run([*inside, 'sh', '-ec', f'ip link add br0 type bridge; ip link add veth0 type veth peer name veth1; {" ".join(host)} true'], capture_output=True, text=True)
    except FileNotFoundError as e:
        return str(e)
    if p.returncode:
        return p.stderr.strip()
    os.environ[MARK] = '1'
    os.execvp(inside[0], [*inside, sys.executable, *sys.argv])


def have_own():
    """start_again for a program that is nothing without: it says so and ends with NOT_HERE."""
    why = start_again()
    if why is not None:
        print(f'SKIP: no network namespaces here: {why}', flush=True)
        sys.exit(NOT_HERE)


def ip(*words):
    subprocess.run(['ip', *words], check=True)


def setns(fd, kind):
    if libc.setns(fd, kind) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Switch:
    def __init__(self, name='switch', address=None):
        """With an address this program is on it, too."""
        self.name = name
        ip('link', 'add', name, 'type', 'bridge')
        if address:
            ip('addr', 'add', address + '/24', 'dev', name)
        ip('link', 'set', name, 'up')


class Host:
    """Host i of a switch: 0, 1, .."""

    def __init__(self, i):
        self.i, self.port, self.address = i, f'port{i}', f'10.79.0.{i + 1}'
        self.keeper = subprocess.Popen(['unshare', '--net', '--pid', '--fork', '--kill-child', '--mount-proc', 'sh', '-c', 'echo; exec sleep infinity'],
                                       stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
        self.keeper.stdout.readline()
        ns = f'/proc/{self.keeper.pid}/ns/'
        self.enter = ['nsenter', f'--net={ns}net', f'--mount={ns}mnt']
        self.net, self.pids = os.open(ns + 'net', os.O_RDONLY), os.open(ns + 'pid_for_children', os.O_RDONLY)
        self.own_net, self.own_pids = os.open('/proc/self/ns/net', os.O_RDONLY), os.open('/proc/self/ns/pid', os.O_RDONLY)
        ip('link', 'add', self.port, 'type', 'veth', 'peer', 'name', 'eth0', 'netns', str(self.keeper.pid))
        for words in (['link', 'set', 'lo', 'up'], ['addr', 'add', self.address + '/24', 'dev', 'eth0'], ['link', 'set', 'eth0', 'up']):
            subprocess.run([*self.enter, 'ip', *words], check=True)
        self.is_off = None
        self.join()

    @contextlib.contextmanager
    def network(self):
        """What this thread connects to meanwhile is on that host."""
        setns(self.net, NEWNET)
        try:
            yield
        finally:
            setns(self.own_net, NEWNET)

    @contextlib.contextmanager
    def processes(self):
        """What this thread starts meanwhile, with self.enter before its words, runs on that host. No other thread may be started meanwhile."""
        setns(self.pids, NEWPID)
        try:
            yield
        finally:
            setns(self.own_pids, NEWPID)

    def cut(self, way):
        self.is_off = way
        ip('link', 'set', self.port, *{'silent': ['nomaster'], 'carrier': ['down']}[way])

    def join(self):
        if self.is_off != 'carrier':
            ip('link', 'set', self.port, 'master', 'switch')
        ip('link', 'set', self.port, 'up')
        self.is_off = None

    def move_to(self, switch):
        """Only hosts of the same switch reach each other."""
        ip('link', 'set', self.port, 'master', switch)

    def cut_from(self, other, is_off=True):
        """What this host sends to that one goes to a machine that does not exist."""
        words = ['replace', other.address, 'lladdr', '02:00:00:00:00:01', 'dev', 'eth0', 'nud', 'permanent'] if is_off else ['del', other.address, 'dev', 'eth0']
        subprocess.run([*self.enter, 'ip', 'neigh', *words], check=True)
