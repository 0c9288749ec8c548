#!/usr/bin/env python3
"""ctest_counts.py - counts the cases of one ctest run. usage: ctest_counts.py JUNIT.xml

A test program of tests/harness reports its cases in its last line; any other program counts as one case. Prints the reasons of
skipped cases, then "PASSED FAILED SKIPPED"."""
import re
import sys
import xml.etree.ElementTree

LINE = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped\s*$", re.M)
WHY = re.compile(r"SKIPPED, NOT TESTED: (.*)$", re.M)


def counts(case):
    """(passed, failed, skipped, output) of one test program."""
    out = (case.findtext("system-out") or "") + "\n"
    found = LINE.findall(out)
    ran_well = case.get("status") == "run"
    if case.get("status") in ("notrun", "disabled"):
        return 0, 0, 1, out
    if not found:
        return int(ran_well), int(not ran_well), 0, out
    p, f, s = map(int, found[-1])
    return p, f if ran_well else max(f, 1), s, out  # a program that died after its cases has still failed


def main():
    total = [0, 0, 0]
    for case in xml.etree.ElementTree.parse(sys.argv[1]).getroot().iter("testcase"):
        p, f, s, out = counts(case)
        total = [total[0] + p, total[1] + f, total[2] + s]
        if s:
            why = WHY.findall(out)
            lines = [f"{why.count(w)} skipped: {w}" for w in dict.fromkeys(why)] or ["not run"]
            print(case.get("name"), *lines, sep="\n    ", file=sys.stderr)
    print(*total)


main()
