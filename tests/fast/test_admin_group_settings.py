"""The changes of a group's settings that an operator requests."""

import pytest

from marshal_dagster.admin.group_settings import SettingsChange
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.resources.claimer import ClaimerResource


@pytest.mark.parametrize("interval_s", [float("nan"), float("inf"), 1e18, 3_600.1, 0.05])
def test_an_interval_that_no_member_can_have_is_refused(interval_s: float) -> None:
    """A group with such an interval could have no member, because a member's settings must be equal to the group's."""
    with pytest.raises(ConfigurationError, match=r"--heartbeat-interval: .* give 0.1 to 3600 seconds"):
        SettingsChange(heartbeat_interval_s=interval_s).settings({})


def test_the_intervals_are_those_of_members() -> None:
    """The smallest and the largest interval are those that `ClaimerResource` accepts."""
    of_members = ClaimerResource.model_fields["heartbeat_interval_s"].metadata
    limits = {getattr(limit, name) for limit in of_members for name in ("ge", "le") if hasattr(limit, name)}
    assert limits == {0.1, 3_600}
    for interval_s in limits:
        interval_ms = SettingsChange(heartbeat_interval_s=interval_s).settings({}).heartbeat_interval_ms
        assert interval_ms == interval_s * 1_000
