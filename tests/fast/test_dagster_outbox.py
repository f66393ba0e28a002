"""Check the outbox in Dagster: the sensor, the check and the resource, with a fake backlog."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
from dagster import (
    DagsterInstance,
    DagsterRunStatus,
    Definitions,
    EnvVar,
    ExecuteInProcessResult,
    SensorResult,
    SkipReason,
    asset,
    build_asset_check_context,
    build_sensor_context,
)
from dagster._core.remote_origin import InProcessCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from pydantic import PrivateAttr

from marshal_dagster.assets.checks import build_outbox_check
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.jobs.outbox import build_outbox_drain_job
from marshal_dagster.outbox.backoff import HarvestLimits
from marshal_dagster.outbox.harvest import HarvestCounts
from marshal_dagster.outbox.harvester import Harvester
from marshal_dagster.outbox.options import HarvesterOptions
from marshal_dagster.outbox.schema import OutboxRegistration
from marshal_dagster.outbox.status import OutboxStatus
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.resources.outbox import OutboxResource, parked_text
from marshal_dagster.sensors.outbox_backlog import build_outbox_backlog_sensor

KAFKA = KafkaConnectionConfig(bootstrap_servers="localhost:1")
DRAIN = build_outbox_drain_job()


class FakeOutbox(OutboxResource):
    """An outbox with a number of waiting rows, the age of the oldest, and a number of parked rows."""

    rows: int = 0
    age_s: float = 0.0
    parked: int = 0
    parked_by_another: int = 0
    """How many rows another harvester sets aside while a run drains the outbox."""

    _drained: bool = PrivateAttr(default=False)

    def status(self) -> OutboxStatus:
        """Return the fake status."""
        registration = OutboxRegistration("outbox", "uid", 1, 3, "host")
        parked = self.parked + (self.parked_by_another if self._drained else 0)
        return OutboxStatus(registration, self.rows, self.age_s if self.rows else None, parked, None)

    def drained(self) -> None:
        """Note that a run drained the outbox."""
        self._drained = True


class FakeHarvester:
    """A harvester that publishes all rows."""

    def __init__(self, box: FakeOutbox) -> None:
        self.box = box
        self.counts = HarvestCounts(published=box.rows)

    def drain(self) -> int:
        """Return the number of rows."""
        self.box.drained()
        return self.box.rows


class DrainedOutbox(FakeOutbox):
    """An outbox with a fake harvester."""

    def harvester(self) -> Harvester:
        """Return the fake harvester."""
        return cast("Harvester", FakeHarvester(self))


def drain(instance: DagsterInstance, **fields: Any) -> ExecuteInProcessResult:  # noqa: ANN401 - the fields of the class
    """Run the job on a fake outbox."""
    box = DrainedOutbox(connection=KAFKA, dsn="postgresql://localhost/db", **fields)
    return DRAIN.execute_in_process(instance=instance, resources={"outbox": box}, raise_on_error=False)


def outbox(**fields: Any) -> FakeOutbox:  # noqa: ANN401 - the fields of the class
    """Return an outbox."""
    return FakeOutbox(connection=KAFKA, dsn="postgresql://localhost/db", **fields)


@pytest.fixture
def instance() -> Iterator[DagsterInstance]:
    """Yield a Dagster instance for one test."""
    with DagsterInstance.ephemeral() as instance:
        yield instance


def tick(instance: DagsterInstance, box: OutboxResource, **options: Any) -> SensorResult | SkipReason:  # noqa: ANN401 - options of the sensor
    """Evaluate the sensor once."""
    sensor = build_outbox_backlog_sensor(DRAIN, **options)
    result = sensor(build_sensor_context(instance, resources={"outbox": box}))
    assert isinstance(result, SensorResult | SkipReason)
    return result


@pytest.mark.parametrize(
    ("rows", "age_s", "options", "asks"),
    [
        (0, 0.0, {}, False),
        (1, 0.1, {}, True),
        (10, 5.0, {"max_backlog_rows": 10}, False),
        (11, 5.0, {"max_backlog_rows": 10}, True),
        (10, 61.0, {"max_backlog_rows": 10, "max_backlog_age_s": 60}, True),
        (10, 60.0, {"max_backlog_rows": 10, "max_backlog_age_s": 60}, False),
        (0, 0.0, {"max_backlog_age_s": 0}, False),
    ],
)
def test_the_sensor_asks_beyond_its_thresholds(
    instance: DagsterInstance, rows: int, age_s: float, options: dict[str, Any], asks: bool
) -> None:
    """More rows than allowed, or an older one, cause a request; an empty outbox never does."""
    result = tick(instance, outbox(rows=rows, age_s=age_s), **options)

    if asks:
        assert isinstance(result, SensorResult)
        assert [request.tags["marshal/outbox"] for request in result.run_requests or []] == ["outbox"]
    else:
        assert isinstance(result, SkipReason)


@pytest.mark.parametrize(
    ("status", "asks"),
    [
        (DagsterRunStatus.NOT_STARTED, False),
        (DagsterRunStatus.STARTED, False),
        (DagsterRunStatus.SUCCESS, True),
        (DagsterRunStatus.FAILURE, True),
    ],
)
def test_one_run_at_a_time(instance: DagsterInstance, status: DagsterRunStatus, asks: bool) -> None:
    """While a run of the job is in progress, the sensor requests no other."""
    instance.create_run_for_job(DRAIN, status=status)
    assert isinstance(tick(instance, outbox(rows=5)), SensorResult) is asks


@pytest.mark.parametrize("status", [DagsterRunStatus.STARTED, DagsterRunStatus.NOT_STARTED])
def test_a_run_whose_host_died_blocks_for_a_bounded_time(
    instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch, status: DagsterRunStatus
) -> None:
    """Without run monitoring such a run stays unfinished; a queued run is waited for."""
    instance.create_run_for_job(DRAIN, status=status)
    assert isinstance(tick(instance, outbox(rows=5)), SkipReason)
    monkeypatch.setattr("marshal_dagster.sensors.outbox_backlog.OPEN_RUN_PATIENCE_S", -60)
    assert isinstance(tick(instance, outbox(rows=5)), SensorResult)
    location = InProcessCodeLocationOrigin(LoadableTargetOrigin(python_file="of_a_test.py"))
    origin = RemoteJobOrigin(RemoteRepositoryOrigin(location, "all"), DRAIN.name)
    instance.create_run_for_job(DRAIN, status=DagsterRunStatus.QUEUED, remote_job_origin=origin)
    assert isinstance(tick(instance, outbox(rows=5)), SkipReason)


@pytest.mark.parametrize(
    ("fields", "succeeds"),
    [
        ({"rows": 3}, True),
        ({"rows": 3, "parked": 1}, True),
        ({"parked": 1}, False),
        ({"rows": 3, "parked_by_another": 1}, False),
        ({"parked_by_another": 1}, False),
    ],
)
def test_a_run_is_not_green_while_rows_are_set_aside(
    instance: DagsterInstance, fields: dict[str, Any], succeeds: bool
) -> None:
    """Rows that another run or service set aside count too; a run that published others warns only."""
    done = drain(instance, **fields)
    assert done.success is succeeds
    logged = [entry for entry in instance.all_logs(done.run_id) if "outbox parked list" in str(entry)]
    assert bool(logged) is bool(fields.get("parked") or fields.get("parked_by_another"))


def test_the_sensor_names_rows_that_are_set_aside(instance: DagsterInstance) -> None:
    """No run publishes them, so the tick shows that an operator must act."""
    result = tick(instance, outbox(parked=2))
    assert isinstance(result, SkipReason)
    assert "is empty" in (result.skip_message or "")
    assert "2 rows are set aside: `marshal-dagster outbox parked list`" in (result.skip_message or "")


def test_the_advice_names_the_outbox() -> None:
    """Without its name the command would list the rows of another outbox."""
    named = OutboxResource(connection=KAFKA, dsn="postgresql://db/x", outbox="billing", database_schema="events")
    command = "marshal-dagster outbox parked list --name billing --schema events"
    assert parked_text(named, 2).startswith(f"2 rows are set aside: `{command}` shows why")


def test_thresholds_that_cannot_be_are_refused() -> None:
    """A limit must be 0 or more."""
    with pytest.raises(ConfigurationError, match="max_backlog_rows is -1"):
        build_outbox_backlog_sensor(DRAIN, max_backlog_rows=-1)
    with pytest.raises(ConfigurationError, match="max_age_s is -1"):
        build_outbox_check("delays", max_age_s=-1)


@asset
def delays() -> None:
    """An asset whose events go through the outbox."""


@pytest.mark.parametrize(
    ("box", "passes", "says"),
    [
        ({}, True, "is empty"),
        ({"rows": 5, "age_s": 60.0}, True, "5 rows wait"),
        ({"rows": 5, "age_s": 61.0}, False, "a harvester is running"),
        ({"parked": 1}, False, "outbox parked"),
    ],
)
def test_the_check_reports_old_and_parked_rows(box: dict[str, Any], passes: bool, says: str) -> None:
    """The check describes the problem and what to do; its metadata have the numbers."""
    checked = build_outbox_check(delays)
    result: Any = checked(build_asset_check_context(resources={"outbox": outbox(**box)}))

    assert result.passed is passes
    assert says in (result.description or "")
    assert result.metadata["rows waiting"].value == box.get("rows", 0)


@pytest.mark.filterwarnings("ignore::dagster.BetaWarning")  # Dagster warns when it copies a sensor
def test_all_of_it_makes_definitions() -> None:
    """Job, sensor, check and resource form a valid code location."""
    definitions = Definitions(
        assets=[delays],
        asset_checks=[build_outbox_check(delays, blocking=True)],
        jobs=[DRAIN],
        sensors=[build_outbox_backlog_sensor(DRAIN)],
        resources={"outbox": OutboxResource(connection=KAFKA, dsn=EnvVar("OUTBOX_DSN"))},
    )
    assert definitions.resolve_sensor_def("outbox_backlog").job.name == "drain_outbox"
    assert definitions.resolve_job_def("drain_outbox").required_resource_keys == {"outbox", "io_manager"}


def test_a_password_in_the_code_is_refused() -> None:
    """Dagster would store and show a password that is part of the definitions."""
    for dsn in ("postgresql://me:hunter2@localhost/db", "host=localhost password=hunter2"):
        with pytest.raises(ConfigurationError, match="dsn is written in the code") as raised:
            OutboxResource(connection=KAFKA, dsn=dsn).get_resource_definition()
        assert "hunter2" not in str(raised.value) + repr(OutboxResource(connection=KAFKA, dsn=dsn))


def test_a_script_can_use_what_names_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a run, the variable is read when it is needed; a missing variable is an error that names it."""
    outbox = OutboxResource(connection=KAFKA, dsn=EnvVar("OUTBOX_DSN"))
    with pytest.raises(ConfigurationError, match="variable OUTBOX_DSN is not set"):
        outbox.tables()
    monkeypatch.setenv("OUTBOX_DSN", "postgresql://me:hunter2@localhost/db")
    assert outbox.tables().database.has_password


def test_the_resources_harvester_works_as_it_says() -> None:
    """The harvester has the resource's limits and partitioner; the latter must be that of the other harvesters."""
    box = outbox(max_in_flight_records=7, max_attempts=2, topic_patience_s=9.0, partitioner="fnv1a")
    limits = HarvestLimits(7, max_attempts=2, topic_patience_s=9)
    assert box.harvester()._options == HarvesterOptions(limits, partitioner="fnv1a")
    with pytest.raises(ConfigurationError, match="partitioner: 'java'; give murmur2_random or"):
        outbox(partitioner="java").harvester()


def test_another_resource_in_its_place_is_reported() -> None:
    """If the key names another kind of resource, the error shows that."""
    sensor = build_outbox_backlog_sensor(DRAIN)
    with pytest.raises(ConfigurationError, match="it must be OutboxResource"):
        sensor(build_sensor_context(resources={"outbox": "no"}))
