"""Check the resources: their settings, their secrets, and what they learn from Dagster."""

import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, cast

import dagster as dg
import pytest
import yaml  # type: ignore[import-untyped]
from dagster._core.remote_representation.external_data import RepositorySnap
from dagster._core.snap.snap_to_yaml import default_values_yaml_from_type_snap

from marshal_dagster.batches import BatchRequest
from marshal_dagster.errors import BatchAbortedError, ConfigurationError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.messages import (
    INT32_MAX,
    INT64_MAX,
    ClaimingRange,
    DeliveryMode,
    GroupSettings,
    PlanningRange,
    RuleSet,
    render,
)
from marshal_dagster.protocol.state import Owner
from marshal_dagster.resources.claimer import BatchOptions, ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.resources.launchpad import configured_in_code
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.runs.announcements import AnnouncedRange, announced_ranges, announcer, rows_in
from marshal_dagster.runs.log_forwarding import logs_to_run
from marshal_dagster.runs.names import run_of
from marshal_dagster.runs.status import EndedRunDetector, run_is_over, run_worker_ended
from marshal_dagster.sensors.group_membership import Subscription, process_member
from tests.conditions import WITHIN_S

CANARY = "canary-7b1e"
STATUSES = [
    status for status in dg.DagsterRunStatus if status is not dg.DagsterRunStatus.QUEUED
]  # a queued run needs a daemon
SASL = {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "username": "etl"}


def _connection(**fields: Any) -> KafkaConnectionConfig:  # noqa: ANN401 - any field
    return KafkaConnectionConfig(**{"bootstrap_servers": "127.0.0.1:1", **fields})


def _claimer(**fields: Any) -> ClaimerResource:  # noqa: ANN401 - any field
    return ClaimerResource(**{"connection": _connection(), "group": "etl", **fields})


# Settings


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"bootstrap_servers": "nowhere"}, "bootstrap_servers must be a comma-separated list of host:port"),
        ({"security_protocol": "SASL_SSL"}, "needs sasl_mechanism: PLAIN, "),
        ({"username": "etl"}, "username would not be used with security_protocol PLAINTEXT"),
        ({"client_settings": {"acks": "0"}}, "client_settings must not contain 'acks'"),
    ],
)
def test_a_connection_that_cannot_be_is_refused_where_it_is_written(fields: dict[str, Any], reported: str) -> None:
    """The error is raised when the resource is created; it names the field and shows which values are accepted."""
    with pytest.raises(ConfigurationError, match=reported):
        _connection(**fields)


def test_a_key_with_a_password_is_taken() -> None:
    """Whether key and password match is checked later, with the key's file; a password without one is refused."""
    fields = {"security_protocol": "SSL", "ssl_key_password": CANARY}
    assert _connection(**fields, ssl_certificate_location="c.pem", ssl_key_location="k.pem").ssl_key_password == CANARY
    with pytest.raises(ConfigurationError, match="ssl_key_password needs ssl_key_location"):
        _connection(**fields)


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"heartbeat_interval_s": 0}, "heartbeat_interval_s: .*greater than or equal to 0.1"),
        ({"delivery": "twice"}, "delivery: .*'at_most_once', 'at_least_once' or 'effectively_once'"),
        ({"group": "a/b"}, "group: .*no '/' and no control characters"),
        ({"client_id": ""}, "client_id: .*1 to 255 characters"),
        ({"coordination_topic": "no topic"}, "coordination_topic: .*not a name that Kafka allows"),
        ({"group": "a\nb"}, "group: .*no control characters"),
        ({"group": "a\ud800"}, "group: .*cannot be a name"),
        ({"client_id": "i" * 256}, "client_id: .*1 to 255 characters"),
        ({"group": "\N{DROPLET}" * 255, "client_id": "\N{DROPLET}" * 146}, "more than 1600 bytes of UTF-8"),
        ({"rule_set": "go"}, "heartbeat_interval_s is 10; with rule_set 'go' it must be 60"),
        (
            {"rule_set": "go", "heartbeat_interval_s": 60, "delivery": "at_most_once"},
            "delivery is at_most_once; with rule_set 'go' it must be at_least_once",
        ),
    ],
)
def test_a_wrong_setting_is_refused_by_name(fields: dict[str, Any], reported: str) -> None:
    """The error is one line that names the field and shows which values are accepted."""
    with pytest.raises(ConfigurationError, match=reported) as refused:
        _claimer(**fields)
    assert len(str(refused.value).splitlines()) == 1


def test_the_longest_names_leave_room_for_the_longest_record() -> None:
    """Names that the resource accepts leave enough space for every record."""
    names = {"group": "\N{DROPLET}" * 255, "client": "\N{DROPLET}" * 145}
    about = {**names, "instance": f"revoking-{uuid.uuid4()}.{'f' * 12}", "topic": "t" * 249, "time_s": 10**12}
    for record in (
        PlanningRange(**about, partition=INT32_MAX, epoch=INT64_MAX, end=INT64_MAX),  # type: ignore[arg-type]
        ClaimingRange(**about, partition=INT32_MAX, start=INT64_MAX - 1, end=INT64_MAX),  # type: ignore[arg-type]
    ):
        assert render(record)
    _claimer(group=names["group"], client_id=names["client"])


@pytest.mark.parametrize("name", ["a/b", "a\nb", "a\ud800", "a" * 250, "", ".."])
def test_a_topic_that_cannot_be_is_refused_before_anything_is_opened(name: str) -> None:
    """The topic's name is checked first, whether the brokers are available or not."""
    with pytest.raises(ConfigurationError, match="not a name that Kafka allows"):
        _claimer().claimed_batch(cast("dg.OpExecutionContext", None), topic=name)


def test_the_resource_says_what_its_group_must_agree_on() -> None:
    """Interval, rule set and delivery mode become the group's settings; members of the enums are accepted too."""
    claimer = _claimer(heartbeat_interval_s=2.5, delivery=DeliveryMode.AT_MOST_ONCE, rule_set=RuleSet.NATIVE)
    assert claimer.settings == GroupSettings(2_500, RuleSet.NATIVE, DeliveryMode.AT_MOST_ONCE)


def test_the_batch_options_are_those_of_a_batch_request() -> None:
    """`claimed_batch` has exactly the parameters of a `BatchRequest`."""
    assert BatchOptions.__annotations__.keys() == {each.name for each in fields(BatchRequest)}


def test_every_setting_is_explained_in_the_launchpad() -> None:
    """Each field of the resources has a description."""
    for kind in (KafkaConnectionConfig, ClaimerResource, RationalizerResource):
        assert [name for name, field in kind.model_fields.items() if not field.description] == []


# Branch deployments of Dagster+

BRANCH = {"DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT": "1", "DAGSTER_CLOUD_DEPLOYMENT_NAME": "b7c2"}


@pytest.mark.parametrize(
    ("environment", "fields"),
    [
        ({}, {}),
        ({**BRANCH, "DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT": "0"}, {}),
        (BRANCH, {"group": "etl-b7c2"}),
        (BRANCH, {"allow_branch_deployments": True}),
    ],
)
def test_a_claimer_works_where_it_takes_nothing_from_production(
    environment: dict[str, str], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full deployment claims, and so does a branch deployment with a group of its own or by permission."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    _claimer(**fields).require_own_group()


@pytest.mark.parametrize("environment", [BRANCH, {**BRANCH, "DAGSTER_CLOUD_DEPLOYMENT_NAME": ""}])
def test_a_claimer_is_refused_in_a_branch_deployment(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that claims, an operator's job and a member of a coordinated group fail with one line, before Kafka."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    claimer = _claimer(member="east")

    @dg.op
    def claim(context: dg.OpExecutionContext, claimer: ClaimerResource) -> None:
        with claimer.claimed_batch(context, topic="orders"):
            pass

    @dg.job
    def work() -> None:
        claim()

    attempts: list[Callable[[], object]] = [
        lambda: work.execute_in_process(resources={"claimer": claimer}),
        claimer.require_rights,
        lambda: process_member(claimer, Subscription(("orders",), None, 1), WITHIN_S),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigurationError, match=r"^group 'etl' is not used in the branch deployment") as refused:
            attempt()
        assert len(str(refused.value).splitlines()) == 1


# Secrets


@pytest.mark.parametrize("field", ["connection", "coordination_connection"])
def test_a_secret_in_the_code_is_refused(field: str) -> None:
    """A literal password is refused when definitions are built; the error does not repeat it."""
    wrong = _connection(**SASL, password=CANARY)
    claimer = _claimer(**{field: wrong})
    with pytest.raises(ConfigurationError, match=rf"{field}.password is written in the code.*=EnvVar") as refused:
        dg.Definitions(resources={"claimer": claimer}).get_repository_def()
    assert CANARY not in str(refused.value)
    assert CANARY not in repr(claimer)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _connection(**SASL, password=[CANARY]),
        lambda: _connection(**SASL, password=f"{CANARY}\n"),
        lambda: _connection(**{**SASL, "username": 1}, password=CANARY),
        lambda: _connection(bootstrap_servers=f"etl:{CANARY}@127.0.0.1:1"),
        lambda: _connection(client_settings={"ssl.keystore.password": CANARY}),
        lambda: _claimer(connection={"bootstrap_servers": "127.0.0.1:1", "password": [CANARY]}),
        lambda: _claimer(connection={"bootstrap_servers": "127.0.0.1:1", "password": CANARY}, group="a/b"),
        lambda: RationalizerResource(connection={"bootstrap_servers": 1, "password": CANARY}),  # type: ignore[arg-type]
    ],
)
def test_an_error_about_settings_shows_no_secret(make: Callable[[], object]) -> None:
    """Neither the error nor its causes contain the secret, whichever setting is wrong."""
    with pytest.raises(ConfigurationError) as refused:
        make()
    error: BaseException | None = refused.value
    while error is not None:
        assert CANARY not in f"{error}{error!r}"
        error = error.__context__


def test_a_secret_of_the_environment_reaches_the_connection_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A password given as EnvVar reaches the connection in the op, but no event, config or text."""
    monkeypatch.setenv("KAFKA_PASSWORD", CANARY)
    seen = []

    @dg.op
    def connect(context: dg.OpExecutionContext, claimer: ClaimerResource) -> None:
        seen.append(claimer.connection.to_connection("connection").password)
        context.log.info("%r %s", claimer, claimer)

    @dg.job
    def work() -> None:
        connect()

    claimer = _claimer(connection=_connection(**SASL, password=dg.EnvVar("KAFKA_PASSWORD")))
    definitions = dg.Definitions(jobs=[work], resources={"claimer": claimer})
    with dg.DagsterInstance.ephemeral() as instance:
        result = definitions.get_job_def("work").execute_in_process(instance=instance)
        reported = [str(instance.get_run_by_id(result.run_id)), *map(str, instance.all_logs(result.run_id))]
    assert [secret and secret.get_secret_value() for secret in seen] == [CANARY]
    reported += [repr(claimer), str(claimer._convert_to_config_dictionary()), *map(str, result.all_events)]
    assert len(reported) > 10
    assert [text for text in reported if CANARY in text] == []


def defaults_of_launchpad(job: dg.JobDefinition) -> Any:  # noqa: ANN401 - any YAML
    """Return what the launchpad's button "Scaffold all default config" fills in."""
    schema = job.get_job_snapshot().config_schema_snapshot
    root = schema.get_config_snap(job.run_config_schema.run_config_schema_type.key)
    return yaml.safe_load(default_values_yaml_from_type_snap(schema, root))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("connection", "password"),
    [(_connection(), None), (_connection(**SASL, password=dg.EnvVar("KAFKA_PASSWORD")), CANARY)],
)
def test_the_launchpad_fills_in_nothing_of_resources(
    connection: KafkaConnectionConfig, password: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without a config of resources has the settings of the code, secrets included; a run config replaces one."""
    monkeypatch.setenv("KAFKA_PASSWORD", CANARY)
    seen = []

    @dg.op
    def connect(claimer: ClaimerResource) -> None:
        found = claimer.connection.to_connection("connection").password
        seen.append((found and found.get_secret_value(), claimer.heartbeat_interval_s, claimer.group))

    @dg.job
    def work() -> None:
        connect()

    claimer = _claimer(connection=connection, heartbeat_interval_s=7)
    job = dg.Definitions(jobs=[work], resources={"claimer": claimer}).get_job_def("work")
    assert defaults_of_launchpad(job) == {}
    assert job.execute_in_process().success
    other = {"resources": {"claimer": {"config": {"heartbeat_interval_s": 9}}}}
    assert job.execute_in_process(run_config=other).success
    assert seen == [(password, 7, claimer.group), (password, 9, claimer.group)]


class _Session(dg.ConfigurableResource):  # type: ignore[type-arg] # it is its own value
    """A resource that is not of this package."""

    settings: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    path: str = "/"


@pytest.mark.slow
def test_any_resource_can_stay_out_of_the_launchpad() -> None:
    """The settings of the code apply, and the page of the resource shows them."""
    seen = []

    @dg.op
    def use(spark: _Session) -> None:
        seen.append((spark.settings, spark.path))

    @dg.job
    def work() -> None:
        use()

    kept = _Session(settings={"a.b": "c"}, path="/jars")
    shown = dg.Definitions(jobs=[work], resources={"spark": kept}).get_job_def("work")
    assert "resources" in defaults_of_launchpad(shown)
    definitions = dg.Definitions(jobs=[work], resources={"spark": configured_in_code(kept)})
    job = definitions.get_job_def("work")
    assert defaults_of_launchpad(job) == {}
    assert job.execute_in_process().success
    assert job.execute_in_process(run_config={"resources": {"spark": {"config": {"path": "/"}}}}).success
    assert seen == [({"a.b": "c"}, "/jars"), ({"a.b": "c"}, "/")]
    (resource,) = RepositorySnap.from_def(definitions.get_repository_def()).resources or []
    assert resource.resource_type.endswith("_Session")
    assert resource.configured_values["path"] == '"/jars"'


def test_from_environment_keeps_secrets_there() -> None:
    """Settings that are not secret are read at once; a secret is only referred to by its variable."""
    environment = {
        "MARSHAL_BOOTSTRAP_SERVERS": "kafka:9092",
        "MARSHAL_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "MARSHAL_SASL_MECHANISM": "PLAIN",
        "MARSHAL_USERNAME": "etl",
        "MARSHAL_PASSWORD": CANARY,
    }
    config = KafkaConnectionConfig.from_environment(environment)
    assert (config.bootstrap_servers, config.username) == ("kafka:9092", "etl")
    assert config._convert_to_config_dictionary()["password"] == {"env": "MARSHAL_PASSWORD"}
    assert CANARY not in repr(config)
    with pytest.raises(ConfigurationError, match="MARSHAL_BOOTSTRAP_SERVERS is missing"):
        KafkaConnectionConfig.from_environment({})


# What the resources learn from Dagster


def _owner(run_id: str) -> Owner:
    return Owner(f"{run_id}.5f3a", "client", 1)


@dg.job
def _nothing() -> None: ...


def _run(instance: dg.DagsterInstance, status: dg.DagsterRunStatus) -> str:
    return instance.create_run_for_job(_nothing, status=status).run_id


@pytest.mark.parametrize("status", STATUSES)
def test_an_owner_is_dead_when_its_run_is_over(status: dg.DagsterRunStatus) -> None:
    """Claims are dead after success, failure or cancellation of their run, and in no other status."""
    with dg.DagsterInstance.ephemeral() as instance:
        is_dead = EndedRunDetector(instance)(_owner(_run(instance, status)))
    finished = {dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED}
    assert is_dead == (status in finished)


@pytest.mark.parametrize("instance_id", ["a-run-of-elsewhere.5f3a", "no-dot", ".5f3a", ""])
def test_an_owner_whose_run_is_not_known_is_not_dead(instance_id: str) -> None:
    """An instance id without a known run is not reported as dead."""
    with dg.DagsterInstance.ephemeral() as instance:
        assert not EndedRunDetector(instance)(Owner(instance_id, "client", 1))


class CountingInstance:
    """An instance that counts look-ups of runs, and can fail them."""

    def __init__(self, run: object) -> None:
        self.run = run
        self.requested = 0

    def get_run_by_id(self, run_id: str) -> object:
        """Return the run, or fail as an unavailable storage does."""
        assert run_id == "run"
        self.requested += 1
        if isinstance(self.run, Exception):
            raise self.run
        return self.run


def test_a_storage_that_does_not_answer_knows_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of Dagster's storage makes no owner dead and stops no work; the storage is not queried again at once."""
    monkeypatch.setattr("marshal_dagster.runs.status._ASK_AGAIN_AFTER_S", WITHIN_S)
    down = CountingInstance(OSError("no such host"))
    dead = EndedRunDetector(cast("dg.DagsterInstance", down))
    assert not any(dead(_owner("run")) for _ in range(1_000))
    assert down.requested == 1
    assert run_is_over(cast("dg.DagsterInstance", down), "run")() is None


@pytest.mark.parametrize("status", STATUSES)
def test_work_stops_when_dagster_says_that_its_run_is_over(status: dg.DagsterRunStatus) -> None:
    """If the run is over or being canceled, that is a reason to stop, which names the run."""
    ends = {"SUCCESS", "FAILURE", "CANCELED", "CANCELING"}
    with dg.DagsterInstance.ephemeral() as instance:
        run_id = _run(instance, status)
        reason = run_is_over(instance, run_id)()
    assert reason == (f"Dagster reports that run {run_id} is {status.value.lower()}" if status.value in ends else None)


def test_a_run_worker_watches_no_parent() -> None:
    """Only a step in a child process of the run worker has a parent whose end is a reason to stop."""
    with dg.DagsterInstance.ephemeral() as instance:
        assert run_worker_ended(instance, _run(instance, dg.DagsterRunStatus.STARTED)) is None


@pytest.mark.parametrize(("instance_id", "run_id"), [("a.b.c", "a.b"), ("run.1", "run"), ("run", ""), ("", "")])
def test_the_run_id_stands_before_the_last_dot(instance_id: str, run_id: str) -> None:
    """The part of an instance id before its last dot is the run id."""
    assert run_of(instance_id) == run_id


# At most once


def _range(partition: int, start: int = 0, end: int = 5) -> ClaimedRange:
    return ClaimedRange("log", "etl", "orders", "data", partition, 0, 7 + partition, start, end, start)


def test_an_announcement_can_be_read_from_the_run() -> None:
    """The run's events have each announced range before `announce` returns."""
    found: list[AnnouncedRange] = []

    @dg.op
    def announce(context: dg.OpExecutionContext) -> None:
        context.log_event(dg.AssetObservation(["kafka", "orders"], metadata={"announced": "not ours"}))
        announcer(context)([_range(0), _range(3, 2, 9)])
        found.extend(row for row, _ in announced_ranges(context.instance, context.run_id))

    @dg.job
    def work() -> None:
        announce()

    assert work.execute_in_process().success
    assert found == [AnnouncedRange("etl", "orders", 0, 7, 0, 5), AnnouncedRange("etl", "orders", 3, 10, 2, 9)]


@pytest.mark.slow
def test_an_announcement_that_is_not_stored_stops_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the event cannot be read back, the batch is aborted before anything is committed."""
    log_event = dg.OpExecutionContext.log_event

    @dg.op
    def announce(context: dg.OpExecutionContext) -> None:
        for partition in range(9):
            announcer(context)([_range(partition)])
        monkeypatch.setattr(dg.OpExecutionContext, "log_event", lambda *_: None)
        try:
            announcer(context)([_range(8), _range(9)])
        finally:
            monkeypatch.setattr(dg.OpExecutionContext, "log_event", log_event)

    @dg.job
    def work() -> None:
        announce()

    with pytest.raises(BatchAbortedError, match="nothing was committed"):
        work.execute_in_process()


@pytest.mark.slow
def test_an_announcement_is_read_back_without_all_that_were_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch of a run with thousands takes no longer than the first; events of other steps are skipped."""
    read = 0

    @dg.op
    def announce(context: dg.OpExecutionContext) -> None:
        for partition in range(30):
            announcer(context)([_range(partition)])
        monkeypatch.setattr("marshal_dagster.runs.announcements.rows_in", count)
        log_event = context.log_event

        def log_among_others(event: Any) -> None:  # noqa: ANN401 - a type of Dagster
            log_event(event)
            for _ in range(5):
                log_event(dg.AssetObservation("another"))

        monkeypatch.setattr(context, "log_event", log_among_others)
        announcer(context)([_range(30)])

    def count(entry: dg.EventLogEntry) -> Iterator[AnnouncedRange]:
        nonlocal read
        read += 1
        return rows_in(entry)

    @dg.job
    def work() -> None:
        announce()

    assert work.execute_in_process().success
    assert 6 <= read <= 10


# Log lines


def test_the_librarys_warnings_are_in_the_runs_log() -> None:
    """While an op works, each warning of the library is logged once in the run; afterwards no more."""
    ours = logging.getLogger("marshal_dagster.coordination.claimer")

    @dg.op
    def warn(context: dg.OpExecutionContext) -> None:
        with logs_to_run(context):
            ours.warning("the lease of %s ended", "orders/0")
            ours.info("not this")
        ours.warning("nor this")

    @dg.job
    def work() -> None:
        warn()

    with dg.DagsterInstance.ephemeral() as instance:
        run_id = work.execute_in_process(instance=instance).run_id
        lines = [entry.user_message for entry in instance.all_logs(run_id) if not entry.is_dagster_event]
    assert lines == ["the lease of orders/0 ended"]


STRANGE: dict[str, Any] = {"heartbeat": 5}


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClaimerResource(connection=KafkaConnectionConfig(bootstrap_servers="a:1"), group="g", **STRANGE),
        lambda: RationalizerResource(connection=KafkaConnectionConfig(bootstrap_servers="a:1"), **STRANGE),
        lambda: KafkaConnectionConfig(bootstrap_servers="a:1", **STRANGE),
    ],
)
def test_a_field_that_is_not_there_is_refused(make: Callable[[], object]) -> None:
    """A misspelled field would be ignored silently; the error names the similar field, or lists all."""
    with pytest.raises(
        ConfigurationError, match=r"has no field heartbeat; (did you mean heartbeat_interval_s\?$|it has )"
    ):
        make()


def test_a_field_that_is_missing_is_described() -> None:
    """The message has the field's own description, not that of its type."""
    with pytest.raises(ConfigurationError, match=r": bootstrap_servers: must be set \(Brokers .* host:port\)$"):
        KafkaConnectionConfig()
    with pytest.raises(ConfigurationError, match=r"^ClaimerResource: connection: must be set .*; group: must be set "):
        ClaimerResource()  # type: ignore[call-arg] # the missing ones
