"""Finds the programs that run on the GPU and the libraries that they may load, and says how they are started."""
import glob, os, shutil, site, subprocess, sys, tarfile, tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PACKED, BUILT, ARCHIVE = os.path.join(ROOT, 'build-gpu'), os.path.join(ROOT, 'build-gpu-here'), 'gpu.tar.xz'
LIST = 'gpu_tests.txt'
LOADER = os.path.join('lib', 'glibc', 'ld-linux-x86-64.so.2')


class CannotBegin(Exception):
    pass


def architecture():
    """The architecture of this machine's GPU. For compute capability 9.0 it is 90a, which alone has its special instructions."""
    if not shutil.which('nvidia-smi'):
        raise CannotBegin(f'there is no {os.path.relpath(PACKED)} (tests/gpu/pack.sh makes it), and no nvidia-smi to ask which GPU to build for: is there one here?')
    r = subprocess.run(['nvidia-smi', '--query-gpu=compute_cap', '--format=csv,noheader'], stdout=subprocess.PIPE, text=True)
    return '90a-real' if r.stdout.split()[:1] == ['9.0'] else 'native'


def build(folder):
    """Builds on this machine, for this machine's GPU."""
    cmake, ninja = shutil.which('cmake'), shutil.which('ninja')
    if not (cmake and ninja):
        raise CannotBegin(f'there is no {os.path.relpath(PACKED)} (tests/gpu/pack.sh makes it) and no cmake and ninja to build with')
    steps = [[cmake, '-S', ROOT, '-B', folder, '-G', 'Ninja', '-DCMAKE_BUILD_TYPE=Release', '-DBATON_CUDA=on', f'-DCMAKE_CUDA_ARCHITECTURES={architecture()}'],
             [ninja, '-C', folder]]
    for argv in steps:
        r = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if r.returncode:
            raise CannotBegin(f'there is no {os.path.relpath(PACKED)} (tests/gpu/pack.sh makes it), and it does not build here:\n{r.stdout[-1500:]}')


def read_list(path):
    if not os.path.isfile(path):
        raise CannotBegin(f'there is no {path}, which names the test programs: is this a build with CUDA kernels?')
    with open(path, encoding='utf-8') as f:
        lines = [line.split() for line in f if line.strip()]
    return [(name, dict(v.split('=', 1) for v in values)) for name, *values in lines]


class Programs:
    """The programs in a folder, which is a build's or has pack.sh's archive. start(NAME) is the beginning of a command line."""

    def __init__(self, folder=None):
        if not folder:
            folder = PACKED if os.path.isdir(PACKED) else BUILT
            if folder == BUILT:
                build(BUILT)
        self.home = self.folder = os.path.abspath(folder)  # results are written to home
        self.own = tempfile.mkdtemp(prefix='baton-gpu-')
        self.wrapped = False
        try:
            self.open(folder)
        except CannotBegin:
            self.close()
            raise

    def open(self, folder):
        if os.path.isfile(os.path.join(folder, ARCHIVE)):
            self.folder = os.path.join(self.own, 'pack')
            self.unpack(os.path.join(folder, ARCHIVE))
        if not self.path('baton'):
            raise CannotBegin(f'{folder} holds no program baton')
        r = subprocess.run([self.path('baton'), 'version'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.how = 'with the C library of this machine'
        if r.returncode:
            self.wrap(r.stdout)

    def unpack(self, archive):
        try:
            with tarfile.open(archive, 'r:xz') as t:
                t.extractall(self.folder)
        except tarfile.CompressionError:  # this Python has no lzma
            os.makedirs(self.folder)
            if subprocess.run(['tar', '-C', self.folder, '-xJf', archive]).returncode:
                raise CannotBegin(f'{archive} cannot be unpacked here')

    def gpu_tests(self):
        """[(program, what is set in its environment)] of the test programs with cases for a GPU: the list that tests/CMakeLists.txt writes into a build."""
        return read_list(os.path.join(self.folder, LIST))

    def commit(self):
        """Of what the programs were built from: pack.sh says it, and in a tree of its own git."""
        path = os.path.join(self.folder, 'commit')
        if os.path.isfile(path):
            with open(path) as f:
                return f.read().strip()
        if not shutil.which('git'):
            return 'unknown'
        r = subprocess.run(['git', '-C', ROOT, 'describe', '--always', '--dirty'], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return r.stdout.strip() or 'unknown'

    def is_emulated(self):
        """Is the GPU emulated by tests/simt?"""
        r = subprocess.run([self.start('baton'), 'doctor', '--device', 'cuda'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return 'Baton SIMT' in r.stdout

    def path(self, name):
        for below in ('bin', '', 'tests', os.path.join('tests', 'gpu')):
            path = os.path.join(self.folder, below, name)
            if os.path.isfile(path) and os.access(path, os.X_OK):
                return path
        return None

    def wrap(self, why):
        """If the machine's C library is older than the programs need, they are started by the loader of the one that they bring."""
        loader = os.path.join(self.folder, LOADER)
        if not os.path.exists(loader):
            raise CannotBegin(f'{self.path("baton")} does not start: {why.strip()[-500:]}')
        os.mkdir(os.path.join(self.own, 'start'))
        folders = ':'.join(os.path.join(self.folder, f) for f in (os.path.join('lib', 'glibc'), 'lib'))
        for name in os.listdir(os.path.join(self.folder, 'bin')):
            wrapper = os.path.join(self.own, 'start', name)
            with open(wrapper, 'w') as f:
                f.write(f'#!/bin/sh\nexec "{loader}" --library-path "{folders}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" "{self.path(name)}" "$@"\n')
            os.chmod(wrapper, 0o755)
        self.wrapped = True
        r = subprocess.run([self.start('baton'), 'version'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if r.returncode:
            raise CannotBegin(f'baton does not start, with its own C library either: {r.stdout.strip()[-500:]}')
        self.how = f'with the C library that they bring; with this machine\'s: {why.strip().splitlines()[-1]}'

    def start(self, name):
        """None if there is no such program."""
        path = self.path(name)
        return os.path.join(self.own, 'start', name) if path and self.wrapped else path

    def close(self):
        shutil.rmtree(self.own)


def library_folders():
    """Folders that may contain CUDA's libraries: Python packages first, because they fit the newest driver in use here, then CUDA's own."""
    packages = {*sys.path, *site.getsitepackages(), site.getusersitepackages()}
    found = [f for p in sorted(packages) if p for f in sorted(glob.glob(os.path.join(p, 'nvidia', '*', 'lib')))]
    return found + [f for f in ('/usr/local/cuda/lib64', '/usr/local/cuda/targets/x86_64-linux/lib') if os.path.isdir(f)]


def libraries():
    """{name: path} of the libraries that are loaded on demand and that were found."""
    wanted = {'cublas': 'libcublas.so.1[0-9]', 'cublasLt': 'libcublasLt.so.1[0-9]', 'nccl': 'libnccl.so.2'}
    found = {}
    for folder in library_folders():
        for name, pattern in wanted.items():
            paths = sorted(glob.glob(os.path.join(folder, pattern)))
            if paths:
                found.setdefault(name, paths[-1])
    return found


def environment(found):
    """The environment of the programs: BATON_CUBLAS is for bench_gpu, BATON_CUBLASLT for baton (docs/gpu.md); NCCL is found by its folder."""
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
    """The path of compute-sanitizer, or None."""
    found = shutil.which('compute-sanitizer')
    if found:
        return found
    paths = glob.glob('/usr/local/cuda*/bin/compute-sanitizer') + glob.glob('/opt/nvidia/**/compute-sanitizer', recursive=True)
    return next((p for p in sorted(paths) if os.access(p, os.X_OK) and os.path.isfile(p)), None)
