"""The result of a check of `doctor`: what it found, why that matters, and how to fix it."""

from dataclasses import dataclass
from enum import StrEnum

from marshal_dagster.errors import AuthorizationError, MarshalError


class CheckState(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. A warning or a problem has a reason (`why`) and a command that repairs it (`fix`)."""

    name: str
    state: CheckState
    found: str
    why: str = ""
    fix: str = ""


def ok(name: str, found: str) -> Finding:
    """Return the finding that nothing is wrong."""
    return Finding(name, CheckState.OK, found)


def not_checked(name: str, why: str) -> Finding:
    """Return the finding that a check could not be made, and why."""
    return Finding(name, CheckState.NOT_CHECKED, why)


def failed(name: str, error: MarshalError) -> Finding:
    """Return the finding that a check ended with `error`: a problem, unless this user only lacks a right for it."""
    if isinstance(error, AuthorizationError):
        return not_checked(name, str(error))
    return problem(
        name,
        str(error),
        "what could not be checked may be wrong too, and batches may meet the same error",
        "fix what is reported, then: marshal-dagster doctor",
    )


def warning(name: str, found: str, why: str, fix: str) -> Finding:
    """Return a finding about something that works, but could be better or may soon fail."""
    return Finding(name, CheckState.WARNING, found, why, fix)


def problem(name: str, found: str, why: str, fix: str) -> Finding:
    """Return a finding about something that does not work."""
    return Finding(name, CheckState.PROBLEM, found, why, fix)


def alter_topic(topic: str, setting: str, servers: str = "HOST:PORT") -> str:
    """Return the command that changes a setting of a topic (NAME=VALUE,...)."""
    return (
        f"kafka-configs --bootstrap-server {servers} --alter --entity-type topics --entity-name {topic} "
        f"--add-config {setting}"
    )
