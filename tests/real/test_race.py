"""Two processes race for the same partitions on a real broker.

One wins each partition, and both read the same owner.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

from marshal_dagster.kafka.connection import KafkaConnection
from tests.conditions import WITHIN_S

ROUNDS = 50
PARTITIONS = 1_000


class Racer:
    """One of the processes."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        """Wait until the process is ready."""
        self._process = process
        assert self.answer() == "ready"

    def report(self, word: str) -> None:
        """Send a command to the process."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:  # noqa: ANN401 - JSON
        """Wait for the process's answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process ended"
        return json.loads(line)


@contextmanager
def racer(connection: KafkaConnection, topic: str, run: str) -> Iterator[Racer]:
    """Run a process that executes commands until its input ends."""
    command = [
        sys.executable,
        "-m",
        "tests.real.race_worker",
        connection.bootstrap_servers,
        topic,
        run,
        str(PARTITIONS),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Racer(process)
            process.communicate(timeout=WITHIN_S)
        finally:
            process.kill()
    assert process.returncode == 0


def ask(racers: list[Racer], word: str) -> list[Any]:
    """Send a command to both processes, then wait for both answers."""
    for each in racers:
        each.report(word)
    return [each.answer() for each in racers]


def test_each_partition_is_won_once_in_each_round(connection: KafkaConnection, coordination_topic: str) -> None:
    """In each round of 1,000 partitions one of two processes wins each partition, and both read the same owners.

    There are 50 rounds, and more if the processes have never competed until then.
    """
    is_shared = False
    until_s = time.monotonic() + WITHIN_S
    with ExitStack() as stack:
        racers = [stack.enter_context(racer(connection, coordination_topic, run)) for run in ("red", "blue")]
        for number in count():
            if number >= ROUNDS and (is_shared or time.monotonic() > until_s):
                break
            # the order alternates, so that neither process always starts first
            order = racers if number % 2 else racers[::-1]
            won = ask(order, "claim")
            looks = ask(order, "look")

            assert won[0].keys() & won[1].keys() == set()
            assert won[0].keys() | won[1].keys() == {str(partition) for partition in range(PARTITIONS)}
            assert looks[0] == looks[1]
            epochs = {partition: epoch for each in won for partition, epoch in each.items()}
            assert {partition: owner[1] for partition, owner in looks[0].items()} == epochs
            is_shared |= all(won)
            assert ask(order, "release") == ["released"] * 2
            assert set(ask(order, "look")[0].values()) == {None}
    assert is_shared, "the processes never competed, so the race shows nothing"
