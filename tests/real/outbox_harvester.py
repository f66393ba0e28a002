"""An outbox harvester in its own process, which ends in order on SIGTERM.

Its batches are small, so that it needs seconds for a backlog.
"""

import os
import signal

from marshal_dagster._internal.postgres import Database
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox.backoff import HarvestLimits
from marshal_dagster.outbox.harvester import Harvester
from marshal_dagster.outbox.options import HarvesterOptions
from marshal_dagster.outbox.schema import OutboxTables

IN_FLIGHT = 20


def main() -> None:
    """Harvest the outbox of the database in the environment."""
    harvester = Harvester(
        OutboxTables(Database(os.environ["DELAYS_DSN"])),
        KafkaConnection(bootstrap_servers=os.environ["MARSHAL_BOOTSTRAP_SERVERS"]),
        HarvesterOptions(limits=HarvestLimits(max_in_flight_records=IN_FLIGHT)),
    )
    signal.signal(signal.SIGTERM, lambda *_: harvester.stop())
    harvester.run()


if __name__ == "__main__":
    main()
