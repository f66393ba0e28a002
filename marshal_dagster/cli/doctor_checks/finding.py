"""What a check found, and how to fix it."""

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
    """One check and what it found; if that is not right, why it matters and the command that fixes it."""

    name: str
    state: CheckState
    found: str
    why: str = ""
    mend: str = ""


def ok(name: str, found: str) -> Finding:
    """Return what is as it should be."""
    return Finding(name, CheckState.OK, found)


def not_checked(name: str, why: str) -> Finding:
    """Return why a check could not be made."""
    return Finding(name, CheckState.NOT_CHECKED, why)


def warning(name: str, found: str, why: str, mend: str) -> Finding:
    """Return what works, but could be better or may soon fail."""
    return Finding(name, CheckState.WARNING, found, why, mend)


def problem(name: str, found: str, why: str, mend: str) -> Finding:
    """Return what does not work."""
    return Finding(name, CheckState.PROBLEM, found, why, mend)


def alter_topic(topic: str, setting: str, servers: str = "HOST:PORT") -> str:
    """Write the command that gives a topic a setting (NAME=VALUE,...)."""
    return (
        f"kafka-configs --bootstrap-server {servers} --alter --entity-type topics --entity-name {topic} "
        f"--add-config {setting}"
    )
