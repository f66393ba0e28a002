"""Which names Kafka allows for a topic, and which ones are near to one that was misspelt."""

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Final

from marshal_dagster._internal.texts import first_few
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.messages import is_topic

_MOST_NEAR: Final = 5


def nearest_names_text(name: str, names: Iterable[str]) -> str:
    """Name up to five of `names`, the one that is most like `name` first; for the end of an error message."""
    others = sorted(set(names) - {name})
    if not others:
        return "there is no topic that this user may see"
    lowered = name.lower()
    others.sort(key=lambda other: -SequenceMatcher(None, lowered, other.lower()).ratio())
    return f"existing topics, nearest names first: {first_few(list(map(repr, others)), _MOST_NEAR)}"


def topic_name_problem(name: str) -> str | None:
    """Return why `name` cannot be a topic's; None if it can."""
    if is_topic(name):
        return None
    return f"{name!r} is no name that Kafka allows for a topic: use letters, digits, '.', '_' and '-'"


def require_topic_name(field: str, name: str) -> None:
    """Raise `ConfigurationError`, which names `field`, unless Kafka allows `name` for a topic."""
    problem = topic_name_problem(name)
    if problem is not None:
        raise ConfigurationError(f"{field}: {problem}")
