"""Reprocess a range with members that really read and write, and check their output."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import pytest

from marshal_dagster.admin.reprocess import RangeReprocessor
from marshal_dagster.admin.reset_positions import PositionResetter
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.testing import ManualClock
from tests.batch_fixtures import GROUP, TOPIC, Scene
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Side

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics

EFFECTIVELY_ONCE, AT_LEAST_ONCE = DeliveryMode.EFFECTIVELY_ONCE, DeliveryMode.AT_LEAST_ONCE
AGAIN = range(10, 20)


@dataclass(slots=True)
class Busy:
    """A clock that lets a member work during each sleep of the operator; the first member may die."""

    scene: Scene
    mode: DeliveryMode
    clock: ManualClock
    death: KillPoint | None = None
    has_died: bool = False
    late_ms: int = 0
    """How late the operator's clock is, compared with that of the brokers."""

    def wall_ms(self) -> int:
        """Return the time of the operator's clock."""
        return self.clock.wall_ms() - self.late_ms

    def lease_ms(self) -> float:
        """Return the scene's time."""
        return self.clock.lease_ms()

    def sleep_ms(self, duration_ms: float) -> None:
        """Let a member process a batch of at most 7 messages, then let the time pass."""
        death, self.death = self.death, None
        log = self.scene.log() if death is None else KillableLog(self.scene.log(), death)
        try:
            self.scene.work(self.scene.delivery(self.mode, log=log), max_records=7)
        except KilledError:
            self.has_died = True
            self.scene.wait_until_stale()
        self.clock.advance(duration_ms)


def reprocessor(clock: Busy) -> RangeReprocessor:
    """Return the operator's access to the log of a scene."""
    scene = clock.scene
    return RangeReprocessor(
        PositionResetter(
            open_log=lambda _: Rationalizer(scene.log(), clock=scene.clock),
            topics=cast("Topics", scene.data),
            group=GROUP,
            topic=TOPIC,
            client="ops",
            clock=clock,
        )
    )


DEATHS = [KillPoint(side, record) for record in ("ClaimingPartition", "ClaimingMessages", "Heartbeat") for side in Side]


@pytest.mark.parametrize("death", [None, *DEATHS], ids=str)
@pytest.mark.parametrize("mode", [EFFECTIVELY_ONCE, AT_LEAST_ONCE])
def test_what_is_done_again_is_replaced_or_repeated(mode: DeliveryMode, death: KillPoint | None) -> None:
    """Effectively-once output has each message once.

    At-least-once output repeats the range and at most a batch more.
    """
    scene = Scene()
    scene.data.make(partitions=1, messages=40)
    scene.drain(scene.delivery(mode))
    generation = scene.key().generation
    clock = Busy(scene, mode, scene.clock, death)
    reprocessing = reprocessor(clock)
    redo = reprocessing.look(0, AGAIN.start, AGAIN.stop)
    redone = reprocessing.carry_out([redo], wait_s=600, within_s=600).of(0)

    assert clock.has_died == (death is not None)
    assert AGAIN.stop <= redone.reached
    assert (redone.resume_offset, scene.key().offset) == (40, 40)
    counts, once = scene.counts(mode), Counter(scene.data.all_messages())
    if mode is EFFECTIVELY_ONCE:
        assert counts == once
        renewed = {offset for _, number, (_, offset) in scene.sink.rows if number > generation}
        assert renewed >= set(AGAIN)
        return
    more = counts - once
    assert set(more) >= {(0, offset) for offset in AGAIN}
    assert not once - counts
    assert {offset for _, offset in more} <= set(range(AGAIN.start, redone.reached + 7))


def test_an_owner_is_stale_by_log_time() -> None:
    """If the operator's clock is slow, the claim of a dead member is not waited for longer than by the log."""
    scene = Scene()
    scene.data.make(partitions=1, messages=30)
    scene.drain(scene.delivery(EFFECTIVELY_ONCE))
    scene.data.append(0, 1)
    with pytest.raises(KilledError):
        scene.work(
            scene.delivery(EFFECTIVELY_ONCE, log=KillableLog(scene.log(), KillPoint(Side.AFTER, "ClaimingPartition")))
        )
    scene.wait_until_stale()
    reprocessing = reprocessor(Busy(scene, EFFECTIVELY_ONCE, scene.clock, late_ms=3_600_000))
    redo = reprocessing.look(0, AGAIN.start, AGAIN.stop)
    assert reprocessing.carry_out([redo], wait_s=600, within_s=600).of(0).reached >= AGAIN.stop
