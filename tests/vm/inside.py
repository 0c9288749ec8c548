#!/usr/bin/env python3
"""inside.py - runs the tests of one folder inside the virtual machine. usage: inside.py FOLDER [--long] [name part ...]; last line as tests/e2e/run.py's."""
import os, sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, '..', 'e2e'), HERE]
from run import run_folder

if __name__ == '__main__':
    folder = os.path.join(HERE, sys.argv[1])
    sys.path.insert(0, folder)
    sys.exit(run_folder(folder, [a for a in sys.argv[2:] if a != '--long'], '--long' in sys.argv))
