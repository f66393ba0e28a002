"""Check the names of topics, and suggest existing topics for a misspelt name."""

from collections.abc import Iterable
from typing import Final

from marshal_dagster._internal.texts import first_few
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.messages import is_topic

_MOST_NEAR: Final = 5


def nearest_names_text(name: str, names: Iterable[str]) -> str:
    """Return the end of an error message with up to five of `names`, the most similar to `name` first."""
    from difflib import SequenceMatcher

    others = sorted(set(names) - {name})
    if not others:
        return "this user can see no topic"
    lowered = name.lower()
    others.sort(key=lambda other: -SequenceMatcher(None, lowered, other.lower()).ratio())
    return f"existing topics, nearest names first: {first_few(list(map(repr, others)), _MOST_NEAR)}"


def topic_name_problem(name: str) -> str | None:
    """Return why Kafka does not allow `name` for a topic, or None if it does."""
    if is_topic(name):
        return None
    return (
        f"{name!r} is not a name that Kafka allows for a topic: use 1 to 249 letters, digits, '.', '_' and '-', but "
        "not '.' or '..' alone"
    )


def require_topic_name(field: str, name: str) -> None:
    """Raise `ConfigurationError`, with the name of `field`, unless Kafka allows `name` for a topic."""
    problem = topic_name_problem(name)
    if problem is not None:
        raise ConfigurationError(f"{field}: {problem}")
