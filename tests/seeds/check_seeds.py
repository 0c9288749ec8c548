#!/usr/bin/env python3
"""check_seeds.py - compares docs/compatibility.md with the documents it describes, and the generated pages with the program.

usage: check_seeds.py BATON SOURCE_DIR

The documents are tests/seeds/data/*.txt. Patterns that know nothing of Baton's table find flags, environment variables, commands and
model names in them; one that the table lacks is a failure. Last line: N passed, N failed, N skipped."""
import os
import re
import subprocess
import sys
import tempfile

from documents import command_flags, commands, documents, page, table

BATON, SOURCE = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
FLAG = re.compile(r"(?<![A-Za-z0-9_-])--[A-Za-z][A-Za-z0-9_-]*")
# Words in capitals with '_' that are not environment variables: an attention kernel's name, a key of the OpenAI client example,
# quantities of the sizing formula, a Linux capability.
NOT_ENV = {"FLASH_ATTN", "EMPTY_API_KEY", "NUM_TOTAL_TOKEN", "INFER_MODEL_MAX_SEQ_LEN", "EXTEND_RATIO", "SYS_PTRACE"}
ENV = [
    re.compile(r"\bexport ([A-Za-z_][A-Za-z0-9_]*)="),
    re.compile(r"\bunset ([A-Za-z_][A-Za-z0-9_]*)"),
    re.compile(r"-e \"([A-Za-z_][A-Za-z0-9_]*)="),
    re.compile(r"^([A-Z][A-Za-z0-9_]*|model_name) \| (?:int|str|float) \|", re.M),
    re.compile(r"\b([A-Z][A-Z0-9]*_[A-Za-z0-9_]+)\b"),
    re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)"),
    re.compile(r"环境变量`?([A-Za-z_]+)"),
]
NOT_VARIABLE = {"nic_name", "local_ip", "i", "path_to_mtp_model", "PWD", "proxy"}  # of the scripts themselves; of a comment
MODEL = [
    re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+/(?:weight_only_int[48]|a8w8[a-z0-9_]*)"),
    re.compile(r"--model ([A-Za-z0-9_./-]+)"),
    re.compile(r"vllm serve ([A-Za-z0-9_./-]+)"),
]
QUANTIZATION = re.compile(r"--quantization ([a-z0-9_]+)|quant_type=([a-z0-9_]+)")
JSON_MEMBER = {"--kv-transfer-config": re.compile(r"\"(kv_[a-z_]+|engine_id)\":"), "--additional-config": re.compile(r"\"(enable_[a-z_]+)\":")}


def found(patterns, text):
    return {next((g for g in m.groups() if g), m.group(0)) if m.groups() else m.group(0) for p in patterns for m in p.finditer(text)}


TABLE = table(BATON)


def expect_rows(heading, wanted):
    """Every (name, document) pair is in a row of that name which lists that document."""
    have = {(row[0], number) for row in TABLE[heading] for number in row[2]}
    missing = sorted(set(wanted) - have)
    assert not missing, f"not in the table under {heading!r}: " + ", ".join(f"{n} (document {d})" for n, d in missing)
    assert len(set(wanted)) > 0


def test_flags_and_variables_of_the_page_on_parallelism_are_the_programs():
    """docs/parallelism.md is written by hand: each of its flags is an option, and its table gives each the variables that it has."""
    options, of_ranks, section = {}, set(), ""
    for line in page(BATON, "configuration").splitlines():
        section = line[3:] if line.startswith("## ") else section
        cells = [c.strip() for c in line.strip("|").split("|")]
        if line.startswith("| `--") and len(cells) > 3:
            for flag in re.findall(r"`(--[a-z0-9-]+)`", cells[0] + cells[1]):
                options.setdefault(flag, set()).update(re.findall(r"`([A-Za-z_0-9]+)`", cells[2]))
            if section == "Parallelism" and cells[-1] == "works":
                of_ranks.update(FLAG.findall(cells[0]))
    with open(os.path.join(SOURCE, "docs", "parallelism.md"), encoding="utf-8") as f:
        text = f.read()
    flags = set(FLAG.findall(text))
    assert len(flags) > 10 and flags <= set(options), flags - set(options)
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `--")]
    listed = {flag for row in rows for flag in FLAG.findall(row[0])}
    assert len(of_ranks) > 15 and of_ranks <= listed, of_ranks - listed
    for row in rows:
        have = set().union(*(options[flag] for flag in FLAG.findall(row[0])))
        said = set(re.findall(r"`([A-Z_0-9]+)`", row[1]))
        foreign = {v for v in have if not v.startswith("BATON_")}
        assert said == foreign, (row[0], said, foreign)


def test_every_flag_has_a_row():
    expect_rows("Flags", [(f, d) for d, text in documents() for f in found([FLAG], text)])


def test_every_environment_variable_has_a_row():
    expect_rows("Environment variables", [(v, d) for d, text in documents() for v in found(ENV, text) - NOT_ENV - NOT_VARIABLE])


def test_every_command_has_a_row():
    expect_rows("Commands", [(name, d) for d, _ in documents() for _, name in commands(d)])


def test_every_model_and_value_has_a_row():
    wanted = [(m, d) for d, text in documents() for m in found(MODEL, text)]
    wanted += [("--quantization " + q, d) for d, text in documents() for q in found([QUANTIZATION], text)]
    for flag, pattern in JSON_MEMBER.items():
        wanted += [(f"{flag} {m}", d) for d, text in documents() for m in found([pattern], text)]
    expect_rows("Values and models", wanted)


def test_no_row_names_a_document_that_lacks_it():
    texts = dict(documents())
    for heading in ("Flags", "Environment variables"):
        for name, _, numbers, _, _ in TABLE[heading]:
            for n in [n for n in numbers if n != "-"]:
                assert re.search(r"(?<![A-Za-z0-9_-])" + re.escape(name) + r"(?![A-Za-z0-9-])", texts[n]), f"{name} is not in document {n}"


def test_no_name_appears_twice():
    for heading, rows in TABLE.items():
        names = [r[:2] for r in rows]
        twice = {n for n in names if names.count(n) > 1}
        assert not twice, f"{heading}: {twice}"


def run_serve(*args, model="/nonexistent/model"):
    p = subprocess.run([BATON, "serve", "--model", model, *args], capture_output=True, text=True, timeout=60,
                       env={"PATH": os.environ["PATH"]})
    return p.returncode, p.stderr


def test_flags_of_other_programs_are_no_options():
    own = {r[0] for r in TABLE["Flags"] if not r[1]}
    for name, owner, _, _, _ in TABLE["Flags"]:
        if owner and name not in own:
            status, text = run_serve(name, "1")
            assert status == 2 and ("no option" in text or 'is not an option of "serve"' in text), f"{name} of {owner}: status {status}, {text!r}"


def test_every_serving_flag_is_known():
    for name, owner, _, _, _ in TABLE["Flags"]:
        if not owner:
            _, text = run_serve(name, "1")
            assert "there is no option" not in text, text


def refusal(command, flag):
    """What `baton COMMAND FLAG 1` says if that command does not know the flag; None if it does. Without a model, and a router with one that there is not, nothing starts."""
    model = ["--model", "/nonexistent/model"] if command == "router" else []
    p = subprocess.run([BATON, command, *model, flag, "1"], capture_output=True, text=True, timeout=60, env={"PATH": os.environ["PATH"]})
    assert p.returncode != 0, (command, flag)
    return next((line for line in p.stderr.splitlines() if f'is not an option of "{command}"' in line or "there is no option" in line), None)


def test_every_flag_is_known_to_the_command_that_a_document_gives_it_to():
    """serve and launch have options of their own: a flag of multi_api_server must be one of launch."""
    works = {name: re.match(r"`baton (\w+)`", sentence)[1] for name, _, _, effect, sentence in TABLE["Commands"]
             if effect == "works" and re.match(r"`baton (serve|launch|router)`", sentence)}
    assert len(works) == 5, works
    assert refusal("launch", "--kv-transfer-config") and refusal("launch", "--nonsense") and not refusal("serve", "--kv-transfer-config")
    said, seen = {}, set()
    for number, _ in documents():
        for line, name, flags in command_flags(number):
            if name in works:
                seen |= {(works[name], flag) for flag in flags}
                said.update({(number, line, name, flag): why for flag in flags if (why := refusal(works[name], flag))})
    assert {("launch", "--router"), ("router", "--port"), ("router", "--decoder-ports-inc"), ("serve", "--splitwise-role"), ("serve", "--kv-transfer-config")} <= seen, seen
    assert not said, said


def variables_of(pattern, *folders, suffixes):
    """The BATON_* variables that a pattern finds in the files of some folders."""
    names = set()
    for folder in folders:
        for place, _, files in os.walk(os.path.join(SOURCE, folder)):
            for file in [f for f in files if f.endswith(suffixes)]:
                with open(os.path.join(place, file), encoding="utf-8", errors="replace") as f:
                    names |= set(re.findall(pattern, f.read(), re.M))
    return names


def test_every_variable_that_something_reads_is_known():
    """A variable that the program does not know is called misspelt when it starts."""
    getenv = variables_of(r'getenv\("(BATON_[A-Z0-9_]+)"\)', "deploy", "shared", "kernels", "kvtransfer", "scheduler", "prefill", "decode", "tests",
                          suffixes=(".c", ".h", ".cc", ".cu"))
    environ = variables_of(r"environ(?:\.get\(|\.setdefault\(|\[)['\"](BATON_[A-Z0-9_]+)['\"]", "tests", suffixes=(".py",))
    shell = variables_of(r"(?:\$\{?|^export )(BATON_[A-Z0-9_]+)", "tests", "deploy", suffixes=(".sh",))
    documents = variables_of(r"(?<![A-Z0-9_-])(BATON_[A-Z0-9_]*[A-Z0-9])(?![A-Z0-9_*])", "docs", suffixes=(".md",))
    assert "BATON_MODELS" in getenv and "BATON_BIN" in environ and "BATON_CACHE" in shell and "BATON_PORT" in documents
    build = {"BATON_CUDA"}  # an option of CMake
    with tempfile.TemporaryDirectory() as folder:  # some variables name a folder, which is made
        for name in sorted((getenv | environ | shell | documents) - build):
            p = subprocess.run([BATON, "serve", "--model", "/nonexistent/model"], capture_output=True, text=True, timeout=60, cwd=folder,
                               env={"PATH": os.environ["PATH"], name: "1"})
            assert f"{name}: no variable of that name is read" not in p.stderr, p.stderr


def test_a_misspelt_secret_stops_a_node_and_another_variable_does_not():
    def serve(name):
        return subprocess.run([BATON, "serve", "--model", "/nonexistent/model"], capture_output=True, text=True, timeout=60,
                              env={"PATH": os.environ["PATH"], name: "1"})
    p = serve("BATON_API_KYE")
    assert p.returncode == 2 and "did you mean BATON_API_KEY?" in p.stderr and "/nonexistent" not in p.stderr, p.stderr
    p = serve("BATON_PROT")
    assert "warning: BATON_PROT: no variable of that name is read; did you mean BATON_PORT?" in p.stderr and "/nonexistent" in p.stderr, p.stderr


def test_refused_values_stop_the_start_with_their_reason():
    model = os.path.join(SOURCE, "tests", "data", "goldens", "llama", "model")
    assert os.path.isdir(model), model
    for name, _, _, effect, _ in TABLE["Values and models"]:
        if effect != "refused" or not name.startswith("--quantization"):
            continue
        status, text = run_serve(*name.split(), model=model)
        assert status == 2 and name in text, f"{name}: status {status}, {text!r}"


def page_matches(name):
    path = os.path.join(SOURCE, "docs", name + ".md")
    with open(path, encoding="utf-8") as f:
        committed = f.read()
    assert committed == page(BATON, name), f"docs/{name}.md differs from `baton docs {name}`; `ninja pages` writes it again"


def test_the_compatibility_page_is_the_programs():
    page_matches("compatibility")


def test_the_configuration_page_is_the_programs():
    page_matches("configuration")


def test_the_recovery_page_is_the_programs():
    page_matches("recovery")


def main():
    failed = passed = 0
    for name, test in [(n, t) for n, t in globals().items() if n.startswith("test_")]:
        try:
            test()
            passed += 1
            print("ok", name)
        except (AssertionError, OSError, subprocess.SubprocessError) as e:
            failed += 1
            print(f"FAIL {name}: {e}")
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return failed > 0


sys.exit(main())
