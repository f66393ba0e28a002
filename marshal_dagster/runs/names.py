"""Names that Dagster allows."""

import hashlib
import logging
from typing import Final

DEFAULT_INTERVAL_S: Final = 30
"""How often a sensor is evaluated unless its builder is told otherwise, in seconds."""

_LOG: Final = logging.getLogger(__name__)
_NAMED: Final[dict[str, str]] = {}
"""What each sensor of this process is named after."""


def as_name(text: str) -> str:
    """Give `text` with `_` in place of each character that a Dagster name must not have."""
    return "".join(each if each.isascii() and each.isalnum() else "_" for each in text)


def own_name(text: str) -> str:
    """Give the same, told apart from what other texts come to: `a.b` and `a-b` are two topics."""
    name = as_name(text)
    return name if name == text else f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def sensor_name(text: str, what: str) -> str:
    """Name a sensor after a group or topic; its dashes alone become `_` as they are.

    That gives `a-b` and `a_b` one name, and of two sensors Dagster tells but that: so it is logged whose name it is.
    """
    plain = text.replace("-", "_")
    name = f"{plain if plain == as_name(text) else own_name(text)}_{what}"
    other = _NAMED.setdefault(name, text)
    if other != text:
        _LOG.warning(
            "a sensor of %r and one of %r are both named %s: where they meet in one deployment, give one a `name`",
            other,
            text,
            name,
        )
    return name
