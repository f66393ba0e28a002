"""What the members of a group must agree on before one claims: its settings (PROTOCOL.md 6, "Settings")."""

from typing import Final

from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.sending import Sender
from marshal_dagster.coordination.tenure import Member
from marshal_dagster.errors import ConfigurationError, SettingsDiffer, UnavailableError
from marshal_dagster.protocol.leases import delivery_timeout_ms
from marshal_dagster.protocol.messages import (
    GO_HEARTBEAT_INTERVAL_MS,
    DeliveryMode,
    GroupSettings,
    RuleSet,
    Settings,
)
from marshal_dagster.protocol.state import RANGES, Group

KNOWN_FEATURES: Final = frozenset({RANGES})
"""Features of a group (PROTOCOL.md 1) that this version knows; any other keeps it from claiming."""
SETTINGS_TRIES: Final = 10
"""How often a group's first settings are sent: on a young cluster the first records of a producer can take seconds."""


def check_settings(settings: Settings, log_delivery_timeout_ms: int) -> None:
    """Raise `ConfigurationError` for settings that a member cannot keep (PROTOCOL.md 1, 6 and 7).

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


def require_settings(name: str, group: Group, settings: Settings) -> None:
    """Raise `SettingsDiffer` unless group `name` works under `settings`."""
    if group.settings != settings:
        raise SettingsDiffer(_difference(name, settings, group.settings))


def give_settings(rationalizer: Rationalizer, sender: Sender, member: Member, settings: Settings) -> None:
    """Give a group its first settings, or complete half-written ones; where they are refused nothing changes.

    Raises `SettingsDiffer` where others are written already, `UnavailableError`, `LogChanged`.
    """
    message = GroupSettings(**{**sender.signed(member), "topic": ""}, settings=settings)
    unsent = _without_settings(rationalizer, member, settings)
    for _ in range(SETTINGS_TRIES):
        sent = sender.send([message] * len(unsent), unsent)
        unheard = [number for number, outcome in zip(unsent, sent.outcomes, strict=True) if outcome is None]
        if not unheard:
            return
        unsent = [number for number in _without_settings(rationalizer, member, settings) if number in unheard]
    raise UnavailableError(
        f"the settings of group {member.group!r} could not be written to coordination partitions {unsent}: the broker "
        "did not acknowledge them in time. Nothing was claimed; try again when it answers"
    )


def _without_settings(rationalizer: Rationalizer, member: Member, settings: Settings) -> list[int]:
    """Give the coordination partitions where the group has no settings; others there must be `settings`."""
    world = rationalizer.follow_all()
    groups = {number: partition.groups.get(member.group) for number, partition in world.partitions.items()}
    accepted = {number: group for number, group in groups.items() if group is not None and group.settings_accepted}
    for group in accepted.values():
        require_settings(member.group, group, settings)
    return [number for number in groups if number not in accepted]


def _difference(name: str, ours: Settings, theirs: Settings) -> str:
    pairs = (
        ("heartbeat interval (ms)", ours.heartbeat_interval_ms, theirs.heartbeat_interval_ms),
        ("rule set", str(ours.rule_set), str(theirs.rule_set)),
        ("delivery", str(ours.delivery), str(theirs.delivery)),
        ("features", ",".join(ours.features) or "-", ",".join(theirs.features) or "-"),
    )
    differing = ", ".join(f"{what} {here!r} here, {there!r} in force" for what, here, there in pairs if here != there)
    return (
        f"group {name!r} works under other settings than this member is configured with: {differing}. Configure it "
        "alike, or change the group's settings while it is paused"
    )
