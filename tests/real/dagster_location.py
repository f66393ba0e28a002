"""A code location for tests that run, signal and kill Dagster's own processes. Environment variables configure it.

`spark_multiprocess` holds a batch while Spark works endlessly; `hold` holds one without Spark, and `hold_in_step` does
so in a child process of the run worker. `kill_after_announcing` and `kill_after_commit` kill their own process as soon
as an at-most-once batch is announced or committed.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg

from marshal_dagster.batches import ClaimedBatch
from marshal_dagster.jobs.batch import build_claimed_batch_job, build_reprocess_job
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.sinks import FileSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPIC = os.environ["TEST_TOPIC"]
MARK = Path(os.environ["TEST_MARK"])
"""The file that shows that a batch is being processed. It holds the process id."""


def _mark() -> None:
    written = MARK.with_suffix(".new")
    written.write_text(str(os.getpid()))
    written.rename(MARK)


def _mark_when_at_work(spark: "SparkSession") -> None:
    tracker = spark.sparkContext.statusTracker()
    while not tracker.getActiveStageIds():
        time.sleep(0.02)
    _mark()


def _endless(context: dg.OpExecutionContext, batch: ClaimedBatch, frame: "DataFrame") -> None:  # noqa: ARG001 - the op's signature
    spark = frame.sparkSession
    threading.Thread(target=_mark_when_at_work, args=(spark,), daemon=True).start()
    spark.range(0, 10**9, 1, 2).selectExpr("reflect('java.lang.Thread', 'sleep', 1000L)").collect()


endless = build_claimed_batch_op(
    _endless, name="endless", topic=TOPIC, spark_config={"spark.master": "local[2]", "spark.driver.memory": "512m"}
)
spark_multiprocess = build_claimed_batch_job(endless, name="spark_multiprocess", executor_def=dg.multiprocess_executor)
redo = build_reprocess_job(endless, name="redo")


@dg.op
def hold_batch(context: dg.OpExecutionContext, claimer: ClaimerResource) -> None:
    """Hold a batch until its claim is lost."""
    has_sink = claimer.settings.delivery is DeliveryMode.EFFECTIVELY_ONCE
    sink = FileSink(MARK.parent / "out") if has_sink else None
    most = int(os.environ["TEST_MAX_RECORDS"])
    with claimer.claimed_batch(context, topic=TOPIC, max_records=most, sink=sink) as batch:
        _mark()
        while True:
            batch.check()
            time.sleep(0.05)


@dg.job(executor_def=dg.in_process_executor)
def hold() -> None:
    """Hold a batch."""
    hold_batch()


@dg.job(executor_def=dg.multiprocess_executor)
def hold_in_step() -> None:
    """Hold a batch in a child process of the run worker."""
    hold_batch()


@dg.op
def announce_and_die(context: dg.OpExecutionContext, claimer: ClaimerResource) -> None:
    """Die by SIGKILL between the announcement and the commit."""
    delivery = claimer.open_delivery(context)
    announce = delivery.announce

    def announce_then_die(ranges: Sequence[ClaimedRange]) -> None:
        announce(ranges)
        os.kill(os.getpid(), signal.SIGKILL)

    delivery.announce = announce_then_die
    with claimer.claimed_batch(context, topic=TOPIC) as batch:
        batch.begin_processing()


@dg.job(executor_def=dg.in_process_executor)
def kill_after_announcing() -> None:
    """Die at a point at which a batch's dropped messages must be known afterwards."""
    announce_and_die()


@dg.op
def commit_and_die(context: dg.OpExecutionContext, claimer: ClaimerResource) -> None:
    """Die by SIGKILL between the commit and the processing."""
    with claimer.claimed_batch(context, topic=TOPIC) as batch:
        batch.begin_processing()
        os.kill(os.getpid(), signal.SIGKILL)


@dg.job(executor_def=dg.in_process_executor)
def kill_after_commit() -> None:
    """Die at a point at which messages are dropped."""
    commit_and_die()


defs = dg.Definitions(
    jobs=[
        spark_multiprocess,
        redo,
        hold,
        hold_in_step,
        kill_after_announcing,
        kill_after_commit,
    ],
    resources={
        "claimer": ClaimerResource(
            connection=KafkaConnectionConfig(bootstrap_servers=os.environ["TEST_SERVERS"]),
            coordination_topic=os.environ["TEST_COORDINATION_TOPIC"],
            group=os.environ["TEST_GROUP"],
            heartbeat_interval_s=float(os.environ["TEST_HEARTBEAT_INTERVAL_S"]),
            delivery=os.environ["TEST_DELIVERY"],  # type: ignore[arg-type] # the resource validates it
            claim_ranges=os.environ["TEST_CLAIM_RANGES"] == "True",
        )
    },
)
