"""A harvester that kills itself: `python -m tests.outbox_process STEP ORDERS`, with the orders of a fault worker."""

import sys
from collections.abc import Callable
from typing import Final

from marshal_dagster.kafka.transactions import Transaction
from marshal_dagster.outbox.interfaces import BatchTransaction, TransactionResult
from marshal_dagster.outbox.store import PostgresStore
from tests.outbox_faults.worker import Orders, harvester
from tests.real.kill_points import die


def before_commit() -> None:
    """Kill the process while the whole batch is at the brokers and its transaction is open."""

    def commit(_: Transaction) -> None:
        die()

    setattr(Transaction, "commit", commit)  # noqa: B010 - mypy knows that it is a method


def before_strike() -> None:
    """Kill the process while a batch is committed in Kafka and its rows are still in the database."""
    turn = PostgresStore.turn

    def dying_turn(store: PostgresStore, session: int, given: BatchTransaction) -> TransactionResult:
        if given.done.ranges:
            die()
        return turn(store, session, given)

    setattr(PostgresStore, "turn", dying_turn)  # noqa: B010 - mypy knows that it is a method


def after_strike() -> None:
    """Kill the process while a batch is committed in Kafka and its rows are deleted."""
    turn = PostgresStore.turn

    def dying_turn(store: PostgresStore, session: int, given: BatchTransaction) -> TransactionResult:
        turned = turn(store, session, given)
        if given.done.ranges:
            die()
        return turned

    setattr(PostgresStore, "turn", dying_turn)  # noqa: B010 - mypy knows that it is a method


STEPS: Final[dict[str, Callable[[], None]]] = {
    each.__name__: each for each in (before_commit, before_strike, after_strike)
}


def main() -> None:
    """Harvest until the process kills itself."""
    STEPS[sys.argv[1]]()
    harvester(Orders.model_validate_json(sys.argv[2])).run()


if __name__ == "__main__":
    main()
