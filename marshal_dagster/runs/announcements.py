"""What Dagster knows of the runs behind instance ids: who is dead, whether one's own run goes on, what was announced.

Dagster's word is advice to the protocol: it lets a member revoke early or stop early, and never decides who owns what.
"""

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dagster import (
    AssetKey,
    AssetObservation,
    DagsterEventType,
    DagsterInstance,
    DagsterRunStatus,
    EventLogEntry,
    MetadataValue,
    TableColumn,
    TableMetadataValue,
    TableRecord,
    TableSchema,
)

from marshal_dagster.errors import BatchAborted
from marshal_dagster.protocol.ranges import ClaimedRange
from marshal_dagster.protocol.state import Owner
from marshal_dagster.telemetry.lines import FIELDS, FURTHER_FIELDS

if TYPE_CHECKING:
    from dagster import AssetExecutionContext, OpExecutionContext

    RunContext = OpExecutionContext | AssetExecutionContext

GROUP_TAG: Final = "marshal/group"
TOPIC_TAG: Final = "marshal/topic"
OUTCOME_TAG: Final = "marshal/outcome"
"""Tags on runs: whose batches they work on, and what a run came to that had nothing to do."""

FINISHED: Final = frozenset({DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED})
UNFINISHED: Final = frozenset(DagsterRunStatus) - FINISHED
NOT_LAUNCHED: Final = frozenset({DagsterRunStatus.QUEUED, DagsterRunStatus.NOT_STARTED})
MAY_CLAIM: Final = UNFINISHED - {DagsterRunStatus.CANCELING}
"""Statuses of runs: those that are over, the others, and of these those without a process, and those that may claim."""
ANNOUNCED: Final = "announced"
DROPPED: Final = "possibly_dropped"
"""Names of tables of ranges in observations of a data topic."""
_NOT_PROCESSED: Final = frozenset({"dropped", "possibly dropped"})
_ASK_AGAIN_AFTER_S: Final = 1.0
_EVENTS_AT_ONCE: Final = 4

logger = logging.getLogger(__name__)


def run_of(instance_id: str) -> str:
    """Give the run id that stands in front of an instance id: all before its last dot, or nothing."""
    return instance_id.rpartition(".")[0]


def topic_asset_key(topic: str) -> AssetKey:
    """Give the asset key under which Dagster shows a data topic, unless a translator gives it another."""
    return AssetKey(["kafka", topic])


def announcements_key(topic: str) -> AssetKey:
    """Give the asset key under which runs announce what they are about to commit, and what was dropped is told.

    Not the data topic's own: an observation without a data version would make those start that wait for new messages.
    """
    return AssetKey(["kafka", topic, "announcements"])


def tag_run(context: "RunContext", tags: Mapping[str, str]) -> None:
    """Tag the run of an op, where Dagster's storage knows it."""
    if context.instance.has_run(context.run_id):
        context.instance.add_run_tags(context.run_id, dict(tags))


class DeadRuns:
    """Says of an owner that it is dead when this Dagster instance knows its run and the run is over.

    A run that the instance does not know (of another deployment, say) is not dead. What a finished run claimed stays
    dead; about one that goes on Dagster is asked again after a second.
    """

    def __init__(self, instance: DagsterInstance) -> None:
        """Ask `instance`."""
        self._instance = instance
        self._over: set[str] = set()
        self._asked_s: dict[str, float] = {}

    def __call__(self, owner: Owner) -> bool:
        """Tell whether `owner` is dead. Never raises: a storage that does not answer knows of nobody."""
        run_id = run_of(owner.instance)
        if not run_id or run_id in self._over:
            return bool(run_id)
        now_s = time.monotonic()
        if now_s - self._asked_s.get(run_id, -_ASK_AGAIN_AFTER_S) < _ASK_AGAIN_AFTER_S:
            return False
        self._asked_s[run_id] = now_s
        try:
            run = self._instance.get_run_by_id(run_id)
        except Exception as error:  # noqa: BLE001 - every storage raises its own
            logger.warning("Dagster was asked about run %s of another member and did not answer: %s", run_id, error)
            return False
        if run is None or run.status not in FINISHED:
            return False
        self._over.add(run_id)
        return True


def run_is_over(instance: DagsterInstance, run_id: str) -> Callable[[], str | None]:
    """Give a reason to stop: Dagster says that the run is over or being canceled. A storage's errors are none."""

    def reason() -> str | None:
        try:
            run = instance.get_run_by_id(run_id)
        except Exception as error:  # noqa: BLE001 - every storage raises its own
            logger.debug("Dagster was asked about this run and did not answer: %s", error)
            return None
        if run is None or run.status in MAY_CLAIM:
            return None
        return f"Dagster says that run {run_id} is {run.status.value.lower()}"

    return reason


def run_worker_ended(instance: DagsterInstance, run_id: str) -> Callable[[], str | None] | None:
    """Give a reason to stop for a step in a child process of the run worker: the run worker has ended; None elsewhere.

    Where the step runs in the run worker itself, that one's parent is the code server, which may be replaced at any
    time. Dagster wrote down in which process it started the step, before it did.
    """
    parent = multiprocessing.parent_process()
    if parent is None or str(os.getpid()) not in _step_workers(instance, run_id):
        return None
    return lambda: None if parent.is_alive() else f"the run worker that started this step (pid {parent.pid}) has ended"


def _step_workers(instance: DagsterInstance, run_id: str) -> set[str]:
    """Give the process ids of the child processes in which steps of the run were started."""
    found = set()
    for entry in instance.all_logs(run_id, of_type=DagsterEventType.STEP_WORKER_STARTED):
        event = entry.dagster_event
        pid = event and event.engine_event_data.metadata.get("pid")
        if pid is not None:
            found.add(str(pid.value))
    return found


# Announcements of at-most-once batches


@dataclass(frozen=True, slots=True)
class Announced:
    """A range that an at-most-once batch was about to commit before it processed it."""

    group: str
    topic: str
    partition: int
    epoch: int
    start: int
    end: int


_COLUMNS: Final = ("group", "topic", "partition", "epoch", "start", "end")


def announcer(context: "RunContext") -> Callable[[Sequence[ClaimedRange]], None]:
    """Give what writes an at-most-once batch's ranges into the run, where they outlive this process (PROTOCOL.md 6)."""

    def announce(ranges: Sequence[ClaimedRange]) -> None:
        """Write and read back; raises `BatchAborted`, before anything is committed, when it cannot be read back."""
        rows = [Announced(one.group, one.topic, one.partition, one.epoch, one.start, one.end) for one in ranges]
        context.log_event(
            AssetObservation(
                asset_key=announcements_key(ranges[0].topic),
                description="At most once: about to commit these offsets before they are processed. Should the run die "
                "now, they are possibly dropped.",
                metadata={ANNOUNCED: announcement_table(rows)},
            )
        )
        if context.instance.has_run(context.run_id) and not _is_announced(context.instance, context.run_id, rows):
            raise BatchAborted(
                "the ranges of this at-most-once batch were written into the run's events but cannot be read back, so "
                "nobody could say afterwards what was dropped; nothing was committed. Is Dagster's event storage "
                "writing in batches (DAGSTER_EVENT_BATCH_SIZE)?"
            )

    return announce


def _is_announced(instance: DagsterInstance, run_id: str, rows: Sequence[Announced]) -> bool:
    """Tell whether the run's events have all of `rows`; the newest are read first, of a long run those alone."""
    missing, cursor = set(rows), None
    while missing:
        page = instance.get_records_for_run(
            run_id, cursor, DagsterEventType.ASSET_OBSERVATION, limit=_EVENTS_AT_ONCE, ascending=False
        )
        missing -= {row for record in page.records for row in rows_in(record.event_log_entry)}
        if not page.has_more:
            break
        cursor = page.cursor
    return not missing


def announcement_table(rows: Sequence[Announced]) -> TableMetadataValue:
    """Show `rows` as a table."""
    schema = TableSchema([TableColumn(name, "string" if name in {"group", "topic"} else "int") for name in _COLUMNS])
    records = [TableRecord({name: getattr(row, name) for name in _COLUMNS}) for row in rows]
    return MetadataValue.table(records, schema)


def announced(instance: DagsterInstance, run_id: str) -> Iterator[Announced]:
    """Give what a run announced, oldest first; events that are not of this form are passed over."""
    return (row for _, row in announced_at(instance, run_id))


def announced_at(instance: DagsterInstance, run_id: str) -> Iterator[tuple[float, Announced]]:
    """Give the same with the time of each, in unix seconds."""
    for entry in instance.all_logs(run_id, of_type=DagsterEventType.ASSET_OBSERVATION):
        yield from ((entry.timestamp, row) for row in rows_in(entry))


def rows_in(entry: EventLogEntry, name: str = ANNOUNCED) -> Iterator[Announced]:
    """Give the ranges in table `name` of an observation, what was announced or (`DROPPED`) reported as dropped."""
    event = entry.dagster_event
    if event is None or event.event_type is not DagsterEventType.ASSET_OBSERVATION:
        return
    table = event.asset_observation_data.asset_observation.metadata.get(name)
    if isinstance(table, TableMetadataValue):
        yield from (row for record in table.records if (row := _announced(record.data)) is not None)


def processed(instance: DagsterInstance, run_id: str, group: str) -> set[tuple[str, object, object]]:
    """Give topic, partition and epoch of what a run recorded as done, as claimed-batch ops do behind each batch."""
    found: set[tuple[str, object, object]] = set()
    for entry in instance.all_logs(run_id, of_type=DagsterEventType.ASSET_MATERIALIZATION):
        event = entry.dagster_event
        metadata = event.step_materialization_data.materialization.metadata if event else {}
        of_group, table = metadata.get("group"), metadata.get("ranges")
        if of_group is None or of_group.value != group or not isinstance(table, TableMetadataValue):
            continue
        rows = [record.data for record in table.records if record.data.get("state") not in _NOT_PROCESSED]
        found |= {(str(row.get("topic")), row.get("partition"), row.get("epoch")) for row in rows}
    return found


@dataclass(frozen=True, slots=True)
class Recorded:
    """What an attempt of a step recorded of a batch: in which run, and the metadata."""

    run_id: str
    metadata: Mapping[str, MetadataValue[Any]]


def recorded_before(context: "OpExecutionContext", group: str, topic: str) -> list[Recorded]:
    """Give each batch that earlier attempts of this step recorded, the oldest first.

    These are the attempts in this run, those of an earlier run worker of it too, and those in the runs that it
    re-executes, back to the last one in which the step succeeded: what that did was handed on.
    """
    instance, step_key = context.instance, context.get_step_execution_context().step.key
    found, run_id = _recorded(instance, context.run_id, step_key), context.run.parent_run_id
    while run_id is not None and not _has_succeeded(instance, run_id, step_key):
        found = [*_recorded(instance, run_id, step_key), *found]
        run = instance.get_run_by_id(run_id)
        run_id = None if run is None else run.parent_run_id
    wanted = {"group": group, "topic": topic}
    return [
        one for one in found if {name: one.metadata[name].value for name in wanted if name in one.metadata} == wanted
    ]


def _recorded(instance: DagsterInstance, run_id: str, step_key: str) -> list[Recorded]:
    events = (entry.dagster_event for entry in instance.all_logs(run_id, DagsterEventType.ASSET_MATERIALIZATION))
    return [
        Recorded(run_id, event.step_materialization_data.materialization.metadata)
        for event in events
        if event is not None and event.step_key == step_key
    ]


def _has_succeeded(instance: DagsterInstance, run_id: str, step_key: str) -> bool:
    events = (entry.dagster_event for entry in instance.all_logs(run_id, DagsterEventType.STEP_SUCCESS))
    return any(event is not None and event.step_key == step_key for event in events)


def _announced(data: Mapping[str, object]) -> Announced | None:
    group, topic, *numbers = (data.get(name) for name in _COLUMNS)
    if isinstance(group, str) and isinstance(topic, str) and all(isinstance(each, int) for each in numbers):
        return Announced(group, topic, *numbers)  # type: ignore[arg-type] # each is an int
    return None


# Log lines


class _Forward(logging.Handler):
    """Hands the library's warnings and errors to a run's log."""

    def __init__(self, context: "RunContext") -> None:
        super().__init__(logging.WARNING)
        self._context = context

    def emit(self, record: logging.LogRecord) -> None:
        """Log the line in the run; from any thread."""
        try:
            extra = {name: getattr(record, name) for name in (*FIELDS, *FURTHER_FIELDS) if hasattr(record, name)}
            self._context.log.log(record.levelno, record.getMessage(), extra=extra)
        except Exception:  # noqa: BLE001 - a line that cannot be logged harms nothing
            self.handleError(record)


@contextmanager
def forwarded_logs(context: "RunContext") -> Iterator[None]:
    """Show the library's warnings and errors in the run's log, unless Dagster is configured to do so by itself."""
    ours = logging.getLogger("marshal_dagster")
    managed = context.instance.managed_python_loggers
    if any(name == "root" or name.split(".")[0] == ours.name for name in managed):
        yield
        return
    handler = _Forward(context)
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
