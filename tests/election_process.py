"""A member of an election: `python -m tests.election_process SERVERS TOPIC GROUP JOURNAL SESSION_MS`.

It writes to the journal each event of a term that it receives, and at each interval whether it leads, with the times
before and after the look. SIGTERM ends it cleanly.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Final

from marshal_dagster.election import elector as elector_module
from marshal_dagster.election.elector import Elector
from marshal_dagster.election.rules import Event
from marshal_dagster.kafka.connection import KafkaConnection

LOOK_S: Final = 0.02


def boot_ms() -> float:
    """Return the milliseconds of a clock that all processes share and that runs while a process is stopped."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) * 1_000


def main() -> None:
    """Take part in the election until SIGTERM."""
    servers, topic, group, journal, session_ms = sys.argv[1:]
    elector_module._SESSION_MS = int(session_ms)  # type: ignore[misc]
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    file = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(**line: object) -> None:
        os.write(file, json.dumps(line).encode() + b"\n")

    def listen(partition: int, event: Event) -> None:
        write(at_ms=boot_ms(), event=type(event).__name__, partition=partition, reported=event.term.fence)

    with Elector(KafkaConnection(bootstrap_servers=servers), topic, group, listener=listen) as elector:
        while not over.is_set():
            at_ms, term = boot_ms(), elector.term()
            write(at_ms=at_ms, until_ms=boot_ms(), fence=None if term is None else term.fence)
            over.wait(LOOK_S)
    write(at_ms=boot_ms(), event="Ended")


if __name__ == "__main__":
    main()
