"""The metrics of the exporter: one definition each, and their rendering in Prometheus' text format.

Labels are groups, topics and numbers of partitions, which are bounded. A run or an instance is a label of
`PARTITION_OWNER` alone, which exists only for stale claims by default (docs/reference/metrics.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric


class Kind(StrEnum):
    """The type of a metric in Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True)
class Definition:
    """A metric: its name in Prometheus, its meaning and its labels."""

    name: str
    """The name as queries use it; that of a counter ends in `_total`."""
    about: str
    labels: tuple[str, ...] = ()
    kind: Kind = Kind.GAUGE


_GROUP: Final = ("group",)
_TOPIC: Final = ("group", "topic")
_PARTITION: Final = ("group", "topic", "partition")

GROUP_PAUSED: Final = Definition("marshal_group_paused", "1 while the group is paused, else 0.", _GROUP)
GROUP_PAUSED_UNTIL: Final = Definition(
    "marshal_group_paused_until_timestamp_seconds", "End of the present pause; absent without a pause.", _GROUP
)
GROUP_STALE_AFTER: Final = Definition(
    "marshal_group_stale_after_seconds", "Age of the last heartbeat from which on an owner is stale.", _GROUP
)
TOPIC_PARTITIONS: Final = Definition("marshal_topic_partitions", "Partitions of the data topic.", _TOPIC)
TOPIC_CLAIMS: Final = Definition(
    "marshal_topic_claims",
    "Claims of partitions and ranges, by the age of the last heartbeat: fresh, unknown (one interval), stale (two).",
    (*_TOPIC, "freshness"),
)
TOPIC_POSITION: Final = Definition(
    "marshal_topic_position_offsets", "Sum of the group's positions; its rate is the number of offsets read.", _TOPIC
)
TOPIC_LAG: Final = Definition("marshal_topic_lag_records", "Unread offsets of the whole data topic.", _TOPIC)
TOPIC_LAG_S: Final = Definition(
    "marshal_topic_lag_seconds", "Age of the oldest unread record of the data topic; 0 if all is read.", _TOPIC
)
TOPIC_LAG_UNKNOWN: Final = Definition(
    "marshal_topic_lag_unknown_partitions",
    "Partitions whose position is of an earlier topic of that name, or after the end.",
    _TOPIC,
)
TOPIC_UNHELD_PLANS: Final = Definition(
    "marshal_topic_unheld_plans", "Open plans that no live member holds, including exhausted ones.", _TOPIC
)
TOPIC_EXHAUSTED_PLANS: Final = Definition(
    "marshal_topic_exhausted_plans", "Open plans that failed too often, which members no longer retry.", _TOPIC
)
TOPIC_MARGIN: Final = Definition(
    "marshal_topic_retention_margin_records",
    "Offsets from the topic's beginning to the oldest unread record; the smallest of all partitions with unread ones.",
    _TOPIC,
)
TOPIC_DELETED: Final = Definition(
    "marshal_topic_deleted_unread_records", "Offsets after the positions that retention has deleted unread.", _TOPIC
)
DATA_TOPIC_KNOWN: Final = Definition(
    "marshal_data_topic_known", "1 if the offsets of the data topic could be looked up, else 0.", ("topic",)
)
DATA_TOPIC_RETENTION: Final = Definition(
    "marshal_data_topic_retention_seconds",
    "retention.ms of the data topic; absent without a limit, or without the right DESCRIBE_CONFIGS.",
    ("topic",),
)
PARTITION_CLAIMED: Final = Definition(
    "marshal_partition_claimed",
    "1 if a member holds the partition or a range of it, live or stale.",
    _PARTITION,
)
PARTITION_HEARTBEAT_AGE: Final = Definition(
    "marshal_partition_heartbeat_age_seconds",
    "Age of the owner's last heartbeat, the oldest of all owners of ranges; absent without an owner.",
    _PARTITION,
)
PARTITION_POSITION: Final = Definition("marshal_partition_position_offset", "The next offset to read.", _PARTITION)
PARTITION_LAG: Final = Definition("marshal_partition_lag_records", "Unread offsets.", _PARTITION)
PARTITION_LAG_S: Final = Definition(
    "marshal_partition_lag_seconds", "Age of the oldest unread record; 0 if all is read.", _PARTITION
)
PARTITION_ATTEMPTS: Final = Definition(
    "marshal_partition_plan_attempts",
    "How often a member took the open plan over, the most of all ranges; absent without an open plan.",
    _PARTITION,
)
PARTITION_MARGIN: Final = Definition(
    "marshal_partition_retention_margin_records",
    "Offsets from the partition's beginning to its oldest unread record; absent if all is read.",
    _PARTITION,
)
PARTITION_OWNER: Final = Definition(
    "marshal_partition_owner_info",
    "1 for each owner whose claim is stale (with --all-owners for each owner), with its run or instance.",
    (*_PARTITION, "owner"),
)
LOG_REFUSED: Final = Definition(
    "marshal_log_refused_records_total", "Records that the protocol's rules refused.", ("reason",), Kind.COUNTER
)
LOG_INVALID: Final = Definition(
    "marshal_log_invalid_records_total", "Records that are no valid messages.", ("reason",), Kind.COUNTER
)
LOG_TIME: Final = Definition("marshal_log_timestamp_seconds", "Time of the newest record in the coordination log.")
LOG_UNCERTAIN: Final = Definition(
    "marshal_log_uncertain_partitions",
    "Coordination partitions without their first records and without a snapshot, so that nothing can be claimed.",
)
EXPORTER_UP: Final = Definition(
    "marshal_exporter_up", "1 if the last read of the coordination log succeeded and its values are served, else 0."
)
EXPORTER_LAST_READ: Final = Definition(
    "marshal_exporter_last_read_timestamp_seconds", "When the last successful read ended; 0 before the first."
)
EXPORTER_REFRESH_S: Final = Definition(
    "marshal_exporter_refresh_seconds", "How long the last read and the look-up of offsets took."
)
EXPORTER_FAILURES: Final = Definition(
    "marshal_exporter_failed_reads_total", "Reads of the coordination log that failed.", kind=Kind.COUNTER
)
EXPORTER_RECORDS: Final = Definition(
    "marshal_exporter_read_records_total", "Records of the coordination log that were read.", kind=Kind.COUNTER
)

DEFINITIONS: Final = tuple(found for found in list(globals().values()) if isinstance(found, Definition))
"""All metrics of the exporter."""

Row = tuple[tuple[str, ...], float]


@dataclass(slots=True)
class Samples:
    """Values of metrics, by definition; `add` appends one."""

    rows: dict[Definition, list[Row]] = field(default_factory=dict)

    def add(self, definition: Definition, value: float, *labels: str) -> None:
        """Add the value of one series."""
        self.rows.setdefault(definition, []).append((labels, value))

    def extend(self, definition: Definition, rows: Sequence[Row]) -> None:
        """Add series that may share the tuples of their labels."""
        self.rows.setdefault(definition, []).extend(rows)

    def render(self) -> bytes:
        """Return the values in Prometheus' text format. Needs the extra `prometheus`."""
        from prometheus_client import generate_latest

        # One family at a time, because the client needs several times the memory of the text.
        return b"".join(generate_latest(_registry(*item)) for item in self.rows.items())


class _Registry:
    """A registry of one family, as `generate_latest` reads it."""

    def __init__(self, definition: Definition, rows: Sequence[Row]) -> None:
        self._definition, self._rows = definition, rows

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        made = CounterMetricFamily if self._definition.kind is Kind.COUNTER else GaugeMetricFamily
        family = made(self._definition.name, self._definition.about, labels=self._definition.labels)
        for labels, value in self._rows:
            family.add_metric(labels, value)
        yield family


def _registry(definition: Definition, rows: Sequence[Row]) -> "CollectorRegistry":
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Registry(definition, rows))
    return registry
