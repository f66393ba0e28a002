"""Write tests/scenarios and docs/verification/transcripts.md: annotated coordination logs of typical cases.

Each scenario runs the library on a coordination log in memory. The scenario advances the clock and counts ids, so that
its transcript is always the same. Run `python -m tools.transcripts` after a change to what members write or readers
conclude, and review the difference.
"""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from unittest import mock

from marshal_dagster.admin import group_writer
from marshal_dagster.admin.operator import GroupAdmin
from marshal_dagster.batches import session
from marshal_dagster.coordination import claims
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import MarshalError
from marshal_dagster.protocol.messages import DeliveryMode, InvalidMessage, coordination_partition, parse
from marshal_dagster.protocol.state import Group, Key
from marshal_dagster.protocol.world import PartitionWorld, Verdict, World
from marshal_dagster.testing import ManualClock, MemoryBroker
from tests.batch_fixtures import Scene
from tests.members import GROUP, HI_MS, TOPIC, TOPIC_ID, Site, faulty
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Side

TOP = Path(__file__).resolve().parents[1]
FOLDER = TOP / "tests" / "scenarios"
PAGE = TOP / "docs" / "verification" / "transcripts.md"

COLUMNS = "seconds, log offset, instance, record, verdict: what it changed"
INTRODUCTION = """\
<!-- Made by `python -m tools.transcripts`; do not edit. -->

# Members at work

The contents of the coordination log in six cases, with the readers' verdict on each record. Lines with `--` show what
members find and what happens between the records. The library itself writes these transcripts, with a log in memory,
and tests compare them with its current behaviour. An offset is the next one to read. A range [start, end) excludes its
end. A record is shown without the fields that are the same in all records. A dash means that a value no longer exists.
HI is the heartbeat interval of the group. [The protocol](docs/reference/protocol.md) explains the records.
"""

State = Mapping[str, Mapping[str, object]]
"""The displayed state: fields of the group and of each key."""

_NONE: Final = "-"


@dataclass(slots=True)
class Transcript:
    """The records of one scenario, and annotations between them."""

    broker: MemoryBroker
    clock: ManualClock
    events: list[tuple[int, str]] = field(default_factory=list)
    began_ms: int = field(init=False)

    def __post_init__(self) -> None:
        """Start the time at 0."""
        self.began_ms = self.clock.wall_ms()

    @property
    def home(self) -> int:
        """The coordination partition of `TOPIC`."""
        return coordination_partition(TOPIC, self.broker.identity.partitions)

    def tell(self, text: str) -> None:
        """Add an annotation at the current end of the log."""
        self.events.append((self.broker.bounds(self.home).end, text))

    def report_error(self, who: str, act: Callable[[], object]) -> None:
        """Call `act`, which must fail, and add the error as an annotation."""
        try:
            act()
        except MarshalError as error:
            self.tell(f"{who}: {type(error).__name__}: {error}")
        else:
            raise AssertionError(f"{who} should have failed")

    def advance(self, duration_ms: float) -> None:
        """Advance the clock, with an annotation."""
        self.tell(f"{duration_ms / 1_000:.3f} s pass")
        self.clock.advance(duration_ms)

    def lines(self) -> Iterator[str]:
        """Yield a line for each record with its verdict and its changes, then the final state."""
        world = World(self.broker.identity.partitions).start(self.home, 0)
        events, before = list(self.events), self._state(world)
        for offset, at_ms, value in self.broker.records(self.home):
            while events and events[0][0] <= offset:
                yield f"      -- {events.pop(0)[1]}"
            verdict = world.apply(offset, at_ms, value)
            after = self._state(world)
            changes = "; ".join(_changes(before, after))
            before = after
            yield f"{self._time(at_ms):>8} {offset:3}  {_record(value):66} {_verdict(verdict)}" + (
                changes and f": {changes}"
            )
        yield from (f"      -- {text}" for _, text in events)
        yield from ("", "Final state:", *(f"  {change}" for change in _changes({}, before)))

    def _state(self, world: PartitionWorld) -> State:
        """Return the displayed state of the group and its keys."""
        group = world.groups.get(GROUP)
        if group is None:
            return {}
        keys = {f"{topic}/{number}": self._key_state(key) for (topic, number), key in sorted(group.keys.items())}
        return {"group": self._group_state(group), **keys}

    def _group_state(self, group: Group) -> dict[str, object]:
        settings, until_s = group.settings, group.paused_until_s
        return {
            "HI": f"{settings.heartbeat_interval_ms} ms",
            "rule set": settings.rule_set,
            "delivery": settings.delivery,
            "paused until": None if until_s is None else self._time(until_s * 1_000),
            "paused by": group.paused_by,
        }

    def _key_state(self, key: Key) -> dict[str, object]:
        owner = key.owner
        return {
            "owner": owner and owner.instance,
            "epoch": owner and owner.epoch,
            "last beat": owner and self._time(key.last_beat_ms),
            "offset": key.offset,
            "plan end": key.plan_end,
            "plan attempts": key.plan_attempts or None,
            "generation": key.generation or None,
            "data topic": key.data_topic_id,
        }

    def _time(self, at_ms: int) -> str:
        return f"{(at_ms - self.began_ms) / 1_000:.3f}"


def _changes(before: State, after: State) -> Iterator[str]:
    """Yield the changed fields of each name, with a dash for a value that no longer exists."""
    for name, now in after.items():
        was = before.get(name, {})
        parts = [f"{what} {_NONE if value is None else value}" for what, value in now.items() if value != was.get(what)]
        if parts:
            yield f"{name} {', '.join(parts)}"


def _record(value: bytes | None) -> str:
    """Return a record as text, without the fields that are the same in all records."""
    message = parse(value)
    if isinstance(message, InvalidMessage) or value is None:
        return f"(invalid: {message})"
    kind, *fields = value.decode().split("/")
    place = f" {message.topic}/{message.partition}" if message.topic else ""
    return f"{message.instance:20} {kind}{place} {'/'.join(fields[7:])}"


def _verdict(verdict: Verdict) -> str:
    why = verdict.reason or "; ".join(verdict.notes)
    return f"{verdict.kind}" + (f" ({why})" if why else "")


# Scenarios


def claim_race() -> Transcript:
    """Two members find the same free partitions. Each partition goes to the member whose claim is first in the log."""
    site = Site()
    story = Transcript(site.broker, site.clock)
    first, second = site.member(), site.member()
    found = [(one.member.instance, one.claimable([0, 1])) for one in (first, second)]
    story.tell(f"claimable for each member: {found}")

    def second_is_faster() -> None:
        faulty(first).recover()
        story.tell(f"{second.member.instance} wins {[one.partition for one in second.claim([1])]}")

    faulty(first).before_append = second_is_faster
    story.tell(f"{first.member.instance} wins {[one.partition for one in first.claim([0, 1])]}")
    for member, number in ((first, 0), (second, 1)):
        member.name_data_topic(TOPIC_ID)
        member.beat({number: 0})
        member.plan({number: 5})
        member.commit({number: 5})
        member.release()
    return story


def takeover_of_a_plan() -> Transcript:
    """A member dies before its commit. Once it is stale, another member repeats its exact plan, and then continues."""
    scene = Scene()
    scene.data.make(partitions=1, messages=5)
    story = Transcript(scene.broker, scene.clock)
    _die(story, scene, DeliveryMode.AT_LEAST_ONCE, KillPoint(Side.BEFORE, "Heartbeat", 2))
    scene.data.append(0, 2)
    story.tell("2 more messages arrive")
    _work(story, scene, DeliveryMode.AT_LEAST_ONCE)
    story.advance(2 * HI_MS + 1)
    _work(story, scene, DeliveryMode.AT_LEAST_ONCE)
    _work(story, scene, DeliveryMode.AT_LEAST_ONCE)
    _report_counts(story, scene, DeliveryMode.AT_LEAST_ONCE)
    return story


def at_most_once_killed_after_its_commit() -> Transcript:
    """A member dies between its commit and its work. The batch is dropped, so that no member processes it twice."""
    scene = Scene()
    scene.data.make(partitions=1, messages=5)
    story = Transcript(scene.broker, scene.clock)
    _die(story, scene, DeliveryMode.AT_MOST_ONCE, KillPoint(Side.AFTER, "Heartbeat", 2), max_records=3)
    story.tell(f"it had announced: {', '.join(map(str, scene.announced))}")
    story.advance(2 * HI_MS + 1)
    _work(story, scene, DeliveryMode.AT_MOST_ONCE)
    _work(story, scene, DeliveryMode.AT_MOST_ONCE)
    _report_counts(story, scene, DeliveryMode.AT_MOST_ONCE)
    return story


def pause_and_set_position() -> Transcript:
    """During a pause a member finishes its batch, and none claims. Then an operator sets the position back."""
    site = Site()
    story = Transcript(site.broker, site.clock)
    acting = GroupAdmin(Rationalizer(site.log(), clock=site.clock), GROUP, "ops", clock=site.clock)
    member, waiting = site.owner_of(0, at=50), site.member()
    member.plan({0: 60})
    acting.pause(site.clock.wall_ms() // 1_000 + 60)
    waiting.rationalizer.catch_up()
    story.report_error(waiting.member.instance, lambda: waiting.claim([1]))
    member.commit({0: 60})
    story.report_error(member.member.instance, lambda: member.plan({0: 70}))
    member.release()
    acting.set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    story.tell("the pause that was in force is restored")
    story.advance(60_000)
    (claim,) = waiting.claim([0])
    story.tell(f"{waiting.member.instance} starts at {claim.offset} in generation {claim.generation}")
    waiting.beat()
    waiting.plan({0: 20})
    waiting.commit({0: 20})
    waiting.release()
    return story


def effectively_once_half_taken_over() -> Transcript:
    """A member dies during its commit. Two others take over its partitions, and find the rows in the output."""
    scene = Scene()
    scene.data.make(partitions=3, messages=5)
    story = Transcript(scene.broker, scene.clock)
    _die(story, scene, DeliveryMode.EFFECTIVELY_ONCE, KillPoint(Side.WITHIN, "Heartbeat", 3))
    story.advance(2 * HI_MS + 1)
    _work(story, scene, DeliveryMode.EFFECTIVELY_ONCE, partitions=(0, 1))
    scene.data.append(2, 1)
    story.tell("a message arrives in orders/2")
    _work(story, scene, DeliveryMode.EFFECTIVELY_ONCE, partitions=(2,))
    _work(story, scene, DeliveryMode.EFFECTIVELY_ONCE)
    _report_counts(story, scene, DeliveryMode.EFFECTIVELY_ONCE)
    return story


def zombie_fenced() -> Transcript:
    """A member stops just before its commit, and continues after its successor has started. It commits nothing."""
    site = Site()
    story = Transcript(site.broker, site.clock)
    late = site.owner_of(0)
    late.plan({0: 5})
    successor = site.member()

    def sleep() -> None:
        faulty(late).recover()
        story.tell(f"{late.member.instance} stops as it sends its commit")
        story.advance(2 * HI_MS + 1)
        (claim,) = successor.claim([0])
        successor.beat()
        story.tell(f"{successor.member.instance} takes over [{claim.offset}, {claim.plan_end})")
        story.tell(f"{late.member.instance} continues")

    faulty(late).before_append = sleep
    story.report_error(late.member.instance, lambda: late.commit({0: 5}))
    story.tell(f"{late.member.instance} holds {list(late.claims)} and writes no more records")
    successor.commit({0: 5})
    successor.release()
    return story


SCENARIOS: Final = (
    claim_race,
    takeover_of_a_plan,
    at_most_once_killed_after_its_commit,
    pause_and_set_position,
    effectively_once_half_taken_over,
    zombie_fenced,
)


def _die(story: Transcript, scene: Scene, mode: DeliveryMode, at: KillPoint, max_records: int | None = None) -> None:
    """Let a member process a batch until it is killed at `at`."""
    member = scene.delivery(mode, log=KillableLog(scene.log(), at))
    try:
        scene.work(member, max_records=max_records)
    except KilledError:
        story.tell(f"{member.run_id} is killed")
        _report_counts(story, scene, mode)
    else:
        raise AssertionError(f"the member was not killed at {at}")


def _work(story: Transcript, scene: Scene, mode: DeliveryMode, partitions: tuple[int, ...] | None = None) -> None:
    """Let a member process one batch, and add its ranges as an annotation."""
    member = scene.delivery(mode)
    batch = scene.work(member, partitions=partitions)
    if batch.idle is not None:
        story.tell(f"{member.run_id} has nothing to do: {batch.idle.text}")
        return
    ranges, skipped = (", ".join(map(str, each)) or "nothing" for each in (batch.ranges, batch.skipped))
    story.tell(f"{member.run_id} has processed {ranges}; skipped: {skipped}")


def _report_counts(story: Transcript, scene: Scene, mode: DeliveryMode) -> None:
    """Add an annotation that shows how often each message is in the output."""
    counts = scene.counts(mode)
    times = Counter(counts[place] for place in scene.data.all_messages())
    story.tell("messages of the topic in the output: " + ", ".join(f"{times[n]} of them {n}x" for n in sorted(times)))


Scenario = Callable[[], Transcript]


@contextmanager
def counted_ids() -> Iterator[None]:
    """Replace random instance ids with counters for each run."""
    counts: Counter[str] = Counter()

    def next_id(run_id: str) -> str:
        counts[run_id] += 1
        return f"{run_id}.{counts[run_id]}"

    with ExitStack() as stack:
        for module in (session, group_writer, claims):
            stack.enter_context(mock.patch.object(module, "new_instance_id", next_id))
        yield


def path_of(scenario: Scenario) -> Path:
    """Return the path of a scenario's transcript."""
    return FOLDER / f"{scenario.__name__}.txt"


def render(scenario: Scenario) -> str:
    """Run a scenario and return its transcript."""
    with counted_ids():
        story = scenario()
    return "\n".join((_heading(scenario), scenario.__doc__ or "", "", COLUMNS, "", *story.lines())) + "\n"


def page() -> str:
    """Return the page of the documentation, from the stored transcripts."""
    parts = [INTRODUCTION.replace("](docs/", "](../")]
    for scenario in SCENARIOS:
        text = path_of(scenario).read_text()
        lines = text[text.index(COLUMNS) :].rstrip("\n")
        parts.append(f"## {_heading(scenario)}\n\n{scenario.__doc__}\n\n```text\n{lines}\n```\n")
    return "\n".join(parts)


def _heading(scenario: Scenario) -> str:
    return scenario.__name__.replace("_", " ").capitalize()


def main() -> int:
    """Write all transcripts."""
    logging.disable()
    FOLDER.mkdir(exist_ok=True)
    for scenario in SCENARIOS:
        path_of(scenario).write_text(render(scenario))
        print(f"written: {path_of(scenario).relative_to(TOP)}")
    PAGE.write_text(page())
    print(f"written: {PAGE.relative_to(TOP)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
