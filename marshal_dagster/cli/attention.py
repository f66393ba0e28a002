"""Find what needs an operator in the world state.

`status` and `top` show exhausted plans first. `status --check` also fails for open plans that no member holds, claims
that are stale for long, long pauses, an incomplete log, re-created data topics, and an unknown group.
"""

import shlex
from collections.abc import Iterator
from typing import Any, Final

from marshal_dagster.admin.pause import unknown_group
from marshal_dagster.admin.texts import utc_to_second
from marshal_dagster.cli import output
from marshal_dagster.cli.world_view import KeyOverview, LagUnknownReason, LastHeartbeat, WorldView, listed
from marshal_dagster.coordination.pause_text import pause_end_text
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS, OpenPlan, exhausted, open_plans, retry_commands
from marshal_dagster.protocol.staleness import stale_after_ms

_STALE_FOR_MS: Final = 120_000
"""A claim that is stale for longer than this needs an operator, because no sensor and no run has taken it over."""
_LONG_PAUSE_MS: Final = 86_400_000
_MOST_SHOWN: Final = 10
_MOST_LINES: Final = 15


def plans_of(view: WorldView) -> list[OpenPlan]:
    """Return the open plans in the view that no live member holds. For a stored log the list is empty."""
    if view.at_ms is None:
        return []
    return open_plans(view.world, view.at_ms, group=view.wanted.group, topic=view.wanted.topic)


def exhausted_lines(view: WorldView, max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> list[str]:
    """Return a line for each exhausted plan, with the command that retries it. After ten, one line has the rest."""
    plans = exhausted(plans_of(view), max_attempts)
    lines = [f"exhausted: {plan.tried}; {retry_commands([plan])}" for plan in plans[:_MOST_SHOWN]]
    if others := plans[_MOST_SHOWN:]:
        lines.append(f"exhausted: {len(others)} more plans; {retry_commands(others)}")
    return lines


def urgent_lines(view: WorldView, max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> list[output.Line]:
    """Return what needs a person, the most urgent first, in 15 lines at most."""
    lines = [output.styled(line, "bold red") for line in exhausted_lines(view, max_attempts)]
    lines += [output.styled(line, "yellow") for line in other_lines(view, max_attempts)]
    if len(lines) <= _MOST_LINES:
        return lines
    left = len(lines) - _MOST_LINES + 1
    more = f"Left out: {left} more that need a person; `marshal-dagster status --json` has all"
    return [*lines[: _MOST_LINES - 1], output.styled(more, "yellow")]


def exhausted_json(view: WorldView, max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> list[dict[str, Any]]:
    """Return the exhausted plans as JSON values."""
    return [
        {"group": plan.group, "topic": plan.topic, **plan_json(plan), "retry": retry_commands([plan])}
        for plan in exhausted(plans_of(view), max_attempts)
    ]


def plan_json(plan: OpenPlan) -> dict[str, Any]:
    """Return a plan as a JSON value, without its group and topic."""
    return {"partition": plan.partition, "start": plan.start, "end": plan.end, "tries": plan.tries}


def other_lines(view: WorldView, max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> list[str]:
    """Return a line for each open plan that no member holds, and for all else that needs an operator."""
    return [
        *_unknown_group(view),
        *_incomplete_log(view),
        *_recreated_topics(view),
        *_left_plans(view, max_attempts),
        *_stale_claims(view),
        *_long_pauses(view),
    ]


def _unknown_group(view: WorldView) -> Iterator[str]:
    name = view.wanted.group
    if name is not None and not view.groups:
        yield f"unknown group: {unknown_group(view.world, name)}"


def _incomplete_log(view: WorldView) -> Iterator[str]:
    if view.observed:
        yield (
            f"incomplete log: nothing can be claimed from coordination partitions {listed(view.observed)}; stop all "
            "members of all groups, then run `marshal-dagster recover`"
        )


def _recreated_topics(view: WorldView) -> Iterator[str]:
    for group in view.groups:
        lags = [(key.place[0], key.lag.unknown) for key in group.keys if key.lag is not None]
        for topic in sorted({topic for topic, unknown in lags if unknown is LagUnknownReason.OTHER_TOPIC}):
            reset = shlex.join(["marshal-dagster", "position", "reset", group.name, topic])
            yield (
                f"re-created topic: positions of group {group.name!r} belong to a deleted topic {topic!r}, and runs "
                f"fail; check what was processed of it, then run `{reset}`"
            )


def _left_plans(view: WorldView, max_attempts: int) -> Iterator[str]:
    for plan in plans_of(view):
        if plan.attempts < max_attempts:
            yield f"open plan: {plan.tried}, and no member holds it; start a run of the group, or check its last run"


def _stale_claims(view: WorldView) -> Iterator[str]:
    for group in view.groups:
        stale_ms = stale_after_ms(group.settings.heartbeat_interval_ms)
        for key in group.keys:
            for what, instance, heartbeat in _heartbeats(key):
                over_ms = (heartbeat.silent_ms or 0) - stale_ms
                if over_ms > _STALE_FOR_MS:
                    yield (
                        f"stale claim: {what} of group {group.name!r} is held by {instance}, stale for "
                        f"{output.duration(over_ms)}; start a run of the group, which takes it over"
                    )


def _heartbeats(key: KeyOverview) -> Iterator[tuple[str, str, LastHeartbeat]]:
    place = f"{key.place[0]}/{key.place[1]}"
    if key.key.owner is not None and key.last_heartbeat is not None:
        yield place, key.key.owner.instance, key.last_heartbeat
    for part in key.ranges:
        if part.range.owner is not None and part.last_heartbeat is not None:
            yield f"{place} [{part.range.start}, {part.range.end})", part.range.owner.instance, part.last_heartbeat


def _long_pauses(view: WorldView) -> Iterator[str]:
    for group in view.groups:
        if view.at_ms is None or not group.is_paused or group.paused_until_s is None:
            continue
        left_ms = group.paused_until_s * 1_000 - view.at_ms
        until = utc_to_second(group.paused_until_s)
        if left_ms > _LONG_PAUSE_MS:
            yield (
                f"long pause: group {group.name!r} is paused until "
                f"{pause_end_text(until, group.pause_origin)}; `marshal-dagster resume {group.name}` ends it"
            )
