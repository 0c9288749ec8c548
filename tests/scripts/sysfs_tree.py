"""sysfs_tree.py - builds the part of a sysfs tree that names PCI devices, RDMA devices and network interfaces, from a short description.

usage: sysfs_tree.py DESCRIPTION DIRECTORY     (also a module: build(text, root))

The result has the kernel's shape: real folders under devices/pciDDDD:BB/..., relative links from class/ and bus/ to them, `device`
links back, `physfn`/`virtfn` between functions, bonds with their ports. A description is one line per thing; two spaces of indent put a
PCI function below a bridge:

    host 0000:15                                   a host bridge (PCI domain and bus)
      bridge 0000:15:01.0 [numa=0]                 a root port or a port of a switch
        gpu 0000:18:00.0 [vendor=10de class=030200 numa=0]
        rdma 0000:19:00.0 mlx5_0 port=ACTIVE/400/NDR/InfiniBand [port=DOWN/...] [net=ens1] [numa=0] [vf_of=0000:19:00.0] [state=up]
        nic 0000:20:00.0 eth0 [state=up] [numa=0]  a NIC without RDMA
        vga 0000:21:00.0                           the display controller of a board's management controller
    bond bond0 ens1,ens2 [state=up]
    bridge_net br0 ens1                            a bridge or VLAN on top of other interfaces; none: "-"
    rxe rxe0 eth0 [port=ACTIVE/2.5/SDR/Ethernet]   an emulated RDMA device
    ipv4 bond0 10.0.0.5/24
    expect gpu KVCACHE_RDMA_NICS=mlx5_0            the script must print this,
    expect gpu fails WORDS                         or fail with a sentence that has these words
    expect gpu+software ...                        the same with BATON_RDMA_SOFTWARE=1
"""
import os
import sys

LANES = {"2.5": 1, "10": 1, "25": 1}


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as f:
        f.write(text + "\n")


def link(path, target):
    """A relative link, as sysfs has them."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.symlink(os.path.relpath(target, os.path.dirname(path)), path)


class Tree:
    def __init__(self, root):
        self.root = root
        self.functions = {}  # PCI address -> folder
        self.nets = {}  # interface -> folder
        self.addresses = []
        self.expectations = []

    def at(self, *parts):
        return os.path.join(self.root, *parts)

    def pci(self, folder, address, cls, vendor, options):
        path = os.path.join(folder, address)
        write(os.path.join(path, "class"), "0x" + cls)
        write(os.path.join(path, "vendor"), "0x" + vendor)
        write(os.path.join(path, "numa_node"), options.get("numa", "-1"))
        link(self.at("bus/pci/devices", address), path)
        self.functions[address] = path
        return path

    def net(self, name, folder, state="up", device=None):
        path = os.path.join(folder, "net", name)
        write(os.path.join(path, "operstate"), state)
        write(os.path.join(path, "carrier"), "1" if state in ("up", "unknown") else "0")
        write(os.path.join(path, "mtu"), "1500")
        if device:
            link(os.path.join(path, "device"), device)
        link(self.at("class/net", name), path)
        self.nets[name] = path
        return path

    def ib(self, name, folder, ports, device=None):
        path = os.path.join(folder, "infiniband", name)
        states = {"DOWN": "1: DOWN", "INIT": "2: INIT", "ACTIVE": "4: ACTIVE"}
        write(os.path.join(path, "node_type"), "1: CA")
        for number, port in enumerate(ports, 1):
            state, rate, speed, layer = port.split("/")
            base = os.path.join(path, "ports", str(number))
            write(os.path.join(base, "state"), states[state])
            write(os.path.join(base, "phys_state"), "5: LinkUp" if state == "ACTIVE" else "3: Disabled")
            write(os.path.join(base, "rate"), f"{rate} Gb/sec ({LANES.get(rate, 4)}X {speed})")
            write(os.path.join(base, "link_layer"), layer)
        if device:
            link(os.path.join(path, "device"), device)
        link(self.at("class/infiniband", name), path)

    def adapter(self, kind, folder, words, options, ports):
        address = words[0]
        if kind == "bridge":
            return self.pci(folder, address, "060400", "1000", options)
        if kind == "gpu":
            return self.pci(folder, address, options.get("class", "030200"), options.get("vendor", "10de"), options)
        if kind == "vga":
            return self.pci(folder, address, "030000", options.get("vendor", "1a03"), options)
        path = self.pci(folder, address, "020000", options.get("vendor", "15b3"), options)
        if kind == "rdma":
            self.ib(words[1], path, ports, path)
        name = options.get("net") if kind == "rdma" else words[1]
        if name:
            self.net(name, path, options.get("state", "up"), path)
        if "vf_of" in options:
            physical = self.functions[options["vf_of"]]
            link(os.path.join(path, "physfn"), physical)
            n = sum(entry.startswith("virtfn") for entry in os.listdir(physical))
            link(os.path.join(physical, f"virtfn{n}"), path)
        return path

    def virtual(self, kind, words, options, ports):
        folder = self.at("devices/virtual")
        if kind == "rxe":
            self.ib(words[0], folder, ports or ["ACTIVE/2.5/SDR/Ethernet"])
            write(self.at("devices/virtual/infiniband", words[0], "parent"), words[1])
            return
        path = self.net(words[0], folder, options.get("state", "up"))
        lowers = [] if words[1] == "-" else words[1].split(",")
        if kind == "bond":
            write(os.path.join(path, "bonding/slaves"), " ".join(lowers))
        for lower in lowers:
            link(os.path.join(path, "lower_" + lower), self.nets[lower])
            link(os.path.join(self.nets[lower], "master" if kind == "bond" else "upper_" + words[0]), path)

    def line(self, text, stack):
        depth = (len(text) - len(text.lstrip())) // 2
        kind, *words = text.split()
        options = dict(w.split("=", 1) for w in words if "=" in w and not w.startswith("port="))
        ports = [w[5:] for w in words if w.startswith("port=")]
        plain = [w for w in words if "=" not in w]
        del stack[depth:]
        if kind == "host":
            stack.append(self.at("devices/pci" + plain[0]))
        elif kind in ("bridge", "gpu", "rdma", "nic", "vga"):
            stack.append(self.adapter(kind, stack[-1], plain, options, ports))
        elif kind in ("bond", "bridge_net", "rxe"):
            self.virtual(kind, plain, options, ports)
        elif kind == "ipv4":
            self.addresses.append((plain[0], plain[1]))
        elif kind == "expect":
            self.expectations.append((words[0], " ".join(words[1:])))
        else:
            raise ValueError(f"'{kind}' is no kind of thing: {text}")


def build(text, root):
    """Builds the tree below `root`. Returns its Tree, with the addresses and expectations."""
    tree, stack = Tree(root), []
    os.makedirs(tree.at("class/net"))
    os.makedirs(tree.at("bus/pci/devices"))
    lo = tree.net("lo", tree.at("devices/virtual"), "unknown")
    assert lo
    for raw in text.splitlines():
        line = raw.split("#")[0].rstrip()
        if line:
            tree.line(line, stack)
    return tree


def ip_addr_text(tree):
    """The output that `ip -o -4 addr` would have."""
    lines = ["1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever"]
    for i, (name, address) in enumerate(tree.addresses, 2):
        lines.append(f"{i}: {name}    inet {address} scope global {name}\\       valid_lft forever preferred_lft forever")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with open(sys.argv[1]) as f:
        build(f.read(), sys.argv[2])
