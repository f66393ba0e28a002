"""Check the jobs with which an operator acts on a group, with a coordination log in memory."""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import dagster as dg
import pytest

from marshal_dagster.admin.operator import GroupAdmin
from marshal_dagster.admin.revoke import ClaimRevoker, HeldClaim
from marshal_dagster.assets.reprocess import ReprocessWindowConfig, build_reprocess_asset
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.coordination.log import Append
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.jobs import _admin_action
from marshal_dagster.jobs.admin import (
    ImportPositionsConfig,
    PauseConfig,
    ReprocessRangeConfig,
    ResumeConfig,
    RetryConfig,
    RevokeConfig,
    SetPositionConfig,
    SettingsConfig,
    build_import_positions_job,
    build_pause_job,
    build_reprocess_range_job,
    build_resume_job,
    build_retry_job,
    build_revoke_job,
    build_set_position_job,
    build_settings_job,
)
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.ops.config import ClaimedBatchConfig
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.messages import ClaimingPartition
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.runs.names import GROUP_TAG
from tests.admin_fixtures import END, GO_TYPES, START, FakeTopics, go_left, go_owner, site_now, types
from tests.checkpoints import write_batch
from tests.members import GROUP, HI_MS, SETTINGS, TOPIC, Site, about

HOUR_S = 3_600
JOBS = {
    "pause_group": (build_pause_job, PauseConfig),
    "resume_group": (build_resume_job, ResumeConfig),
    "set_position": (build_set_position_job, SetPositionConfig),
    "import_positions": (build_import_positions_job, ImportPositionsConfig),
    "reprocess_range": (build_reprocess_range_job, ReprocessRangeConfig),
    "retry_plans": (build_retry_job, RetryConfig),
    "revoke_claims": (build_revoke_job, RevokeConfig),
    "set_settings": (build_settings_job, SettingsConfig),
}


@dataclass(slots=True)
class Stand:
    """A group with the position 50 in two partitions, and a Dagster instance that acts on it."""

    instance: dg.DagsterInstance
    site: Site = field(default_factory=site_now)
    topics: FakeTopics = field(default_factory=FakeTopics)
    intervals: list[int] = field(default_factory=list)
    requested_rights: int = 0
    configured: dict[str, Any] = field(default_factory=dict)
    """Settings of the claimer in addition to its group."""

    def claimer(self) -> ClaimerResource:
        """Return a claimer that uses this site's log and data topics."""
        stand = self

        class SceneClaimer(ClaimerResource):
            def open_log(self, interval_ms: int) -> Rationalizer:
                stand.intervals.append(interval_ms)
                return Rationalizer(stand.site.log())

            def require_rights(self) -> None:
                stand.requested_rights += 1

            def open_data(self) -> Topics:
                return cast("Topics", stand.topics)

        return SceneClaimer(
            connection=KafkaConnectionConfig(bootstrap_servers="127.0.0.1:1"), group=GROUP, **stand.configured
        )

    def run(self, name: str, **config: Any) -> dg.ExecuteInProcessResult:  # noqa: ANN401 - fields of the config
        """Run a job."""
        build, config_class = JOBS[name]
        return build().execute_in_process(
            run_config=dg.RunConfig(ops={f"{name}_op": config_class(**config)}),
            resources={"claimer": self.claimer()},
            instance=self.instance,
            raise_on_error=False,
        )

    def is_paused(self) -> set[bool]:
        """Return whether the group is paused, as a set over all coordination partitions."""
        groups = [world.groups.get(GROUP) for world in self.site.world().partitions.values()]
        return {group is not None and group.is_paused(self.site.clock.wall_ms()) for group in groups}

    def offsets(self) -> list[int | None]:
        """Return the group's positions."""
        return [self.site.key(number).offset for number in range(3)]

    def work_in_sleeps(self, monkeypatch: pytest.MonkeyPatch, *, up_to: int) -> None:
        """Let a member process partitions 0 and 1 up to an offset whenever the operator waits."""
        stand = self

        class Working(SystemClock):
            def sleep_ms(self, _: float) -> None:
                unread = [n for n in (0, 1) if (stand.site.key(n).offset or 0) < up_to]
                owner = stand.site.member()
                if owner.paused_until_s() is None and owner.claim(unread):
                    owner.plan(dict.fromkeys(unread, up_to))
                    owner.commit(dict.fromkeys(unread, up_to))
                    owner.release()

        monkeypatch.setattr(_admin_action, "SystemClock", Working)

    def lines(self, result: dg.ExecuteInProcessResult) -> str:
        """Return the lines that a run logged."""
        return "\n".join(
            entry.user_message for entry in self.instance.all_logs(result.run_id) if not entry.is_dagster_event
        )


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    """Yield one Dagster instance for all tests of this module."""
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def stand(instance: dg.DagsterInstance) -> Stand:
    """Return a group that has positions."""
    stand = Stand(instance)
    stand.site.owner_of(0, 1, at=50).release()
    return stand


@pytest.fixture
def empty(instance: dg.DagsterInstance) -> Stand:
    """Return a group whose coordination topic is empty."""
    return Stand(instance)


def shown(result: dg.ExecuteInProcessResult) -> list[dict[str, Any]]:
    """Return the rows of the table "before and after"."""
    assert result.success
    (event,) = [all_node_event for all_node_event in result.all_node_events if all_node_event.is_successful_output]
    return rows(event.step_output_data.metadata["before_and_after"])


def error_of(result: dg.ExecuteInProcessResult) -> str:
    """Return the reason why the op failed."""
    return str(failure(result).step_failure_data.error) + str(failure(result).step_failure_data.user_failure_data)


def rows(table: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - a metadata value
    """Return a table's rows."""
    return [record.data for record in table.records]


def failure(result: dg.ExecuteInProcessResult) -> dg.DagsterEvent:
    """Return the event of the failed op."""
    (event,) = [all_node_event for all_node_event in result.all_node_events if all_node_event.is_step_failure]
    return event


@pytest.mark.slow
def test_a_group_is_paused_and_resumed_from_the_launchpad(stand: Stand) -> None:
    """The metadata show the state before and after, for each coordination partition."""
    before_s = int(time.time())
    (row,) = shown(stand.run("pause_group", duration="2h"))
    after_s = int(time.time()) + 1
    assert stand.is_paused() == {True}
    assert (row["before"], row["coordination_partitions"]) == ("not paused", "all")
    found = re.fullmatch(r"paused until (.+) by (.+)", row["after"])
    assert found
    until, by = found.groups()
    assert before_s + 2 * HOUR_S <= datetime.fromisoformat(until).timestamp() <= after_s + 2 * HOUR_S
    assert re.fullmatch("run [0-9a-f]{8}", by)
    assert shown(stand.run("resume_group")) == [{**row, "before": row["after"], "after": "not paused"}]
    assert stand.is_paused() == {False}


@pytest.mark.slow
def test_a_pause_of_some_coordination_partitions_is_reported_as_such(stand: Stand) -> None:
    """Coordination partitions with the same state share a row."""
    site = stand.site
    site.log().append([Append(1, f"ReleaseGroup/0/1/x.1/x/{GROUP}//0/4102444800".encode())])
    first, second = shown(stand.run("resume_group", dry_run=True))
    assert (first["before"], first["coordination_partitions"]) == ("not paused", "0, 2, 3")
    assert (second["before"], second["coordination_partitions"]) == ("paused until 2100-01-01 00:00:00Z by x", "1")


@pytest.mark.parametrize("until_s", [10**12, 10**18])
def test_a_pause_beyond_the_calendar_is_ended(stand: Stand, until_s: int) -> None:
    """The pause's end is shown as the number that the log has."""
    records = [Append(number, f"ReleaseGroup/0/1/x.1/x/{GROUP}//0/{until_s}".encode()) for number in range(4)]
    stand.site.log().append(records)
    (row,) = shown(stand.run("resume_group"))
    assert (row["before"], row["after"]) == (f"paused until {until_s} s after 1970 by x", "not paused")
    assert stand.is_paused() == {False}


OPENS_WITH: dict[str, dict[str, Any]] = {
    "pause_group": {"duration": "1h"},
    "set_position": {"topic": TOPIC},
    "import_positions": {"topic": TOPIC},
    "reprocess_range": {"topic": TOPIC},
    "retry_plans": {"topic": TOPIC},
    "revoke_claims": {"topic": TOPIC, "instance": ""},
}
"""What a launchpad shows besides `dry_run`, if the job was built with a topic."""


@pytest.mark.parametrize("name", JOBS)
def test_the_launchpad_opens_with_a_dry_run(stand: Stand, name: str) -> None:
    """The config as it opens is valid, begins with `dry_run: true`, and has nothing of resources."""
    claimer = stand.claimer()
    for options in ({}, {"topic": TOPIC, "group": GROUP}):
        job = JOBS[name][0](**options)  # type: ignore[arg-type] # options of any job
        definitions = dg.Definitions(jobs=[job], resources={"claimer": claimer})
        resolved = definitions.resolve_job_def(job.name)
        opened = resolved.run_config
        assert opened is not None
        assert dg.validate_run_config(resolved, opened)
        shown_fields = opened["ops"][f"{job.name}_op"]["config"]
        expected = OPENS_WITH.get(name, {})
        assert list(opened) == ["ops"]
        assert next(iter(shown_fields)) == "dry_run"
        topic = {"topic": options.get("topic", "")} if "topic" in expected else {}
        assert shown_fields == {**expected, "dry_run": True, **topic}
        schema: Any = resolved.run_config_schema.run_config_schema_type
        resources = schema.fields["resources"]
        assert not resources.is_required


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_what_opens_changes_nothing(stand: Stand, name: str) -> None:
    """A run with the launchpad's initial config writes nothing; it shows a preview, or what the config still needs."""
    before = stand.site.values()
    result = JOBS[name][0](topic=TOPIC).execute_in_process(
        resources={"claimer": stand.claimer()}, instance=stand.instance, raise_on_error=False
    )
    assert stand.site.values() == before
    needs = {
        "import_positions": "give either a consumer group or a checkpoint",
        "set_position": "give one of to_offset, to_datetime",
        "reprocess_range": "partitions, start and end",
        "retry_plans": "no exhausted plan",
        "revoke_claims": "nothing to revoke in the selected partitions of topic 'orders'",
    }
    if name in needs:
        assert needs[name] in error_of(result)
    else:
        assert shown(result)


@pytest.mark.slow
def test_several_partitions_are_reprocessed(stand: Stand) -> None:
    """All jobs name partitions in one form."""
    again = {"topic": TOPIC, "partitions": "0-1", "start": 30, "end": 40, "dry_run": True}
    assert [row["partition"] for row in shown(stand.run("reprocess_range", **again))] == [0, 1]
    configs: list[Any] = [ClaimedBatchConfig, *(config for _, config in JOBS.values())]
    forms = [config.model_fields["partitions"] for config in configs if "partitions" in config.model_fields]
    assert {field.annotation for field in forms} == {str | None}
    assert all("'0-3,7'" in (field.description or "") for field in forms)


@pytest.mark.slow
def test_the_group_is_in_name_and_description(stand: Stand) -> None:
    """An operator of several groups sees whose job it is, and a job of another group's claimer fails."""
    job = build_pause_job(group="my-shops")
    assert (job.name, job.description) == ("my_shops_pause_group", "Pauses group 'my-shops'.")
    assert build_pause_job().description == "Pauses the group."
    with pytest.raises(dg.Failure, match=f"for group 'my-shops', but .* for group '{GROUP}'"):
        job.execute_in_process(resources={"claimer": stand.claimer()}, instance=stand.instance)


@pytest.mark.slow
def test_an_operators_run_is_tagged_with_the_group(stand: Stand) -> None:
    """Runs of batches have the same tag, so the list of runs can be filtered by group."""
    run = stand.instance.get_run_by_id(stand.run("resume_group").run_id)
    assert run
    assert run.tags[GROUP_TAG] == GROUP


@pytest.mark.slow
def test_a_pause_ends_at_a_time(stand: Stand) -> None:
    """The end of a pause may be given in any time zone."""
    (row,) = shown(stand.run("pause_group", until="2100-01-01T01:00:00+01:00"))
    assert row["after"].startswith("paused until 2100-01-01 00:00:00Z by ")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "must have either until or duration"),
        ({"until": "2100-01-01T00:00:00Z", "duration": "1h"}, "must have either until or duration"),
        ({"until": "2001-01-01T00:00:00Z"}, "until: this time has passed"),
        ({"duration": "soon"}, "duration: 'soon' is not a duration"),
    ],
    ids=str,
)
def test_a_pause_that_cannot_be_fails_the_run(stand: Stand, config: dict[str, str], says: str) -> None:
    """The run fails and writes nothing."""
    before = stand.site.values()
    result = stand.run("pause_group", **config)
    assert says in str(failure(result).step_failure_data.error)
    assert stand.site.values() == before


def test_what_is_not_paused_is_resumed_all_the_same(stand: Stand) -> None:
    """This also repairs a pause that was written to some coordination partitions only.

    The run logs that the group is not paused.
    """
    assert "group 'etl' is not paused" in stand.lines(stand.run("resume_group"))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("pause_group", {"duration": "1h"}),
        ("resume_group", {}),
        ("set_position", {"topic": TOPIC, "to_earliest": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_dry_run_from_the_launchpad_writes_nothing(stand: Stand, name: str, config: dict[str, Any]) -> None:
    """A dry run shows the result that the job would have."""
    before = stand.site.values()
    result = stand.run(name, dry_run=True, **config)
    assert len(shown(result)) == (3 if name == "set_position" else 1)
    assert "dry run: nothing was written" in stand.lines(result)
    assert stand.site.values() == before


def test_positions_are_set_from_the_launchpad(stand: Stand) -> None:
    """The metadata show the positions before and after; the group continues, and the offsets in Kafka are set too."""
    table = shown(stand.run("set_position", topic=TOPIC, to_offset="0=30,2=40"))
    assert [(row["partition"], row["before"], row["after"], row["set"]) for row in table] == [
        (0, 50, 30, True),
        (2, None, 40, True),
    ]
    assert {(row["log_start"], row["log_end"]) for row in table} == {(START, END)}
    assert (stand.offsets(), stand.is_paused(), stand.topics.committed) == ([30, 50, 40], {False}, {0: 30, 2: 40})
    assert stand.intervals[-1] == HI_MS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("set_position", {"topic": TOPIC, "to_offset": "0=30"}),
        ("reprocess_range", {"topic": TOPIC, "partitions": "0", "start": 30, "end": 50}),
    ],
)
def test_a_sink_that_is_named_in_the_config_is_requested(
    stand: Stand, capfd: pytest.CaptureFixture[str], name: str, config: dict[str, Any]
) -> None:
    """The sink's objection is a warning of the run; a sink that cannot be imported fails the run."""
    sink = f"{__name__}:unable"
    assert stand.run(name, **config, dry_run=True, sink=sink).success
    assert "the sink would reject the records that are read again: not 1" in capfd.readouterr().err
    said = failure(stand.run(name, **config, dry_run=True, sink=f"{__name__}:nothing")).step_failure_data.error
    assert "failed to load: AttributeError" in str(said)


class Unable:
    """A sink that can replace no rows."""

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str:
        """Return how many ranges it cannot replace."""
        return f"not {len(ranges)}"


unable = Unable()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "after"),
    [
        ({"to_datetime": "1970-01-01T00:00:03Z"}, [60, 60, 60]),
        ({"to_latest": True, "partitions": "1-2"}, [50, END, END]),
        ({"shift_by": -10, "partitions": "0"}, [40, 50, None]),
        ({"to_offset": "5", "partitions": "1", "allow_out_of_range": True}, [50, 5, None]),
    ],
    ids=str,
)
def test_each_way_to_name_a_position_is_in_the_config(
    stand: Stand, config: dict[str, Any], after: list[int | None]
) -> None:
    """The config has the same ways to specify a position as the command line."""
    assert stand.run("set_position", topic=TOPIC, **config).success
    assert stand.offsets() == after


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "give one of to_offset, to_datetime, to_earliest, to_latest and shift_by"),
        ({"to_earliest": True, "to_latest": True}, "give one of"),
        ({"to_offset": "5"}, "offsets outside of the topic"),
        ({"to_earliest": True, "partitions": "x"}, "partitions: 'x' names no partitions"),
    ],
    ids=str,
)
def test_a_position_that_cannot_be_fails_the_run(stand: Stand, config: dict[str, Any], says: str) -> None:
    """The run fails and writes nothing."""
    before = stand.site.values()
    assert says in str(failure(stand.run("set_position", topic=TOPIC, **config)).step_failure_data.error)
    assert stand.site.values() == before


@pytest.mark.slow
def test_members_that_stay_fail_the_run(stand: Stand) -> None:
    """No position is set, and the failure's metadata show that."""
    stand.site.owner_of(0, at=50)
    result = stand.run("set_position", topic=TOPIC, to_offset="30", partitions="0,1", wait_s=0)
    data = failure(result).step_failure_data
    assert data.user_failure_data is not None
    assert "still claimed by live members" in (data.user_failure_data.description or "")
    table = rows(data.user_failure_data.metadata["before_and_after"])
    assert [(row["partition"], row["set"]) for row in table] == [(0, False), (1, False)]
    assert (stand.offsets()[:2], stand.is_paused()) == ([50, 50], {False})


@pytest.mark.slow
def test_what_was_set_half_way_stands_in_the_failure(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error in the middle, the failure's metadata show which positions the log has."""
    set_positions = GroupAdmin.set_positions

    def half(self: GroupAdmin, topic: str, offsets: dict[int, int], topic_id: str, **_: object) -> None:
        set_positions(self, topic, {0: offsets[0]}, topic_id, wait_ms=0)
        raise UnavailableError("the broker is gone")

    monkeypatch.setattr(GroupAdmin, "set_positions", half)
    data = failure(stand.run("set_position", topic=TOPIC, to_offset="30")).step_failure_data
    assert data.user_failure_data is not None
    assert (
        data.user_failure_data.description
        == f"the broker is gone. Topic {TOPIC!r}: the position was set in partitions [0]"
    )
    table = rows(data.user_failure_data.metadata["before_and_after"])
    assert [(row["partition"], row["set"]) for row in table] == [(0, True), (1, False), (2, False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"),
    [("set_position", {"to_offset": "0=30,1=30"}), ("import_positions", {"consumer_group": "loader"})],
)
def test_a_position_that_another_process_sets_meanwhile_fails_the_run(
    stand: Stand, empty: Stand, monkeypatch: pytest.MonkeyPatch, name: str, config: dict[str, Any]
) -> None:
    """The failure names the partition, and its table has only what the run set."""
    where = empty if name == "import_positions" else stand
    where.topics.committed = dict.fromkeys(range(3), 30)
    set_positions = GroupAdmin.set_positions

    def then_set_back(self: GroupAdmin, topic: str, offsets: dict[int, int], topic_id: str, **_: object) -> None:
        set_positions(self, topic, offsets, topic_id, wait_ms=0)
        set_positions(self, topic, {0: 20}, topic_id, wait_ms=0)

    monkeypatch.setattr(GroupAdmin, "set_positions", then_set_back)
    data = failure(where.run(name, topic=TOPIC, **config)).step_failure_data.user_failure_data
    assert data is not None
    assert "partitions 0 do not have these positions, because another process set them" in (data.description or "")
    assert [row["partition"] for row in rows(data.metadata["before_and_after"]) if not row["set"]] == [0]


@pytest.mark.slow
def test_what_a_run_holds_that_is_over_is_not_waited_for(stand: Stand) -> None:
    """Dagster knows that the run is over, so its claims do not have to expire first."""
    over = stand.run("resume_group")
    claimer = stand.site.claimer(instance=f"{over.run_id}.0")
    claimer.ensure_group_settings()
    assert claimer.claim([0])
    assert stand.run("set_position", topic=TOPIC, to_offset="0=30", wait_s=0).success
    assert stand.site.key(0).offset == 30


@pytest.mark.slow
def test_offsets_that_kafka_does_not_take_are_a_warning(stand: Stand) -> None:
    """Only lag tools read these offsets, so an error with them is a warning."""
    stand.topics.problem = "READ is missing"
    result = stand.run("set_position", topic=TOPIC, to_offset="0=30")
    assert result.success
    assert "READ is missing" in stand.lines(result)


@pytest.mark.slow
def test_first_positions_are_adopted_from_the_launchpad(stand: Stand) -> None:
    """Positions are imported where the group has none.

    A dry run shows them. Running consumers are a failure of the run, and a warning of a dry run.
    """
    stand.topics.committed = {0: 30, 1: 40, 2: 45}
    before = stand.site.values()
    stand.topics.has_consumers_of = {"loader"}
    config = {"topic": TOPIC, "consumer_group": "loader", "partitions": "2"}
    assert "has running consumers" in str(failure(stand.run("import_positions", **config)).step_failure_data.error)
    result = stand.run("import_positions", **config, dry_run=True)
    assert [(row["before"], row["after"], row["set"]) for row in shown(result)] == [(None, 45, False)]
    assert "these offsets will soon be outdated" in stand.lines(result)
    assert stand.site.values() == before
    stand.topics.has_consumers_of = set()
    table = shown(stand.run("import_positions", **config))
    assert [(row["partition"], row["before"], row["after"], row["set"]) for row in table] == [(2, None, 45, True)]
    assert stand.offsets() == [50, 50, 45]


@pytest.mark.slow
def test_a_checkpoint_is_adopted_from_the_launchpad(stand: Stand, tmp_path: Path) -> None:
    """Partitions without a checkpointed offset start at the beginning."""
    write_batch(tmp_path, 0, {TOPIC: {0: 33}})
    assert stand.run("import_positions", topic=TOPIC, checkpoint=str(tmp_path), partitions="2").success
    assert stand.offsets() == [50, 50, START]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "give either a consumer group or a checkpoint"),
        ({"consumer_group": "loader", "checkpoint": "/nowhere"}, "give either a consumer group or a checkpoint"),
        ({"consumer_group": "loader", "others": "first"}, "others: 'first'; give earliest or latest"),
        ({"consumer_group": "loader"}, "already has positions in topic 'orders', partitions [0, 1]"),
    ],
    ids=str,
)
def test_an_adoption_that_cannot_be_fails_the_run(stand: Stand, config: dict[str, Any], says: str) -> None:
    """The run fails and writes nothing."""
    stand.topics.committed = {0: 30, 1: 40, 2: 45}
    before = stand.site.values()
    assert says in str(failure(stand.run("import_positions", topic=TOPIC, **config)).step_failure_data.error)
    assert stand.site.values() == before


@pytest.mark.slow
def test_a_range_is_done_again_from_the_launchpad(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's members process the range again; the metadata show the old position and where the group continues."""
    again = {"topic": TOPIC, "partitions": "0", "start": 30, "end": 40}
    (row,) = shown(stand.run("reprocess_range", **again, dry_run=True))
    assert (row["before"], row["reached"], row["after"]) == (50, None, None)

    stand.work_in_sleeps(monkeypatch, up_to=45)
    (row,) = shown(stand.run("reprocess_range", **again))
    assert (row["partition"], row["start"], row["end"]) == (0, 30, 40)
    assert (row["before"], row["reached"], row["after"]) == (50, 45, 50)
    assert (stand.offsets(), stand.is_paused()) == ([50, 50, None], {False})


WINDOW = {"from_datetime": "1970-01-01T00:00:01.500Z", "to_datetime": "1970-01-01T00:00:02.250Z"}
"""The window of time with the offsets from 30 up to 45."""


@pytest.mark.slow
def test_a_window_of_time_is_done_again_from_the_launchpad(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The members process the window's offsets of each partition that has a position."""
    stand.work_in_sleeps(monkeypatch, up_to=45)
    result = stand.run("reprocess_range", topic=TOPIC, **WINDOW)
    found = [[row[name] for name in ("partition", "start", "end", "reached", "after")] for row in shown(result)]
    assert found == [[0, 30, 45, 45, 50], [1, 30, 45, 45, 50]]
    assert "orders/2: nothing to process again: the group has no position" in stand.lines(result)
    assert (stand.offsets(), stand.is_paused()) == ([50, 50, None], {False})


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [{}, {"partitions": "0", "start": 30}, {**WINDOW, "end": 3}, {"partitions": "0", "start": 3, "end": 5, **WINDOW}],
)
def test_a_config_that_selects_nothing_fails_in_one_line(stand: Stand, config: dict[str, Any]) -> None:
    """Offsets and times together, or parts of them, are refused."""
    said = error_of(stand.run("reprocess_range", topic=TOPIC, **config))
    assert "must have either partitions, start and end, or from_datetime and to_datetime" in said


@pytest.mark.slow
@pytest.mark.parametrize("last", ["1970-01-01-00:00", "1970-01-01-00:01"])
def test_a_backfill_does_the_windows_of_its_partitions_again(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """A run of one or of several adjacent windows is one range of offsets, and materializes each window."""
    monkeypatch.setattr(FakeTopics, "offsets_at", at_minutes)
    stand.work_in_sleeps(monkeypatch, up_to=45)
    again = build_reprocess_asset(TOPIC, partitions_def=MINUTES)
    done = dg.materialize(
        [again],
        resources={"claimer": stand.claimer()},
        instance=stand.instance,
        tags={"dagster/asset_partition_range_start": "1970-01-01-00:00", "dagster/asset_partition_range_end": last},
    )
    windows = ["1970-01-01-00:00", "1970-01-01-00:01"]
    events = done.get_asset_materialization_events()
    assert [event.partition for event in events] == windows[: windows.index(last) + 1]
    end = {"1970-01-01-00:00": 30, "1970-01-01-00:01": 40}[last]
    found = rows(events[0].materialization.metadata["before_and_after"])
    assert [[row[name] for name in ("partition", "start", "end", "after")] for row in found] == [
        [0, 20, end, 50],
        [1, 20, end, 50],
    ]
    assert (stand.offsets(), stand.is_paused()) == ([50, 50, None], {False})


@pytest.mark.slow
def test_a_backfill_in_which_nothing_was_processed_succeeds(stand: Stand) -> None:
    """A window without processed messages is materialized, and nothing is written."""
    before = stand.site.values()
    again = build_reprocess_asset(TOPIC, partitions_def=MINUTES, name="again")
    done = dg.materialize(
        [again],
        partition_key="1970-01-01-00:05",
        resources={"claimer": stand.claimer()},
        instance=stand.instance,
        run_config=dg.RunConfig(ops={"again": ReprocessWindowConfig(partitions="0-1")}),
    )
    (event,) = done.get_asset_materialization_events()
    assert (rows(event.materialization.metadata["before_and_after"]), stand.site.values()) == ([], before)


@pytest.mark.slow
@pytest.mark.parametrize("is_backfill", [False, True])
def test_a_dry_run_of_a_window_materializes_nothing(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, *, is_backfill: bool
) -> None:
    """Otherwise a backfill of the missing windows would pass over it. A backfill itself fails instead of waiting."""
    monkeypatch.setattr(FakeTopics, "offsets_at", at_minutes)
    before = stand.site.values()
    again = build_reprocess_asset(TOPIC, partitions_def=MINUTES, name="again")
    last = "1970-01-01-00:01"
    tags = {"dagster/asset_partition_range_start": "1970-01-01-00:00", "dagster/asset_partition_range_end": last}
    done = dg.materialize(
        [again],
        resources={"claimer": stand.claimer()},
        instance=stand.instance,
        tags={**tags, "dagster/backfill": "one"} if is_backfill else tags,
        run_config=dg.RunConfig(ops={"again": ReprocessWindowConfig(dry_run=True)}),
        raise_on_error=False,
    )
    assert done.success is not is_backfill
    assert (done.get_asset_materialization_events(), stand.site.values()) == ([], before)
    observed = [event.asset_observation_data.asset_observation for event in done.get_asset_observation_events()]
    assert [one.partition for one in observed] == ([] if is_backfill else ["1970-01-01-00:00", last])
    for one in observed:
        assert [row["start"] for row in rows(one.metadata["before_and_after"])] == [20, 20]
    if is_backfill:
        assert "launch the backfill without dry_run" in error_of(done)


@pytest.mark.slow
def test_a_window_that_the_group_has_not_processed_yet_fails(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the job nor a backfill reports success, as if its messages had been processed again."""
    monkeypatch.setattr(FakeTopics, "offsets_at", at_minutes)
    before = stand.site.values()
    window = {"from_datetime": "1970-01-01T00:03Z", "to_datetime": "1970-01-01T00:04Z"}
    said = [error_of(stand.run("reprocess_range", topic=TOPIC, **window, dry_run=is_dry)) for is_dry in (True, False)]
    done = dg.materialize(
        [build_reprocess_asset(TOPIC, partitions_def=MINUTES)],
        partition_key="1970-01-01-00:03",
        resources={"claimer": stand.claimer()},
        instance=stand.instance,
        raise_on_error=False,
    )
    assert done.get_asset_materialization_events() == []
    for text in (*said, error_of(done)):
        assert "partition 0: not processed yet; partition 1: not processed yet; partition 2: the group has no" in text
    assert stand.site.values() == before


MINUTES = dg.TimeWindowPartitionsDefinition(start="1970-01-01-00:00", fmt="%Y-%m-%d-%H:%M", cron_schedule="* * * * *")


def at_minutes(_: FakeTopics, __: str, partitions: Sequence[int], at_ms: int) -> dict[int, int]:
    """Return the first offset of a time, for ten messages in each minute, of which the first begins at offset 20."""
    offset = START + at_ms // 6_000
    return {} if offset > END else dict.fromkeys(partitions, offset)


@pytest.mark.thorough
def test_a_range_that_is_not_done_in_time_fails_the_run(stand: Stand) -> None:
    """The group continues at its old position."""
    result = stand.run("reprocess_range", topic=TOPIC, partitions="0", start=30, end=40, within_s=0.1)
    data = failure(result).step_failure_data.user_failure_data
    assert data is not None
    assert data.description == (
        "the runs of group 'etl' reached offset 30 of 40 in topic 'orders', partition 0 within 0.1 s; the group "
        "continues at 50. Launch it again for the rest, with a larger within_s"
    )
    (row,) = rows(data.metadata["before_and_after"])
    assert (row["reached"], row["after"]) == (30, 50)
    assert (stand.offsets(), stand.is_paused()) == ([50, 50, None], {False})


@pytest.mark.slow
def test_exhausted_plans_are_tried_again_from_the_launchpad(stand: Stand) -> None:
    """The plans end and the positions do not change; a run without an exhausted plan fails."""
    owner = stand.site.owner_of(0, 1, at=50)
    owner.plan({0: 60, 1: 80})
    owner.release()
    for _ in range(5):
        again = stand.site.member()
        again.claim([1])
        again.release()
    before = stand.site.values()
    table = shown(stand.run("retry_plans", topic=TOPIC, dry_run=True))
    assert ([row["partition"] for row in table], stand.site.values()) == ([1], before)
    (row,) = shown(stand.run("retry_plans", topic=TOPIC))
    assert (row["partition"], row["before"], row["after"]) == (1, 50, 50)
    keys = [stand.site.key(number) for number in (0, 1)]
    assert [(key.offset, key.plan_end, key.plan_attempts) for key in keys] == [(50, 60, 0), (50, None, 0)]
    data = failure(stand.run("retry_plans", topic=TOPIC)).step_failure_data
    assert data.user_failure_data is not None
    assert "group 'etl' has no exhausted plan in topic 'orders'" in (data.user_failure_data.description or "")


@pytest.mark.slow
def test_what_the_dead_hold_is_revoked_from_the_launchpad(stand: Stand) -> None:
    """The metadata show the claims that were revoked; a dry run shows those that would be."""
    dead = stand.site.owner_of(0, 1, at=50)
    before = stand.site.values()
    table = shown(stand.run("revoke_claims", topic=TOPIC, instance=dead.member.instance, dry_run=True))
    assert ([row["revoked"] for row in table], stand.site.values()) == ([False, False], before)
    table = shown(stand.run("revoke_claims", topic=TOPIC, instance=dead.member.instance, partitions="1"))
    assert [(row["partition"], row["instance"], row["freshness"], row["revoked"]) for row in table] == [
        (1, dead.member.instance, "fresh", True)
    ]
    assert [stand.site.owner(number) for number in (0, 1)] == [dead.member.instance, None]
    assert stand.intervals[-1] == HI_MS


@pytest.mark.slow
def test_a_dry_run_without_an_owner_shows_all_claims(stand: Stand) -> None:
    """The launchpad of a revocation opens with such a dry run, so that the operator finds the owner."""
    owners = [stand.site.owner_of(number, at=50).member.instance for number in (0, 1)]
    table = shown(stand.run("revoke_claims", topic=TOPIC, instance="", dry_run=True))
    assert [(row["partition"], row["instance"], row["revoked"]) for row in table] == [
        (0, owners[0], False),
        (1, owners[1], False),
    ]
    (row,) = shown(stand.run("revoke_claims", topic=TOPIC, instance="", partitions="1-2", dry_run=True))
    assert row["partition"] == 1
    assert "no owner is named" in error_of(stand.run("revoke_claims", topic=TOPIC, instance=""))


@pytest.mark.slow
def test_a_revocation_of_nothing_fails_the_run(stand: Stand) -> None:
    """The failure names the instance that does hold a claim."""
    owner = stand.site.owner_of(0)
    before = stand.site.values()
    data = failure(stand.run("revoke_claims", topic=TOPIC, instance="no-member")).step_failure_data
    assert data.user_failure_data is not None
    assert "'no-member' has no claim of topic 'orders'" in (data.user_failure_data.description or "")
    assert owner.member.instance in (data.user_failure_data.description or "")
    assert stand.site.values() == before


@pytest.mark.slow
def test_what_changed_hands_fails_the_run(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure's metadata show which claims were revoked."""
    dead = stand.site.owner_of(0, 1, at=50)
    carry_out = ClaimRevoker.carry_out

    def late(self: ClaimRevoker, claims: Sequence[HeldClaim]) -> Sequence[HeldClaim]:
        dead.release([0])
        return carry_out(self, claims)

    monkeypatch.setattr(ClaimRevoker, "carry_out", late)
    data = failure(stand.run("revoke_claims", topic=TOPIC, instance=dead.member.instance)).step_failure_data
    assert data.user_failure_data is not None
    table = rows(data.user_failure_data.metadata["claims"])
    assert [(row["partition"], row["revoked"]) for row in table] == [(0, False), (1, True)]


def test_another_resource_is_refused(stand: Stand) -> None:
    """The resource must be a claimer, because that defines the group."""
    job = build_resume_job(claimer_key="other")
    with pytest.raises(ConfigurationError, match="resource 'other' is of type "):
        job.execute_in_process(
            resources={"other": dg.ResourceDefinition.hardcoded_resource(1)}, instance=stand.instance
        )


@pytest.mark.parametrize("config_class", [config_class for _, config_class in JOBS.values()])
def test_the_launchpad_explains_every_field(config_class: type[dg.Config]) -> None:
    """Each field of the config has a description."""
    assert [name for name, field in config_class.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("name", JOBS)
def test_an_operators_job_can_be_named_and_tagged(name: str) -> None:
    """A deployment needs such a job for each group."""
    job = JOBS[name][0](name="mine", tags={"team": "a"})
    assert (job.name, job.tags["team"]) == ("mine", "a")
    assert JOBS[name][0]().name == name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"), [("set_position", {"to_latest": True}), ("revoke_claims", {"instance": "i"})]
)
def test_a_topic_that_cannot_be_is_refused(stand: Stand, name: str, config: dict[str, Any]) -> None:
    """A topic name that would add fields to a record fails the run before the log is read."""
    data = failure(stand.run(name, topic="orders/0", **config)).step_failure_data
    assert data.user_failure_data is not None
    assert data.user_failure_data.description is not None
    assert data.user_failure_data.description.startswith("topic: 'orders/0' is not a name")
    assert stand.intervals == []


@pytest.mark.slow
def test_only_what_writes_needs_the_right_to(stand: Stand) -> None:
    """A dry run needs no authorization; the same job checks it first if it writes."""
    assert stand.run("pause_group", duration="1h", dry_run=True).success
    assert stand.requested_rights == 0
    assert stand.run("pause_group", duration="1h").success
    assert stand.run("set_position", topic=TOPIC, to_latest=True).success
    assert stand.requested_rights == 2


# Groups without settings, and groups that Go consumers share


@pytest.mark.slow
def test_a_group_without_settings_gets_the_claimers_before_it_is_paused(empty: Stand) -> None:
    """Without settings, the members would not recognise the pause as one of this library."""
    assert empty.run("pause_group", duration="1h", dry_run=True).success
    assert empty.site.values() == []
    assert empty.run("pause_group", duration="1h").success
    assert empty.is_paused() == {True}
    assert {world.groups[GROUP].settings for world in empty.site.world().partitions.values()} == {SETTINGS}


@pytest.mark.slow
def test_a_group_without_settings_gets_the_claimers_before_its_positions_are_set(empty: Stand) -> None:
    """The same is true for imported positions."""
    empty.topics.committed = {0: 30, 1: 40, 2: 45}
    assert empty.run("import_positions", topic=TOPIC, consumer_group="loader").success
    assert empty.offsets() == [30, 40, 45]
    assert {world.groups[GROUP].settings for world in empty.site.world().partitions.values()} == {SETTINGS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("pause_group", {"duration": "1h"}),
        ("resume_group", {}),
        ("set_position", {"topic": TOPIC, "to_offset": "0=30"}),
        ("set_settings", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_where_go_consumers_are_a_job_needs_a_persons_word(empty: Stand, name: str, config: dict[str, Any]) -> None:
    """With the operator's confirmation the job runs; a confirmation that names another group is an error."""
    go_left(empty.site, 0)
    before = empty.site.values()
    assert f"--go-consumers-stopped {GROUP}" in error_of(empty.run(name, **config))
    assert "names 'other'" in error_of(empty.run(name, **config, go_consumers_stopped="other"))
    assert empty.site.values() == before
    assert empty.run(name, **config, go_consumers_stopped=GROUP).success


@pytest.mark.parametrize("rule_set", ["go", "native"])
def test_positions_of_a_go_group_are_set_by_records_that_go_knows(empty: Stand, rule_set: str) -> None:
    """This holds whatever the claimer's settings are, because the operator confirmed who uses the group."""
    empty.configured = {"rule_set": "go", "heartbeat_interval_s": 60} if rule_set == "go" else {}
    go_left(empty.site, 0)
    assert empty.run("set_position", topic=TOPIC, to_offset="0=30", go_consumers_stopped=GROUP).success
    assert (empty.site.key(0).offset, types(empty.site) <= GO_TYPES) == (30, True)
    assert empty.topics.committed == {0: 30}


@pytest.mark.slow
def test_a_group_is_given_its_claimers_settings(stand: Stand) -> None:
    """The settings change during a pause.

    The metadata show the old and the new settings; a dry run writes nothing.
    """
    stand.configured = {"heartbeat_interval_s": 20.0, "delivery": "effectively_once"}
    before = stand.site.values()
    (row,) = shown(stand.run("set_settings", dry_run=True))
    assert (row["before"], row["after"], row["coordination_partitions"]) == (
        "10 s, native, at_least_once",
        "20 s, native, effectively_once",
        "all",
    )
    assert stand.site.values() == before
    assert shown(stand.run("set_settings")) == [row]
    assert (stand.site.world().group_of(GROUP, TOPIC).settings.heartbeat_interval_ms, stand.is_paused()) == (
        20_000,
        {False},
    )
    assert "already has these settings" in stand.lines(stand.run("set_settings"))


@pytest.mark.slow
def test_a_dead_go_owner_is_freed_from_the_launchpad(empty: Stand) -> None:
    """The partitions are released without a revocation.

    A partition without an offset cannot be released this way, so the run fails.
    """
    instance = go_owner(empty.site, 0)
    result = empty.run("revoke_claims", topic=TOPIC, instance=instance)
    assert result.success
    assert "takes its partitions back with its next heartbeat" in empty.lines(result)
    assert (empty.site.owner(), types(empty.site) <= GO_TYPES) == (None, True)
    empty.site.say(about(ClaimingPartition, instance, 2))
    assert "not all partitions could be released" in error_of(
        empty.run("revoke_claims", topic=TOPIC, instance=instance)
    )
