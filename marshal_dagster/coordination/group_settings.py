"""What the members of a group must agree on before one claims: its settings (protocol.md, section 6, "Settings")."""

import shlex
from collections.abc import Sequence
from typing import Final

from marshal_dagster.coordination.appender import Sender
from marshal_dagster.coordination.claims import Member
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import (
    ConfigurationError,
    GoGroupError,
    IncompleteLogError,
    SettingsMismatchError,
    UnavailableError,
)
from marshal_dagster.protocol.leases import delivery_timeout_ms
from marshal_dagster.protocol.messages import (
    GO_HEARTBEAT_INTERVAL_MS,
    WITHOUT_SETTINGS,
    DeliveryMode,
    GroupSettings,
    GroupSettingsRecord,
    RuleSet,
)
from marshal_dagster.protocol.state import RANGES, DataPartitionId, Group, without_ranges
from marshal_dagster.protocol.world import World

KNOWN_FEATURES: Final = frozenset({RANGES})
"""Features of a group (protocol.md, section 1) that this version knows; any other keeps it from claiming."""
SETTINGS_TRIES: Final = 10
"""How often a group's first settings are sent: on a young cluster the first records of a producer can take seconds."""


def check_settings(settings: GroupSettings, log_delivery_timeout_ms: int) -> None:
    """Raise `ConfigurationError` for settings that a member cannot keep (protocol.md, sections 1, 6 and 7).

    `log_delivery_timeout_ms` is how long a record may wait in the log that it was given.
    """
    unknown = sorted(set(settings.features) - KNOWN_FEATURES)
    if unknown:
        raise ConfigurationError(f"features {unknown} are not known to this version: leave the group to a newer one")
    if RANGES in settings.features and settings.rule_set is RuleSet.GO:
        raise ConfigurationError(
            "feature 'ranges' does not go with rule set 'go': Go consumers take for free what is held by ranges. Leave "
            "out one of the two"
        )
    interval_ms = settings.heartbeat_interval_ms
    if interval_ms < 1:
        raise ConfigurationError(f"heartbeat interval is {interval_ms} ms; it must be at least 1")
    if settings.rule_set is RuleSet.GO and settings.delivery is not DeliveryMode.AT_LEAST_ONCE:
        raise ConfigurationError(
            f"delivery is {settings.delivery}; a group shared with Go consumers (rule set 'go') can only promise "
            "at_least_once"
        )
    if settings.rule_set is RuleSet.GO and interval_ms != GO_HEARTBEAT_INTERVAL_MS:
        raise ConfigurationError(
            f"heartbeat interval is {interval_ms} ms; Go consumers have {GO_HEARTBEAT_INTERVAL_MS}"
        )
    most_ms = delivery_timeout_ms(interval_ms)
    if log_delivery_timeout_ms > most_ms:
        raise ConfigurationError(
            "the coordination log was opened for a longer heartbeat interval: its records may wait "
            f"{log_delivery_timeout_ms} ms to be sent, with a heartbeat interval of {interval_ms} ms at most {most_ms}"
        )


def require_settings(name: str, group: Group, settings: GroupSettings) -> None:
    """Raise `SettingsMismatchError` unless group `name` works under `settings`."""
    if group.settings == settings:
        return
    if group.settings_accepted:
        raise SettingsMismatchError(_difference(name, settings, group.settings))
    raise SettingsMismatchError(
        f"group {name!r} has no settings yet and could not be given any: it has live owners or open plans from before. "
        f"Let them end, or give it settings: {_how_to_set(name, settings, group.settings)}"
    )


def write_first_settings(rationalizer: Rationalizer, sender: Sender, member: Member, settings: GroupSettings) -> None:
    """Write a group's first settings, or complete half-written ones, wherever it has none and may be given them.

    A member configured as what holds without settings writes none. Raises `GoGroupError` where Go consumers use the
    group, or the coordination topic while no group in it has settings: a person must decide before anything is
    written. Raises `SettingsMismatchError` where others are in force, `IncompleteLogError` where a coordination
    partition can only be observed, `UnavailableError`, `CoordinationLogChangedError`.
    """
    if settings == WITHOUT_SETTINGS:
        return
    world = rationalizer.follow_all()
    require_all_certain(world)
    require_no_go_consumers(world, member.group)
    message = GroupSettingsRecord(**{**sender.signed(member), "topic": ""}, settings=settings)
    unsent = _without_settings(world, member, settings)
    for _ in range(SETTINGS_TRIES):
        sent = sender.send([message] * len(unsent), unsent)
        unconfirmed = [number for number, outcome in zip(unsent, sent.outcomes, strict=True) if outcome is None]
        if not unconfirmed:
            return
        world = rationalizer.catch_up()
        require_all_certain(world)
        unsent = [number for number in _without_settings(world, member, settings) if number in unconfirmed]
    raise UnavailableError(
        f"the settings of group {member.group!r} could not be written to coordination partitions {unsent}: the broker "
        "did not acknowledge them in time. Nothing was claimed; try again when it answers"
    )


def require_all_certain(world: World) -> None:
    """Raise `IncompleteLogError` where the settings of a group in any coordination partition can only be observed."""
    if unsure := [number for number, partition in sorted(world.partitions.items()) if not partition.certain]:
        raise IncompleteLogError(
            f"coordination partitions {unsure} no longer begin at offset 0 and have no snapshot: the settings there "
            "are not known. Stop all members of the group, then see `marshal-dagster recover`"
        )


def require_no_go_consumers(world: World, name: str) -> None:
    """Raise `GoGroupError` unless group `name` may be given settings without a person's decision.

    See protocol.md, sections 1, 6.

    `world` follows every coordination partition.
    """
    used = world.go_groups()
    if name in used:
        raise GoGroupError(
            f"Go consumers use group {name!r}: {_first_key(used[name])} has an offset but no settings. Nothing was "
            "written. Configure this member with rule_set 'go', or stop the Go consumers for good and give the group "
            f"settings with `marshal-dagster settings set {name} --go-consumers-stopped {name}`"
        )
    if used and not world.has_settings:
        other, places = next(iter(used.items()))
        raise GoGroupError(
            f"Go consumers use this coordination topic: group {other!r} holds {_first_key(places)}. Records of a group "
            f"with other rules disturb them when they start, so nothing was written for group {name!r}. Use another "
            f"coordination topic, or allow it with `marshal-dagster settings set {name} --go-consumers-stopped {name}`"
        )


def _first_key(places: Sequence[DataPartitionId]) -> str:
    topic, partition = min(places)
    return f"{topic}/{partition}"


def _without_settings(world: World, member: Member, settings: GroupSettings) -> list[int]:
    """Return the coordination partitions where the group has no settings; others there must be `settings`.

    `world` follows every coordination partition.
    """
    groups = {number: partition.groups.get(member.group) for number, partition in world.partitions.items()}
    accepted = {number: group for number, group in groups.items() if group is not None and group.settings_accepted}
    for group in accepted.values():
        require_settings(member.group, group, settings)
    return [number for number, group in groups.items() if number not in accepted and _may_be_settled(group)]


def _may_be_settled(group: Group | None) -> bool:
    """Return whether no open plan forbids first settings; a live owner may be stale when they reach the log."""
    return group is None or all(key.plan_end is None for key in group.keys.values())


def _difference(name: str, ours: GroupSettings, theirs: GroupSettings) -> str:
    pairs = (
        ("heartbeat interval (ms)", ours.heartbeat_interval_ms, theirs.heartbeat_interval_ms),
        ("rule set", str(ours.rule_set), str(theirs.rule_set)),
        ("delivery", str(ours.delivery), str(theirs.delivery)),
        ("features", ",".join(ours.features) or "-", ",".join(theirs.features) or "-"),
    )
    differing = ", ".join(f"{what} {here!r} here, {there!r} in force" for what, here, there in pairs if here != there)
    text = f"group {name!r} works under other settings than this member is configured with: {differing}. "
    unknown = sorted(set(theirs.features) - KNOWN_FEATURES)
    if unknown:
        return f"{text}Features {unknown} are not known to this version: use the version of the group's other members"
    if theirs.rule_set is RuleSet.GO:
        text += f"Go consumers share the group: configure this member alike (rule_set {str(RuleSet.GO)!r}), or stop "
        return f"{text}them for good, then change the group's settings: {_how_to_set(name, ours, theirs)}"
    return f"{text}Configure it alike, or change the group's settings: {_how_to_set(name, ours, theirs)}"


def _how_to_set(name: str, wanted: GroupSettings, in_force: GroupSettings) -> str:
    """Return the commands, and the job, that give group `name` the settings `wanted`."""
    commands = []
    after = in_force
    if RANGES in in_force.features and RANGES not in wanted.features:
        commands.append(["settings", "disable-ranges", name])
        after = without_ranges(in_force)
    if after != wanted or not commands:
        interval_s = str(wanted.heartbeat_interval_ms / 1_000).removesuffix(".0")
        options = {"--heartbeat-interval": interval_s, "--rules": wanted.rule_set, "--delivery": wanted.delivery}
        ranges = ["--ranges"] if RANGES in wanted.features else []
        stopped = ["--go-consumers-stopped", name] if in_force.rule_set is RuleSet.GO else []
        given = [str(word) for option in options.items() for word in option]
        commands.append(["settings", "set", name, *given, *ranges, *stopped])
    text = " and then ".join(f"`marshal-dagster {shlex.join(command)}`" for command in commands)
    return f"{text}, or the job of build_settings_job, pauses the group, waits until nothing is claimed, and sets them"
