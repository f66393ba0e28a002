"""The command that draws a timeline, as messages name it."""

from marshal_dagster.timeline.shell_command import timeline_command


def test_the_command_names_a_coordination_topic_that_is_not_the_default_one() -> None:
    """It can be copied."""
    event_ms = 1_769_882_400_000
    shown = "--group 'all shops' --topic orders --since 2026-01-31T17:50:00Z"
    assert timeline_command("all shops", "orders", event_ms) == f"marshal-dagster timeline {shown}"
    other = timeline_command("all shops", "orders", event_ms, coordination_topic="claims")
    assert other == f"marshal-dagster timeline --coordination-topic claims {shown}"
