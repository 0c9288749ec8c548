"""The parts of cluster.py: a cluster that is broken by script while its answers are checked."""
import os, sys

CHAOS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
for folder in (CHAOS, os.path.join(CHAOS, '..', 'e2e')):
    if folder not in sys.path:
        sys.path.insert(0, folder)
