"""Writes records about one group to all coordination partitions."""

from collections.abc import Mapping
from dataclasses import replace

from marshal_dagster.coordination.appender import Sender
from marshal_dagster.coordination.claims import Member, new_instance_id
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.group_settings import require_all_certain
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import UnavailableError
from marshal_dagster.protocol.messages import ReleaseGroup
from marshal_dagster.protocol.state import Group

TRIES = 5


class GroupWriter:
    """Writes pauses of one group, each in the name of a new instance, and shows the group by coordination partition.

    The rationalizer follows all coordination partitions from the first act on.
    """

    def __init__(self, rationalizer: Rationalizer, group: str, client: str, *, clock: Clock | None = None) -> None:
        """Act on `group`; `client` is for people to see. Raises `ConfigurationError` for names no record can carry."""
        self.name = group
        self.rationalizer = rationalizer
        self.clock = clock or SystemClock()
        self._member = Member(group, client, new_instance_id("operator"))
        self._sender = Sender(rationalizer, "", self.clock)

    @property
    def numbers(self) -> range:
        """All coordination partitions."""
        return range(self.rationalizer.identity.partitions)

    def new_member(self, role: str = "operator") -> Member:
        """Return a member whose instance id was never used; it begins with `role`."""
        return replace(self._member, instance=new_instance_id(role))

    def group(self, topic: str) -> Group:
        """Return the group as the coordination partition of `topic` has it."""
        return self.rationalizer.world.group_of(self.name, topic)

    def groups(self) -> dict[int, Group]:
        """Read on, and return the group as each coordination partition has it, if it does.

        Raises `IncompleteLogError` where that is not known, as after retention has overtaken the reader.
        """
        world = self.rationalizer.follow_all()
        require_all_certain(world)
        found = {number: partition.groups.get(self.name) for number, partition in world.partitions.items()}
        return {number: group for number, group in found.items() if group is not None}

    def write_pause(self, member: Member, ends: Mapping[int, int]) -> None:
        """Write the end of a pause to each coordination partition, in the name of `member`, and read it back.

        Raises `UnavailableError`, which names the coordination partitions where it could not be written.
        """
        with self.rationalizer.lock:
            self.rationalizer.follow_all()
            signed, unsent = self._sender.signed(member), list(ends)
            for _ in range(TRIES):
                messages = [ReleaseGroup(expiry_s=ends[number], **signed) for number in unsent]
                sent = self._sender.send(messages, unsent)
                unsent = [number for number, outcome in zip(unsent, sent.outcomes, strict=True) if outcome is None]
                if not unsent:
                    return
        raise UnavailableError(
            f"the pause of group {self.name!r} could not be written to coordination partitions {unsent}: the broker "
            "did not acknowledge it in time. Elsewhere it is in force; try again, which completes it"
        )
