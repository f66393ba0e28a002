"""Find what needs an operator in the world state.

`status` and `top` show exhausted plans first. `status --check` also fails for open plans that no member holds, claims
that are stale for long, long pauses and those that are half written, an incomplete log, positions that do not belong to
their data topic, and an unknown group.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster._internal.texts import first_few
from marshal_dagster.admin.texts import owner_text
from marshal_dagster.cli import output
from marshal_dagster.cli.world_view import (
    GroupOverview,
    KeyOverview,
    LagUnknownReason,
    LastHeartbeat,
    WorldView,
)
from marshal_dagster.coordination.pause_text import paused_group_text, resume_command
from marshal_dagster.protocol.open_plans import (
    DEFAULT_MAX_ATTEMPTS,
    OpenPlan,
    exhausted,
    open_plans,
    retry_commands,
    retry_text,
    skip_command,
    skip_text,
)
from marshal_dagster.protocol.staleness import stale_after_ms

_STALE_FOR_MS: Final = 120_000
"""A claim that is stale for longer than this needs an operator, because no sensor and no run has taken it over."""
_LONG_PAUSE_MS: Final = 86_400_000
_MOST_SHOWN: Final = 10
_MOST_PLACES: Final = 5
_MOST_LINES: Final = 8
_WRONG_POSITIONS: Final = {
    LagUnknownReason.OTHER_TOPIC: "re-created topic: positions of group {group!r} belong to a deleted topic {topic!r}",
    LagUnknownReason.BEYOND_END: "lost records: positions of group {group!r} are after the end of topic {topic!r}",
}


class Need(NamedTuple):
    """Something that needs an operator, and what to do about it."""

    problem: str
    advice: str
    otherwise: str | None = None
    """What else may be done, on a line of its own."""

    def __str__(self) -> str:
        """Return it as one line."""
        return "; ".join(filter(None, (self.problem, self.advice, self.otherwise)))


def plans_of(view: WorldView) -> list[OpenPlan]:
    """Return the open plans in the view that no live member holds. For a stored log the list is empty."""
    if view.at_ms is None:
        return []
    return open_plans(view.world, view.at_ms, group=view.wanted.group, topic=view.wanted.topic)


def exhausted_lines(view: WorldView, max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> list[str]:
    """Return a line for each exhausted plan, with the commands that retry and skip it. After ten, one has the rest."""
    return list(map(str, _exhausted(view, max_attempts)))


def _exhausted(view: WorldView, max_attempts: int) -> Iterator[Need]:
    plans = exhausted(plans_of(view), max_attempts)
    shown, of_topic = plans[:_MOST_SHOWN], defaultdict(list)
    for plan in plans:
        of_topic[plan.group, plan.topic].append(plan)
    advice = {place: _retry_or_skip(view, of_topic[place]) for place in {(plan.group, plan.topic) for plan in shown}}
    for plan in shown:
        yield Need(f"exhausted: {plan.tried}", *advice[plan.group, plan.topic])
    if others := plans[_MOST_SHOWN:]:
        yield Need(f"exhausted: {len(others)} more plans", _retry_advice(others))


def urgent_lines(view: WorldView, max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> list[output.Line]:
    """Return what needs an operator, most urgent first, eight at most. Needs with the same advice share its line."""
    needs = [(need, "bold red") for need in _exhausted(view, max_attempts)]
    needs += [(need, "yellow") for need in _others(view, max_attempts)]
    lines = []
    for advice, alike in groupby(needs[:_MOST_LINES], key=lambda styled: styled[0][1:]):
        lines += [output.styled(need.problem, style) for need, style in alike]
        lines += [output.Line((("  " + line, ""),)) for line in advice if line]
    if left := needs[_MOST_LINES:]:
        text = f"Left out: {len(left)} more that need an operator; `marshal-dagster status --json` has all"
        lines.append(output.styled(text, "yellow"))
    return lines


def exhausted_json(view: WorldView, max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> list[dict[str, Any]]:
    """Return the exhausted plans as JSON values."""
    return [
        {"group": plan.group, "topic": plan.topic, **plan_json(plan)}
        | {"retry": retry_commands([plan]), "skip": skip_command([plan], _offsets(view, [plan]))}
        for plan in exhausted(plans_of(view), max_attempts)
    ]


def _retry_or_skip(view: WorldView, plans: Sequence[OpenPlan]) -> tuple[str, str | None]:
    return _retry_advice(plans), skip_text(plans, _offsets(view, plans))


def _retry_advice(plans: Sequence[OpenPlan]) -> str:
    return f"fix the cause and {retry_text(plans)}"


def _offsets(view: WorldView, plans: Sequence[OpenPlan]) -> dict[int, int | None]:
    return {plan.partition: view.world.key(plan.group, plan.topic, plan.partition).offset for plan in plans}


def plan_json(plan: OpenPlan) -> dict[str, Any]:
    """Return a plan as a JSON value, without its group and topic."""
    return {"partition": plan.partition, "start": plan.start, "end": plan.end, "tries": plan.tries}


def other_lines(view: WorldView, max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> list[str]:
    """Return a line for each open plan that no member holds, and for all else that needs an operator."""
    return list(map(str, _others(view, max_attempts)))


def _others(view: WorldView, max_attempts: int) -> Iterator[Need]:
    yield from _unknown_group(view)
    yield from _incomplete_log(view)
    yield from _half_written(view)
    yield from _recreated_topics(view)
    yield from _unreachable_topics(view)
    yield from _left_plans(view, max_attempts)
    yield from _stale_claims(view)
    yield from _long_pauses(view)


def _unknown_group(view: WorldView) -> Iterator[Need]:
    if view.unknown_group is not None:
        yield Need(f"unknown group: {view.unknown_group}", "start a run of the group, or correct the name")


def _incomplete_log(view: WorldView) -> Iterator[Need]:
    if view.observed:
        yield Need(
            f"incomplete log: nothing can be claimed from coordination partitions {runs_text(view.observed)}",
            "stop all members of all groups, then run `marshal-dagster recover`",
        )


def _half_written(view: WorldView) -> Iterator[Need]:
    for group in view.groups:
        for difference in group.differences:
            yield Need(f"half written: group {group.name!r}: {difference.problem}", difference.advice)


def _recreated_topics(view: WorldView) -> Iterator[Need]:
    for group in view.groups:
        found = {(key.place[0], key.lag.unknown) for key in group.keys if key.lag is not None}
        for unknown, problem in _WRONG_POSITIONS.items():
            for topic in sorted(topic for topic, why in found if why is unknown):
                reset = shlex.join(["marshal-dagster", "position", "reset", group.name, topic, "--to-earliest"])
                yield Need(
                    problem.format(group=group.name, topic=topic),
                    f"runs fail; check what was processed of it, then run `{reset}`",
                )


def _unreachable_topics(view: WorldView) -> Iterator[Need]:
    keys = [key for group in view.groups for key in group.keys]
    topics = sorted(
        {key.place[0] for key in keys if key.lag is not None and key.lag.unknown is LagUnknownReason.UNAVAILABLE}
    )
    if topics:
        yield Need(
            f"unknown lag: brokers do not answer for the data topics {first_few(topics, _MOST_PLACES)}",
            "check them; if the topics are in another cluster, name that with --data-connection",
        )


def _left_plans(view: WorldView, max_attempts: int) -> Iterator[Need]:
    held = {(group.name, *key.place) for group in view.groups for key in group.keys if any(_late(group, key))}
    for plan in plans_of(view):
        if plan.attempts < max_attempts and (plan.group, plan.topic, plan.partition) not in held:
            yield Need(
                f"open plan: {plan.tried}, and no member holds it", "start a run of the group, or check its last run"
            )


def _stale_claims(view: WorldView) -> Iterator[Need]:
    for group in view.groups:
        held: dict[str, list[str]] = {}
        over_ms: dict[str, int] = {}
        for key in group.keys:
            for what, owner, late_ms in _late(group, key):
                held.setdefault(owner, []).append(what)
                over_ms[owner] = max(late_ms, over_ms.get(owner, 0))
        for owner, places in held.items():
            yield Need(
                f"stale claim: {first_few(places, _MOST_PLACES)} of group {group.name!r}, stale for "
                f"{output.duration(over_ms[owner])}",
                f"held by {owner}; start a run of the group, which takes it over",
            )


def _late(group: GroupOverview, key: KeyOverview) -> Iterator[tuple[str, str, int]]:
    """Yield each claim of a key that needs an operator: its place, its owner, and how long it is stale, in ms."""
    stale_ms = stale_after_ms(group.settings.heartbeat_interval_ms)
    for what, owner, heartbeat in _heartbeats(key):
        late_ms = (heartbeat.silent_ms or 0) - stale_ms
        if late_ms > _STALE_FOR_MS:
            yield what, owner, late_ms


def _heartbeats(key: KeyOverview) -> Iterator[tuple[str, str, LastHeartbeat]]:
    place = f"{key.place[0]}/{key.place[1]}"
    if key.key.owner is not None and key.last_heartbeat is not None:
        yield place, owner_text(key.key.owner), key.last_heartbeat
    for part in key.ranges:
        if part.range.owner is not None and part.last_heartbeat is not None:
            yield f"{place} [{part.range.start}, {part.range.end})", owner_text(part.range.owner), part.last_heartbeat


def _long_pauses(view: WorldView) -> Iterator[Need]:
    for group in view.groups:
        if view.at_ms is None or not group.is_paused or group.paused_until_s is None:
            continue
        left_ms = group.paused_until_s * 1_000 - view.at_ms
        if left_ms > _LONG_PAUSE_MS:
            yield Need(
                f"long pause: {paused_group_text(group.name, group.paused_until_s, group.pause_origin)}",
                f"`{resume_command(group.name)}` ends it",
            )
