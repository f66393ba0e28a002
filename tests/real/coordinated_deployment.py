"""A deployment of `examples/coordinator` in one process: it evaluates the member's sensor and runs the job in a loop.

On SIGTERM it leaves the group and ends.
"""

import logging
import runpy
import signal
import sys
import threading
from pathlib import Path

import dagster as dg

from marshal_dagster.sensors import group_membership

PARCELS = Path(__file__).parents[2] / "examples" / "coordinator" / "parcels.py"
PAUSE_S = 1.0

logger = logging.getLogger(__name__)


def tick_on(
    sensor: dg.SensorDefinition, claimer: object, instance: dg.DagsterInstance, ending: threading.Event
) -> None:
    """Evaluate the sensor in a loop, as Dagster's daemon does during runs. At the end leave the group."""
    cursor: str | None = None
    while not ending.is_set():
        with dg.build_sensor_context(instance=instance, cursor=cursor, resources={"claimer": claimer}) as context:
            tick = sensor(context)
        assert isinstance(tick, dg.SensorResult)
        cursor = tick.cursor
        skipped = tick.skip_reason
        logger.info("%s", "a run is requested" if skipped is None else skipped.skip_message)
        ending.wait(PAUSE_S)
    for membership in list(group_membership._kept.values()):
        membership.stop()


def work_on(job: dg.JobDefinition, instance: dg.DagsterInstance, ending: threading.Event) -> None:
    """Run the job in a loop, as a schedule does."""
    while not ending.is_set():
        assert job.execute_in_process(instance=instance).success
        ending.wait(PAUSE_S)


def main() -> None:
    """Run until SIGTERM. The argument is a folder for Dagster's instance."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    defs: dg.Definitions = runpy.run_path(str(PARCELS))["defs"]
    sensor, job = defs.resolve_sensor_def("parcels_job_member"), defs.resolve_job_def("parcels_job")
    with dg.DagsterInstance.local_temp(sys.argv[1]) as instance:
        # Within a run Dagster handles signals itself, in the main thread.
        threads = [
            threading.Thread(target=tick_on, args=(sensor, (defs.resources or {})["claimer"], instance, ending)),
            threading.Thread(target=work_on, args=(job, instance, ending)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
