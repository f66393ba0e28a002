"""Let each check of an asset of claimed batches pass and fail."""

import time
import uuid
from collections.abc import Sequence
from functools import partialmethod
from types import ModuleType
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.asset_checks.asset_check_evaluation import AssetCheckEvaluationPlanned
from hypothesis import given
from hypothesis import strategies as st

from marshal_dagster.admin.operator import GroupAdmin
from marshal_dagster.assets.checks import (
    MOST_LAST,
    ClaimCheck,
    OffsetFinding,
    RecordedRange,
    build_claim_checks,
    double_commits,
    gaps,
    recorded_ranges,
    rewinds,
)
from marshal_dagster.batches import ClaimedBatch, RangeOptions
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.ops.metadata import ranges_table
from marshal_dagster.protocol.messages import ClaimingPartition
from marshal_dagster.protocol.open_plans import OpenPlan
from marshal_dagster.runs.exhausted_plans import exhausted_plans_evaluation, has_failed
from tests.batch_fixtures import GROUP, HI_MS, TOPIC, Scene
from tests.fast.test_dagster_assets import Shop, own_instance, shop
from tests.fast.test_dagster_ops import AT_LEAST_ONCE, Stand, evaluations, instance, stand

__all__ = ["instance", "own_instance", "shop", "stand"]


def evaluate(shop: Shop, **settings: Any) -> dict[str, dg.AssetCheckEvaluation]:  # noqa: ANN401 - settings of the checks
    """Run all checks and return their evaluations by name."""
    checks = build_claim_checks(shop.asset, **{"max_lag": 0, **settings})
    result = dg.materialize(
        [checks],
        instance=shop.instance,
        resources=shop.resources(),
        selection=dg.AssetSelection.checks(checks),
    )
    return {one.check_name: one for one in result.get_asset_check_evaluations()}


def failed(shop: Shop, **settings: Any) -> dict[str, str]:  # noqa: ANN401 - settings of the checks
    """Return the descriptions of the checks that failed."""
    found = evaluate(shop, **settings)
    assert set(found) == {each.value for each in ClaimCheck}
    return {name: one.description or "" for name, one in found.items() if not one.passed}


@pytest.mark.thorough
def test_after_good_runs_all_pass(shop: Shop) -> None:
    """All checks pass after successful runs with batches of various sizes."""
    for _ in range(3):
        assert shop.run(max_records=7, max_batches=2).success
    shop.stand.scene.data.append(0, 4)
    assert shop.run().success
    assert failed(shop) == {}


@pytest.mark.slow
def test_what_a_dead_member_left_is_reported(shop: Shop) -> None:
    """Claims of a dead member are listed by partition; a live claim is no problem."""
    shop.run()
    scene = shop.stand.scene
    scene.clock.advance(time.time_ns() // 1_000_000 - 10 * HI_MS - scene.clock.wall_ms())
    scene.about(ClaimingPartition, "dead.1", partition=2)
    scene.clock.advance(10 * HI_MS)
    scene.about(ClaimingPartition, "alive.1", partition=1)
    reported = failed(shop)
    assert list(reported) == ["stale_claims"]
    assert reported["stale_claims"].startswith(f"{TOPIC}/2: no plan, client")
    assert f"{TOPIC}/1" not in reported["stale_claims"]


def _exhaust(scene: Scene, stand: Stand) -> None:
    for _ in range(6):
        with pytest.raises(ZeroDivisionError), scene.batch(scene.delivery(stand.mode), partitions=(1,), max_attempts=9):
            _ = 1 / 0


@pytest.mark.slow
def test_exhausted_plans_fail_their_check_by_the_run_itself_and_by_hand(shop: Shop) -> None:
    """A run that finds only exhausted plans fails before its checks start.

    It evaluates this check itself, and the others are skipped.
    """
    shop.run()
    shop.stand.scene.data.append(1, 4)
    _exhaust(shop.stand.scene, shop.stand)
    text = f"{TOPIC}/1 [10, 14) of group '{GROUP}' was tried 6 times"
    reported = failed(shop, max_lag=10)
    assert reported["exhausted_plans"].startswith(text)
    assert f"marshal-dagster retry {GROUP} {TOPIC} 1" in reported["exhausted_plans"]
    assert evaluate(shop)["exhausted_plans"].severity is dg.AssetCheckSeverity.ERROR
    checks = build_claim_checks(shop.asset)
    result = dg.materialize(
        [shop.asset, checks], instance=shop.instance, resources=shop.resources(), raise_on_error=False
    )
    assert not result.success
    assert verdicts(shop, result) == [("exhausted_plans", False)]


@pytest.mark.thorough
def test_the_run_whose_attempt_was_the_last_fails_the_check_itself(shop: Shop) -> None:
    """A user who looks only at the asset's checks sees the plan at once, not after the next run."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    shop.stand.scene.data.append(1, 4)
    shop.stand.process = fail
    runs = [shop.run() for _ in range(8)]
    assert not any(run.success for run in runs)
    assert [verdicts(shop, run) for run in runs] == [*[[]] * 5, *[[("exhausted_plans", False)]] * 3]


def verdicts(shop: Shop, run: dg.ExecuteInProcessResult) -> list[tuple[str, bool]]:
    """Return the name of each check that a run evaluated itself, and whether it passed."""
    return [(one.check_name, one.passed) for one in evaluations(shop.stand, run)]


def test_a_failed_check_is_seen_after_many_that_were_only_planned() -> None:
    """Each run that fails before its checks start leaves a planned check without a result."""
    key = dg.AssetKey("work")
    planned = dg.DagsterEvent(
        dg.DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED.value,
        "job",
        event_specific_data=AssetCheckEvaluationPlanned(asset_key=key, check_name="exhausted_plans"),
    )
    with dg.DagsterInstance.ephemeral() as instance:
        assert not has_failed(instance, key)
        plan = OpenPlan(GROUP, TOPIC, 0, 0, 10, 5)
        instance.report_runless_asset_event(exhausted_plans_evaluation(key, [plan], "text"))
        for _ in range(12):
            instance.report_dagster_event(planned, run_id=str(uuid.uuid4()))
        assert has_failed(instance, key)
        instance.report_runless_asset_event(exhausted_plans_evaluation(key, [], ""))
        assert not has_failed(instance, key)


def test_the_checks_of_an_op_belong_to_the_asset_of_its_batches() -> None:
    """Checks of an op belong to the asset with the op's name, or to its `asset_key`."""
    own = build_claimed_batch_op(lambda *_: None, name="work", topic=TOPIC)
    other = build_claimed_batch_op(lambda *_: None, name="work", topic=TOPIC, asset_key=dg.AssetKey(["a", "b"]))
    for op, key in ((own, ["work"]), (other, ["a", "b"])):
        names = {each.value for each in ClaimCheck} - {"lag"}
        assert build_claim_checks(op).check_keys == {dg.AssetCheckKey(dg.AssetKey(key), name) for name in names}


@pytest.mark.slow
@pytest.mark.slow
def test_an_op_that_dagster_made_an_asset_has_committed_nothing_twice(
    stand: Stand, own_instance: dg.DagsterInstance
) -> None:
    """The materialization of its output has the ranges of all batches again."""
    op = build_claimed_batch_op(stand.process, name="work", topic=TOPIC, sink=stand.scene.sink, spark_key="spark")
    asset = dg.AssetsDefinition.from_op(op)
    resources = {"claimer": stand.claimer(), "spark": stand.spark()}
    result = dg.materialize([asset], instance=own_instance, resources=resources)
    assert len(result.asset_materializations_for_node("work")) == 2
    recorded = recorded_ranges(own_instance, asset.key, GROUP, TOPIC, 10)
    assert len(recorded) == 3
    assert double_commits(recorded) == []


def test_too_much_lag_is_reported(shop: Shop) -> None:
    """The check fails above the limit, not at the limit."""
    shop.run(partitions="0")
    assert failed(shop, max_lag=20) == {}
    assert failed(shop, max_lag=19) == {"lag": "20 offsets are unread; 19 are allowed"}


@pytest.mark.slow
@pytest.mark.parametrize("is_shorter", [False, True])
def test_positions_of_a_deleted_topic_are_no_small_lag(shop: Shop, *, is_shorter: bool) -> None:
    """Every run fails then. Without the topic's id, an offset after the end shows it."""
    shop.run()
    scene = shop.stand.scene
    if is_shorter:
        scene.data._topics[TOPIC].partitions[1].end = 9
    else:
        scene.data.make(partitions=3, messages=2)
    which = "1" if is_shorter else "0-2"
    said = failed(shop, max_lag=100)["lag"]
    assert said.endswith(f"; the positions of partitions {which} belong to a deleted topic")


@pytest.mark.slow
def test_a_log_that_lacks_records_passes_no_check_that_reads_it(shop: Shop) -> None:
    """A plan may be exhausted, or a member dead, in the records that are missing."""
    shop.run()
    shop.stand.scene.data.append(1, 4)
    _exhaust(shop.stand.scene, shop.stand)
    broker = shop.stand.scene.broker
    for partition in range(broker.identity.partitions):
        broker.retain_from(partition, len(broker.records(partition)))
    reported = failed(shop, max_lag=1_000)
    assert list(reported) == ["stale_claims", "exhausted_plans"]
    assert all("`marshal-dagster recover`" in text for text in reported.values())


@pytest.mark.slow
def test_what_nobody_recorded_is_reported(shop: Shop) -> None:
    """Another member processed offsets between two runs, and no run recorded them."""
    scene = shop.stand.scene
    shop.run(partitions="0", max_records=3, max_batches=1)
    scene.work(scene.delivery(shop.stand.mode), partitions=(0,), max_records=2)
    shop.run()
    found = evaluate(shop)
    assert [name for name, one in found.items() if not one.passed] == ["gaps"]
    table = found["gaps"].metadata["ranges"]
    assert isinstance(table, dg.TableMetadataValue)
    assert [row.data for row in table.records] == [
        {"partition": 0, "start": 3, "end": 5, "what": "no recorded batch has these offsets"}
    ]
    assert found["gaps"].severity is dg.AssetCheckSeverity.WARN


@pytest.mark.slow
def test_what_others_still_work_on_is_no_gap(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group with range claims, later ranges may be done first.

    Once an earlier range is committed without a record, it is a gap.
    """
    scene = shop.stand.scene
    monkeypatch.setattr(Scene, "delivery", partialmethod(Scene.delivery, ranges=True))

    def batch() -> ClaimedBatch:
        return scene.batch(scene.delivery(shop.stand.mode), partitions=(0,), ranges=RangeOptions(size=4))

    def work(one: ClaimedBatch) -> None:
        with one:
            scene.process(one)
        row = one.report()
        shop.instance.report_runless_asset_event(
            dg.AssetMaterialization(
                shop.key, metadata={"group": GROUP, "batch_id": one.batch_id, "ranges": ranges_table(row)}
            )
        )

    work(batch())
    with batch() as slow:
        work(batch())
        assert (scene.key().offset, [range_.start for range_ in slow.ranges]) == (4, [4])
        assert "gaps" not in failed(shop, max_lag=100)
        scene.process(slow)
    assert failed(shop, max_lag=100) == {"gaps": "4 offsets in 1 ranges: no recorded batch has these offsets"}


@pytest.mark.slow
def test_what_retention_deleted_unread_is_reported(shop: Shop) -> None:
    """The check reports the deleted offsets at once, before the next run."""
    shop.run(max_records=6, max_batches=1)
    shop.stand.scene.data.retain_from(1, 8)
    assert failed(shop, max_lag=100) == {"gaps": "6 offsets in 1 ranges: retention deleted them before they were read"}


@pytest.mark.slow
def test_a_position_set_back_is_reported(shop: Shop) -> None:
    """A position that was set back is a new generation, so nothing is a double commit; one set forward leaves a gap."""
    scene = shop.stand.scene
    shop.run()
    topic_id = scene.data.describe(TOPIC).topic_id
    operator = GroupAdmin(Rationalizer(scene.log(), clock=scene.clock), GROUP, "ops", clock=scene.clock)
    operator.set_positions(TOPIC, {0: 4, 1: 12}, topic_id, wait_ms=0)
    scene.data.append(0, 2)
    scene.data.append(1, 5)
    shop.run()
    reported = failed(shop)
    assert list(reported) == ["gaps", "rewinds"]
    assert reported["gaps"] == "2 offsets in 1 ranges: skipped by a new position"
    assert reported["rewinds"].startswith("6 offsets in 1 ranges: set back in generation")


def _record(shop: Shop, generation: int, start: int, end: int) -> None:
    """Record a batch of partition 0 as a run would."""
    row = dg.TableRecord(
        {"topic": TOPIC, "partition": 0, "generation": generation, "start": start, "end": end, "state": "done"}
    )
    table = dg.MetadataValue.table([row], ranges_table([]).schema)
    metadata: dict[str, Any] = {"group": GROUP, "batch_id": f"b{end}", "ranges": table}
    shop.instance.report_runless_asset_event(dg.AssetMaterialization(shop.key, metadata=metadata))


@pytest.mark.slow
def test_a_log_that_knows_the_group_no_more_is_no_rewind(shop: Shop) -> None:
    """In a new log the generation starts at a lower number; only offsets that are read again are reported."""
    _record(shop, 57, 0, 6)
    _record(shop, 0, 6, 8)
    assert failed(shop, max_lag=100) == {}
    _record(shop, 12, 7, 9)
    assert failed(shop, max_lag=100) == {"rewinds": "1 offsets in 1 ranges: set back in generation 12"}


@pytest.mark.thorough
def test_a_double_commit_is_an_error(shop: Shop) -> None:
    """Two batches of one generation report the same committed offsets; older batches are not checked again."""
    shop.run(partitions="0")
    (before,) = shop.instance.fetch_materializations(shop.key, limit=1).records
    again = before.asset_materialization
    assert again is not None
    shop.instance.report_runless_asset_event(
        again._replace(metadata={**again.metadata, "batch_id": dg.TextMetadataValue("zombie.1")})
    )
    found = evaluate(shop, max_lag=100)
    assert [name for name, one in found.items() if not one.passed] == ["double_commits"]
    assert found["double_commits"].severity is dg.AssetCheckSeverity.ERROR
    assert "zombie.1" in (found["double_commits"].description or "")
    for _ in range(3):
        shop.stand.scene.data.append(0, 1)
        shop.run(partitions="0")
    assert failed(shop, max_lag=100, last=3) == {}


@pytest.mark.slow
def test_what_was_done_of_another_topic_before_is_passed_over(stand: Stand, own_instance: dg.DagsterInstance) -> None:
    """Records of a topic that the asset used before are ignored."""
    stand.mode, stand.process, stand.instance = AT_LEAST_ONCE, lambda *_: None, own_instance
    stand.scene.data.make("orders_v2", messages=7)
    before, now = (Shop(stand, own_instance, topic=topic) for topic in (TOPIC, "orders_v2"))
    assert before.run().success
    assert now.run().success
    assert failed(now) == {}


@pytest.mark.slow
def test_what_was_perhaps_committed_may_be_committed_by_another(shop: Shop) -> None:
    """An at-most-once run reports a range as possibly dropped if it cannot learn whether its commit was written.

    Such a range is neither a double commit nor a gap.
    """
    shop.run(partitions="0", max_records=4, max_batches=1)
    shop.run(partitions="0", max_records=4, max_batches=1)
    again, _ = (
        record.asset_materialization for record in shop.instance.fetch_materializations(shop.key, limit=2).records
    )
    assert again is not None
    table = again.metadata["ranges"]
    assert isinstance(table, dg.TableMetadataValue)
    perhaps = [dg.TableRecord({**row.data, "state": "possibly dropped"}) for row in table.records]
    shop.instance.report_runless_asset_event(
        again._replace(metadata={**again.metadata, "ranges": dg.MetadataValue.table(perhaps, table.schema)})
    )
    shop.run(partitions="0")
    assert failed(shop, max_lag=100) == {}


@pytest.mark.slow
def test_a_blocking_check_stops_what_depends_on_the_asset(shop: Shop) -> None:
    """A failed check that only warns does not stop downstream assets."""
    shop.run(partitions="0", max_records=3, max_batches=1)
    shop.stand.scene.work(shop.stand.scene.delivery(shop.stand.mode), partitions=(0,), max_records=2)

    @dg.asset(deps=[shop.asset])
    def after() -> None:
        pass

    def ran(**settings: Any) -> bool:  # noqa: ANN401 - settings of the checks
        shop.stand.scene.data.append(0, 1)
        checks = build_claim_checks(shop.asset, **settings)
        result = dg.materialize(
            [shop.asset, after, checks], instance=shop.instance, resources=shop.resources(), raise_on_error=False
        )
        return bool(result.asset_materializations_for_node("after"))

    assert ran()
    assert not ran(blocking=["gaps"])


@pytest.mark.slow
def test_checks_go_with_a_prefix_that_dagster_adds_to_keys(shop: Shop) -> None:
    """The prefix applies to the asset and its checks."""
    module = ModuleType("sales")
    vars(module).update(work=shop.asset, checks=build_claim_checks(shop.asset))
    (asset,) = dg.load_assets_from_modules([module], key_prefix="eu")
    (checks,) = dg.load_asset_checks_from_modules([module], asset_key_prefix="eu")
    shop.stand.scene.data.append(0, 1)
    result = dg.materialize([asset, checks], instance=shop.instance, resources=shop.resources())  # type: ignore[list-item]
    found = result.get_asset_check_evaluations()
    assert len(found) == 5
    assert {one.asset_key for one in found} == {dg.AssetKey(["eu", "work"])}
    assert all(one.passed for one in found)


def test_what_makes_no_sense_is_refused(shop: Shop) -> None:
    """Wrong arguments are refused at definition, with what to do."""

    @dg.asset
    def other() -> None:
        pass

    with pytest.raises(ConfigurationError, match="'other' has no topic: build it with"):
        build_claim_checks(other)
    with pytest.raises(ConfigurationError, match="'lags'; give stale_claims or lag"):
        build_claim_checks(shop.asset, errors=["lags"])
    with pytest.raises(ConfigurationError, match="pass max_lag too"):
        build_claim_checks(shop.asset, blocking=["lag"])
    with pytest.raises(ConfigurationError, match="last must be 1 or more, max_lag 0 or more"):
        build_claim_checks(shop.asset, last=0)
    with pytest.raises(ConfigurationError, match="must not be above 5000"):
        build_claim_checks(shop.asset, last=5_001)


def test_as_many_as_are_allowed_can_be_read(own_instance: dg.DagsterInstance) -> None:
    """The largest `last` is within the number of records that Dagster returns."""
    assert recorded_ranges(own_instance, dg.AssetKey("work"), GROUP, TOPIC, MOST_LAST) == []


# Judgements of recorded ranges

cuts = st.lists(st.integers(1, 60), unique=True, max_size=8).map(sorted)


def cut(ends: Sequence[int]) -> list[RecordedRange]:
    """Return consecutive ranges of partition 0, from 0 up to the last of `ends`."""
    return [
        RecordedRange(0, 1, start, end, f"b{end}") for start, end in zip([0, *ends], ends, strict=False) if start < end
    ]


@pytest.mark.slow
@given(cuts, st.randoms())
def test_ranges_that_follow_on_one_another_are_well_in_any_order(ends: list[int], chance: Any) -> None:  # noqa: ANN401 - a Random
    """Consecutive ranges are correct in whatever order they were recorded."""
    ranges = cut(ends)
    chance.shuffle(ranges)
    assert gaps(ranges) == rewinds(ranges) == double_commits(ranges) == []


@pytest.mark.slow
@given(cuts.filter(lambda ends: len(ends) > 2), st.data())
def test_one_left_out_is_a_gap_and_one_twice_is_double(ends: list[int], data: Any) -> None:  # noqa: ANN401 - a type of hypothesis
    """The checks report exactly the range that is missing or recorded twice."""
    ranges = cut(ends)
    one = data.draw(st.sampled_from(ranges[1:-1]))
    without = [each for each in ranges if each is not one]
    assert gaps(without) == [OffsetFinding(0, one.start, one.end, "no recorded batch has these offsets")]
    twice = [*ranges, one]
    (found,) = double_commits(twice)
    assert (found.start, found.end) == (one.start, one.end)
    assert gaps(twice) == []


def test_a_table_has_what_is_read_back() -> None:
    """The table's columns have the names that the checks read."""
    names = {column.name for column in ranges_table([]).schema.columns}
    assert {"partition", "generation", "start", "end", "state"} <= names
