"""Suggestions of existing topic names for a misspelt one."""

from marshal_dagster.kafka.topic_names import nearest_names_text


def test_the_nearest_names_come_first_and_five_are_named() -> None:
    """Names with swapped, missing or differently cased letters are suggested."""
    names = ["payments", "orders.dlq", "Orders", "order", "flights", "orders"]
    assert nearest_names_text("ordres", names) == (
        "existing topics, nearest names first: 'Orders', 'orders', 'order', 'orders.dlq', 'payments' and 1 more"
    )


def test_no_visible_topic_is_reported() -> None:
    """The missing name itself is not suggested."""
    assert nearest_names_text("orders", ["orders"]) == "this user can see no topic"
