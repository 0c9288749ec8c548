#!/usr/bin/env python3
"""check_references.py - every file, folder and identifier of ours that a comment or a document names exists, the head of a product
file names that file, every folder of the layer table exists, every page of docs/ is in the table of README.md, and every file that
begins with "#!" is executable.
usage: check_references.py [ROOT]

A name of a file is a word that ends in .c, .h, .cu, .cuh, .cc, .py, .sh, .md or .proto. It is found when a tracked file has this
path, or a path that ends in it. A name of a folder begins with one at the top of the tree ("kernels/cuda/gemm"). An
identifier is a word like "kv_pool_take" in a comment of C; it is found when code or a string has it. Files and identifiers of
others are listed below."""
import os
import re
import sys

import source

NAME = re.compile(r"(?<![\w./<~$*{-])((?:[\w.-]+/)*[\w-]+\.(?:c|h|cu|cuh|cc|py|sh|md|proto))(?![\w*/(-]|\.\w)")
FOLDER = re.compile(r"(?<![\w./<~$*{@-])((?:shared|kernels|kvtransfer|prefill|decode|scheduler|deploy|tests|docs)(?:/[\w-]+)+)"
                    r"(?![\w*/(<{-]|/?\.[\w\[{*]|/[*<{$])")
IDENTIFIER = re.compile(r"(?<![\w./-])([a-z][a-z0-9]+(?:_[a-z0-9]{2,})+)\b(?![\w/*-]|\.\w)")
HEAD = re.compile(r"/\* ([\w./-]+) - ")
# Headers and programs of others that texts speak of.
OTHERS = {
    "cublasLt.h", "ucp.h", "ib_verbs.h", "udma_barrier.h", "xxhash_spec.md",
    "load_balance_proxy_server_example.py", "download_model.py", "run_dp_template.sh",
    "scripts/get_rdma_nics.sh", "compare.py", "a.cu",
}
# Of the kernel, rdma-core, UCX, CUDA, Jinja and transformers.
OTHERS_IDENTIFIERS = {
    "udma_from_device_barrier", "ib_uverbs_event_poll", "verbs_is_destroy_err", "uct_ud_verbs", "ucp_rkey_resolve",
    "ucp_put_handler", "do_sample", "trim_blocks", "lstrip_blocks", "sm_80", "sm_90a",
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
    folders = {os.path.dirname(f) for f in files}
    folders |= {"/".join(d.split("/")[:i]) for d in folders for i in range(1, d.count("/") + 2)}
    words = set()
    for path in files:
        if source.is_c(path):
            whole = source.read(root, path)
            words.update(re.findall(r"[A-Za-z_]\w*", source.code(whole)))
            words.add(os.path.basename(path).split(".")[0])
            words.update(w for _, s in source.strings(whole) for w in re.findall(r"[A-Za-z_]\w*", s))
    n = bad = 0
    for path in files:
        with open(os.path.join(root, path), "rb") as f:
            if f.read(2) == b"#!" and not os.access(f.name, os.X_OK):
                print("%s:1: begins with #! and is not executable" % path)
                bad += 1
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
            for m in FOLDER.finditer(text):
                name = m.group(1)
                n += 1
                if not name.startswith("tests/data") and name not in folders and not {name, name + ".c", name + ".h"} & known:
                    print("%s:%d: there is no folder %s" % (path, line + text.count("\n", 0, m.start()), name))
                    bad += 1
            for m in IDENTIFIER.finditer(text) if source.is_c(path) else ():
                n += 1
                if m.group(1) not in words and m.group(1) not in OTHERS_IDENTIFIERS:
                    print("%s:%d: there is no %s" % (path, line + text.count("\n", 0, m.start()), m.group(1)))
                    bad += 1
    for folder in layer_rows(root):
        if not os.path.isdir(os.path.join(root, folder)):
            print("tests/lint/check_layers.sh: there is no folder %s" % folder)
            bad += 1
    for page in sorted(f for f in files if os.path.dirname(f) == "docs" and f.endswith(".md")):
        if "](%s) |" % page not in source.read(root, "README.md"):
            print("README.md: no row of the table of pages is %s" % page)
            bad += 1
    print("%d names, %d of what does not exist" % (n, bad))
    return 1 if bad or not n else 0


sys.exit(main())
