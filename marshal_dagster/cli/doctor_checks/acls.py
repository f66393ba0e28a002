"""Check the rights of this user on each topic, and report what the user can do with them."""

from collections.abc import Iterable
from dataclasses import dataclass

from marshal_dagster.cli.doctor_checks.finding import Finding, not_checked, ok, problem, warning
from marshal_dagster.kafka.acls import Right, on_topic
from marshal_dagster.kafka.inspection import TopicInfo

NAME = "rights"
_RIGHTS_REPORTED = (Right.DESCRIBE, Right.DESCRIBE_CONFIGS, Right.READ, Right.WRITE)


@dataclass(frozen=True, slots=True)
class Principal:
    """The brokers and the user that `doctor` connects as. Without a user name the principal is unknown."""

    servers: str
    user: str | None = None

    def granting(self, rights: Iterable[Right], topic: str) -> str:
        """Return the command that grants rights on a topic."""
        return on_topic(topic, *rights).command(self.servers, self.user)


def of_coordination_topic(topic_info: TopicInfo, asker: Principal) -> Finding:
    """Report what the principal can do with this coordination log. For some users reading is enough."""
    if topic_info.rights is None:
        return _rights_not_reported(topic_info)
    if Right.READ not in topic_info.rights:
        return problem(
            NAME,
            f"on {_rights_text(topic_info)}; not Read",
            "a process that cannot read the log sees no claims and cannot make any",
            asker.granting([Right.READ], topic_info.name),
        )
    if Right.WRITE in topic_info.rights:
        can = "it can claim, and pause and set the positions of every group in this log"
    else:
        can = (
            "it can read (doctor, status, tail, sensors that only request runs), but not claim, pause or set positions"
        )
    return ok(NAME, f"on {_rights_text(topic_info)}: {can}")


def of_snapshot_topic(topic_info: TopicInfo, asker: Principal, *, is_member: bool) -> Finding:
    """Check whether the principal can start from snapshots, and write them if it is a member."""
    if topic_info.rights is None:
        return _rights_not_reported(topic_info)
    wanted = [Right.READ, Right.WRITE] if is_member else [Right.READ]
    missing = [right for right in wanted if right not in topic_info.rights]
    if not missing:
        return ok(NAME, f"on {_rights_text(topic_info)}")
    why = (
        "each of its processes reads the whole log, and can claim nothing once retention has cut the log"
        if Right.READ in missing
        else "its runs cannot write snapshots: if no other runs do, each process reads the whole log"
    )
    found = f"on {_rights_text(topic_info)}; not {' nor '.join(missing)}"
    return warning(NAME, found, why, asker.granting(missing, topic_info.name))


def of_data_topic(topic_info: TopicInfo, asker: Principal, *, is_member: bool) -> Finding | None:
    """Return a warning if this principal can claim batches of a data topic, but not read them."""
    if not is_member or topic_info.rights is None or Right.READ in topic_info.rights:
        return None
    return warning(
        NAME,
        f"on {_rights_text(topic_info)}; not Read",
        "a batch of this topic would be claimed by this user, and then fail when it is read",
        asker.granting([Right.READ], topic_info.name),
    )


def missing_describe(topic: str, asker: Principal, *, is_needed: bool) -> Finding:
    """Report that the principal may not even see a topic. `is_needed`: nothing works without that right."""
    report = problem if is_needed else warning
    return report(
        NAME,
        f"on {topic}: none, not even Describe",
        "the coordination log cannot be seen at all" if is_needed else "its offsets and settings cannot be checked",
        asker.granting([Right.DESCRIBE, Right.READ], topic),
    )


def _rights_not_reported(topic_info: TopicInfo) -> Finding:
    return not_checked(NAME, f"on {topic_info.name}: the brokers do not report them")


def _rights_text(topic_info: TopicInfo) -> str:
    held = topic_info.rights or frozenset()
    return f"{topic_info.name}: {', '.join(right for right in _RIGHTS_REPORTED if right in held) or 'none'}"
