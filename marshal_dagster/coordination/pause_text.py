"""Texts for a paused group, shared by errors, idle batches, tables and the command line."""


def pause_end_text(until: str, by: str | None = None) -> str:
    """Return the text for the end of a pause, with the instance `by` that began it, if that is to be shown."""
    return until + (f" by {by}" if by else "")


def paused_text(until: str, by: str | None = None) -> str:
    """Return the text for a pause that ends at `until`."""
    return f"paused until {pause_end_text(until, by)}"


def paused_group_text(group: str, until_s: int | None, by: str | None = None) -> str:
    """Return the text for `group`, paused until `until_s` (unix seconds)."""
    return f"group {group!r} is {paused_text(f'{until_s} (unix seconds)', by)}"
