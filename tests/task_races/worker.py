"""The process of a task, which can kill or stop itself at a step of the sink."""

import os
import pickle
import signal
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from marshal_dagster.sinks.kafka import tasks

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from pyarrow import RecordBatch

PRELOADED: Final = (__name__, tasks.__name__, "pyarrow.compute", "confluent_kafka")
"""The modules that are imported before the processes are forked."""
STEPS: Final = ("fenced", "sent", "noted", "committed")
"""The steps of a task, for each of its ranges."""
STOPPED: Final = "stopped"
"""What a process reports before it stops itself."""


class Act(StrEnum):
    """What a process does to itself."""

    KILL = "kill"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Fault:
    """A process acts when it reaches a step for the given time, counted from 1."""

    act: Act
    step: str
    count: int


_faults: list[tuple[Fault, "Connection[object, object]"]] = []
_reached: Counter[str] = Counter()


def reached(step: str) -> None:
    """Act if the fault of this process is due. The sink calls this at each of its steps."""
    _reached[step] += 1
    for fault, results in _faults:
        if (fault.step, fault.count) != (step, _reached[step]):
            continue
        if fault.act is Act.STOP:
            results.send(STOPPED)
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def run_task(
    task: bytes, rows: "list[RecordBatch]", fault: Fault | None, results: "Connection[object, object]"
) -> None:
    """Run a task as a Python worker of Spark does, and send the rows of its results, or its error."""
    if fault is not None:
        _faults.append((fault, results))
    try:
        results.send([row for batch in pickle.loads(task)(rows) for row in batch.to_pylist()])  # noqa: S301
    except Exception as error:  # noqa: BLE001 - sent to the driver, as by Spark
        results.send(error)
