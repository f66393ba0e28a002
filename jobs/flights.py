"""Departures per carrier: count the flights in topic `flights` and sum up their delays, each flight once.

A message is one flight of nycflights13 as JSON. Each batch writes one row per partition and carrier. The sum over all
rows is the result. It depends neither on the size of the batches nor on retries.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dagster import AssetSpec, DefaultScheduleStatus, OpExecutionContext

from jobs.settings import MAX_BATCHES, MAX_RECORDS, OUTPUT
from marshal_dagster.assets.checks import build_claim_checks
from marshal_dagster.batches import ClaimedBatch
from marshal_dagster.jobs.batch import build_claimed_batch_job, build_claimed_batch_schedule, build_reprocess_job
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.sinks import FileSink

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame

TOPIC: Final = "flights"
GROUP: Final = "flights-by-carrier"

sink = FileSink(OUTPUT / "flights_by_carrier")


def departures_by_carrier(context: OpExecutionContext, batch: ClaimedBatch, frame: "DataFrame") -> "DataFrame":  # noqa: ARG001 - the parameters that the op passes
    """Count the flights of each carrier, and sum up their departure delays (minutes; null if unknown)."""
    from pyspark.sql import functions as f

    flight = f.from_json(f.col("value").cast("string"), "carrier string, dep_delay double")
    return (
        frame.select("partition", flight.alias("flight"))
        .groupBy("partition", f.col("flight.carrier").alias("carrier"))
        .agg(
            f.count("*").alias("flights"),
            f.sum("flight.dep_delay").alias("delay_sum"),
            f.count("flight.dep_delay").alias("delay_count"),
        )
    )


@dataclass(frozen=True, slots=True)
class CarrierTotal:
    """One carrier's flights, and the sum (in minutes) and the number of the known departure delays."""

    flights: int
    delay_sum: float
    delay_count: int


def carrier_totals(output: FileSink = sink) -> "Mapping[str, CarrierTotal]":
    """Return the totals of the committed files of `output`, by carrier. Spark is not needed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = [pq.read_table(path, partitioning=None) for path in output.committed_files()]
    if not tables:
        return {}
    rows = pa.concat_tables(tables).group_by("carrier")
    summed = rows.aggregate([("flights", "sum"), ("delay_sum", "sum"), ("delay_count", "sum")]).to_pylist()
    return {
        row["carrier"]: CarrierTotal(row["flights_sum"], row["delay_sum_sum"] or 0.0, row["delay_count_sum"])
        for row in summed
    }


flights_by_carrier = build_claimed_batch_op(
    departures_by_carrier,
    name="flights_by_carrier",
    topic=TOPIC,
    sink=sink,
    max_records=MAX_RECORDS,
    max_batches=MAX_BATCHES,
    spark_key="pyspark",
)
flights_asset = AssetSpec(
    flights_by_carrier.name,  # the op records its batches under its name
    description="Departures per carrier: what each batch counted.",
    kinds={"kafka", "spark"},
)
flights_checks = build_claim_checks(flights_by_carrier)
flights_job = build_claimed_batch_job(flights_by_carrier, name="flights")
reprocess_flights_job = build_reprocess_job(flights_by_carrier, name="reprocess_flights")
flights_schedule = build_claimed_batch_schedule(
    flights_job, name="flights_each_minute", default_status=DefaultScheduleStatus.RUNNING
)
