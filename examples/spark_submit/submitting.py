"""A job that submits a script to Spark for each batch, with Dagster Pipes.

The run claims the batch and sends heartbeats while the script works. It commits if the script succeeds. The run shows
what the script logs and reports.
"""

import os
from pathlib import Path

import dagster as dg

from marshal_dagster import ClaimerResource, FileSink, KafkaConnectionConfig, handed_over

SCRIPT = Path(__file__).with_name("parse_orders.py")
OUTPUT = Path(os.environ.get("ORDERS_OUTPUT", "orders"))


@dg.op
def parse_orders(
    context: dg.OpExecutionContext, claimer: ClaimerResource, pipes: dg.ResourceParam[dg.PipesSubprocessClient]
) -> None:
    """Claim a batch of the topic, and process it with the script."""
    sink = FileSink(OUTPUT, format="json")
    with claimer.claimed_batch(context, topic="orders", sink=sink) as batch:
        if batch.idle is not None:
            context.log.info(batch.idle.text)
        elif batch.ranges:
            with handed_over(batch, claimer) as submission:
                command = submission.command(SCRIPT, str(OUTPUT), settings={"spark.master": "local[2]"})
                done = pipes.run(context=context, command=[*command], env=submission.environment)
                context.add_output_metadata(dict(done.get_custom_messages()[0]))


@dg.job(executor_def=dg.in_process_executor)
def orders() -> None:
    """Process one batch."""
    parse_orders()


defs = dg.Definitions(
    jobs=[orders],
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
