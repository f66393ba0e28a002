"""Describe the rights that a request needs, and build the `kafka-acls` command that grants them.

`errors` and the command line put both into error messages.
"""

from dataclasses import dataclass
from enum import StrEnum


class Right(StrEnum):
    """An operation that a principal may be allowed to do, as `kafka-acls` names it."""

    DESCRIBE = "Describe"
    DESCRIBE_CONFIGS = "DescribeConfigs"
    READ = "Read"
    WRITE = "Write"
    CREATE = "Create"
    ALTER = "Alter"
    DELETE = "Delete"


@dataclass(frozen=True, slots=True)
class Needed:
    """Rights on a topic, on a group, or on both; if neither is named, on the cluster.

    With `transactional_ids` the rights are on the transactional ids that begin with that text.
    """

    rights: tuple[Right, ...]
    topic: str | None = None
    group: str | None = None
    transactional_ids: str | None = None

    def __str__(self) -> str:
        places = [f"on {kind} {name!r}" for kind, name in self._named()] or ["on the cluster"]
        if self.transactional_ids is not None:
            places = [f"on transactional ids that begin with {self.transactional_ids!r}"]
        return f"{' and '.join(right.name for right in self.rights)} {' and '.join(places)}"

    def _named(self) -> list[tuple[str, str]]:
        kinds = (("group", self.group), ("topic", self.topic), ("transactional-id", self.transactional_ids))
        return [(kind, name) for kind, name in kinds if name is not None]

    def command(self, servers: str, user: str | None) -> str:
        """Return the command that grants the rights.

        Args:
            servers: The bootstrap servers.
            user: The user name; None if the name of the principal is unknown. The command then has `NAME` in its place.
        """
        import shlex

        words = ["kafka-acls", "--bootstrap-server", servers, "--add", "--allow-principal", f"User:{user or 'NAME'}"]
        for right in self.rights:
            words += ["--operation", right]
        for kind, name in self._named():
            words += [f"--{kind}", name]
        if self.transactional_ids is not None:
            words += ["--resource-pattern-type", "prefixed"]
        return shlex.join(words if self._named() else [*words, "--cluster"])


def on_topic(topic: str, *rights: Right) -> Needed:
    """Return `rights` on a topic."""
    return Needed(rights, topic)
