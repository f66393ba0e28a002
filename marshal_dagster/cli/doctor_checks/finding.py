"""The result of a check of `doctor`: what it found, why that matters, and how to fix it."""

from dataclasses import dataclass
from enum import StrEnum


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
