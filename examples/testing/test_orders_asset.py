"""Tests that need neither Kafka nor Spark."""

import dagster as dg
import pytest
from orders_asset import defs, notify_shops

from marshal_dagster.testing import CrashPoint, crash, run_in_memory

ORDERS = {"orders": ["north", "south", "west"]}


class FakeWebhook:
    """Keeps the orders, and can end the run after some of them."""

    def __init__(self, crash_after: int | None = None) -> None:
        self.sent: list[str] = []
        self.crash_after = crash_after

    def send(self, order: str) -> None:
        """Keep the order."""
        self.sent.append(order)
        if len(self.sent) == self.crash_after:
            crash()


def test_the_definitions_load() -> None:
    """Loading opens no connection."""
    dg.Definitions.validate_loadable(defs)


def test_each_order_is_sent() -> None:
    """One run sends all orders and commits them."""
    webhook = FakeWebhook()
    result = run_in_memory(notify_shops, ORDERS, resources={"webhook": webhook})
    assert webhook.sent == ["north", "south", "west"]
    assert result.positions == {"orders": {0: 3}}


def test_a_crash_before_the_commit_repeats() -> None:
    """At least once: shops must tolerate an order twice."""
    webhook = FakeWebhook()
    result = run_in_memory(
        notify_shops,
        ORDERS,
        crash_at=CrashPoint.AFTER_PROCESS,
        resources={"webhook": webhook},
    )
    assert webhook.sent == ["north", "south", "west"] * 2
    assert len(result.repeated) == 3


def test_a_crash_in_the_middle_loses_nothing() -> None:
    """The run dies after the second order, and the next run begins with the first."""
    webhook = FakeWebhook(crash_after=2)
    run_in_memory(notify_shops, ORDERS, attempts=2, resources={"webhook": webhook})
    assert webhook.sent == ["north", "south", "north", "south", "west"]


@pytest.mark.parametrize("point", [CrashPoint.AFTER_CLAIM, CrashPoint.AFTER_READ])
def test_a_crash_before_the_function_repeats_nothing(point: CrashPoint) -> None:
    """Nothing was sent yet."""
    webhook = FakeWebhook()
    run_in_memory(notify_shops, ORDERS, crash_at=point, resources={"webhook": webhook})
    assert webhook.sent == ["north", "south", "west"]
