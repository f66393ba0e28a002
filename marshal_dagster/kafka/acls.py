"""Which rights a request takes, in Kafka's words, and the command that grants them."""

import shlex
from dataclasses import dataclass
from enum import StrEnum


class Right(StrEnum):
    """What a principal may do, in the words of Kafka's own tool for rights."""

    DESCRIBE = "Describe"
    DESCRIBE_CONFIGS = "DescribeConfigs"
    READ = "Read"
    WRITE = "Write"
    CREATE = "Create"
    ALTER = "Alter"
    DELETE = "Delete"


@dataclass(frozen=True, slots=True)
class Needed:
    """Rights on a topic, a group, or both; on transactional ids that begin so; on the cluster where none is named."""

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
        """Give the command that grants them to `user`; None: the principal is not known here."""
        words = ["kafka-acls", "--bootstrap-server", servers, "--add", "--allow-principal", f"User:{user or 'NAME'}"]
        for right in self.rights:
            words += ["--operation", right]
        for kind, name in self._named():
            words += [f"--{kind}", name]
        if self.transactional_ids is not None:
            words += ["--resource-pattern-type", "prefixed"]
        return shlex.join(words if self._named() else [*words, "--cluster"])


def on_topic(topic: str, *rights: Right) -> Needed:
    """Give rights on a topic."""
    return Needed(rights, topic)
