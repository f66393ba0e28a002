"""Runs seeds: `python -m tests.simulator --first 0 --seeds 10000`, or shows one: `python -m tests.simulator --seed 7`.

The last line counts seeds, records, steps, faults by kind and violations. The exit code is 1 on any violation. Failing
seeds are shrunk, and the command that shows each is printed. `--results FILE` adds each finished range of seeds to a
file, with the commit that it ran on and a digest of the code. It skips the ranges that the file has for the same code.
"""

import sys

from tests.simulator.runner import SIMULATOR

if __name__ == "__main__":
    sys.exit(SIMULATOR.main())
