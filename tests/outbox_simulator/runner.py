"""What the seeds of the outbox's simulator depend on, and how they are run."""

from collections import Counter
from typing import Final

from tests.outbox_simulator.scenario import scenario
from tests.outbox_simulator.world import Result, simulate
from tests.simulator_runner import Simulator

CODE: Final = ("marshal_dagster", "tests/simulator", "tests/outbox_simulator")
"""What happens in a seed depends on, as git names it."""


def outcomes(result: Result) -> Counter[str]:
    """Return what harvests and elections came to in a seed."""
    return result.outcomes


SIMULATOR: Final = Simulator(
    module="tests.outbox_simulator",
    description="Runs seeds of an outbox; the last line counts them, records, steps, faults and violations.",
    code=CODE,
    scenario=scenario,
    simulate=simulate,
    result=Result,
    outcomes=outcomes,
)
