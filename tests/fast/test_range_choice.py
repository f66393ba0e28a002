"""Which range of a partition a member is advised to claim (protocol.md, section 8.4, "Claim")."""

from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from marshal_dagster.protocol.messages import ClaimingRange, GroupSettings, RuleSet
from marshal_dagster.protocol.range_choice import ChoiceContext, choose_range, overlapping_dead_ranges
from marshal_dagster.protocol.range_set import MOST_RANGES, give_up
from marshal_dagster.protocol.rules import NATIVE, Event, Refusal
from marshal_dagster.protocol.state import Group, Key, Owner, Phase, Range

HI_MS = 1_000
NOW_MS = 100_000
TOPIC_ID = "A" * 22
OWNERS = [Owner(f"i{number}", "c", number) for number in range(4)]
beats_ms = st.sampled_from([NOW_MS, NOW_MS - 2 * HI_MS, NOW_MS - 2 * HI_MS - 1])


def range_group() -> Group:
    """Return a group that enables ranges and is not paused."""
    return Group(GroupSettings(HI_MS, features=("ranges",)), settings_accepted=True)


@st.composite
def keys(draw: st.DrawFn) -> Key:
    """Return a key with ranges, as a log may produce it."""
    offset = draw(st.integers(0, 5))
    at, ranges = offset, []
    for _ in range(draw(st.integers(0, 6))):
        start = at + draw(st.integers(0, 3))
        at = start + draw(st.integers(1, 5))
        phase = draw(st.sampled_from(Phase))
        owner = draw(st.sampled_from(OWNERS if phase is Phase.CLAIMED else [None, *OWNERS]))
        if phase is Phase.DONE:
            at += 1  # adjacent done ranges are merged
            ranges.append(Range(start + 1, at, phase))
            continue
        ranges.append(Range(start, at, phase, owner, draw(beats_ms) if owner else 0, draw(st.integers(0, 3))))
    return Key(
        offset=draw(st.sampled_from([offset, offset, offset, None])) if not ranges else offset,
        owner=draw(st.sampled_from([None, *OWNERS])),
        last_beat_ms=draw(beats_ms),
        plan_end=None if ranges else draw(st.sampled_from([None, None, 99])),
        data_topic_id=TOPIC_ID if ranges else draw(st.sampled_from([None, TOPIC_ID])),
        ranges=tuple(ranges),
    )


looks = st.builds(ChoiceContext, st.just(NOW_MS), st.frozensets(st.sampled_from(OWNERS), max_size=2))


def requested(group: Group, key: Key, start: int, end: int) -> Event[ClaimingRange]:
    """Return the record that claims a range."""
    message = ClaimingRange(
        instance="new", client="c", group="g", topic="t", partition=0, time_s=0, start=start, end=end
    )
    return Event(message, 1_000, NOW_MS, group, key)


def refusal_of(event: Event[ClaimingRange]) -> Refusal | None:
    """Return the reason of the first guard that fails, or None if the claim would be accepted."""
    return next((refusal for guard, refusal in NATIVE[ClaimingRange].guards if not guard(event)), None)


def without_the_dead(key: Key, start: int, end: int, look: ChoiceContext) -> Key:
    """Revoke what a member revokes before it claims [start, end), and return the key."""
    after = replace(key, owner=None if key.owner in look.dead else key.owner)
    for each in overlapping_dead_ranges(key.ranges, start, end, look.dead):
        after.ranges = give_up(after.ranges, each)
    return after


@pytest.mark.thorough
@settings(max_examples=400)
@given(keys(), looks, st.integers(0, 40), st.integers(1, 6), st.sampled_from([None, 1, 2]))
def test_what_is_chosen_is_accepted_and_the_lowest(
    key: Key, look: ChoiceContext, until: int, size: int, max_attempts: int | None
) -> None:
    """A planned range without a live owner is chosen first, with its exact bounds.

    Otherwise the lowest free range of at most `size` offsets is chosen. The log accepts each choice.
    """
    group = range_group()
    chosen = choose_range(group, key, look, until=until, size=size, max_attempts=max_attempts)
    is_live = {range_: range_.is_live(NOW_MS, HI_MS) and range_.owner not in look.dead for range_ in key.ranges}
    left = [
        (each.start, each.end)
        for each in key.ranges
        if each.phase is Phase.PLANNED and not is_live[each] and (max_attempts is None or each.attempts < max_attempts)
    ]
    kept = [each for each in key.ranges if each.phase is not Phase.CLAIMED or is_live[each]]
    free = [at for at in range(key.offset or 0, until) if not any(each.overlaps(at, at + 1) for each in kept)]
    is_whole = group.is_live(key, NOW_MS) and key.owner not in look.dead
    if is_whole or key.plan_end is not None or key.offset is None or key.data_topic_id is None:
        event("cannot be claimed by ranges")
        assert chosen is None
        return
    if left:
        event("a planned range is left")
        assert chosen == left[0]
    elif free:
        event("a gap")
        end = next(at for at in range(free[0] + 1, free[0] + size + 1) if at not in free or at == free[0] + size)
        assert chosen == (free[0], end)
    else:
        event("nothing is free")
        assert chosen is None
    if chosen is not None:
        after = without_the_dead(key, *chosen, look)
        assert refusal_of(requested(group, after, *chosen)) is None


@pytest.mark.parametrize(
    "group",
    [
        replace(range_group(), settings=GroupSettings(HI_MS)),
        replace(range_group(), settings=GroupSettings(60_000, RuleSet.GO, features=("ranges",))),
        replace(range_group(), paused_until_s=NOW_MS // 1_000 + 1, paused_by="ops"),
    ],
    ids=["not enabled", "shared with Go", "paused"],
)
def test_nothing_is_chosen_where_the_group_allows_none(group: Group) -> None:
    """In a group that does not enable ranges, or that is paused, no range is chosen."""
    key = Key(offset=0, data_topic_id=TOPIC_ID)
    assert choose_range(range_group(), key, ChoiceContext(NOW_MS), until=9, size=5) == (0, 5)

    assert choose_range(group, key, ChoiceContext(NOW_MS), until=9, size=5) is None


def test_nothing_is_chosen_of_what_is_only_observed() -> None:
    """Nothing is chosen from a provisional state, because it does not show what is free."""
    key = Key(offset=0, data_topic_id=TOPIC_ID, provisional=True)

    assert choose_range(range_group(), key, ChoiceContext(NOW_MS), until=9, size=5) is None


def test_no_more_ranges_than_a_key_may_have() -> None:
    """With 256 ranges no new range is chosen, unless some expired or are revoked first.

    A planned range is still taken over.
    """
    owners = [Owner("i", "c", number) for number in range(MOST_RANGES)]
    ranges = tuple(Range(2 * n, 2 * n + 1, Phase.CLAIMED, owners[n], NOW_MS) for n in range(MOST_RANGES))
    key, group = Key(offset=0, data_topic_id=TOPIC_ID, ranges=ranges), range_group()
    assert choose_range(group, key, ChoiceContext(NOW_MS), until=1_000, size=5) is None
    assert refusal_of(requested(group, key, 1, 2)) is Refusal.TOO_MANY_RANGES

    elsewhere = ChoiceContext(NOW_MS, frozenset(owners[-1:]))
    assert choose_range(group, key, elsewhere, until=1_000, size=5) is None
    in_place = ChoiceContext(NOW_MS, frozenset(owners[:1]))
    assert choose_range(group, key, in_place, until=1_000, size=5) == (0, 2)
    key.ranges = (*ranges[:-1], ranges[-1]._replace(phase=Phase.PLANNED, owner=None))
    assert choose_range(group, key, ChoiceContext(NOW_MS), until=1, size=5) == (510, 511)
