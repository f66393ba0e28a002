"""What the principal may do with each topic, and what it can therefore do with the library."""

from collections.abc import Iterable
from dataclasses import dataclass

from marshal_dagster.cli.doctor_checks.finding import Finding, State
from marshal_dagster.kafka.acls import Right, on_topic
from marshal_dagster.kafka.inspection import Standing

NAME = "rights"
_TOLD = (Right.DESCRIBE, Right.DESCRIBE_CONFIGS, Right.READ, Right.WRITE)


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks which brokers, for a command that grants a right; a principal without a user name is not known here."""

    servers: str
    user: str | None = None

    def granting(self, rights: Iterable[Right], topic: str) -> str:
        """Give the command."""
        return on_topic(topic, *rights).command(self.servers, self.user)


def of_coordination_topic(standing: Standing, asker: Asker) -> Finding:
    """Tell what the principal can do with this coordination log: a reader is as right as a member."""
    if standing.rights is None:
        return _not_told(standing)
    if Right.READ not in standing.rights:
        return Finding(
            NAME,
            State.PROBLEM,
            f"on {_said(standing)}; not Read",
            "who cannot read the log knows of no claim and can make none",
            asker.granting([Right.READ], standing.name),
        )
    if Right.WRITE in standing.rights:
        can = "it can claim, and pause and reposition every group in this log"
    else:
        can = (
            "it can look (doctor, status, tail, sensors that only ask for runs), and cannot claim, pause or reposition"
        )
    return Finding(NAME, State.OK, f"on {_said(standing)}: {can}")


def of_snapshot_topic(standing: Standing, asker: Asker, *, is_member: bool) -> Finding:
    """Tell whether the principal can start from snapshots, and write them where it is one that writes."""
    if standing.rights is None:
        return _not_told(standing)
    wanted = [Right.READ, Right.WRITE] if is_member else [Right.READ]
    missing = [right for right in wanted if right not in standing.rights]
    if not missing:
        return Finding(NAME, State.OK, f"on {_said(standing)}")
    why = (
        "each of its processes reads the whole log, and can claim nothing once retention has cut that"
        if Right.READ in missing
        else "its runs leave no snapshot behind: if no others do, each process reads the whole log"
    )
    found = f"on {_said(standing)}; not {' nor '.join(missing)}"
    return Finding(NAME, State.WARNING, found, why, asker.granting(missing, standing.name))


def of_data_topic(standing: Standing, asker: Asker, *, is_member: bool) -> Finding | None:
    """Tell whether batches of this principal could be read; None where nothing is in their way, or it claims none."""
    if not is_member or standing.rights is None or Right.READ in standing.rights:
        return None
    return Finding(
        NAME,
        State.WARNING,
        f"on {_said(standing)}; not Read",
        "a batch of this topic would be claimed by this user, and then fail when it is read",
        asker.granting([Right.READ], standing.name),
    )


def missing_describe(topic: str, asker: Asker, *, is_needed: bool) -> Finding:
    """Tell that the topic may not even be looked at; `is_needed`: nothing works without."""
    return Finding(
        NAME,
        State.PROBLEM if is_needed else State.WARNING,
        f"on {topic}: none, not even Describe",
        "nothing of the coordination log can be seen" if is_needed else "its offsets and settings cannot be looked at",
        asker.granting([Right.DESCRIBE, Right.READ], topic),
    )


def _not_told(standing: Standing) -> Finding:
    return Finding(NAME, State.NOT_CHECKED, f"on {standing.name}: the brokers do not tell")


def _said(standing: Standing) -> str:
    held = standing.rights or frozenset()
    return f"{standing.name}: {', '.join(right for right in _TOLD if right in held) or 'none'}"
