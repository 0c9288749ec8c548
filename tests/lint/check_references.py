#!/usr/bin/env python3
"""check_references.py - every file of ours that a comment or a document names exists, the head of a product file names that file, and every
folder of the layer table exists.
usage: check_references.py [ROOT]

A name is a word that ends in .c, .h, .cu, .cuh, .cc, .py, .sh, .md or .proto. It is found when a tracked file has this path, or a path that
ends in it. Generated files, and headers of libraries, are listed below."""
import os
import re
import sys

import source

NAME = re.compile(r"(?<![\w./<~$*{-])((?:[\w.-]+/)*[\w-]+\.(?:c|h|cu|cuh|cc|py|sh|md|proto))(?![\w*/(-]|\.\w)")
HEAD = re.compile(r"/\* ([\w./-]+) - ")
# Headers and programs of others that texts speak of.
OTHERS = {
    "cublasLt.h", "ucp.h", "ib_verbs.h", "udma_barrier.h", "xxhash_spec.md",
    "load_balance_proxy_server_example.py", "download_model.py", "run_dp_template.sh",
    "scripts/get_rdma_nics.sh", "compare.py", "a.cu",
}


def texts(root, path):
    """(line number, text) of what people read in the file."""
    whole = source.read(root, path)
    if source.is_c(path):
        return source.comments(whole)
    if path.endswith(".md"):
        return [(1, whole)]
    if path.endswith((".sh", ".py", ".cmake")) or path.endswith("CMakeLists.txt"):
        return [(n, line[line.index("#"):]) for n, line in enumerate(whole.split("\n"), 1) if "#" in line]
    return []


def layer_rows(root):
    """Folders that the layer table of check_layers.sh has rows for."""
    table = source.read(root, "tests/lint/check_layers.sh").split("LAYERS='", 1)[1].split("'", 1)[0]
    return [line.split()[0] for line in table.split("\n") if line.strip()]


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "../..")
    files = source.tracked(root)
    known = set()
    for path in files:
        parts = path.split("/")
        known.update("/".join(parts[i:]) for i in range(len(parts)))
    n = bad = 0
    for path in files:
        if source.is_product(path) and source.is_c(path):
            head = HEAD.match(source.read(root, path))
            if not head or not (path + "/").endswith(head.group(1) + "/"):
                print("%s:1: the head names %s" % (path, head.group(1) if head else "no file"))
                bad += 1
        for line, text in texts(root, path):
            for m in NAME.finditer(text):
                name = m.group(1).removeprefix("./")
                while name.startswith("../"):
                    name = name[3:]
                n += 1
                if name in known or name in OTHERS or name.split("/")[-1] in OTHERS:
                    continue
                print("%s:%d: there is no %s" % (path, line + text.count("\n", 0, m.start()), name))
                bad += 1
    for folder in layer_rows(root):
        if not os.path.isdir(os.path.join(root, folder)):
            print("tests/lint/check_layers.sh: there is no folder %s" % folder)
            bad += 1
    print("%d names of files, %d that do not exist" % (n, bad))
    return 1 if bad or not n else 0


sys.exit(main())
