"""One of two processes that race for the same partitions, round after round. `test_race` starts them.

`python -m tests.real.race_worker SERVERS TOPIC RUN PARTITIONS` prints `ready`. Then it executes the command on each
line of its standard input and answers with one line of JSON: the claims that it won, or the owners that it read.
"""

import json
import sys

from marshal_dagster.coordination.claimer import Claimer, Member, new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import GroupSettings

GROUP, DATA_TOPIC = "racers", "orders"


def main(servers: str, topic: str, run: str, partitions: int) -> None:
    """Claim all partitions, read the owners or release, as each line of the input commands."""
    log = KafkaLog(KafkaConnection(bootstrap_servers=servers), topic)
    rationalizer = Rationalizer(log, topics=[DATA_TOPIC])
    claimer = Claimer(rationalizer, Member(GROUP, run, new_instance_id(run)), DATA_TOPIC, GroupSettings())
    claimer.ensure_group_settings()
    say("ready")
    for line in sys.stdin:
        match line.strip():
            case "claim":
                claimer = Claimer(rationalizer, claimer.member.with_new_instance(), DATA_TOPIC, GroupSettings())
                won = claimer.claim(range(partitions))
                say({str(claim.partition): claim.epoch for claim in won})
            case "look":
                rationalizer.catch_up()
                say(owners(claimer, partitions))
            case "release":
                claimer.release()
                say("released")
    log.close()


def owners(claimer: Claimer, partitions: int) -> dict[str, tuple[str, int | None] | None]:
    """Return the instance and epoch of each partition's owner, as read from the log."""
    found = {number: claimer.key(number).owner for number in range(partitions)}
    return {str(number): None if owner is None else (owner.instance, owner.epoch) for number, owner in found.items()}


def say(answer: object) -> None:
    """Write one line of JSON."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
