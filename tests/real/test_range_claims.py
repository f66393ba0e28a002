"""Several members share a partition of a real log by ranges.

One dies, and all is processed (protocol.md, section 8.4).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from marshal_dagster.coordination.claimer import Claimer, Member, new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.range_claimer import RangeClaimer
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ClaimLostError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import GroupSettings
from marshal_dagster.protocol.state import Key, Phase
from tests.real.log_time import let_claims_become_stale

GROUP, DATA_TOPIC, TOPIC_ID = "sharers", "orders", "A" * 22
SETTINGS = GroupSettings(60_000, features=("ranges",))
"""With an interval so long that no lease ends, even if this process or the broker is stopped for a while."""
MESSAGES, SIZE = 1_000, 100


class Site:
    """A coordination topic of a real cluster, and members that open it."""

    def __init__(self, connection: KafkaConnection, topic: str, stack: ExitStack) -> None:
        """Use an existing topic."""
        self._connection, self._topic, self._stack = connection, topic, stack
        self.reader = self.rationalizer()

    def rationalizer(self) -> Rationalizer:
        """Open a separate log."""
        log = KafkaLog(self._connection, self._topic, SETTINGS.heartbeat_interval_ms)
        self._stack.enter_context(closing(log))
        return Rationalizer(log, topics=[DATA_TOPIC])

    def member(self, rationalizer: Rationalizer, name: str) -> RangeClaimer:
        """Open a member."""
        claimer = RangeClaimer(rationalizer, Member(GROUP, name, new_instance_id(name)), DATA_TOPIC, SETTINGS)
        claimer.ensure_group_settings()
        return claimer

    def let_claims_become_stale(self) -> None:
        """Let the claims of all present members become stale. None of them may write meanwhile."""
        let_claims_become_stale(self._connection, self._topic, SETTINGS.heartbeat_interval_ms)

    def key(self) -> Key:
        """Read the partition's state."""
        return self.reader.catch_up().snapshot_key(GROUP, DATA_TOPIC, 0)


@pytest.fixture
def site(connection: KafkaConnection, coordination_topic: str) -> Iterator[Site]:
    """A group that enables ranges, with a partition at offset 0."""
    with ExitStack() as stack:
        site = Site(connection, coordination_topic, stack)
        first = Claimer(site.reader, Member(GROUP, "first", new_instance_id("first")), DATA_TOPIC, SETTINGS)
        first.ensure_group_settings()
        first.claim([0])
        first.name_data_topic(TOPIC_ID)
        first.beat({0: 0})
        first.release()
        yield site


Processed = list[tuple[int, int, int]]
"""Start, end and attempts of each range that was processed."""


def share(site: Site, is_done: Callable[[Key], bool]) -> Processed:
    """Process range after range in three threads, each with a new member, until the partition is done."""
    processed: Processed = []

    def work(name: str) -> None:
        rationalizer = site.rationalizer()
        while not is_done((claimer := site.member(rationalizer, name)).key(0)):
            for claim in claimer.claim(claimer.choose({0: MESSAGES}, SIZE)):
                claimer.plan({0: claim.end})
                claimer.beat()
                processed.append((claim.start, claim.end, claim.attempts))
                claimer.commit({0: claim.end})
            claimer.release()

    names = ("red", "green", "blue")
    with ThreadPoolExecutor(len(names)) as threads:
        list(threads.map(work, names))
    return processed


def test_three_members_share_a_partition_and_outlive_a_fourth(site: Site) -> None:
    """Each offset is processed once.

    A member lives until the others have done the rest. Its planned range is then taken over exactly, and the offset
    reaches the end.
    """
    dead = site.member(site.rationalizer(), "dead")
    dead.claim({0: (0, 2 * SIZE)})
    dead.plan({0: SIZE})

    done = share(site, lambda key: any((*of[:2], of.phase) == (SIZE, MESSAGES, Phase.DONE) for of in key.ranges))
    assert site.key().offset == 0, "a living member's range was taken"
    assert sorted(done) == [(start, start + SIZE, 0) for start in range(SIZE, MESSAGES, SIZE)]

    dead.beat()
    site.let_claims_become_stale()
    assert share(site, lambda key: key.offset == MESSAGES) == [(0, SIZE, 1)]
    assert (site.key().offset, site.key().ranges) == (MESSAGES, ())
    with pytest.raises(ClaimLostError):
        dead.commit({0: SIZE})


def test_a_dead_member_that_is_known_keeps_nobody_waiting(site: Site) -> None:
    """Ranges of a member known to be dead are revoked and claimed at once, planned or not."""
    dead = site.member(site.rationalizer(), "dead")
    dead.claim({0: (0, SIZE)})
    dead.plan({0: SIZE})
    other = site.member(site.rationalizer(), "other")
    other.claim({0: (SIZE, 3 * SIZE)})
    successor = site.member(site.rationalizer(), "successor")

    wanted = successor.choose({0: MESSAGES}, SIZE, is_dead=lambda owner: owner.client == "dead")
    (claim,) = successor.claim(wanted, is_dead=lambda owner: owner.client == "dead")
    successor.commit({0: claim.end})

    assert (claim.start, claim.plan_end, claim.attempts) == (0, SIZE, 1)
    other.beat()
    assert site.key().offset == SIZE
    with pytest.raises(ClaimLostError):
        dead.beat()
