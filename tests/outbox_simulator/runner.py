"""Runs seeds of the outbox's simulator, and names the code on which their results depend."""

from collections import Counter
from typing import Final

from tests.outbox_simulator.scenario import scenario
from tests.outbox_simulator.world import Result, simulate
from tests.simulator_runner import Simulator

CODE: Final = ("marshal_dagster", "tests/simulator", "tests/outbox_simulator")
"""The paths on which the results depend, as git names them."""


def outcomes(result: Result) -> Counter[str]:
    """Return the counts of the results of harvests and elections in a seed."""
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
