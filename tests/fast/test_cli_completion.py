"""Completion of groups and topics in a shell: quick, silent, and from the coordination log."""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from marshal_dagster.cli import completion
from marshal_dagster.cli.completion import complete_group, complete_topic
from tests.cli import environ
from tests.conditions import WITHIN_S
from tests.fast.test_cli_lag import site as site  # noqa: PLC0414 - a fixture
from tests.members import GROUP, TOPIC, Site


def given(**params: str) -> Any:  # noqa: ANN401 - the part of a context that is used
    """Return the context of a command line with these options."""
    return SimpleNamespace(params=params)


def test_groups_and_topics_of_the_log_are_offered(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that begin with what was typed, and only topics of the group that was given."""
    from marshal_dagster.coordination.rationalizer import Rationalizer

    monkeypatch.setattr(completion, "open_reader", lambda *_, **__: Rationalizer(site.log(), clock=site.clock))
    here = {"bootstrap_servers": "somewhere:1"}
    assert complete_group(given(**here), "") == [GROUP]
    assert complete_group(given(**here), "x") == []
    assert complete_topic(given(**here), TOPIC[:2]) == [TOPIC]
    assert complete_topic(given(**here, group="other"), "") == []


def test_a_problem_means_that_there_is_nothing_to_complete(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No Kafka, a wrong option and a log that is slow are all silent."""
    monkeypatch.delenv("MARSHAL_BOOTSTRAP_SERVERS", raising=False)
    assert complete_group(given(), "") == []
    assert complete_group(given(bootstrap_servers="a:1", connection_file="no.toml"), "") == []
    monkeypatch.setattr(completion, "_MOST_S", 0.05)
    may_end, has_ended = threading.Event(), threading.Event()

    def read(_: object) -> None:
        may_end.wait()
        has_ended.set()

    monkeypatch.setattr(completion, "_read_world", read)
    assert complete_topic(given(), "") == []
    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(WITHIN_S)
    assert capfd.readouterr() == ("", "")


@pytest.mark.thorough
def test_a_shell_gets_an_answer_without_kafka() -> None:
    """The program answers a completion request with nothing on stderr."""
    environment = environ() | {
        "_MARSHAL_DAGSTER_COMPLETE": "complete_bash",
        "COMP_WORDS": "marshal-dagster status -b 127.0.0.1:1 --group ",
        "COMP_CWORD": "5",
    }
    code = "import sys; from marshal_dagster.cli.main import app; app(prog_name='marshal-dagster')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("", "")
    assert os.environ.get("_MARSHAL_DAGSTER_COMPLETE") is None
