"""An asset whose batches a script processes, with any client of Dagster Pipes."""

import os
import sys
from pathlib import Path

import dagster as dg

from marshal_dagster import (
    ClaimedBatch,
    ClaimerResource,
    KafkaConnectionConfig,
    RemoteSink,
    build_claimed_batch_job,
    marshal_asset,
    run_with_pipes,
)

SCRIPT = Path(__file__).with_name("parse_orders.py")
OUTPUT = os.environ.get("ORDERS_OUTPUT", "orders")


@marshal_asset(
    topic="orders",
    sink=RemoteSink(OUTPUT),
    with_frame=False,
    required_resource_keys=["pipes"],
)
def parsed_orders(context: dg.AssetExecutionContext, batch: ClaimedBatch) -> None:
    """The orders as JSON files."""
    run_with_pipes(
        context, batch, context.resources.pipes, command=[sys.executable, str(SCRIPT)]
    )


defs = dg.Definitions(
    assets=[parsed_orders],
    jobs=[build_claimed_batch_job(parsed_orders)],
    resources={
        "claimer": ClaimerResource(
            connection=KafkaConnectionConfig.from_environment(),
            coordination_topic=os.environ.get("ORDERS_COORDINATION_TOPIC", "__marshal"),
            group="parsed-orders",
            delivery="effectively_once",
        ),
        "pipes": dg.PipesSubprocessClient(),
    },
)
