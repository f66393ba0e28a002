"""What the simulator's seeds depend on, and how they are run."""

from typing import Final

from tests.simulator.scenario import scenario
from tests.simulator.world import Result, simulate
from tests.simulator_runner import Simulator

CODE: Final = (
    "marshal_dagster/protocol",
    "marshal_dagster/coordination",
    "marshal_dagster/delivery",
    "marshal_dagster/sensors/left.py",
    "marshal_dagster/runs.py",
    "marshal_dagster/errors.py",
    "marshal_dagster/testing.py",
    "tests/simulator",
    "tests/delivering.py",
    "tests/plain_reader.py",
    ":(exclude)tests/simulator/__main__.py",
    ":(exclude)tests/simulator/mutants.py",
    ":(exclude)tests/simulator/running.py",
)
"""What happens in a seed depends on, as git names it: not how seeds are asked for, counted and shrunk."""

SIMULATOR: Final = Simulator(
    module="tests.simulator",
    description="Runs seeds of whole groups; the last line counts them, records, steps, faults and violations.",
    code=CODE,
    scenario=scenario,
    simulate=simulate,
    result=Result,
)
