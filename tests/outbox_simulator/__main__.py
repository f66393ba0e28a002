"""Runs seeds: `python -m tests.outbox_simulator --seeds 10000`, or shows one: `... --seed 7`.

The last line counts seeds, records, steps, faults by kind and violations. The exit code is 1 on any violation. Failing
seeds are shrunk, and the command that shows each is printed. `--results FILE` keeps finished ranges, as in
`tests.simulator`.
"""

import sys

from tests.outbox_simulator.runner import SIMULATOR

if __name__ == "__main__":
    sys.exit(SIMULATOR.main())
