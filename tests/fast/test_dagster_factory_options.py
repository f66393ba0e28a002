"""Each option of the factories of jobs, schedules, sensors, assets and checks arrives in what they build."""

from typing import Any

import dagster as dg
import pytest

from marshal_dagster.assets.checks import build_outbox_check
from marshal_dagster.assets.decorator import DagsterMarshalTranslator
from marshal_dagster.assets.reprocess import build_reprocess_asset
from marshal_dagster.assets.topics import build_topic_sensor
from marshal_dagster.jobs.batch import build_claimed_batch_job, build_claimed_batch_schedule
from marshal_dagster.jobs.outbox import build_outbox_drain_job
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.sensors import group_membership
from marshal_dagster.sensors.group_membership import build_group_member_sensor

DAYS = dg.DailyPartitionsDefinition(start_date="2026-01-01")


def process(context: dg.OpExecutionContext, batch: object, frame: object) -> None:
    """Process nothing."""


JOB = build_claimed_batch_job(build_claimed_batch_op(process, name="parcels", topic="parcels"))


class Translator(DagsterMarshalTranslator):
    """Puts the assets of topics below another prefix."""

    def get_topic_spec(self, topic: str) -> dg.AssetSpec:
        """Return a spec with the key `bus/<topic>`."""
        return dg.AssetSpec(dg.AssetKey(["bus", topic]))


def test_a_drain_job_takes_its_name_outbox_executor_and_tags() -> None:
    """The key of the outbox is a required resource of the job."""
    job = build_outbox_drain_job(
        name="drain_billing", outbox_key="billing", executor_def=dg.multiprocess_executor, tags={"team": "billing"}
    )
    assert (job.name, job.tags["team"], job.executor_def) == ("drain_billing", "billing", dg.multiprocess_executor)
    assert "billing" in job.required_resource_keys


def test_a_schedule_takes_its_time_zone_and_tags() -> None:
    """The tags are those of the runs that the schedule requests."""
    schedule = build_claimed_batch_schedule(JOB, execution_timezone="Europe/Berlin", tags={"team": "parcels"})
    assert schedule.execution_timezone == "Europe/Berlin"
    (request,) = schedule.evaluate_tick(dg.build_schedule_context()).run_requests or ()
    assert request.tags["team"] == "parcels"


def test_a_reprocess_asset_takes_its_claimer_group_and_pool() -> None:
    """Without a pool, that of the asset's name applies."""
    asset = build_reprocess_asset(
        "parcels", partitions_def=DAYS, claimer_key="east", group_name="operations", pool="reprocessing"
    )
    assert (asset.required_resource_keys - {"io_manager"}, asset.op.pool) == ({"east"}, "reprocessing")
    assert asset.group_names_by_key == {asset.key: "operations"}
    assert build_reprocess_asset("parcels", partitions_def=DAYS).op.pool == "reprocess_parcels"


def test_a_topic_sensor_takes_its_translator_and_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sensor observes the asset with the translator's key."""
    monkeypatch.setattr("marshal_dagster.assets.topics._Topic.look", lambda *_: ([], []))
    sensor = build_topic_sensor("parcels", translator=Translator(), minimum_interval_s=77)
    assert sensor.minimum_interval_seconds == 77
    with dg.build_sensor_context(instance=dg.DagsterInstance.ephemeral(), resources={"claimer": object()}) as context:
        result: Any = sensor(context)
    assert "bus/parcels" in str(result.skip_reason)


def test_a_member_sensor_takes_its_topics_pattern_name_interval_and_claimer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The topics of the job are those of the member only if neither topics nor a pattern are given."""
    seen: list[group_membership.Subscription] = []

    def no_member(_: object, interest: group_membership.Subscription, patience_s: float) -> None:
        assert patience_s == 6 * 50
        seen.append(interest)
        raise LookupError

    monkeypatch.setattr(group_membership, "process_member", no_member)
    monkeypatch.setattr(group_membership, "claimer_of", lambda *_: object())
    monkeypatch.setattr(group_membership, "require_member", lambda *_: "east")
    for options in ({"topics": ["letters"]}, {"pattern": "mail-*"}, {"topics": ["letters"], "pattern": "mail-*"}):
        sensor = build_group_member_sensor(
            JOB,
            name="member",
            minimum_interval_s=50,
            claimer_key="east",
            **options,
        )
        assert (sensor.name, sensor.minimum_interval_seconds) == ("member", 50)
        assert sensor.required_resource_keys == {"east"}
        with dg.build_sensor_context(resources={"east": object()}) as context, pytest.raises(LookupError):
            sensor(context)
    assert [(interest.topics, interest.pattern) for interest in seen] == [
        (("letters",), None),
        ((), "mail-*"),
        (("letters",), "mail-*"),
    ]


def test_a_check_of_an_outbox_takes_its_limits_name_and_outbox() -> None:
    """Rows that are set aside pass up to `max_parked`."""
    from tests.fast.test_dagster_outbox import outbox

    checked = build_outbox_check("delays", max_parked=2, name="events", outbox_key="billing")
    (spec,) = checked.check_specs
    assert spec.name == "events"
    found: list[Any] = [
        checked(dg.build_asset_check_context(resources={"billing": outbox(parked=parked)})) for parked in (2, 3)
    ]
    assert [result.passed for result in found] == [True, False]
