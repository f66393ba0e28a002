"""Parse times and durations that an operator writes."""

import pytest

from marshal_dagster.admin.times import duration_s, instant_ms, moment_ms
from marshal_dagster.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1s", 1), ("90s", 90), ("30m", 1_800), ("2h", 7_200), ("1d12h", 129_600), ("1d 2h 3m 4s", 93_784), ("0h5s", 5)],
)
def test_a_length_of_time_is_read(text: str, seconds: int) -> None:
    """Days, hours, minutes and seconds are read, each at most once and in that order."""
    assert duration_s(text, "--for") == seconds


@pytest.mark.parametrize(
    "text", ["", " ", "5", "h", "2h1d", "1h1h", "-5m", "1.5h", "5 parsecs", "0s", "٣h", "1234567d"]
)
def test_what_is_no_length_of_time_is_an_error_that_names_it(text: str) -> None:
    """A number without a unit, a duration of zero and digits other than ASCII are errors."""
    with pytest.raises(ConfigurationError, match="--for: "):
        duration_s(text, "--for")


@pytest.mark.parametrize(
    ("text", "at_ms"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("2023-11-14T22:13:20.5Z", 1_700_000_000_500),
        ("2023-11-14T23:13:20+01:00", 1_700_000_000_000),
        ("20231114T221320Z", 1_700_000_000_000),
    ],
)
def test_a_time_is_read_in_its_zone(text: str, at_ms: int) -> None:
    """The result does not depend on the time zone of the machine."""
    assert instant_ms(text, "until") == at_ms


@pytest.mark.parametrize(
    "text", ["", "tomorrow", "2023-11-14", "2023-11-14T22:13:20", "1969-12-31T23:59:59Z", "0001-01-01T00:00:00+23:59"]
)
def test_a_time_without_a_zone_is_an_error_that_names_it(text: str) -> None:
    """A time without a zone, or before 1970, is an error, because machines would read it differently."""
    with pytest.raises(ConfigurationError, match="until: "):
        instant_ms(text, "until")


@pytest.mark.parametrize(("text", "at_ms"), [("2h", 2_800_000), ("1m 40s", 9_900_000), ("1970-01-01T00:00:05Z", 5_000)])
def test_a_moment_is_a_time_or_that_long_ago(text: str, at_ms: int) -> None:
    """A duration counts back from now."""
    assert moment_ms(text, "--since", 10_000_000) == at_ms


@pytest.mark.parametrize("text", ["", "yesterday", "2026-01-31", "0s", "2 parsecs"])
def test_what_is_no_moment_is_an_error_that_names_both_forms(text: str) -> None:
    """The message shows a duration and a time."""
    with pytest.raises(ConfigurationError, match="--since: "):
        moment_ms(text, "--since", 10_000_000)
