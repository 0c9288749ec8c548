#!/usr/bin/env python3
"""figures.py - prints how readable the product is in numbers, and below each figure what is over its limit; fails if something is.
usage: figures.py [ROOT]"""
import collections
import os
import re
import subprocess
import sys

import source

UNUSED_YET = {"kernels/ep/ep.h"}  # their heads say what will call them
COLUMNS, HEAD_LINES, FOLDER_FILES, OPS, FUNCTION_LINES = 100, 15, 30, 15, 40
FIGURES = re.compile(r"[\u2190-\u21ff\u2500-\u257f\u25a0-\u25ff]")  # arrows and boxes: a diagram


def in_table(lines):
    """For each line, whether it stands in a table that clang-format leaves alone."""
    off, out = False, []
    for line in lines:
        if "clang-format off" in line:
            off = True
        out.append(off)
        if "clang-format on" in line:
            off = False
    return out


def wide_lines(path, text):
    lines = text.split("\n")
    tables = in_table(lines)
    return ["%s:%d (%d)" % (path, i + 1, len(line)) for i, line in enumerate(lines)
            if len(line) > COLUMNS and not tables[i] and not FIGURES.search(line)]


def wide_document_lines(path, text):
    """Lines of Markdown beside tables and examples."""
    out, example = [], False
    for i, line in enumerate(text.split("\n")):
        if line.startswith("```"):
            example = not example
        if len(line) > COLUMNS and not example and not re.match(r"\s*\||    ", line) and " " in line.strip()[:COLUMNS]:
            out.append("%s:%d (%d)" % (path, i + 1, len(line)))
    return out


def head_lines(text):
    """Lines of the comment that opens the file, or of one between the includes and the first declaration that declares nothing."""
    if not text.startswith("/*"):
        return 0
    most = text.split("*/", 1)[0].count("\n") + 1
    for m in re.finditer(r"(?m)^/\*(?:[^*]|\*(?!/))*\*/\n(?=\n|struct \w+;\n)", text):
        most = max(most, m.group().count("\n"))
    return most


def functions(path, code):
    """(lines, "path:line name") of each function with a body on lines of its own."""
    lines = code.split("\n")
    out, start = [], None
    for i, line in enumerate(lines):
        if line == "{" or (line.endswith("{") and re.match(r"[A-Za-z_].*\)\s*\{$", line)):
            start = i
            while start > 0 and line == "{" and lines[start - 1].strip() and lines[start - 1][0] not in "}#/":
                start -= 1
                if re.match(r"[A-Za-z_]", lines[start]) and not lines[start - 1].rstrip().endswith((",", "(")):
                    break
        elif line == "}" and start is not None:
            name = re.search(r"([A-Za-z_]\w*)\s*\(", " ".join(lines[start:i]))
            out.append((i - start + 1, "%s:%d %s" % (path, start + 1, name.group(1) if name else "?")))
            start = None
    return out


def ops_tables(codes):
    """name -> function members of each struct that has two or more of them and instances that are constants."""
    tables, everything = {}, "\n".join(codes.values())
    constant = set(re.findall(r"(?m)^(?:static )?(?:const )?struct (\w+) \w+(?:\[\w*\])?\s*=", everything))
    for code in codes.values():
        for m in re.finditer(r"\bstruct\s+(\w+)\s*\{(.*?)\n\};", code, re.S):
            ops = re.findall(r"(?m)^    [A-Za-z_][\w ]*[ *]\(\*(\w+)\)\(", m.group(2))
            if len(ops) > 1 and m.group(1) in constant:
                tables[m.group(1)] = ops
    return tables


def empty_ops(codes, tables):
    """Ops that a table leaves NULL."""
    everything, out = "\n".join(codes.values()), []
    for path, code in codes.items():
        for m in re.finditer(r"(?m)^(?:static )?(?:const )?struct (\w+) (\w+)\s*=\s*\{(.*?)\};", code, re.S):
            if m.group(1) not in tables:
                continue
            body = m.group(3)
            for macro in re.findall(r"(?m)(?:^|,|\{)\s*([A-Z][A-Z0-9_]+)\b(?!\s*=)", body):
                body += "".join(re.findall(r"#\s*define\s+%s\b((?:.*\\\n)*.*)" % macro, everything))
            given = dict(re.findall(r"\.(\w+)\s*=\s*([^,\n]+)", body))
            for op in tables[m.group(1)]:
                if given.get(op, "NULL").split()[0] in ("NULL", "0"):
                    out.append("%s: %s has no %s" % (path, m.group(2), op))
    return out


def one_user_headers(codes):
    users = collections.defaultdict(set)
    for path, text in codes.items():
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.M):
            users[name].add(path)
    return [h for h in codes if h.endswith((".h", ".cuh")) and len(users[h] - {h}) <= 1]


def uncalled(codes, texts):
    """Functions that a header declares and nothing in the product names but their definition. Those whose comment begins with
    "For tests" are not counted."""
    declared = {}
    for path, code in codes.items():
        if not path.endswith(".h") or path in UNUSED_YET:
            continue
        flat = re.sub(r"__attribute__\s*\(\(.*?\)\)", "", code)
        for m in re.finditer(r"^(?!static|typedef|#|return)[A-Za-z_][\w\s*]*?\b\*?([a-z_]\w*)\s*\([^;{}]*\)[^;{}()]*;", flat, re.M):
            declared.setdefault(m.group(1), path)
    # What follows one of these on its line is neither a declaration nor a definition. Few names are left for the slow search.
    used = {word for code in codes.values() for rest in re.findall(r"(?m)[;{}=#()](.*)$", code) for word in re.findall(r"[A-Za-z_]\w*", rest)}
    uses = collections.Counter()
    for path, code in codes.items():
        uses.update(re.findall(r"[A-Za-z_]\w*", code))
    out = []
    for name, path in declared.items():
        if name in used:
            continue
        own = 0
        for code in codes.values():
            own += len(re.findall(r"^[A-Za-z_](?:[^;{}=#\n()]|\n(?=[A-Za-z_ ]))*?\b%s\s*\([^;{}]*\)[^;{}()]*[;{]" % name, code, re.M)) if name in code else 0
        if uses[name] <= own and not re.search(r"/\* For tests[^/]*\*/\n[^;\n]*\b%s\(" % name, texts[path]):
            out.append("%s (%s)" % (name, path))
    return sorted(out)


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "../..")
    files = [f for f in source.tracked(root) if source.is_product(f)]
    texts = {f: source.read(root, f) for f in files}
    c_texts = {f: t for f, t in texts.items() if source.is_c(f)}
    # Includes keep their names; everything else that is no code goes.
    codes = {f: re.sub(r'(?m)^(\s*#\s*include\s*)"[^"\n]*"', "", t) for f, t in c_texts.items()}
    codes = {f: source.code(t) for f, t in codes.items()}
    folders = collections.Counter(os.path.dirname(f) for f in files)
    tables = ops_tables(codes)
    functions_all = [x for f, c in codes.items() for x in functions(f, c)]
    heads = sorted(((head_lines(t), f) for f, t in c_texts.items()), reverse=True)
    bad = 0

    def figure(name, value, limit, over):
        nonlocal bad
        print("%-52s %6s%s" % (name, value, "" if limit is None else "  (limit %s)" % limit))
        for line in over if limit is not None else ():
            print("    " + line)
            bad += 1

    big = ["%d %s" % (n, d) for d, n in folders.most_common() if n > FOLDER_FILES]
    figure("files in the fullest folder", max(folders.values()), FOLDER_FILES, big)
    wide = [x for f, t in texts.items() for x in wide_lines(f, t)]
    for f in source.tracked(root):
        if f.endswith(".md"):
            wide += wide_document_lines(f, source.read(root, f))
    figure("lines over %d columns outside tables" % COLUMNS, len(wide), 0, wide[:20])
    figure("lines of the longest file head", heads[0][0], HEAD_LINES,
           ["%d %s" % h for h in heads if h[0] > HEAD_LINES])
    most = max(tables.items(), key=lambda t: len(t[1]))
    figure("ops of the largest table (%s)" % most[0], len(most[1]), OPS,
           ["%d %s" % (len(ops), name) for name, ops in tables.items() if len(ops) > OPS])
    empty = empty_ops(codes, tables)
    figure("ops that are NULL", len(empty), 0, empty)
    figure("headers with one user", len(one_user_headers(c_texts)), None, [])
    long = sorted((x for x in functions_all if x[0] > FUNCTION_LINES), reverse=True)
    figure("functions over %d lines (of %d)" % (FUNCTION_LINES, len(functions_all)), len(long), 0,
           ["%d %s" % x for x in long])
    retired = re.findall(r"(?m)^(\d+) found$", subprocess.run(
        ["bash", os.path.join(root, "tests/lint/check_words.sh"), root], capture_output=True, text=True).stdout)
    figure("retired words", retired[0] if retired else "?", 0, [] if retired == ["0"] else ["see check_words.sh"])
    without = uncalled(codes, c_texts)
    figure("public functions without a caller", len(without), 0, without)
    return 1 if bad else 0


sys.exit(main())
