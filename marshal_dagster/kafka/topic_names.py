"""Which names Kafka allows for a topic, as its user is told."""

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.messages import is_topic


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
