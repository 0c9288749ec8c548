"""Ranks of a group are killed and stopped at random points under load (tests/chaos/group_rounds.py)."""
import importlib.util, os

from harness import *

ROUNDS = os.path.join(HERE, '..', 'chaos', 'group_rounds.py')


def rounds(*args):
    spec = importlib.util.spec_from_file_location('group_rounds', ROUNDS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.rounds(*args)


@alone
def test_rounds_of_eight_ranks():
    rounds(8, 20, 1)


@alone
def test_rounds_of_eight_ranks_long():
    rounds(8, 200, 2)
