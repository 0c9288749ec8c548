#!/usr/bin/env python3
"""check_structs.py - no tag of a struct, union or enum is defined twice in the product, so that grep and a debugger find one.
usage: check_structs.py [ROOT]"""
import collections
import os
import re
import sys

import source

DEFINITION = re.compile(r"\b(?:struct|union|enum)\s+(?:(?:__attribute__\s*\(\([^)]*\)\)|_?[Aa]lign(?:as|_)\([^)]*\)|__align__\([^)]*\))\s*)*([A-Za-z_]\w*)\s*\{")


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "../..")
    places = collections.defaultdict(list)
    for path in source.tracked(root):
        if not source.is_product(path) or not source.is_c(path):
            continue
        text = source.code(source.read(root, path))
        for m in DEFINITION.finditer(text):
            places[m.group(1)].append("%s:%d" % (path, text.count("\n", 0, m.start()) + 1))
    twice = {name: at for name, at in places.items() if len(at) > 1}
    for name in sorted(twice):
        print("%s is defined in %s" % (name, ", ".join(twice[name])))
    print("%d tags, %d defined more than once" % (len(places), len(twice)))
    return 1 if twice or not places else 0


sys.exit(main())
