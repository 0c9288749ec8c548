"""machine.py - a virtual machine with RDMA devices, on a host that needs none.

QEMU boots Debian's kernel (kernel.py) with this host's root file system as a read-only lower layer: every file is at its usual path, and what
the machine writes stays in its memory and ends with it. Only the work folder is shared with this host. Soft-RoCE (rdma_rxe) provides the RDMA
devices: rxe0, rxe1, ... on pairs of virtual Ethernet devices ("rails", guest.sh), and rxe_w on the wire between two machines.
The CPU is emulated in software, 10 to 30 times slower than this host, unless BATON_VM_ACCEL says otherwise (kvm, where it works).

Life cycle: Machine(...) starts QEMU, wait() streams the command's output and returns its exit status, close() ends it; a machine never
outlives its time limit or its creator. Any user may do this: no root rights, no devices, no settings of this host are touched.
Raises kernel.Unavailable with a sentence when a machine cannot be had here.
"""
import ctypes, json, os, platform, shlex, shutil, signal, socket, subprocess, sys, tempfile, threading, time

from kernel import Unavailable, busybox, cpio, kernel

HERE = os.path.dirname(os.path.abspath(__file__))
NO_STATUS = 125   # the machine ended before its command did
TIMED_OUT = 124   # as timeout(1)
# no_timer_check: on a host that is busy the emulated timer is late when the kernel tries it, which then panics.
KERNEL_OPTIONS = 'console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr no_timer_check'


def qemu():
    if platform.machine() != 'x86_64':
        raise Unavailable(f'the virtual machine is an x86_64 one, this host is {platform.machine()}')
    path = shutil.which('qemu-system-x86_64')
    if not path:
        raise Unavailable('qemu-system-x86 is not installed')
    return path


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


class Machine:
    """One machine that runs one command.

    argv, env   what to run, as root, in `work`; env is added to a plain environment
    work        a folder that is writable at the same path; None: none, and the command starts in /
    rails       pairs of Ethernet devices with an RDMA device rxe<i> on one end, 10.77.<i>.1
    far         also an RDMA device far<i>, 10.77.<i>.2, on the other end, so that packets between the two cross the pair
    wire, host  (port of this host's loopback) joins two machines: host 1 and host 2 of 10.78.0.0/24, with an RDMA device rxe_w each
    """

    def __init__(self, argv, work=None, env=None, rails=2, far=False, wire=None, host=1, cpus=None, mib=4096, limit_s=600, cpu=None):
        self.limit_s, self.started, self.timed_out = limit_s, time.monotonic(), False
        program, base, static = qemu(), kernel(), busybox()
        self.dir = tempfile.mkdtemp(prefix='baton-vm-')
        try:
            setting = dict(RAILS=rails, FAR=int(far), WIRE_HOST=host if wire else 0, WORK=work or '')
            self.write_initrd(base, static, setting, argv, {**(env or {})})
            self.p = subprocess.Popen(self.command_line(program, base, work, wire, host, cpus or os.cpu_count(), mib, cpu), stdin=subprocess.DEVNULL,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=die_with_parent)
        except BaseException:
            shutil.rmtree(self.dir)
            raise
        self.timer = threading.Timer(limit_s, self.out_of_time)
        self.timer.daemon = True
        self.timer.start()

    def write_initrd(self, base, static, setting, argv, env):
        lines = [f'export {k}={shlex.quote(str(v))}' for k, v in env.items()]
        files = [('init', 'init.sh', 0o755), ('guest', 'guest.sh', 0o755)]
        entries = [(d + '/', 0o755, b'') for d in ('bin', 'dev', 'proc', 'sys', 'below', 'above', 'root')]
        entries += [(name, mode, open(os.path.join(HERE, source), 'rb').read()) for name, source, mode in files]
        entries += [('bin/busybox', 0o755, open(static, 'rb').read()), ('setting', 0o644, ''.join(f'{k}={shlex.quote(str(v))}\n' for k, v in setting.items()).encode()),
                    ('command', 0o755, ('#!/bin/bash\n' + '\n'.join(lines) + '\nexec ' + shlex.join(argv) + '\n').encode())]
        with open(self.dir + '/initrd', 'wb') as f, open(base + '/modules.cpio', 'rb') as modules:
            shutil.copyfileobj(modules, f)
            f.write(bytes(-f.tell() % 512) + cpio(entries))

    def command_line(self, program, base, work, wire, host, cpus, mib, cpu):
        accel = os.environ.get('BATON_VM_ACCEL') or 'tcg,thread=multi,tb-size=256'
        cpu = os.environ.get('BATON_VM_CPU') or cpu or 'max'
        def share(tag, path, *more):
            return ['-virtfs', ','.join(['local', 'path=' + path.replace(',', ',,'), 'mount_tag=' + tag, 'security_model=none', *more])]
        end = ('listen' if host == 1 else 'connect') + f'=127.0.0.1:{wire}'
        net = ['-netdev', f'socket,id=wire,{end}', '-device', f'virtio-net-pci,netdev=wire,mac=52:54:00:78:00:{host:02x},romfile=,host_mtu=4400'] if wire else ['-nic', 'none']
        return [program, '-nodefaults', '-no-user-config', '-no-reboot', '-display', 'none', '-machine', 'q35', '-accel', accel, '-cpu', cpu, '-smp', str(cpus), '-m', str(mib),
                '-kernel', base + '/vmlinuz', '-initrd', self.dir + '/initrd', '-append', KERNEL_OPTIONS,
                '-chardev', f'file,id=console,path={self.dir}/console', '-serial', 'chardev:console',
                '-device', 'virtio-serial-pci', '-chardev', 'file,id=output,path=/dev/stdout', '-device', 'virtserialport,nr=1,chardev=output,name=output',
                '-chardev', f'file,id=status,path={self.dir}/status', '-device', 'virtserialport,nr=2,chardev=status,name=status',
                '-device', 'virtio-rng-pci', *net,
                *share('root', '/', 'readonly=on', 'multidevs=remap'), *(share('work', work) if work else [])]

    def out_of_time(self):
        self.timed_out = True
        self.p.kill()

    def read(self, name):
        try:
            with open(f'{self.dir}/{name}', encoding='utf-8', errors='replace') as f:
                return f.read()
        except FileNotFoundError:
            return ''

    def wait(self, line=None):
        """Returns the command's exit status and passes each line of its output to line(text) (default: this process's stdout). If there is no
        status it says why on stderr and returns NO_STATUS or TIMED_OUT."""
        for raw in self.p.stdout:
            text = raw.decode('utf-8', 'replace')
            if line:
                line(text)
            else:
                sys.stdout.write(text)
                sys.stdout.flush()
        complaint = self.p.stderr.read().decode('utf-8', 'replace').strip()
        self.p.wait()
        self.timer.cancel()
        status = self.read('status').split()
        if status and status[0] == 'status' and not self.timed_out:
            return int(status[1])
        if self.timed_out:
            print(f'vm: the command did not end within {self.limit_s} s', file=sys.stderr)
        else:
            print(f'vm: the machine ended without the status of its command (QEMU ended with {self.p.returncode})', file=sys.stderr)
        for what, text in (('QEMU', complaint), ('its console', self.read('console'))):
            if text:
                print(f'vm: {what} said last:\n{text[-2000:]}', file=sys.stderr)
        return TIMED_OUT if self.timed_out else NO_STATUS

    def close(self):
        self.timer.cancel()
        if self.p.poll() is None:
            self.p.kill()
        self.p.wait()
        for f in (self.p.stdout, self.p.stderr):
            f.close()
        shutil.rmtree(self.dir, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
