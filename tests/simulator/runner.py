"""Runs seeds of the simulator, and names the code on which their results depend."""

from typing import Final

from tests.simulator.scenario import scenario
from tests.simulator.world import Result, simulate
from tests.simulator_runner import Simulator

CODE: Final = (
    "marshal_dagster/protocol",
    "marshal_dagster/coordination",
    "marshal_dagster/admin/group_writer.py",
    "marshal_dagster/admin/log_access.py",
    "marshal_dagster/admin/operator.py",
    "marshal_dagster/admin/paused_change.py",
    "marshal_dagster/admin/recovery.py",
    "marshal_dagster/admin/settings_change.py",
    "marshal_dagster/batches",
    "marshal_dagster/runs",
    "marshal_dagster/errors.py",
    "marshal_dagster/testing",
    "tests/simulator",
    "tests/batch_fixtures.py",
    "tests/reference_reader.py",
    ":(exclude)tests/simulator/__main__.py",
    ":(exclude)tests/simulator/mutants.py",
    ":(exclude)tests/simulator/runner.py",
)
"""The paths on which the results depend, as git names them, without the code that selects, counts and shrinks seeds."""

SIMULATOR: Final = Simulator(
    module="tests.simulator",
    description="Runs seeds of whole groups; the last line counts them, records, steps, faults and violations.",
    code=CODE,
    scenario=scenario,
    simulate=simulate,
    result=Result,
)
