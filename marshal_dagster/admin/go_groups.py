"""What a person decides where Go consumers may be at work: whether they are stopped (protocol.md, sections 6 and 7)."""

from marshal_dagster.coordination.group_settings import require_no_go_consumers
from marshal_dagster.errors import ConfigurationError, GoGroupError
from marshal_dagster.protocol.messages import RuleSet
from marshal_dagster.protocol.world import World


def are_stopped(named: str | None, group: str) -> bool:
    """Return whether a person says that Go consumers are stopped: `named` is then the group's name, typed once more.

    Raises `ConfigurationError` for another name.
    """
    if named not in {None, group}:
        raise ConfigurationError(
            f"--go-consumers-stopped names {named!r}, but the group is {group!r}: nothing was written. Repeat the "
            "group's name there once its Go consumers are stopped (go_consumers_stopped in a run config)"
        )
    return named is not None


def has_native_settings(world: World, group: str) -> bool:
    """Return whether a coordination partition has settings for `group` that are not those of Go consumers."""
    known = (partition.groups.get(group) for partition in world.partitions.values())
    return any(each is not None and each.settings_accepted and not each.is_go for each in known)


def require_pause_allowed(world: World, group: str, *, stopped: bool) -> None:
    """Raise `GoGroupError` where a pause is a record that Go consumers of `group` or of the topic may not know.

    That is so in every group that Go consumers use, or may use because it has no settings. `stopped`: a person says
    that no Go consumer newer than January 2017 will start on this coordination topic again.
    """
    used = world.go_groups()
    if stopped or (group not in used and has_native_settings(world, group)):
        return
    if group in used or _has_go_settings(world, group):
        raise GoGroupError(
            f"Go consumers share group {group!r}, and the newest of them do not know the record that pauses or resumes "
            "it, so nothing was written. Stop its runs and consumers instead, or, if no Go consumer newer than January "
            f"2017 will start on this coordination topic again, give --go-consumers-stopped {group} "
            "(go_consumers_stopped in a run config)"
        )
    others = f" and Go consumers use group {min(used)!r} on this coordination topic" if used else ""
    raise GoGroupError(
        f"group {group!r} has no settings yet{others}, so the record that pauses or resumes it was not written: Go "
        f"consumers do not know it. Give the group settings first with `marshal-dagster settings set {group}`, or, if "
        f"Go consumers are stopped for good, give --go-consumers-stopped {group} (go_consumers_stopped in a run config)"
    )


def require_settings_allowed(world: World, group: str, *, stopped: bool) -> None:
    """Raise `GoGroupError` where settings of `group` would be the first record that Go consumers do not know.

    `stopped`: a person says that no Go consumer, of any group, will use this coordination topic again.
    """
    if stopped:
        return
    if _has_go_settings(world, group) and not has_native_settings(world, group):
        raise GoGroupError(
            f"Go consumers share group {group!r}: its rule set is 'go', so its settings were not changed. Stop all Go "
            f"consumers of this coordination topic for good, then give --go-consumers-stopped {group} "
            "(go_consumers_stopped in a run config)"
        )
    require_no_go_consumers(world, group)


def _has_go_settings(world: World, group: str) -> bool:
    """Return whether a record gave `group` the rule set of Go consumers."""
    known = (partition.groups.get(group) for partition in world.partitions.values())
    return any(each is not None and each.settings_accepted and each.settings.rule_set is RuleSet.GO for each in known)
