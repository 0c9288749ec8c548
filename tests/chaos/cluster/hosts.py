"""hosts.py - where the processes of a cluster run: a namespace each, which can be cut off, or all on the loopback interface.

Namespaces are chosen by start(), which may start the program again (namespaces.py). Thread: a host is cut and joined by one thread at a time."""
import contextlib
import namespaces
from harness import free_ports

LEFT_OUT = 'links of a node, of a pair and of a half of the cluster cannot be cut, no proxy is before a node, and KV goes through shared memory'
OWN_ADDRESS = '10.79.0.254'
HTTP, CLUSTER, KV, REDIS = 8000, 9000, 9100, 6379


class Loopback:
    """Every process on 127.0.0.1, at ports of its own."""
    separate = False

    def __init__(self, why):
        self.why = why

    def describe(self):
        return f'one host for all, without network namespaces ({self.why}): {LEFT_OUT}'

    def host(self):
        return LoopbackHost()


class LoopbackHost:
    address, enter = '127.0.0.1', []

    def __init__(self):
        self.http, self.cluster, self.kv, self.redis = free_ports(4)

    def processes(self):
        return contextlib.nullcontext()


class Separate:
    """A network namespace for each process, on one switch; some can be moved to a second one."""
    separate = True

    def __init__(self):
        self.switch, self.other, self.n = namespaces.Switch('switch', OWN_ADDRESS), namespaces.Switch('other'), 0
        self.n_fronts = 0

    def describe(self):
        return 'a network namespace for each process'

    def host(self):
        h = namespaces.Host(self.n)
        self.n += 1
        h.http, h.cluster, h.kv, h.redis = HTTP, CLUSTER, KV, REDIS
        return h

    def front(self):
        """An address for a proxy; its member has the same ports."""
        self.n_fronts += 1
        return f'10.79.0.{200 + self.n_fronts}'


def start(want_namespaces=True):
    """The hosts of this run; says loudly what it is left without."""
    why = namespaces.start_again() if want_namespaces else 'not asked for'
    hosts = Loopback(why) if why is not None else Separate()
    print(('' if hosts.separate else 'LEFT OUT: ') + hosts.describe(), flush=True)
    return hosts
