"""`doctor` on the snapshot topic, which must keep the newest snapshot of each coordination partition."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from marshal_dagster.cli.doctor_checks.finding import CheckState, Finding
from marshal_dagster.cli.doctor_checks.topic_settings import check_snapshot_topic
from marshal_dagster.coordination.topic_settings import SNAPSHOT_SETTINGS
from marshal_dagster.errors import AuthorizationError, MarshalError, TopicNotFoundError

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics


class Cluster:
    """A coordination topic of 4 partitions and its snapshot topic."""

    def __init__(self, settings: Mapping[str, str], partitions: int = 4, raises: MarshalError | None = None) -> None:
        self.kept = settings
        self.partitions = {"__marshal": 4, "__marshal_snapshot": partitions}
        self.raises = raises

    def describe(self, name: str) -> SimpleNamespace:
        """Return the topic's partitions."""
        return SimpleNamespace(partitions=range(self.partitions[name]))

    def settings(self, name: str) -> Mapping[str, str]:
        """Return the snapshot topic's settings."""
        assert name == "__marshal_snapshot"
        if self.raises is not None:
            raise self.raises
        return self.kept


def check(cluster: Cluster, *, log_is_cut: bool = False) -> list[Finding]:
    """Return the findings for the snapshot topic."""
    return list(check_snapshot_topic(cast("Topics", cluster), "__marshal", "broker:9092", log_is_cut=log_is_cut))


def test_a_topic_as_it_is_made_is_right() -> None:
    """The settings of `topic create` are no problem, nor are settings that the broker does not report."""
    for settings in (SNAPSHOT_SETTINGS, {}):
        (finding,) = check(Cluster(settings), log_is_cut=True)
        assert finding.state is CheckState.OK


@pytest.mark.parametrize(
    ("setting", "value", "when_cut"),
    [
        ("cleanup.policy", "delete", CheckState.PROBLEM),
        ("cleanup.policy", "compact,delete", CheckState.PROBLEM),
        ("max.message.bytes", "1048587", CheckState.PROBLEM),
        ("unclean.leader.election.enable", "true", CheckState.WARNING),
    ],
)
def test_a_wrong_setting_is_reported(setting: str, value: str, when_cut: CheckState) -> None:
    """A wrong setting matters more if retention cuts the log, because readers then start from snapshots."""
    cluster = Cluster({**SNAPSHOT_SETTINGS, setting: value})
    (whole,), (cut,) = check(cluster), check(cluster, log_is_cut=True)
    assert (whole.state, cut.state) == (CheckState.WARNING, when_cut)
    assert whole.found == f"{setting} of __marshal_snapshot is {value}, should be {SNAPSHOT_SETTINGS[setting]}"
    assert whole.why
    assert whole.fix.endswith(f"--entity-name __marshal_snapshot --add-config {setting}={SNAPSHOT_SETTINGS[setting]}")


@pytest.mark.parametrize(
    ("partitions", "states"), [(3, [CheckState.WARNING]), (4, [CheckState.OK]), (5, [CheckState.OK])]
)
def test_missing_partitions_are_reported(partitions: int, states: list[CheckState]) -> None:
    """Each coordination partition needs the snapshot partition of its number; additional ones do no harm."""
    findings = check(Cluster(SNAPSHOT_SETTINGS, partitions))
    assert [each.state for each in findings] == states
    if partitions == 3:
        assert findings[0].fix.endswith("--alter --topic __marshal_snapshot --partitions 4")


def test_a_missing_topic_is_reported_elsewhere() -> None:
    """The check of the snapshots reports a missing topic; settings that cannot be read are not checked."""
    assert check(Cluster({}, raises=TopicNotFoundError("no such topic"))) == []
    (finding,) = check(Cluster({}, raises=AuthorizationError("DESCRIBE_CONFIGS")))
    assert finding.state is CheckState.NOT_CHECKED
