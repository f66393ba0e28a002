"""Checks and writes the settings on which all members of a group must agree (protocol.md, section 6, "Settings").

Claimers call it before they claim.
"""

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
"""The features of a group (protocol.md, section 1) that this version knows. It does not claim with any other."""
SETTINGS_TRIES: Final = 10
"""How often a group's first settings are sent. On a new cluster the first records of a producer can take seconds."""


def check_settings(settings: GroupSettings, log_delivery_timeout_ms: int) -> None:
    """Raise `ConfigurationError` for settings that a member cannot keep (protocol.md, sections 1, 6 and 7).

    Args:
        settings: the settings of the member's group.
        log_delivery_timeout_ms: how long a record may wait to be sent in the member's log, in ms.
    """
    unknown = sorted(set(settings.features) - KNOWN_FEATURES)
    if unknown:
        raise ConfigurationError(
            f"this version does not know the features {unknown}: use a newer version, or leave them out"
        )
    if RANGES in settings.features and settings.rule_set is RuleSet.GO:
        raise ConfigurationError(
            "the feature 'ranges' cannot be used with rule set 'go', because Go consumers do not see claims of ranges: "
            "leave out the feature, or use rule set 'native'"
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
            f"heartbeat interval is {interval_ms} ms; with rule set 'go' it must be {GO_HEARTBEAT_INTERVAL_MS} ms, "
            "because Go consumers use that"
        )
    most_ms = delivery_timeout_ms(interval_ms)
    if log_delivery_timeout_ms > most_ms:
        raise ConfigurationError(
            "the coordination log was opened for a longer heartbeat interval: its records may wait "
            f"{log_delivery_timeout_ms} ms to be sent, but a heartbeat interval of {interval_ms} ms allows at most "
            f"{most_ms} ms. Open the log with the heartbeat interval of the group"
        )


def require_settings(name: str, group: Group, settings: GroupSettings) -> None:
    """Raise `SettingsMismatchError` unless `settings` are in force in group `name`."""
    if group.settings == settings:
        return
    if group.settings_accepted:
        raise SettingsMismatchError(_difference(name, settings, group.settings))
    raise SettingsMismatchError(
        f"group {name!r} has no settings, and first settings were refused, because it has live owners or open plans. "
        f"Wait until they end, or set the settings: {_how_to_set(name, settings, group.settings)}"
    )


def write_first_settings(rationalizer: Rationalizer, sender: Sender, member: Member, settings: GroupSettings) -> None:
    """Write a group's first settings to each coordination partition where it has none and no open plan.

    This also completes settings that were written to only some coordination partitions. If the member has the settings
    that are in force without any record, nothing is written.

    Raises:
        GoGroupError: Go consumers use the group, or they use the coordination topic while no group in it has settings.
            An operator must decide before anything is written.
        IncompleteLogError: a coordination partition can only be observed, so Go consumers may use the group unseen.
        SettingsMismatchError: other settings are in force.
        UnavailableError: the records were not acknowledged in time.
        CoordinationLogChangedError: it is not the log that was read before.
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
        f"the settings of group {member.group!r} could not be written to coordination partitions {unsent}, because the "
        "broker did not acknowledge them in time. Nothing was claimed; try again when the broker answers"
    )


def require_all_certain(world: World) -> None:
    """Raise `IncompleteLogError` if any coordination partition is incomplete, so that settings there are uncertain."""
    if unsure := [number for number, partition in sorted(world.partitions.items()) if not partition.certain]:
        raise IncompleteLogError(
            f"coordination partitions {unsure} no longer begin at offset 0 and have no usable snapshot, so the "
            "settings there are unknown. Stop all members of all groups, then run `marshal-dagster recover`"
        )


def require_no_go_consumers(world: World, name: str) -> None:
    """Raise `GoGroupError` if an operator must allow first settings of group `name` (protocol.md, sections 1, 6).

    `world` must follow every coordination partition.
    """
    used = world.go_groups()
    allow = shlex.join(["marshal-dagster", "settings", "set", name, "--go-consumers-stopped", name])
    if name in used:
        raise GoGroupError(
            f"Go consumers use group {name!r} ({_first_key(used[name])} has an offset, but the group has no settings), "
            "so nothing was written. Configure this member with rule_set 'go', or stop the Go consumers for good and "
            f"set the settings with `{allow}`"
        )
    if used and not world.has_settings:
        other, places = next(iter(used.items()))
        raise GoGroupError(
            f"Go consumers use this coordination topic (group {other!r} has {_first_key(places)}), and records of "
            f"other rule sets disturb them when they start, so nothing was written for group {name!r}. Use another "
            f"coordination topic, or allow it with `{allow}`"
        )


def _first_key(places: Sequence[DataPartitionId]) -> str:
    topic, partition = min(places)
    return f"{topic}/{partition}"


def _without_settings(world: World, member: Member, settings: GroupSettings) -> list[int]:
    """Return the coordination partitions where the group has no settings and may get them.

    Raises `SettingsMismatchError` if the group has other settings anywhere. `world` must follow every coordination
    partition.
    """
    groups = {number: partition.groups.get(member.group) for number, partition in world.partitions.items()}
    accepted = {number: group for number, group in groups.items() if group is not None and group.settings_accepted}
    for group in accepted.values():
        require_settings(member.group, group, settings)
    return [number for number, group in groups.items() if number not in accepted and _may_be_settled(group)]


def _may_be_settled(group: Group | None) -> bool:
    """Return whether no plan is open. A live owner does not matter: it may be stale when the settings arrive."""
    return group is None or all(key.plan_end is None for key in group.keys.values())


def _difference(name: str, ours: GroupSettings, theirs: GroupSettings) -> str:
    pairs = (
        ("heartbeat interval (ms)", ours.heartbeat_interval_ms, theirs.heartbeat_interval_ms),
        ("rule set", str(ours.rule_set), str(theirs.rule_set)),
        ("delivery", str(ours.delivery), str(theirs.delivery)),
        ("features", ",".join(ours.features) or "-", ",".join(theirs.features) or "-"),
    )
    differing = ", ".join(f"{what} {here!r} here, {there!r} in force" for what, here, there in pairs if here != there)
    text = f"group {name!r} has other settings than this member is configured with: {differing}. "
    unknown = sorted(set(theirs.features) - KNOWN_FEATURES)
    if unknown:
        return f"{text}This version does not know the features {unknown}: use the version of the group's other members"
    if theirs.rule_set is RuleSet.GO:
        text += f"Go consumers share the group: configure this member with rule_set {str(RuleSet.GO)!r} too, or stop "
        return f"{text}them for good, then change the group's settings: {_how_to_set(name, ours, theirs)}"
    return f"{text}Configure the same settings, or change the group's: {_how_to_set(name, ours, theirs)}"


def _how_to_set(name: str, wanted: GroupSettings, in_force: GroupSettings) -> str:
    """Return the commands, and the job, that set the settings of group `name` to `wanted`."""
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
    return f"run {text}, or the job of build_settings_job; they pause the group and wait until nothing is claimed"
