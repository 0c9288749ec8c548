"""Ranks of a group are killed and stopped at random points under load, and nodes end in turn (tests/chaos/group_rounds.py); hosts are cut off (cut_rounds.py).

Without --long the ranks are paced: their clients then leave the machine CPU time, and what is timed here is no arithmetic."""
import importlib.util, os

from harness import *

PACED = paced()


def chaos():
    spec = importlib.util.spec_from_file_location('group_rounds', os.path.join(HERE, '..', 'chaos', 'group_rounds.py'))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cuts(*options):
    run_chaos('cut_rounds.py', *options)


@alone
def test_rounds_of_eight_ranks():
    chaos().rounds(8, 6, 1, args=PACED)


@alone
def test_rounds_of_nodes_of_two_ranks():
    chaos().rounds(8, 6, 2, tp=2, redundant=8, args=PACED)


@alone
def test_rounds_of_a_parent():
    chaos().rounds(8, 3, 11, tp=2, served=True, args=PACED)


@alone
def test_nodes_that_end_in_turn():
    chaos().drains(8, 1, 3, redundant=4, args=PACED)
    chaos().drains(8, 1, 4, tp=2, args=PACED)


@alone
def test_hosts_that_are_cut_off():
    cuts('--ranks', 4, '--hosts', 4, '--rounds', 3, '--cut', 6.5, '--seed', 14, *PACED)
    cuts('--ranks', 4, '--hosts', 2, '--rounds', 1, '--cut', 6.5, '--seed', 15, *PACED)


@alone
def test_rounds_of_eight_ranks_long():
    chaos().rounds(8, 40, 5)
    chaos().rounds(8, 40, 6, redundant=8)


@alone
def test_rounds_of_nodes_of_two_ranks_long():
    chaos().rounds(8, 40, 7, tp=2)
    chaos().rounds(8, 40, 8, tp=2, redundant=8)


@alone
def test_rounds_of_a_parent_long():
    chaos().rounds(8, 20, 12, served=True)
    chaos().rounds(8, 20, 13, tp=2, redundant=8, served=True)


@alone
def test_nodes_that_end_in_turn_long():
    chaos().drains(8, 4, 9, redundant=4)
    chaos().drains(8, 8, 10, tp=2)


@alone
def test_hosts_that_are_cut_off_long():
    cuts('--hosts', 8, '--rounds', 24, '--seed', 16)
    cuts('--hosts', 8, '--rounds', 12, '--seed', 17, '--redundant', 8)
    cuts('--hosts', 2, '--rounds', 12, '--seed', 18)
    cuts('--hosts', 3, '--rounds', 12, '--seed', 19, '--redundant', 8)
