"""The library computes the same states as the worked examples in docs/reference/protocol.md show."""

import re
from pathlib import Path

import pytest

from marshal_dagster.protocol.messages import RuleSet
from marshal_dagster.protocol.snapshots import render
from marshal_dagster.protocol.state import Key, Range
from marshal_dagster.protocol.world import World

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "protocol.md").read_text()
RECORD = re.compile(r" ?\d+  (?P<time>\d+)  (?P<value>\S.*)")


def blocks(heading: str, language: str) -> list[str]:
    """Return the code blocks of this language under a heading."""
    section = PAGE.partition(f"\n### {heading}\n")[2].partition("\n### ")[0]
    return re.findall(rf"^```{language}\n(.*?)\n^```$", section, re.MULTILINE | re.DOTALL)


def shown(verdict: str, key: Key) -> list[str]:
    """Return a verdict and the state of a key in the format of the page."""
    owner = "none" if key.owner is None else f"{key.owner.instance} at epoch {key.owner.epoch}"
    offset, plan = ("none" if number is None else number for number in (key.offset, key.plan_end))
    first = (
        f"{verdict}: owner {owner}, offset {offset}, plan {plan}, attempts {key.plan_attempts}, "
        f"generation {key.generation}, id {(key.data_topic_id or 'none')[:4]}"
    )
    return [first, *(["; ".join(map(shown_range, key.ranges))] if key.ranges else [])]


def shown_range(held: Range) -> str:
    """Return a range in the format of the page."""
    by = "" if held.owner is None else f" by {held.owner.instance} at epoch {held.owner.epoch}"
    return f"[{held.start}, {held.end}) {held.phase}{by}"


@pytest.mark.parametrize(
    ("heading", "records"),
    [("9.1 Claim, plan, takeover, set a position", 20), ("9.2 Rule set go", 7), ("9.3 Ranges", 15)],
)
def test_the_state_after_each_record_is_the_one_shown(heading: str, records: int) -> None:
    """Each record of a worked example has the shown verdict and leads to the shown state."""
    (example,) = blocks(heading, "text")
    world, offset, computed = World(1, rule_set=RuleSet.GO), 0, []
    for line in example.split("\n"):
        record = RECORD.fullmatch(line)
        if record is not None:
            verdict = world.apply(0, offset, int(record["time"]) * 1_000, record["value"].encode())
            computed += [line, *(f"         {text}" for text in shown(verdict.kind, world.key("shops", "orders", 0)))]
            offset += 1
    assert computed == example.split("\n")
    assert offset == records


def test_the_snapshot_is_the_one_that_the_library_writes() -> None:
    """The shown keys and values are the snapshot after the sixth record of the first example."""
    (example,) = blocks("9.1 Claim, plan, takeover, set a position", "text")
    lines = [record for line in example.split("\n") if (record := RECORD.fullmatch(line)) is not None]
    world = World(1, rule_set=RuleSet.GO).start(0, 0)
    for offset, line in enumerate(lines[:6]):
        timestamp_ms, value = int(line["time"]) * 1_000, line["value"].encode()
        world.apply(offset, timestamp_ms, value)
        world.set_last_record((offset, timestamp_ms, value))
    records = render(world, topic_id="Wn4mS1yXRkGq0b7c_d2f3A", snapshot_id="example")
    keys, values = blocks("9.4 A snapshot", "text"), blocks("9.4 A snapshot", "json")
    assert [(key.decode(), value and value.decode()) for key, value in records] == list(zip(keys, values, strict=True))
