"""A harvester in a process of its own: `python -m tests.outbox_faults.worker JSON`.

It ends cleanly at SIGTERM. At SIGUSR1 it prints the stacks of its threads.
"""

import faulthandler
import logging
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, TypeAdapter

from marshal_dagster._internal.postgres import Database
from marshal_dagster.election import elector
from marshal_dagster.election.rules import Timing
from marshal_dagster.errors import UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox.backoff import HarvestLimits
from marshal_dagster.outbox.harvester import Harvester
from marshal_dagster.outbox.options import HarvesterOptions
from marshal_dagster.outbox.schema import OutboxTables
from tests.fault_harness.journal import Journal

LOOK_S: Final = 0.02

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a harvester's journal: from now on it leads with this fence, or it does not lead."""

    fence: int | None


LINES: Final = TypeAdapter(Line)


class Orders(BaseModel):
    """The orders for a harvester; it writes to `journal` when it starts and stops to lead."""

    bootstrap_servers: str
    dsn: str
    name: str
    journal: Path
    session_ms: int = 6_000
    receive_deadline_ms: int = 5_000
    transaction_timeout_s: float = 10.0
    timeout_s: float = 10.0
    max_in_flight_records: int = 1_000
    max_attempts: int = 3


def harvester(orders: Orders) -> Harvester:
    """Return the harvester that the orders describe."""
    # Shorter than brokers allow by default, for more takeovers in a run.
    elector._SESSION_MS = orders.session_ms  # type: ignore[misc]
    return Harvester(
        OutboxTables(Database(orders.dsn), orders.name),
        KafkaConnection(bootstrap_servers=orders.bootstrap_servers, timeout_s=orders.timeout_s),
        HarvesterOptions(
            limits=HarvestLimits(orders.max_in_flight_records, max_attempts=orders.max_attempts, topic_patience_s=3),
            timing=Timing(receive_deadline_ms=orders.receive_deadline_ms),
            transaction_timeout_s=orders.transaction_timeout_s,
        ),
    )


def keep_journal(harvester: Harvester, path: Path, is_over: threading.Event) -> None:
    """Write a line at the start and at the end, and one for each term that starts or ends."""
    journal = Journal(path, LINES)
    journal.write(Line(None))
    last = None
    while not is_over.is_set():
        term = harvester.term
        if term != last:
            journal.write(Line(None if term is None else term.fence))
            last = term
        time.sleep(LOOK_S)
    journal.write(Line(None))


def main() -> int:
    """Harvest until SIGTERM, even if services are not available at the start."""
    orders = Orders.model_validate_json(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s %(name)s %(message)s")
    one = harvester(orders)
    is_over, stopped = threading.Event(), threading.Event()

    def stop(*_: object) -> None:
        stopped.set()
        one.stop()

    signal.signal(signal.SIGTERM, stop)
    faulthandler.register(signal.SIGUSR1)
    journal = threading.Thread(target=keep_journal, args=(one, orders.journal, is_over))
    journal.start()
    try:
        while not stopped.is_set():
            try:
                one.run()
            except UnavailableError as error:
                logger.info("not yet: %s", error)
                stopped.wait(0.2)
    finally:
        is_over.set()
        journal.join()
    logger.info("ended: %s", one.counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
