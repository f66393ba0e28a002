"""The text for a paused group, in errors, in reasons for an idle batch, in tables and on the command line."""


def paused_text(until: str, by: str | None = None) -> str:
    """Return the text for a pause that ends at `until`, begun by instance `by` where that is shown."""
    return f"paused until {until}" + (f" by {by}" if by else "")


def paused_group_text(group: str, until_s: int | None, by: str | None = None) -> str:
    """Return the text for `group`, paused until then (unix seconds)."""
    return f"group {group!r} is {paused_text(f'{until_s} (unix seconds)', by)}"
