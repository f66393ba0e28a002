"""Check the snapshots: whether they exist, and whether the log can still be read from them after more deletions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster.cli.doctor_checks.finding import Finding, alter_topic, failed, ok, problem, warning
from marshal_dagster.coordination.log import CoordinationLog
from marshal_dagster.coordination.snapshots import SnapshotHead, Snapshots, snapshot_topic_of
from marshal_dagster.errors import MarshalError, TopicNotFoundError
from marshal_dagster.protocol.messages import MAX_VALUE_BYTES
from marshal_dagster.protocol.state import OffsetBounds


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention of each coordination partition; None means no limit."""

    time_ms: int | None = None
    size_bytes: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> "Retention":
        """Return the retention in a topic's settings. An unknown setting counts as no limit."""
        limits = (int(settings.get(name, "-1")) for name in ("retention.ms", "retention.bytes"))
        return cls(*(None if limit < 0 else limit for limit in limits))


def check_snapshots(log: CoordinationLog, snapshots: Snapshots, retention: Retention, at_ms: int) -> Iterator[Finding]:
    """Check that snapshots exist, and that retention will not soon delete records after the newest of them."""
    topic = None
    try:
        identity = log.identity()
        topic = identity.topic
        heads = snapshots.heads(identity)
        bounds = log.bounds(range(identity.partitions))
    except TopicNotFoundError as error:
        if topic is not None:  # otherwise it was reported already
            yield warning(
                "snapshots",
                str(error),
                "each process reads the whole log, and if retention cuts the log, nothing can be claimed",
                f"marshal-dagster topic create --name {topic}",
            )
        return
    except MarshalError as error:
        yield failed("snapshots", error)
        return
    yield _snapshots(heads, bounds, retention, at_ms, identity.topic)


def _snapshots(
    heads: Mapping[int, SnapshotHead | None],
    bounds: Mapping[int, OffsetBounds],
    retention: Retention,
    at_ms: int,
    topic: str,
) -> Finding:
    overtaken = [number for number, at in bounds.items() if _is_soon_overtaken(heads[number], at, retention, at_ms)]
    if overtaken:
        return problem(
            "snapshots",
            f"coordination partitions {runs_text(overtaken)} have no snapshot that will be useful for long: "
            "the log begins, or will soon begin, after the newest one",
            "then these partitions can only be observed, and nothing can be claimed from them",
            f"let a run of any group succeed (it writes {snapshot_topic_of(topic)}; its user needs WRITE there), or "
            f"raise the retention: {alter_topic(topic, 'retention.ms=-1,retention.bytes=-1')}",
        )
    missing = [number for number, at in bounds.items() if at.end > 0 and heads[number] is None]
    if missing:
        return ok(
            "snapshots",
            f"none yet of coordination partitions {runs_text(missing)}; the next run writes them when it ends",
        )
    later = (bounds[number].end - head.offset for number, head in heads.items() if head is not None)
    most = max(later, default=0)
    return ok("snapshots", f"at most {most} records come after the newest snapshot of a coordination partition")


_MOST_RECORD_BYTES: Final = MAX_VALUE_BYTES + 150
"""The maximum size of a valid record in the log, with Kafka's own overhead."""


def _is_soon_overtaken(head: SnapshotHead | None, at: OffsetBounds, retention: Retention, at_ms: int) -> bool:
    """Return whether retention has deleted records after a snapshot, or will within another half of its limit."""
    if retention == Retention() or at.end == 0:
        return False
    if head is None or not at.start <= head.offset <= at.end:
        return True
    if head.offset == at.end:
        return False
    is_old = retention.time_ms is not None and at_ms - (head.log_time_ms or 0) > retention.time_ms / 2
    records = at.end - at.start
    is_large = retention.size_bytes is not None and records * _MOST_RECORD_BYTES > retention.size_bytes / 2
    return is_old or (is_large and head.offset - at.start < records / 2)
