"""Base class of the operations that write records of one group to all coordination partitions."""

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
    """Writes pauses of one group, each as a new instance, and returns the group's state by coordination partition.

    From the first call on, the rationalizer follows all coordination partitions.
    """

    def __init__(self, rationalizer: Rationalizer, group: str, client: str, *, clock: Clock | None = None) -> None:
        """Prepare records of `group`; `client` names the operator in them.

        Raises `ConfigurationError` for names that a record cannot contain.
        """
        self.name = group
        self.rationalizer = rationalizer
        self.clock = clock or SystemClock()
        self._member = Member(group, client, new_instance_id("operator"))
        self._sender = Sender(rationalizer, "", self.clock)

    @property
    def numbers(self) -> range:
        """The numbers of all coordination partitions."""
        return range(self.rationalizer.identity.partitions)

    def new_member(self, role: str = "operator") -> Member:
        """Return a member with a new instance id, which begins with `role`."""
        return replace(self._member, instance=new_instance_id(role))

    def group(self, topic: str) -> Group:
        """Return the state of the group in the coordination partition of `topic`."""
        return self.rationalizer.world.group_of(self.name, topic)

    def groups(self) -> dict[int, Group]:
        """Read to the end of the log and return the state of the group in each coordination partition that has it.

        Raises `IncompleteLogError` if a partition is incomplete, for example because retention has deleted records that
        the reader has not read.
        """
        world = self.rationalizer.follow_all()
        require_all_certain(world)
        found = {number: partition.groups.get(self.name) for number, partition in world.partitions.items()}
        return {number: group for number, group in found.items() if group is not None}

    def write_pause(self, member: Member, ends: Mapping[int, int], reason: str | None = None) -> None:
        """Write a pause as `member` to each coordination partition in `ends`, and read it back.

        `ends` has the end of the pause in unix seconds, and `reason` is why, for people. Raises `UnavailableError`,
        which names the coordination partitions where the pause could not be written.
        """
        with self.rationalizer.lock:
            self.rationalizer.follow_all()
            signed, unsent = self._sender.signed(member), list(ends)
            for _ in range(TRIES):
                messages = [ReleaseGroup(expiry_s=ends[number], **signed) for number in unsent]
                sent = self._sender.send(messages, unsent, reason)
                unsent = [number for number, outcome in zip(unsent, sent.outcomes, strict=True) if outcome is None]
                if not unsent:
                    return
        raise UnavailableError(
            f"the pause of group {self.name!r} could not be written to coordination partitions {unsent}: the broker "
            "did not acknowledge it in time. It is in force in the others; try again to complete it"
        )
