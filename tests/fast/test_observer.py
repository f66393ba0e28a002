"""An observer is notified of the results of records and batches, and its errors change nothing."""

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from marshal_dagster.batches import ClaimedBatch
from marshal_dagster.coordination.appender import AppendResult
from marshal_dagster.coordination.claims import BaseClaim
from marshal_dagster.coordination.observer import ObservedClaimer
from marshal_dagster.errors import ClaimLostError
from marshal_dagster.protocol.messages import ClaimingPartition, DeliveryMode, RevokingClaim
from tests.batch_fixtures import HI_MS, Scene
from tests.real.kill_points import Side


@dataclass(slots=True)
class Watcher:
    """An observer that records its notifications."""

    records: list[tuple[str, int, bool | None]] = field(default_factory=list)
    """Type and partition of each record, and whether it was accepted."""
    leases_ms: list[float] = field(default_factory=list)
    """The rest of each claim's lease when its records were read back."""
    losses: list[tuple[int, int]] = field(default_factory=list)
    batches: list[ClaimedBatch] = field(default_factory=list)

    def sent(self, claimer: ObservedClaimer, sent: AppendResult) -> None:
        """Append the records, and the rest of the lease."""
        now_ms = claimer.clock.lease_ms()
        for message, outcome in sent:
            accepted = None if outcome is None else outcome.accepted
            self.records.append((type(message).__name__, message.partition, accepted))
            claim = claimer.claims.get(message.partition)
            if claim is not None:
                self.leases_ms.append(claim.lease.left_ms(now_ms))

    def lost(self, claimer: ObservedClaimer, claim: BaseClaim, why: str) -> None:
        """Append the partition and epoch."""
        assert claimer.claims.get(claim.partition) is None
        assert why
        self.losses.append((claim.partition, claim.epoch))

    def left(self, batch: ClaimedBatch) -> None:
        """Append the batch."""
        self.batches.append(batch)


class Broken:
    """An observer that fails at each notification."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - methods of an observer
        """Return a method that fails."""

        def fail(*_: object) -> None:
            raise RuntimeError(name)

        return fail


@pytest.fixture
def scene() -> Scene:
    """Return a topic with one partition and ten messages."""
    scene = Scene()
    scene.data.make(partitions=1, messages=10)
    return scene


@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize("mode", DeliveryMode)
def test_it_is_reported_each_record_and_of_the_batch(scene: Scene, mode: DeliveryMode, ranges: bool) -> None:
    """The observer is notified of the claim, plan, commit and end of a batch, in each mode, with and without ranges."""
    watcher = Watcher()

    batch = scene.work(scene.delivery(mode, ranges=ranges, observer=watcher))

    names = [name for name, _, accepted in watcher.records if accepted]
    wanted = ["ClaimingRange", "PlanningRange", "RangeDone"] if ranges else ["ClaimingPartition", "ClaimingMessages"]
    assert [name for name in names if name in wanted] == wanted
    assert len(names) == len(watcher.records)
    assert watcher.batches[-1] is batch
    assert watcher.losses == []


def test_it_sees_the_lease_as_it_was_before_a_heartbeat_renewed_it(scene: Scene) -> None:
    """The observer sees what was left of the lease before the heartbeat renewed it, at its lowest."""
    watcher = Watcher()
    delivery = scene.delivery(observer=watcher)
    with scene.batch(delivery) as batch:
        scene.process(batch)
        watcher.leases_ms.clear()
        scene.clock.advance(HI_MS)

    assert watcher.leases_ms == [HI_MS * 0.9]


def test_it_is_reported_a_refused_commit_and_of_the_lost_claim(scene: Scene) -> None:
    """If a claim is revoked during the work, the observer gets the refused commit and the lost claim with its epoch."""
    watcher = Watcher()
    revoked: list[int] = []

    def revoke() -> None:
        owner = scene.key().owner
        assert owner is not None
        assert owner.epoch is not None
        revoked.append(owner.epoch)
        scene.about(RevokingClaim, "ops.1", epoch=owner.epoch)

    log = scene.meddled(Side.BEFORE, "Heartbeat", revoke, count=2)
    batch = scene.batch(scene.delivery(log=log, observer=watcher))
    with pytest.raises(ClaimLostError), batch:
        scene.process(batch)

    assert ("Heartbeat", 0, False) in watcher.records
    assert watcher.losses == [(0, revoked[0])]
    assert watcher.batches == [batch]


def test_it_is_reported_a_claim_that_another_got_first(scene: Scene) -> None:
    """A refused claim is not reported as lost, because it was never held."""
    scene.work(scene.delivery(), max_records=1)
    watcher = Watcher()
    log = scene.meddled(Side.BEFORE, "ClaimingPartition", lambda: scene.about(ClaimingPartition, "other.1"))

    scene.work(scene.delivery(log=log, observer=watcher))

    assert watcher.records == [("ClaimingPartition", 0, False)]
    assert watcher.losses == []


def test_one_that_fails_changes_nothing(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """An observer's error is logged. The batch is processed and committed as without the observer."""
    batch = scene.work(scene.delivery(observer=Broken()))

    assert batch.committed
    assert scene.key().offset == 10
    assert scene.key().owner is None
    reported = {record.getMessage() for record in caplog.records if record.levelno == logging.ERROR}
    assert reported == {"an observer of claims failed", "an observer of batches failed"}


def test_a_lost_claim_stays_lost_with_one_that_fails(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """If an observer fails when a claim is lost, the run is still fenced."""
    batch = scene.batch(scene.delivery(observer=Broken()))
    batch.__enter__()
    scene.process(batch)
    scene.wait_until_stale()

    with pytest.raises(ClaimLostError):
        batch.__exit__(None, None, None)

    assert scene.key().offset == 0
    assert "an observer of claims failed" in caplog.text
