"""Programs that run on the card, and the libraries of the machine that they may load: where they are, and how they are started."""
import glob, os, shutil, site, subprocess, sys, tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PACKED, BUILT = os.path.join(ROOT, 'build-gpu'), os.path.join(ROOT, 'build-gpu-here')
LOADER = os.path.join('lib', 'glibc', 'ld-linux-x86-64.so.2')


class CannotBegin(Exception):
    pass


def build(folder):
    """On this machine, for this machine's card."""
    cmake, ninja = shutil.which('cmake'), shutil.which('ninja')
    if not (cmake and ninja):
        raise CannotBegin(f'there is no {os.path.relpath(PACKED)} (tests/gpu/pack.sh makes it) and no cmake and ninja to build with')
    steps = [[cmake, '-S', ROOT, '-B', folder, '-G', 'Ninja', '-DCMAKE_BUILD_TYPE=Release', '-DBATON_CUDA=on', '-DCMAKE_CUDA_ARCHITECTURES=native'],
             [ninja, '-C', folder]]
    for argv in steps:
        r = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if r.returncode:
            raise CannotBegin(f'there is no {os.path.relpath(PACKED)} (tests/gpu/pack.sh makes it), and it does not build here:\n{r.stdout[-1500:]}')


def card_tests():
    """Programs with cases for a card, by their sources: kernels one by one, then tables that have a row for it. The shortest last."""
    sources = glob.glob(os.path.join(ROOT, 'tests', 'cuda', 'test_*.cc')) + glob.glob(os.path.join(ROOT, 'tests', 'conformance', 'test_*.c'))

    def has_card(path):
        with open(path, encoding='utf-8') as f:
            text = f.read()
        return '/cuda/' in path or 'BATON_HAVE_CUDA' in text or 'has_card' in text or 'cuda_row' in text
    return [os.path.splitext(os.path.basename(p))[0] for p in sorted(sources) if has_card(p)]


class Programs:
    """The programs of a folder: a build's or pack.sh's. start(NAME) is the beginning of a command line."""

    def __init__(self, folder=None):
        if not folder:
            folder = PACKED if os.path.isdir(PACKED) else BUILT
            if folder == BUILT:
                build(BUILT)
        self.folder = os.path.abspath(folder)
        if not self.path('baton'):
            raise CannotBegin(f'{folder} holds no program baton')
        self.wrappers = None
        r = subprocess.run([self.path('baton'), 'version'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.how = 'with the C library of this machine'
        if r.returncode:
            self.wrap(r.stdout)

    def path(self, name):
        for below in ('bin', '', 'tests', os.path.join('tests', 'gpu')):
            path = os.path.join(self.folder, below, name)
            if os.path.isfile(path) and os.access(path, os.X_OK):
                return path
        return None

    def wrap(self, why):
        """An older C library than the programs were linked with: they bring theirs, whose loader is called by name."""
        loader = os.path.join(self.folder, LOADER)
        if not os.path.exists(loader):
            raise CannotBegin(f'{self.path("baton")} does not start: {why.strip()[-500:]}')
        self.wrappers = tempfile.mkdtemp(prefix='baton-card-')
        folders = ':'.join(os.path.join(self.folder, f) for f in (os.path.join('lib', 'glibc'), 'lib'))
        for name in os.listdir(os.path.join(self.folder, 'bin')):
            wrapper = os.path.join(self.wrappers, name)
            with open(wrapper, 'w') as f:
                f.write(f'#!/bin/sh\nexec "{loader}" --library-path "{folders}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" "{self.path(name)}" "$@"\n')
            os.chmod(wrapper, 0o755)
        r = subprocess.run([os.path.join(self.wrappers, 'baton'), 'version'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if r.returncode:
            raise CannotBegin(f'baton does not start, with its own C library either: {r.stdout.strip()[-500:]}')
        self.how = f'with the C library that they bring; with this machine\'s: {why.strip().splitlines()[-1]}'

    def start(self, name):
        """None: there is no such program."""
        path = self.path(name)
        return os.path.join(self.wrappers, name) if path and self.wrappers else path

    def close(self):
        if self.wrappers:
            shutil.rmtree(self.wrappers)


def library_folders():
    """Where CUDA's libraries may be: Python packages first, as they fit the newest driver that somebody uses here, then CUDA's own folder."""
    packages = {*sys.path, *site.getsitepackages(), site.getusersitepackages()}
    found = [f for p in sorted(packages) if p for f in sorted(glob.glob(os.path.join(p, 'nvidia', '*', 'lib')))]
    return found + [f for f in ('/usr/local/cuda/lib64', '/usr/local/cuda/targets/x86_64-linux/lib') if os.path.isdir(f)]


def libraries():
    """{name: path} of those that are loaded on demand; what is missing is not in it."""
    wanted = {'cublas': 'libcublas.so.1[0-9]', 'cublasLt': 'libcublasLt.so.1[0-9]', 'nccl': 'libnccl.so.2'}
    found = {}
    for folder in library_folders():
        for name, pattern in wanted.items():
            paths = sorted(glob.glob(os.path.join(folder, pattern)))
            if paths:
                found.setdefault(name, paths[-1])
    return found


def environment(found):
    """For programs: BATON_CUBLAS is bench_card's, BATON_CUBLASLT baton's (docs/gpu.md), and NCCL is found by its folder."""
    env = dict(os.environ)
    if 'cublas' in found:
        env.setdefault('BATON_CUBLAS', found['cublas'])
    if 'cublasLt' in found:
        env.setdefault('BATON_CUBLASLT', found['cublasLt'])
    if 'nccl' in found:
        env['LD_LIBRARY_PATH'] = os.pathsep.join(x for x in (env.get('LD_LIBRARY_PATH'), os.path.dirname(found['nccl'])) if x)
    env.setdefault('BATON_TEST_DATA', os.path.join(ROOT, 'tests', 'data'))
    return env


def sanitizer():
    """Path of compute-sanitizer, or None."""
    found = shutil.which('compute-sanitizer')
    if found:
        return found
    paths = glob.glob('/usr/local/cuda*/bin/compute-sanitizer') + glob.glob('/opt/nvidia/**/compute-sanitizer', recursive=True)
    return next((p for p in sorted(paths) if os.access(p, os.X_OK) and os.path.isfile(p)), None)
