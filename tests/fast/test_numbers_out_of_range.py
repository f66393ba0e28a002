"""Check that numbers with which nothing can work are refused before anything is connected."""

import math
from collections.abc import Callable

import pytest
from dagster import job
from pydantic import ValidationError

from marshal_dagster import KafkaConnection, KafkaSink, PostgresSink
from marshal_dagster.assets.checks import build_outbox_check
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.main import run
from marshal_dagster.cli.recover import settings_of
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.jobs.admin import ReprocessRangeConfig, RetryConfig
from marshal_dagster.sensors.outbox_backlog import build_outbox_backlog_sensor

KAFKA = KafkaConnection(bootstrap_servers="127.0.0.1:1", timeout_s=0.1)


@job
def drain() -> None:
    """Be a job that a sensor can request."""


@pytest.mark.parametrize("number", ["nan", "inf", "-1", "1e18"])
@pytest.mark.parametrize(
    "command",
    [
        "coordinator run --min-session",
        "coordinator run --rebalance-backoff",
        "top --once --interval",
        "recover --yes --heartbeat-interval",
        "settings set g --heartbeat-interval",
        "outbox harvest --topic-patience",
        "outbox harvest --transaction-timeout",
        "outbox harvest --poll-interval",
        "outbox harvest --receive-deadline",
    ],
)
def test_a_command_names_the_option(command: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is an error of use, not one of Kafka or of Python."""
    assert run([*command.split(), number, "--bootstrap-servers", "127.0.0.1:1", "--timeout", "0.1"]) == ExitCode.USAGE
    assert f"'{command.rsplit(maxsplit=1)[-1]}'" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["2h", "3601s"])
def test_recover_names_no_settings_that_no_member_has(interval: str) -> None:
    """Such settings would be written, and each member would be refused."""
    with pytest.raises(ConfigurationError, match=r"--settings: \d+ s; give 0.1 to 3600 seconds"):
        settings_of([f"flights=native,{interval}"])


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0, 1e18])
@pytest.mark.parametrize(
    "config",
    [
        lambda number: RetryConfig(topic="t", wait_s=number),
        lambda number: ReprocessRangeConfig(topic="t", partitions="0", start=0, end=1, within_s=number),
    ],
)
def test_the_config_of_a_job_is_refused(config: Callable[[float], object], number: float) -> None:
    """The run fails before its op starts."""
    with pytest.raises(ValidationError):
        config(number)


@pytest.mark.parametrize("number", [math.nan, -1.0])
@pytest.mark.parametrize(
    "build",
    [
        lambda number: build_outbox_check("orders", max_age_s=number),
        lambda number: build_outbox_backlog_sensor(drain, max_backlog_age_s=number),
        lambda number: PostgresSink("postgresql://localhost/db", "t", lock_timeout_s=number),
        lambda number: KafkaSink(KAFKA, "t", transaction_timeout_s=number),
    ],
)
def test_an_argument_is_refused(build: Callable[[float], object], number: float) -> None:
    """Such a check would always pass, and such a sink would fail in each run."""
    with pytest.raises(ConfigurationError, match=f"{number:g}"):
        build(number)


@pytest.mark.parametrize("number", [math.inf, 1e18])
def test_a_timeout_that_postgresql_cannot_have_is_refused(number: float) -> None:
    """PostgreSQL has milliseconds of 32 bits."""
    with pytest.raises(ConfigurationError, match=r"statement_timeout_s is .* and at most 2,147,483"):
        PostgresSink("postgresql://localhost/db", "t", statement_timeout_s=number)
