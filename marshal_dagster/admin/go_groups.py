"""Rules for groups that Go consumers may use: which operations require a confirmation that the consumers are stopped.

See protocol.md, sections 6 and 7.
"""

import shlex
from enum import Enum, auto

from marshal_dagster.coordination.group_settings import require_no_go_consumers
from marshal_dagster.errors import ConfigurationError, GoGroupError
from marshal_dagster.protocol.messages import GroupSettings, RuleSet
from marshal_dagster.protocol.world import World


class Way(Enum):
    """How positions of a group are set (protocol.md, sections 6 and 7)."""

    PAUSE = auto()
    """While the group is paused."""
    SETTINGS_FIRST = auto()
    """The group has no settings yet: it first gets those that its members are configured with, and is then paused."""
    GO = auto()
    """Without a pause, with records that Go consumers understand, and in Kafka's own group offsets too."""


def are_stopped(named: str | None, group: str) -> bool:
    """Return whether the operator confirms that Go consumers are stopped, by entering the group's name as `named`.

    Raises `ConfigurationError` if `named` is another name.
    """
    if named not in {None, group}:
        raise ConfigurationError(
            f"--go-consumers-stopped names {named!r}, but the group is {group!r}: nothing was written. Repeat the "
            "group's name there once its Go consumers are stopped (go_consumers_stopped in a run config)"
        )
    return named is not None


def require_pause_allowed(world: World, group: str, *, stopped: bool) -> None:
    """Raise `GoGroupError` if Go consumers may read the record of a pause, which they do not understand.

    This applies to each group that Go consumers use, or may use because it has no settings. `stopped`: the operator
    confirms that no Go consumer newer than January 2017 will start on this coordination topic again.
    """
    used = world.go_groups()
    if stopped or (group not in used and has_native_settings(world, group)):
        return
    if group in used or RuleSet.GO in _rule_sets(world, group):
        raise GoGroupError(
            f"Go consumers share group {group!r}, and the newest of them do not know the record that pauses or resumes "
            "it, so nothing was written. Stop its runs and consumers instead, or, if no Go consumer newer than January "
            f"2017 will start on this coordination topic again, give {_confirmation(group)} "
            "(go_consumers_stopped in a run config)"
        )
    others = f" and Go consumers use group {min(used)!r} on this coordination topic" if used else ""
    raise GoGroupError(
        f"group {group!r} has no settings yet{others}, so the record that pauses or resumes it was not written: Go "
        f"consumers do not know it. Give the group settings first with `{_settings_command(world, group)}`, or, if "
        f"Go consumers are stopped for good, give {_confirmation(group)} (go_consumers_stopped in a run config)"
    )


def require_settings_allowed(world: World, group: str, *, stopped: bool) -> None:
    """Raise `GoGroupError` if settings of `group` would be the first record that Go consumers do not understand.

    `stopped`: the operator confirms that no Go consumer, of any group, will use this coordination topic again.
    """
    if stopped:
        return
    if RuleSet.GO in _rule_sets(world, group) and not has_native_settings(world, group):
        raise GoGroupError(
            f"Go consumers share group {group!r}: its rule set is 'go', so its settings were not changed. Stop all Go "
            f"consumers of this coordination topic for good, then give {_confirmation(group)} "
            "(go_consumers_stopped in a run config)"
        )
    require_no_go_consumers(world, group)


def way_to_set(world: World, group: str, topic: str, *, settings: GroupSettings | None, stopped: bool) -> Way:
    """Return how positions of `group` in `topic` are set.

    `settings` are those that the group's members are configured with, if known. `stopped`: the operator confirms that
    all consumers of the group are stopped. Raises `GoGroupError` if the operator must confirm something first.
    """
    state = world.group_of(group, topic)
    has_native = has_native_settings(world, group)
    if state.settings_accepted and not state.is_go:
        return Way.PAUSE
    if stopped and not has_native:
        return Way.GO
    if state.settings_accepted:
        raise GoGroupError(
            f"Go consumers share group {group!r}, so nothing was written. Stop all consumers of the group, then give "
            f"{_confirmation(group)} (go_consumers_stopped in a run config)"
        )
    if settings is not None and settings.rule_set is RuleSet.NATIVE:
        require_no_go_consumers(world, group)
        return Way.SETTINGS_FIRST
    if has_native:
        raise GoGroupError(
            f"group {group!r} has settings in only some coordination partitions, and none for topic {topic!r}, so "
            f"nothing was written. Complete them with `{_settings_command(world, group)}`"
        )
    raise GoGroupError(
        f"group {group!r} has no settings for topic {topic!r}, so nothing was written. If only members of this library "
        f"use it, give it settings with `{_settings_command(world, group)}`; if Go consumers share it, stop all "
        f"consumers of the group, then give {_confirmation(group)} (go_consumers_stopped in a run config)"
    )


def _settings_command(world: World, group: str) -> str:
    """Return the command that gives the group settings; a group of which the log has no record needs an option."""
    is_known = any(group in partition.groups for partition in world.partitions.values())
    return shlex.join(["marshal-dagster", "settings", "set", group, *([] if is_known else ["--new-group"])])


def _confirmation(group: str) -> str:
    return shlex.join(["--go-consumers-stopped", group])


def has_native_settings(world: World, group: str) -> bool:
    """Return whether any coordination partition has settings with the rule set `native` for `group`."""
    return RuleSet.NATIVE in _rule_sets(world, group)


def _rule_sets(world: World, group: str) -> set[RuleSet]:
    """Return the rule sets of `group` in the coordination partitions that have a record of its settings."""
    known = (partition.groups.get(group) for partition in world.partitions.values())
    return {state.settings.rule_set for state in known if state is not None and state.settings_accepted}
