"""`doctor` and `topic check` with Go consumers, and with records that carry their sender's timestamp."""

from typing import Any, Self

import pytest

from marshal_dagster.cli import topic as topic_command
from marshal_dagster.cli.doctor_checks.finding import CheckState, Finding
from marshal_dagster.cli.doctor_checks.go_consumers import check_go_consumers
from marshal_dagster.cli.doctor_checks.senders import check_senders, newest
from marshal_dagster.cli.doctor_checks.topic_settings import check_topic_settings
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka.inspection import FROM_4, Broker
from marshal_dagster.protocol.messages import WITHOUT_SETTINGS, Heartbeat, render
from marshal_dagster.testing import MemoryLog
from tests.admin_fixtures import act, go_left, go_owner, site_now, write_first_settings
from tests.fast.test_coordination_topic import NAME, Cluster, safe
from tests.members import SETTINGS, Site, about, settings_record

OLD = Broker("3.9-IV0")
NEW = Broker(FROM_4)


@pytest.fixture
def site() -> Site:
    """A coordination topic without records."""
    return site_now()


def native_group(site: Site) -> None:
    """Write settings of this library for another group."""
    record = settings_record(SETTINGS)
    for number in range(site.partitions):
        site.broker.append(number, render(record).replace(b"/etl/", b"/native/"))


def findings(site: Site, *brokers: Broker) -> dict[str, Finding]:
    """Return the findings by name, after a check that each problem has a reason and a fix."""
    found = list(check_go_consumers(site.world(), brokers, NAME, site.clock.wall_ms()))
    assert all(each.state is CheckState.OK or all((each.why, each.fix)) for each in found)
    return {each.name: each for each in found}


def test_a_topic_without_go_consumers_is_in_order(site: Site) -> None:
    """A topic is fine with any groups and brokers."""
    write_first_settings(site)
    site.owner_of(0, at=50)
    assert [each.state for each in findings(site, OLD, NEW).values()] == [CheckState.OK]


def test_a_topic_of_go_consumers_alone_is_in_order(site: Site) -> None:
    """The broker's version is one that Go consumers support."""
    go_owner(site, 0)
    found = findings(site, OLD)["Go consumers"]
    assert (found.state, "groups of Go consumers: etl" in found.found) == (CheckState.OK, True)


@pytest.mark.parametrize(("is_live", "state"), [(True, CheckState.PROBLEM), (False, CheckState.WARNING)])
@pytest.mark.parametrize("is_by_record", [True, False])
def test_native_groups_beside_go_consumers_are_reported(
    site: Site, is_live: bool, state: CheckState, is_by_record: bool
) -> None:
    """A starting Go consumer may begin far before its offset. If none is live, its keys may be left over."""
    if is_by_record:
        write_first_settings(site, WITHOUT_SETTINGS)
    (go_owner if is_live else go_left)(site, 0)
    native_group(site)
    found = findings(site, OLD)["Go consumers"]
    assert (found.state, "also groups with settings of this library: native" in found.found) == (state, True)
    assert "settings set etl --go-consumers-stopped etl" in found.fix


def test_go_consumers_cannot_talk_to_kafka_4(site: Site) -> None:
    """One broker of version 4 is enough."""
    go_owner(site, 0)
    assert findings(site, OLD, NEW)["Go consumers and brokers"].state is CheckState.PROBLEM
    assert "Go consumers and brokers" not in findings(site, OLD, Broker(None))


def of_senders(site: Site) -> dict[str, Finding]:
    """Return the findings of the checks of the newest records."""
    log = MemoryLog(site.broker)
    world = Rationalizer(log, timeout_s=1, clock=site.clock).catch_up()
    found = check_senders(newest(log, 1, site.clock.wall_ms()), world, site.clock.wall_ms())
    return {each.name: each for each in found}


def test_records_with_their_senders_timestamps_are_reported(site: Site) -> None:
    """The finding names the last such record."""
    site.owner_of(0, at=50)
    assert of_senders(site)["timestamps"].state is CheckState.OK
    site.broker.is_sender_timed = True
    at = site.say(about(Heartbeat, "run1.0", offset=50))
    found = of_senders(site)["timestamps"]
    assert (found.state, f"offset {at} of coordination partition {site.home}" in found.found) == (
        CheckState.PROBLEM,
        True,
    )
    assert "LogAppendTime" in found.fix


@pytest.mark.parametrize(("behind_s", "is_go", "is_reported"), [(7, True, False), (7, False, True), (10, True, True)])
def test_members_of_go_groups_date_their_records_back_on_purpose(
    site: Site, behind_s: int, is_go: bool, is_reported: bool
) -> None:
    """They set the time two seconds back, which is not a fault of their clocks."""
    if not is_go:
        write_first_settings(site)
    time_s = site.clock.wall_ms() // 1_000 - behind_s
    for _ in range(3):
        site.say(
            Heartbeat(instance="run1.0", client="c", group="etl", topic="orders", partition=0, time_s=time_s, offset=1)
        )
    assert (of_senders(site)["clocks"].state is CheckState.WARNING) is is_reported


UNUSABLE: list[dict[str, Any]] = [
    {"message_timestamp_type": "CreateTime"},
    {"cleanup_policy": "compact,delete"},
]


@pytest.mark.parametrize("changes", UNUSABLE)
def test_an_unusable_topic_is_a_problem(changes: dict[str, str]) -> None:
    """`doctor` reports settings that no option accepts."""
    found = list(check_topic_settings(safe(1, **changes).topics, NAME, "broker:9092"))
    assert CheckState.PROBLEM in {each.state for each in found}


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_compression_at_which_go_consumers_stop_is_a_problem(compression: str) -> None:
    """The broker would compress every record with it."""
    (found,) = (
        each
        for each in check_topic_settings(safe(1, compression_type=compression).topics, NAME, "broker:9092")
        if "compression.type" in each.found
    )
    assert (found.state, "Go consumers stop forever" in found.why) == (CheckState.PROBLEM, True)


class Opened(Cluster):
    """A cluster that can be used as a context manager."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close nothing."""


@pytest.mark.parametrize(
    ("changes", "says", "code"),
    [
        *((each, "cannot be used", 1) for each in UNUSABLE),
        ({"unclean_leader_election_enable": "true"}, "has dangerous settings", 1),
        ({}, "has safe settings", 0),
    ],
)
def test_topic_check_says_what_cannot_be_accepted(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    says: str,
    code: int,
) -> None:
    """No option allows an unusable topic: `topic create --allow-unsafe` refuses it too."""
    made = safe(1, **changes)
    cluster = Opened(1, created=made.created)
    monkeypatch.setattr(topic_command, "Topics", lambda *_, **__: cluster)
    answer = act(capsys, "topic", "check")
    assert (answer.code, says in answer.out) == (code, True)
    created = act(capsys, "topic", "create", "--allow-unsafe")
    assert (created.code, "no option allows them" in created.err) == ((1, True) if changes in UNUSABLE else (0, False))
