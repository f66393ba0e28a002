"""Check assets of claimed batches and of data topics, with a coordination log and data topics in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

import dagster as dg
import pytest
from dagster._core.definitions.observe import observe

from marshal_dagster.assets.checks import recorded_ranges
from marshal_dagster.assets.decorator import ClaimedAsset, DagsterMarshalTranslator, kafka_partitions_def, marshal_asset
from marshal_dagster.assets.topics import (
    MOST_SHOWN,
    PartitionProgress,
    TopicProgress,
    build_topic_asset,
    build_topic_sensor,
)
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError, TopicNotFoundError, UnavailableError
from marshal_dagster.jobs.batch import build_claimed_batch_job, build_claimed_batch_schedule, build_reprocess_job
from marshal_dagster.ops.config import ClaimedBatchConfig
from marshal_dagster.protocol.state import Key, Phase, Range
from marshal_dagster.protocol.world import World
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.runs.names import OUTCOME_TAG
from marshal_dagster.sensors._exhausted_plans import build_exhausted_plans_check
from marshal_dagster.sensors.lag import build_lag_sensor
from marshal_dagster.sensors.stale_claims import build_stale_claim_sensor
from tests.batch_fixtures import GROUP, TOPIC
from tests.fast.test_dagster_ops import AT_LEAST_ONCE, Stand, instance, stand
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Side

__all__ = ["instance", "stand"]


class Eager(DagsterMarshalTranslator):
    """A translator whose assets are materialized when their topic has new messages."""

    def get_asset_spec(self, asset: ClaimedAsset) -> dg.AssetSpec:
        """Add the automation condition."""
        return super().get_asset_spec(asset).replace_attributes(automation_condition=dg.AutomationCondition.eager())


class Renamed(DagsterMarshalTranslator):
    """A translator with other keys, groups and owners."""

    def get_topic_spec(self, topic: str) -> dg.AssetSpec:
        """Return a spec with another key."""
        return super().get_topic_spec(topic).replace_attributes(key=["events", topic])

    def get_asset_spec(self, asset: ClaimedAsset) -> dg.AssetSpec:
        """Return a spec with another key, a group and an owner."""
        spec = super().get_asset_spec(asset)
        return spec.replace_attributes(key=["shop", asset.name], group_name="sales", owners=["team:data"])


@pytest.fixture
def own_instance() -> Iterator[dg.DagsterInstance]:
    """Yield a Dagster instance without history."""
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


class Shop:
    """An asset and the asset of its topic, with stand-ins for Kafka and Spark."""

    def __init__(self, stand: Stand, instance: dg.DagsterInstance, **settings: Any) -> None:  # noqa: ANN401 - settings of the asset
        self.stand, self.instance = stand, instance
        translator, per_partition = settings.get("translator"), settings.get("per_partition", False)
        sink = stand.scene.sink if stand.mode is not AT_LEAST_ONCE else None

        def work(context: dg.AssetExecutionContext, batch: Any, frame: Any) -> Any:  # noqa: ANN401 - a stand-in
            """Count what was ordered."""
            assert isinstance(context, dg.AssetExecutionContext)
            return stand.process(cast("Any", context), batch, frame)

        self.asset: dg.AssetsDefinition = marshal_asset(
            **{"topic": TOPIC, "sink": sink, "spark_key": "spark", **settings}
        )(work)
        self.topic = build_topic_asset(TOPIC, translator=translator, per_partition=per_partition)
        self.key = self.asset.key

    def resources(self) -> dict[str, Any]:
        """Return the stand-ins, which use the scene's log."""
        scene = self.stand.scene
        claimer = self.stand.claimer()

        class Looking(type(claimer)):  # type: ignore[misc] # the class of the stand's claimer
            def open_data(self) -> Any:  # noqa: ANN401 - a stand-in
                return scene.data

            @contextmanager
            def world(self) -> Iterator[World]:
                yield Rationalizer(scene.log(), clock=scene.clock).catch_up()

        return {"claimer": Looking(**claimer.model_dump()), "spark": self.stand.spark()}

    def definitions(self) -> dg.Definitions:
        """Return the definitions of both assets, as in a deployment."""
        return dg.Definitions(assets=[self.asset, self.topic], resources=self.resources())

    def run(self, partition_key: str | None = None, **config: Any) -> dg.ExecuteInProcessResult:  # noqa: ANN401 - any option of the config
        """Materialize the asset."""
        return dg.materialize(
            [self.asset],
            instance=self.instance,
            resources=self.resources(),
            partition_key=partition_key,
            run_config={"ops": {"work": {"config": config}}},
            raise_on_error=False,
        )

    def observe(self) -> dict[str | None, dict[str, Any]]:
        """Observe the topic and return the metadata by partition."""
        result = observe([self.topic], instance=self.instance, resources=self.resources())
        seen = self.stand.observations(cast("Any", result))
        return {one.partition: {name: value.value for name, value in one.metadata.items()} for one in seen}

    def tick(self, *, allow_missing_topic: bool = False) -> dg.SensorResult:
        """Evaluate the topic's sensor and store its result as the daemon does."""
        sensor = build_topic_sensor(
            TOPIC, per_partition=self.asset.partitions_def is not None, allow_missing_topic=allow_missing_topic
        )
        resources = {"claimer": self.resources()["claimer"]}
        with dg.build_sensor_context(instance=self.instance, resources=resources) as context:
            result = sensor(context)
        assert isinstance(result, dg.SensorResult)
        for request in result.dynamic_partitions_requests or ():
            self.instance.add_dynamic_partitions(request.partitions_def_name, list(request.partition_keys))
        for event in result.asset_events:
            self.instance.report_runless_asset_event(event)
        return result

    def recorded(self, result: dg.ExecuteInProcessResult) -> list[tuple[str | None, dict[str, Any]]]:
        """Return the partition and the metadata of each materialization of a run, as Dagster stored them."""
        entries = self.instance.all_logs(result.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
        found = [entry.asset_materialization for entry in entries if entry.asset_materialization is not None]
        assert {one.asset_key for one in found} <= {self.key}
        return [(one.partition, {name: value.value for name, value in one.metadata.items()}) for one in found]


@pytest.fixture
def shop(stand: Stand, own_instance: dg.DagsterInstance) -> Shop:
    """Return a topic of three partitions with ten messages each, and an asset of it."""
    stand.instance = own_instance
    return Shop(stand, own_instance)


# The asset


@pytest.mark.slow
def test_each_batch_is_one_materialization(shop: Shop) -> None:
    """The last materialization is the step's own output; it also shows why the run ended."""
    result = shop.run(max_records=12)
    assert result.success
    batches = [metadata for _, metadata in shop.recorded(result)]
    assert [batch["offsets"] for batch in batches] == [12, 12, 6]
    assert [batch.get("batches") for batch in batches] == [None, None, 3]
    assert "no unread messages" in batches[-1]["ended"]
    assert len({batch["batch_id"] for batch in batches}) == 3
    assert sorted(shop.stand.scene.sink.counts().values()) == [1] * 30


@pytest.mark.slow
def test_with_nothing_to_do_nothing_is_materialized(shop: Shop) -> None:
    """The run succeeds and downstream assets are skipped; an observation of the asset shows why."""
    assert shop.run().success

    @dg.asset(deps=[shop.asset])
    def after() -> None:
        pass

    result = dg.materialize([shop.asset, after], instance=shop.instance, resources=shop.resources())
    assert result.success
    assert shop.recorded(result) == []
    assert [event.step_key for event in result.all_events if event.is_step_skipped] == ["after"]
    (reported,) = shop.stand.observations(result)
    assert (reported.asset_key, reported.metadata["state"].value) == (shop.key, "drained")


@pytest.mark.slow
def test_a_run_that_fails_has_recorded_what_it_committed(shop: Shop) -> None:
    """Batches before the failure are recorded; the batch that failed is not."""
    calls = iter((None, RuntimeError("a bad message")))

    def process(_context: object, _batch: object, frame: Any) -> Any:  # noqa: ANN401 - a stand-in
        if (error := next(calls)) is not None:
            raise error
        return frame

    shop.stand.process = process
    result = shop.run(max_records=12)
    assert not result.success
    assert [metadata["offsets"] for _, metadata in shop.recorded(result)] == [12]


@pytest.mark.slow
def test_metadata_of_the_function_does_not_hide_what_a_batch_recorded(shop: Shop) -> None:
    """Metadata of the user's function are added to the run's last materialization."""

    def process(context: Any, _batch: object, frame: Any) -> Any:  # noqa: ANN401 - a stand-in
        context.add_output_metadata({"shops": len(frame), "group": "large", "ranges": "none"})
        context.add_asset_metadata({"offsets": 1})
        return frame

    shop.stand.process = process
    ((_, metadata),) = shop.recorded(shop.run())
    assert (metadata["shops"], metadata["group"], metadata["offsets"]) == (30, GROUP, 30)
    assert len(metadata["ranges"].records) == 3


@pytest.mark.slow
def test_a_batch_is_recorded_also_when_the_next_cannot_be_claimed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data cluster becomes unavailable between two batches."""
    data = shop.stand.scene.data

    def go_down(*_: object) -> None:
        data.is_down = True

    monkeypatch.setattr(data, "commit_group_offsets", go_down)
    result = shop.run(max_records=12)
    assert not result.success
    assert [metadata["offsets"] for _, metadata in shop.recorded(result)] == [12]


@pytest.mark.slow
def test_a_batch_is_recorded_also_when_the_run_cannot_be_tagged_behind_it(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster's storage is unavailable for a moment after the batch."""
    add_run_tags = shop.instance.add_run_tags

    def fail_at_the_end(run_id: str, tags: dict[str, str]) -> None:
        if OUTCOME_TAG in tags:
            raise RuntimeError("the database is locked")
        add_run_tags(run_id, tags)

    monkeypatch.setattr(shop.instance, "add_run_tags", fail_at_the_end)
    result = shop.run()
    assert not result.success
    assert [metadata["offsets"] for _, metadata in shop.recorded(result)] == [30]


@pytest.mark.thorough
def test_an_asset_that_is_tried_again_is_materialized_though_nothing_is_left(
    stand: Stand, own_instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed attempt had completed all batches.

    The retry materializes the asset without recording a batch twice.
    """
    stand.instance = own_instance
    shop = Shop(stand, own_instance, retry_policy=dg.RetryPolicy(max_retries=1), max_records=12)
    add_run_tags, left = own_instance.add_run_tags, [RuntimeError("the database is locked")]

    def fail_once(run_id: str, tags: dict[str, str]) -> None:
        if OUTCOME_TAG in tags and left:
            raise left.pop()
        add_run_tags(run_id, tags)

    monkeypatch.setattr(own_instance, "add_run_tags", fail_once)
    result = shop.run()
    assert result.success
    *batches, last = [metadata for _, metadata in shop.recorded(result)]
    assert [metadata["offsets"] for metadata in batches] == [12, 12, 6]
    assert (last["batches"], last["batches_of_earlier_attempts"]) == (3, 3)
    assert last["batch_ids"] == [metadata["batch_id"] for metadata in batches]
    assert not {"ranges", "offsets", "batch_id"} & last.keys()
    assert len(recorded_ranges(own_instance, shop.key, GROUP, TOPIC, 9)) == 9


@pytest.mark.slow
def test_an_interrupt_stays_one_though_dagsters_storage_fails(
    stand: Stand, own_instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt ends the run although its last batch cannot be recorded.

    An error would only fail the step, and other steps would continue.
    """
    stand.instance = own_instance
    shop = Shop(stand, own_instance)
    add_run_tags, log_event = own_instance.add_run_tags, dg.OpExecutionContext.log_event

    def interrupt(run_id: str, tags: dict[str, str]) -> None:
        if OUTCOME_TAG in tags:
            raise KeyboardInterrupt
        add_run_tags(run_id, tags)

    def fail(context: dg.OpExecutionContext, event: Any) -> None:  # noqa: ANN401 - a type of Dagster
        if type(event) is dg.AssetMaterialization:
            raise RuntimeError("the database is locked")
        log_event(context, event)

    monkeypatch.setattr(own_instance, "add_run_tags", interrupt)
    monkeypatch.setattr(dg.OpExecutionContext, "log_event", fail)
    result = shop.run()
    (failure,) = (event.step_failure_data for event in result.all_events if event.is_step_failure)
    assert failure.error is not None
    assert (failure.error_source.value, failure.error.cls_name) == ("INTERRUPT", "KeyboardInterrupt")


@pytest.mark.slow
def test_a_translator_says_how_it_looks(stand: Stand, own_instance: dg.DagsterInstance) -> None:
    """The translator sets keys, group and owners, and the key of the topic on which the asset depends."""
    stand.instance = own_instance
    shop = Shop(stand, own_instance, translator=Renamed(), name="work")
    (spec,) = shop.asset.specs
    assert spec.key == dg.AssetKey(["shop", "work"])
    assert (spec.group_name, list(spec.owners)) == ("sales", ["team:data"])
    assert [dep.asset_key for dep in spec.deps] == [dg.AssetKey(["events", TOPIC])] == [shop.topic.key]
    assert spec.description == "Count what was ordered."
    assert len(shop.recorded(shop.run())) == 1
    assert shop.observe()[None]["lag"] == 0


@pytest.mark.slow
def test_a_prefix_that_dagster_adds_to_keys_is_kept_to(shop: Shop) -> None:
    """Both assets are recorded under the keys that they have in the deployment."""
    module = ModuleType("sales")
    vars(module).update(work=shop.asset, topic=shop.topic)
    assets = [
        each for each in dg.load_assets_from_modules([module], key_prefix="eu") if isinstance(each, dg.AssetsDefinition)
    ]
    shop.key = dg.AssetKey(["eu", "work"])
    shop.asset = next(asset for asset in assets if asset.key == shop.key)
    shop.topic = next(each for each in assets if each.key != shop.key)
    result = shop.run(max_records=12)
    assert result.success
    assert len(shop.recorded(result)) == 3
    shop.run()
    assert [one.asset_key for one in shop.instance.fetch_observations(shop.key, limit=9).records] == [shop.key]
    shop.observe()
    (record,) = shop.instance.fetch_observations(dg.AssetKey(["eu", "kafka", TOPIC]), limit=9).records
    assert record.asset_observation is not None


@pytest.mark.slow
def test_each_kafka_partition_may_be_a_dagster_partition(stand: Stand, own_instance: dg.DagsterInstance) -> None:
    """A run claims only its own partition, and materializes that one."""
    stand.instance = own_instance
    shop = Shop(stand, own_instance, per_partition=True)
    shop.observe()
    assert own_instance.get_dynamic_partitions(f"kafka/{TOPIC}") == ["0", "1", "2"]
    result = shop.run(partition_key="1", max_records=6)
    assert result.success
    recorded = shop.recorded(result)
    assert [(partition, metadata["offsets"]) for partition, metadata in recorded] == [("1", 6), ("1", 4)]
    assert {partition for partition, _ in stand.scene.sink.counts()} == {1}
    refused = shop.run(partition_key="1", partitions="0")
    assert not refused.success


def test_what_does_not_go_together_is_refused() -> None:
    """Arguments that contradict each other are refused at definition, with what to do."""
    with pytest.raises(ConfigurationError, match="each run then claims one"):
        marshal_asset(topic=TOPIC, per_partition=True, claim_entire_topic=True)
    with pytest.raises(ConfigurationError, match="not a name that Kafka allows"):
        build_topic_asset("a/b")
    with pytest.raises(ConfigurationError, match="not a name that Kafka allows"):
        marshal_asset(topic="a/b")(lambda *_: None)


# Jobs


@pytest.mark.slow
def test_the_sensor_asks_for_what_a_dead_run_left_of_an_asset(shop: Shop) -> None:
    """The job that the sensor requests takes over the open plan and materializes the asset."""
    scene = shop.stand.scene
    dying = scene.delivery(shop.stand.mode, log=KillableLog(scene.log(), KillPoint(Side.AFTER, "ClaimingMessages")))
    with pytest.raises(KilledError):
        scene.work(dying, partitions=(1,), max_records=4)
    scene.wait_until_stale()
    redo = build_reprocess_job(shop.asset)

    class InMemory(RationalizerResource):
        def rationalizer(self) -> Rationalizer:
            return Rationalizer(scene.log(), clock=scene.clock)

    sensor = build_stale_claim_sensor(redo, group=GROUP)
    reader = InMemory(connection=KafkaConnectionConfig(bootstrap_servers="127.0.0.1:1"))
    tick = sensor(dg.build_sensor_context(instance=shop.instance, resources={"rationalizer": reader}))
    assert isinstance(tick, dg.SensorResult)
    (request,) = tick.run_requests or ()
    assert request.job_name == redo.name == "reprocess_work"

    definitions = dg.Definitions(assets=[shop.asset], jobs=[redo], resources=shop.resources())
    job = definitions.resolve_job_def("reprocess_work")
    result = job.execute_in_process(run_config=request.run_config, instance=shop.instance)
    assert result.success
    assert [metadata["ranges"].records[0].data["replay"] for _, metadata in shop.recorded(result)] == [True]
    assert sorted(scene.sink.counts()) == [(1, offset) for offset in range(4)]


@pytest.mark.slow
def test_a_job_of_an_asset_has_what_a_job_of_an_op_has(shop: Shop) -> None:
    """An asset's job has a config and a schedule.

    An asset without a topic, or with Dagster partitions, is refused.
    """
    work = build_claimed_batch_job(shop.asset, config=ClaimedBatchConfig(max_batches=1, max_records=7))
    schedule = build_claimed_batch_schedule(work)
    assert (work.name, schedule.name, schedule.job_name) == ("work_job", "work_job_schedule", "work_job")
    definitions = dg.Definitions(assets=[shop.asset], jobs=[work], schedules=[schedule], resources=shop.resources())
    result = definitions.resolve_job_def("work_job").execute_in_process(instance=shop.instance)
    assert [metadata["offsets"] for _, metadata in shop.recorded(result)] == [7]

    @dg.asset
    def other() -> None:
        pass

    with pytest.raises(ConfigurationError, match="has no topic: build it with build_claimed_batch_op or marshal_asset"):
        build_claimed_batch_job(other)
    with pytest.raises(ConfigurationError, match="has Dagster partitions"):
        build_reprocess_job(marshal_asset(topic=TOPIC, name="parts", per_partition=True)(lambda *_: None))


def test_what_asks_for_runs_without_a_partition_is_refused_a_job_whose_runs_need_one() -> None:
    """Runs without a partition would fail, so such a job is only for backfills."""
    asset = marshal_asset(topic=TOPIC, name="parts", per_partition=True)(lambda *_: None)
    job = build_claimed_batch_job(asset)
    with pytest.raises(ConfigurationError, match="'parts_job' need a Dagster partition"):
        build_claimed_batch_schedule(job)
    with pytest.raises(ConfigurationError, match="'parts_job' need a Dagster partition"):
        build_stale_claim_sensor(job, group=GROUP)
    with pytest.raises(ConfigurationError, match="'parts_job' need a Dagster partition"):
        build_lag_sensor(job, group=GROUP, max_lag_records=1)


def test_a_function_needs_no_docstring() -> None:
    """Without a docstring the asset's job has no description."""
    asset = marshal_asset(topic=TOPIC, name="terse")(lambda *_: None)
    assert build_claimed_batch_job(asset).description is None
    assert build_reprocess_job(asset).name == "reprocess_terse"


# The topic


@pytest.mark.slow
def test_an_observation_reports_the_topic(shop: Shop) -> None:
    """An observation has the lag, the end offsets, and how fast the topic grew since the last observation."""
    first = shop.observe()[None]
    assert (first["lag"], first["offsets"], first["end_offsets"]) == (30, 30, {"0": 10, "1": 10, "2": 10})
    assert "offsets_per_s" not in first
    shop.run(partitions="0")
    shop.stand.scene.data.append(1, 5)
    second = shop.observe()[None]
    assert (second["lag"], second["offsets"]) == (25, 35)
    assert second["offsets_per_s"] > 0


@pytest.mark.slow
def test_a_topic_re_created_is_unread_wherever_the_group_stood_before(shop: Shop) -> None:
    """Members claim nothing in the new topic until an operator sets the position."""
    shop.run()
    scene = shop.stand.scene
    scene.data.delete()
    scene.data.make(messages=7)
    assert not shop.run().success
    assert shop.observe()[None]["lag"] == 21


def test_what_is_done_ahead_of_the_position_is_not_left_to_read() -> None:
    """Ranges that are done above the position are not part of the lag, except for offsets that retention deleted."""
    ranges = (Range(0, 2, Phase.DONE), Range(4, 6, Phase.PLANNED), Range(6, 9, Phase.DONE), Range(9, 12, Phase.PLANNED))
    assert PartitionProgress(0, 1, 10, Key(offset=0, ranges=ranges)).lag == 9 - 1 - 3


def test_topics_whose_names_differ_in_dots_and_dashes_go_together(shop: Shop) -> None:
    """The observation and the check for exhausted plans have different names for each topic."""
    names = ("a.b", "a-b", "a_b")
    topics = [build_topic_asset(name) for name in names]
    checks = [build_exhausted_plans_check(name, group=GROUP) for name in names]
    dg.Definitions.validate_loadable(dg.Definitions(assets=topics, asset_checks=checks, resources=shop.resources()))


HOWS = ["run", "sensor"]


def look(shop: Shop, how: str) -> None:
    """Observe the topic, by a run or by its sensor."""
    if how == "run":
        shop.observe()
    else:
        shop.tick()


class Automation:
    """The requests of Dagster's automation, one evaluation after another."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.cursor: Any = None

    def requested(self) -> set[str | None]:
        """Return the partitions of the asset that are requested now; None for an asset without partitions."""
        shop = self.shop
        found = dg.evaluate_automation_conditions(shop.definitions(), shop.instance, cursor=self.cursor)
        self.cursor = found.cursor
        keys = set(found.get_requested_partitions(shop.key))
        assert found.total_requested == len(keys)
        return keys


@pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.BetaWarning")  # from Dagster's own evaluation
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.thorough
def test_new_messages_start_what_is_eager(stand: Stand, own_instance: dg.DagsterInstance, how: str) -> None:
    """An observation of new end offsets requests a run once; a run that finds nothing to do requests none."""
    stand.instance = own_instance
    shop = Shop(stand, own_instance, translator=Eager())
    automation = Automation(shop)
    assert automation.requested() == set()
    look(shop, how)
    assert automation.requested() == {None}
    shop.run()
    assert automation.requested() == set()
    shop.run()
    assert automation.requested() == set()
    look(shop, how)
    assert automation.requested() == set()
    stand.scene.data.append(2, 1)
    look(shop, how)
    assert automation.requested() == {None}


@pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.BetaWarning")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.thorough
def test_new_messages_start_the_partitions_that_have_them(
    stand: Stand, own_instance: dg.DagsterInstance, how: str
) -> None:
    """With a Dagster partition for each Kafka partition, only those with new messages are requested.

    A new Kafka partition is added and requested without further steps.
    """
    stand.instance = own_instance
    shop = Shop(stand, own_instance, translator=Eager(), per_partition=True)
    automation = Automation(shop)

    def run_all(keys: set[str | None]) -> None:
        for key in keys:
            assert shop.run(partition_key=key).success

    automation.requested()
    look(shop, how)
    requested = automation.requested()
    assert requested == {"0", "1", "2"}
    run_all(requested)
    assert automation.requested() == set()
    stand.scene.data.append(2, 1)
    look(shop, how)
    assert automation.requested() == {"2"}
    run_all({"2"})
    stand.scene.data.grow(4)
    stand.scene.data.append(3, 2)
    look(shop, how)
    assert "3" in automation.requested()


@pytest.mark.slow
@pytest.mark.parametrize("per_partition", [False, True])
def test_a_tick_that_finds_nothing_new_reports_nothing(
    stand: Stand, own_instance: dg.DagsterInstance, *, per_partition: bool
) -> None:
    """The second tick still reports that no message is added any more; later ones report new messages and batches."""
    stand.instance = own_instance
    shop = Shop(stand, own_instance, per_partition=per_partition)
    everything = 3 if per_partition else 1
    reported = [len(shop.tick().asset_events) for _ in range(3)]
    assert reported == [everything, everything, 0]
    stand.scene.data.append(1, 1)
    (event,) = shop.tick().asset_events
    assert event.metadata["offsets_per_s"].value != 0
    assert [len(shop.tick().asset_events) for _ in range(2)] == [1, 0]
    assert shop.run(partition_key="1" if per_partition else None).success
    (event,) = shop.tick().asset_events
    assert event.metadata["lag"].value == 0


@pytest.mark.slow
def test_a_run_of_one_partition_observes_that_one(stand: Stand, own_instance: dg.DagsterInstance) -> None:
    """Otherwise a backfill of a thousand partitions would make a million observations.

    New partitions are added nevertheless.
    """
    stand.instance = own_instance
    shop = Shop(stand, own_instance, per_partition=True)
    shop.observe()
    stand.scene.data.grow(4)
    result = observe([shop.topic], instance=own_instance, resources=shop.resources(), partition_key="1")
    assert [one.partition for one in stand.observations(cast("Any", result))] == ["1"]
    assert own_instance.get_dynamic_partitions(f"kafka/{TOPIC}") == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_a_partition_that_the_topic_does_not_have_is_not_observed(
    stand: Stand, own_instance: dg.DagsterInstance
) -> None:
    """A topic that was re-created may have fewer partitions. The run fails, because it observes nothing."""
    own_instance.add_dynamic_partitions(f"kafka/{TOPIC}", ["3"])
    stand.instance = own_instance
    shop = Shop(stand, own_instance, per_partition=True)
    with pytest.raises(ConfigurationError, match="delete the Dagster partition '3'"):
        observe([shop.topic], instance=own_instance, resources=shop.resources(), partition_key="3")


@pytest.mark.slow
def test_a_tick_asks_dagster_once_for_each_partition(
    stand: Stand, own_instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tick looks up each partition's last observation once: it has 60 s for a thousand partitions."""
    stand.instance = own_instance
    shop = Shop(stand, own_instance, per_partition=True)
    shop.tick()
    requested: list[str] = []

    def count(name: str) -> None:
        ask = getattr(own_instance, name)

        def counted(*of: Any, **how: Any) -> Any:  # noqa: ANN401 - a type of Dagster
            requested.append(name)
            return ask(*of, **how)

        monkeypatch.setattr(own_instance, name, counted)

    for name in ("fetch_observations", "has_dynamic_partition"):
        count(name)
    shop.tick()
    assert len(requested) == 3


def test_a_tick_of_a_topic_whose_cluster_is_down_fails_with_one_line(shop: Shop) -> None:
    """The tick fails and reports nothing that is not known."""
    shop.stand.scene.data.is_down = True
    with pytest.raises(UnavailableError, match="does not answer"):
        shop.tick()


@pytest.mark.slow
def test_a_tick_of_a_topic_that_is_not_there_says_so(shop: Shop) -> None:
    """The topic's name may be wrong, so the tick fails; an option allows a topic that is created later."""
    shop.stand.scene.data.delete()
    with pytest.raises(TopicNotFoundError, match=f"topic {TOPIC!r} does not exist"):
        shop.tick()
    skipped = shop.tick(allow_missing_topic=True)
    assert (skipped.skip_reason.skip_message if skipped.skip_reason else "", skipped.asset_events) == (
        f"topic {TOPIC!r} does not exist",
        [],
    )


def test_of_many_partitions_those_with_the_most_lag_are_shown() -> None:
    """The partitions with the most lag are listed by number; the total covers all partitions."""
    some = tuple(PartitionProgress(number, 0, number % 7, None) for number in range(1_000))
    found = TopicProgress("id", some)
    rows = [record.data for record in found.table().records]
    assert [(row["partition"], row["lag"]) for row in rows] == [(6 + 7 * place, 6) for place in range(MOST_SHOWN)]
    assert found.lag == sum(number % 7 for number in range(1_000))


def test_partitions_are_named_by_their_topic() -> None:
    """Partitions of two topics do not mix."""
    assert kafka_partitions_def("a").name != kafka_partitions_def("b").name
