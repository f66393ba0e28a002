"""The messages for the benchmarks of sinks, and the ranges that a batch of them would claim."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from benchmarks import services
from benchmarks.harness import Case, Goal, steps_of_ten, take_turns
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.spark.reader import read_ranges

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

INPUT: Final = "orders"


def fill(data: Topics, connection: KafkaConnection, partitions: int, records: int, record_bytes: int) -> None:
    """Create the topic, and write `records` messages to it, the same number to each partition."""
    data.create(INPUT, partitions, 1)
    text = b"x" * record_bytes
    count = records // partitions * partitions
    services.load(connection, INPUT, ((number % partitions, text) for number in range(count)))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: the records of the smallest and the largest batch (in steps of factor 10), and the number of rounds."""

    fewest: int = 10_000
    most: int = 1_000_000
    record_bytes: int = 200
    partitions: int = 4
    alternations: int = 5
    warm_up: int = 2


@dataclass(frozen=True, slots=True)
class SinkInput:
    """The first `records` messages, the same number from each partition."""

    spark: "SparkSession"
    connection: KafkaConnection
    partitions: int
    records: int

    @property
    def wanted(self) -> int:
        """The number of rows that a sink must write."""
        return self.width * self.partitions

    def rows(self, *also: str, key: str = "CAST(offset AS STRING)") -> "DataFrame":
        """Return a key and a value of each message, and the columns `also`."""
        offsets: Mapping[int, tuple[int, int]] = dict.fromkeys(range(self.partitions), (0, self.width))
        frame = read_ranges(self.spark, self.connection.spark_options(), INPUT, offsets)
        return frame.selectExpr(*also, f"{key} AS key", "upper(CAST(value AS STRING)) AS value")

    def ranges(self, group: str, *, is_later: bool = False) -> list[ClaimedRange]:
        """Return the ranges as a member of `group` would claim them, or those of as many messages after them."""
        start = self.width if is_later else 0
        return [
            ClaimedRange(
                coordination_topic_id="coordination",
                group=group,
                topic=INPUT,
                data_topic_id="data",
                partition=number,
                generation=0,
                epoch=1,
                start=start,
                end=start + self.width,
                first_readable=start,
            )
            for number in range(self.partitions)
        ]

    @property
    def width(self) -> int:
        """The number of messages of each partition."""
        return self.records // self.partitions

    def rate(self, found: int, took_s: float) -> float:
        """Return the rows per second of a batch. Raises `RuntimeError` unless all of its rows were found."""
        if found != self.wanted:
            raise RuntimeError(f"{found} rows were written, not {self.wanted}")
        return self.wanted / took_s


class Sides(Protocol):
    """Both ways to write the same rows; each call returns rows per second."""

    def ours(self) -> float:
        """Write with the sink."""
        ...

    def beside(self) -> float:
        """Write with Spark alone."""
        ...


def compare(
    spark: "SparkSession",
    connection: KafkaConnection,
    data: Topics,
    sizes: Sizes,
    sides_of: Callable[[SinkInput], Sides],
    *,
    least: float,
) -> list[Case]:
    """Fill the topic, and measure each size. The target is `least` of the speed of the other side."""
    fill(data, connection, sizes.partitions, sizes.most, sizes.record_bytes)
    cases = []
    for records in steps_of_ten(sizes.fewest, sizes.most):
        sides = sides_of(SinkInput(spark, connection, sizes.partitions, records))
        ours, beside = take_turns(sizes.alternations, [sides.ours, sides.beside], warm_up=sizes.warm_up)
        cases.append(Case(f"{records:,} rows", ours, beside, "rows/s", Goal.RATIO_AT_LEAST, least))
    return cases
