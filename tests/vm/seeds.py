"""seeds.py - the users' own command lines, from the documents in tests/seeds/data, for the virtual machines.

Only three things are changed: the model, the API port where several nodes share a host, and the parallel sizes, which are 1.
"""
import os, sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, '..', 'seeds'))
from documents import server_commands

SCRIPT = os.path.join(HERE, '..', '..', 'deploy', 'get_rdma_nics.sh')
PARALLEL = ('--tensor-parallel-size', '--data-parallel-size')


def changed(options, **values):
    """The options with some values replaced: names with _ for -; a value of None drops the option."""
    out, i = [], 0
    values = {'--' + k.replace('_', '-'): v for k, v in values.items()}
    while i < len(options):
        name, has_value = options[i], i + 1 < len(options) and not options[i + 1].startswith('--')
        if name not in values:
            out += options[i:i + 1 + has_value]
        elif values[name] is not None:
            out += [name, str(values[name])]
        values.pop(name, None)
        i += 1 + has_value
    return out + [w for k, v in values.items() if v is not None for w in (k, str(v))]


def options(number, role, **values):
    given = server_commands(number)[role]
    return changed(given, **{**{p[2:].replace('-', '_'): 1 for p in PARALLEL if p in given}, **values})
