"""Claim one partition in a process of its own: `python -m benchmarks.first_claim SERVERS COORDINATION_TOPIC`.

The process does what a run does before its work begins. It prints `done` once the claim is won, and then releases it.
"""

import sys
from typing import Final

from benchmarks.bare import DONE
from marshal_dagster.coordination.claimer import Claimer, Member, new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import GroupSettings

GROUP: Final = "benchmark"
TOPIC: Final = "orders"


def new_member() -> Member:
    """Return a member of the benchmark's group with a new instance id, as a run has it."""
    return Member(GROUP, "benchmark-client", new_instance_id("3b0e6b5c-6f64-4a4e-9d1b-0c8f6a2d7e11"))


def main(servers: str, coordination_topic: str) -> None:
    """Claim partition 0, print `done`, and release it."""
    log = KafkaLog(KafkaConnection(bootstrap_servers=servers), coordination_topic)
    claimer = Claimer(Rationalizer(log, topics=[TOPIC]), new_member(), TOPIC, GroupSettings())
    claimer.ensure_group_settings()
    if not claimer.claim([0]):
        sys.exit("partition 0 was not won")
    print(DONE, flush=True)
    claimer.release()
    log.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
