"""Which names Kafka allows for a topic, and which existing names are near to a misspelt one."""

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Final

from marshal_dagster._internal.texts import first_few
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.messages import is_topic

_MOST_NEAR: Final = 5


def nearest_names_text(name: str, names: Iterable[str]) -> str:
    """Return up to five of `names` for the end of an error message, the one most similar to `name` first."""
    others = sorted(set(names) - {name})
    if not others:
        return "this user can see no topic"
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
