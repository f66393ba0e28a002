"""Judges a run: compares what writers committed with what consumers read."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.outbox_faults.writers import Fact
from tests.simulator.checkers import ViolationError


class Seen(NamedTuple):
    """A record as a consumer reads it, with the name of its value, in the order of offsets in its partition."""

    topic: str
    partition: int
    offset: int
    key: str | None
    value: str
    row: str
    """The id of the row, from the record's header."""


@dataclass(slots=True)
class Verdict:
    """The result of the checks: counts for the table, and violations."""

    lost: int = 0
    invented: int = 0
    repeated: int = 0
    out_of_order: int = 0
    wrongly_parked: int = 0
    violations: list[ViolationError] = field(default_factory=list)


def judge(
    facts: Sequence[Fact], seen: Sequence[Seen], parked: Mapping[str, str], waiting: Collection[str] = ()
) -> Verdict:
    """Compare the committed rows with those that were read or parked; `waiting` rows are still in the outbox."""
    verdict = Verdict()
    settled = [fact for fact in facts if fact.value not in waiting]
    _check_contents(verdict, facts, seen, waiting)
    _check_parked(verdict, settled, parked)
    _check_order(verdict, facts, seen)
    _check_ids(verdict, seen)
    return verdict


def _check_contents(verdict: Verdict, facts: Sequence[Fact], seen: Sequence[Seen], waiting: Collection[str]) -> None:
    due = {(fact.topic, fact.key, fact.value) for fact in facts if not fact.is_poisoned}
    times = Counter((each.topic, each.key, each.value) for each in seen)
    lost = {each for each in due - times.keys() if each[2] not in waiting}
    invented = times.keys() - due
    again = {each: count for each, count in times.items() if count > 1}
    verdict.lost, verdict.invented = len(lost), len(invented)
    verdict.repeated = sum(count - 1 for count in again.values())
    _report(verdict, "no committed row is lost", sorted(map(str, lost)))
    _report(verdict, "only committed rows are published", sorted(map(str, invented)))
    _report(verdict, "no row is published twice for who reads committed", sorted(map(str, again)))


def _check_parked(verdict: Verdict, facts: Sequence[Fact], parked: Mapping[str, str]) -> None:
    poisoned = {fact.value for fact in facts if fact.is_poisoned}
    wrong = poisoned ^ parked.keys()
    verdict.wrongly_parked = len(wrong)
    _report(
        verdict, "the rows set aside are the poisoned ones", [f"{each}: {parked.get(each)}" for each in sorted(wrong)]
    )


def _check_order(verdict: Verdict, facts: Sequence[Fact], seen: Sequence[Seen]) -> None:
    """Rows of a key come in the order of their commits; a repeated row never follows one of its successors."""
    place = {fact.value: number for number, fact in enumerate(facts)}
    lanes: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    for each in sorted(seen, key=lambda each: (each.topic, each.partition, each.offset)):
        if each.key is not None and each.value in place:
            lanes[each.topic, each.key].append(each)
    for (topic, key), records in lanes.items():
        if len({record.partition for record in records}) > 1:
            _report(verdict, "a key stays in its partition", [f"{key} of {topic}"])
        furthest = -1
        for each in records:
            if place[each.value] < furthest:
                verdict.out_of_order += 1
                _report(verdict, "the order of each key holds", [f"{each} follows a successor"])
            furthest = max(furthest, place[each.value])


def _check_ids(verdict: Verdict, seen: Sequence[Seen]) -> None:
    """Each row has an id that no other row has."""
    by_id: dict[str, set[str]] = defaultdict(set)
    for each in seen:
        by_id[each.row].add(each.value)
    _report(verdict, "each row has its id", sorted(row for row, values in by_id.items() if not row or len(values) > 1))


def _report(verdict: Verdict, rule: str, found: Sequence[str]) -> None:
    if found:
        verdict.violations.append(ViolationError(rule, f"{len(found)}, such as {', '.join(found[:3])}"))
