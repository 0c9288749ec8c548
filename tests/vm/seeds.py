"""seeds.py - the users' own command lines, from the documents in tests/seeds/data, for the virtual machines.

Only three things are changed: the model, the API port where several nodes share a host, and the parallel sizes, which are 1.
"""
import os, re, shlex

HERE = os.path.dirname(os.path.abspath(__file__))
SCRIPT = os.path.join(HERE, '..', '..', 'deploy', 'get_rdma_nics.sh')
PARALLEL = ('--tensor-parallel-size', '--data-parallel-size')


def document(number):
    with open(os.path.join(HERE, '..', 'seeds', 'data', number + '.txt'), encoding='utf-8') as f:
        return f.read()


def server_commands(number):
    """{role: options} of every `python -m ...api_server` in the document that has a role."""
    text = re.sub(r'--scheduler-ttl 9000\n(?= *--)', '--scheduler-ttl 9000 \\\n', document(number))  # the document lacks one line continuation
    text = re.sub(r' \\\n', ' ', text)
    found = {}
    for line in text.splitlines():
        line = line.strip()
        if line.startswith('python -m fastdeploy.entrypoints.openai.api_server') and '--splitwise-role' in line:
            words = shlex.split(line.replace('${quant_type}', 'block_wise_fp8'), comments=True)[3:]
            found[words[words.index('--splitwise-role') + 1]] = words
    return found


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
