"""Names of topics, and which ones are near to one that was misspelt."""

from marshal_dagster.kafka.topic_names import nearest_names_text


def test_the_nearest_names_come_first_and_five_are_named() -> None:
    """Letters that are swapped, left out or of another case are near."""
    names = ["payments", "orders.dlq", "Orders", "order", "flights", "orders"]
    assert nearest_names_text("ordres", names) == (
        "existing topics, nearest names first: 'Orders', 'orders', 'order', 'orders.dlq', 'payments' and 1 more"
    )


def test_no_visible_topic_is_reported() -> None:
    """The missing name itself is not listed."""
    assert nearest_names_text("orders", ["orders"]) == "this user can see no topic"
