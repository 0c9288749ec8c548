"""kernel.py - a Linux kernel to boot in a virtual machine: Debian's own package, and an initial file system made of it.

The kernel and its modules come from the signed Debian package that linux-image-amd64 depends on; apt fetches and checks it. The image and
a few modules (10 MiB) are kept in ${BATON_CACHE:-~/.cache/baton}/vm, one folder per package version; of two processes at once the second
waits. No root rights are needed. Raises Unavailable with a sentence if there is no kernel to be had.
"""
import fcntl, glob, hashlib, os, re, shutil, subprocess, tempfile

META = 'linux-image-amd64'
MODULES = ['virtio_pci', '9pnet_virtio', '9p', 'overlay', 'virtio_console', 'virtio_net', 'virtio_rng', 'veth', 'sch_netem', 'sch_tbf', 'rdma_rxe', 'ib_uverbs',
           'rdma_ucm', 'crc32c_generic', 'crc32_generic']
BUSYBOX = ['/bin/busybox', '/usr/bin/busybox']


class Unavailable(Exception):
    """What this host lacks for a virtual machine, and how to get it."""


def cache_folder():
    base = os.environ.get('BATON_CACHE') or os.path.join(os.path.expanduser('~'), '.cache', 'baton')
    return os.path.join(base, 'vm')


# ---- the format "newc" of cpio archives (Documentation/driver-api/early-userspace/buffer-format.rst in the kernel's sources) ----

def cpio_entry(name, mode, data=b''):
    path = name.encode() + b'\0'
    fields = [0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0]
    head = b'070701' + b''.join(b'%08X' % f for f in fields) + path
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)


def cpio(entries):
    """An archive of (name, mode, bytes); a name ending in / is a folder. Several archives one after the other are one initial file system."""
    out = [cpio_entry(name.rstrip('/'), (0o040000 if name.endswith('/') else 0o100000) | mode, data) for name, mode, data in entries]
    return b''.join(out) + cpio_entry('TRAILER!!!', 0)


# ---- modules ----

def module_info(path):
    """(modules that this one needs, modules that are inserted before it if present), from its .modinfo section."""
    with open(path, 'rb') as f:
        data = f.read()
    needs = re.search(rb'\0depends=([^\0]*)\0', data)
    likes = re.findall(rb'\0softdep=pre: ([^\0]*)\0', data)
    return [n.decode() for n in (needs.group(1).split(b',') if needs else []) if n], [n.decode() for s in likes for n in s.split()]


def in_load_order(folder, wanted):
    """Paths of the modules to insert, each after what it needs. A wanted module that the kernel has built in is not in the list."""
    paths = {os.path.basename(p)[:-3].replace('-', '_'): p for p in glob.glob(folder + '/**/*.ko', recursive=True)}
    order, seen = [], set()

    def visit(name):
        name = name.replace('-', '_')
        if name in seen or name not in paths:
            return
        seen.add(name)
        needs, likes = module_info(paths[name])
        for n in likes + needs:
            visit(n)
        order.append(paths[name])
    for name in wanted:
        visit(name)
    if not any(p.endswith('/rdma_rxe.ko') for p in order):
        raise Unavailable('the kernel package has no module rdma_rxe (Soft-RoCE), or keeps its modules compressed')
    return order


# ---- the package ----

def run(argv, cwd=None):
    return subprocess.run(argv, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace')


def package_name():
    """(name, version) of the package behind the meta package; None when apt does not know it."""
    shown = run(['apt-cache', 'show', '--no-all-versions', META])
    found = re.search(r'^Depends:.*?(linux-image-[^ ,]+)(?: \(= ([^)]+)\))?', shown.stdout, re.M)
    return found and (found.group(1), found.group(2))


def update_lists():
    """Updates the package lists: an image may have none, and old ones name packages that the mirror no longer has. Only root may."""
    if os.geteuid() == 0:
        run(['apt-get', 'update', '-q'])


def unpack(work, package):
    """Download with apt (which checks it against the archive's signature) and unpack into `work`."""
    user = 'root' if os.geteuid() == 0 else ''  # apt's own user may not write into a folder of ours
    for _ in range(2):
        got = run(['apt-get', 'download', '-q', '-o', 'APT::Sandbox::User=' + user, package], cwd=work)
        debs = glob.glob(work + '/*.deb')
        if got.returncode == 0 and len(debs) == 1:
            break
        update_lists()
    else:
        last = (got.stdout.strip().splitlines() or ['no output'])[-1]
        raise Unavailable(f'apt cannot download the kernel package {package} (is the Debian mirror reachable?): {last}')
    if run(['dpkg', '-x', debs[0], work + '/tree']).returncode:
        raise Unavailable(f'dpkg cannot unpack the kernel package {package}; is the disk full?')


def build(target, package):
    """Make the folder `target`: vmlinuz, modules.cpio."""
    with tempfile.TemporaryDirectory(dir=os.path.dirname(target)) as work:
        unpack(work, package)
        images, folders = glob.glob(work + '/tree/boot/vmlinuz-*'), glob.glob(work + '/tree/*/modules/*') + glob.glob(work + '/tree/usr/lib/modules/*')
        if not images or not folders:
            raise Unavailable(f'the kernel package {package} has no image or no modules where they were expected')
        entries = [('modules/', 0o755, b'')]
        for i, path in enumerate(in_load_order(folders[0], MODULES)):
            with open(path, 'rb') as f:
                entries.append((f'modules/{i:03d}-{os.path.basename(path)}', 0o644, f.read()))
        ready = work + '/ready'
        os.mkdir(ready)
        shutil.copy(images[0], ready + '/vmlinuz')
        with open(ready + '/modules.cpio', 'wb') as f:
            f.write(cpio(entries))
        os.rename(ready, target)


def kernel():
    """The folder with vmlinuz and modules.cpio, fetched once. If apt knows no kernel, one that was fetched before is used."""
    cache = cache_folder()
    try:
        os.makedirs(cache, exist_ok=True)
    except OSError as e:
        raise Unavailable(f'the folder {cache} cannot be made ({e.strerror}); set BATON_CACHE to one that can be written')
    with open(cache + '/.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        there = sorted(glob.glob(cache + '/linux-image-*/vmlinuz'), key=os.path.getmtime)
        found = shutil.which('apt-cache') and package_name()
        if not found and not there and shutil.which('apt-cache'):
            update_lists()
            found = package_name()
        if not found:
            if there:
                return os.path.dirname(there[-1])
            raise Unavailable(f'apt knows no package {META}; on Debian for amd64 run `apt-get update`')
        name, version = found
        choice = hashlib.sha256(' '.join(MODULES).encode()).hexdigest()[:8]
        target = f'{cache}/{name}_{version or "any"}_{choice}'.replace(':', '-')
        if not os.path.exists(target):
            build(target, name)
            for old in there:
                shutil.rmtree(os.path.dirname(old), ignore_errors=True)
        return target


def busybox():
    """The program of the initial file system, which has no shared libraries."""
    for path in BUSYBOX:
        if os.path.exists(path):
            with open(path, 'rb') as f:
                if b'/ld-linux' not in f.read(4096):  # no interpreter in its ELF header: statically linked
                    return path
    raise Unavailable('busybox-static is not installed')
