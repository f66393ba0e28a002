"""Names that Dagster allows."""

import hashlib


def as_name(text: str) -> str:
    """Give `text` with `_` in place of each character that a Dagster name must not have."""
    return "".join(each if each.isascii() and each.isalnum() else "_" for each in text)


def own_name(text: str) -> str:
    """Give the same, told apart from what other texts come to: `a.b` and `a-b` are two topics."""
    name = as_name(text)
    return name if name == text else f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
