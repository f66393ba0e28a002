"""Build the world state in a process of its own: `python -m benchmarks.first_state SERVERS TOPIC WAY RECORDS`.

WAY is `snapshot` or `log`. The process prints `done` once it has the state, unless it read more than RECORDS records of
the log.
"""

import sys
from typing import Final

from benchmarks.bare import DONE, TIMEOUT_S
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.kafka_snapshots import kafka_snapshots
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka.connection import KafkaConnection

FROM_SNAPSHOT: Final = "snapshot"
FROM_LOG: Final = "log"


def main(servers: str, coordination_topic: str, way: str, most_records: str) -> None:
    """Build the world state and print `done`."""
    connection = KafkaConnection(bootstrap_servers=servers)
    snapshots = kafka_snapshots(connection, coordination_topic) if way == FROM_SNAPSHOT else None
    log = KafkaLog(connection, coordination_topic)
    rationalizer = Rationalizer(log, timeout_s=TIMEOUT_S, snapshots=snapshots)
    rationalizer.catch_up()
    if rationalizer.records_read > int(most_records):
        sys.exit(f"{rationalizer.records_read} records were read")
    print(DONE, flush=True)
    log.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
