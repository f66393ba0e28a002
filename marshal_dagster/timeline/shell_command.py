"""The command that draws a timeline, for messages and metadata that point to it."""

import shlex
from typing import Final

from marshal_dagster._internal.texts import utc_to_second
from marshal_dagster.coordination.log import DEFAULT_COORDINATION_TOPIC

BEFORE_MS: Final = 10 * 60_000
"""How long before an event the picture begins, in ms."""


def timeline_command(
    group: str, topic: str, event_ms: int, *, coordination_topic: str = DEFAULT_COORDINATION_TOPIC
) -> str:
    """Return the command that draws a topic's partitions in a group from some minutes before an event until now.

    The beginning is a time and not a duration, so that the command is still right when it is read the next morning.

    Args:
        group: The group.
        topic: The data topic.
        event_ms: When the event was, in unix ms.
        coordination_topic: The coordination topic; the default one is not named.

    Returns:
        A command line for a shell, with the arguments quoted.

    Example:
        `marshal-dagster timeline --group shops --topic orders --since 2026-01-31T18:00:00Z`
    """
    since = utc_to_second(max(0, event_ms - BEFORE_MS) // 1_000).replace(" ", "T")
    log = [] if coordination_topic == DEFAULT_COORDINATION_TOPIC else ["--coordination-topic", coordination_topic]
    return shlex.join(["marshal-dagster", "timeline", *log, "--group", group, "--topic", topic, "--since", since])
