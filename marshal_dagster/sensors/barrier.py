"""What keeps every run of a group from claiming, so that no sensor asks for one."""

from marshal_dagster.protocol.world import World


def barrier(world: World, group: str, topic: str, wall_ms: int) -> str | None:
    """Say why nobody could claim `topic` for `group` at present; None: nothing stands against it.

    Paused by the larger of the log's time and `wall_ms` (unix milliseconds): advice, as every answer between records.
    """
    part = world.partition_of(topic)
    if not part.certain:
        return (
            f"the coordination partition of topic {topic!r} no longer begins at offset 0: it is only observed, and "
            "nobody can claim from it (see `marshal-dagster recover`)"
        )
    state = world.group_of(group, topic)
    now_ms = max(part.log_time_ms or 0, wall_ms)
    if state.paused_until_s is not None and state.is_paused(now_ms):
        left_s = state.paused_until_s - now_ms / 1_000
        return f"group {group!r} is paused by {state.paused_by!r}, for {left_s:.0f} s more: no runs"
    return None
