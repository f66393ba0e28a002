"""Names that Dagster allows."""


def as_name(text: str) -> str:
    """Give `text` with `_` in place of each character that a Dagster name must not have."""
    return "".join(each if each.isascii() and each.isalnum() else "_" for each in text)
