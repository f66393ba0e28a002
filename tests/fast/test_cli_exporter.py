"""Test `exporter` as a user calls it, on a log in memory."""

import json
import os
import signal
import urllib.request
from contextlib import nullcontext
from typing import Any

import pytest

from marshal_dagster.cli import exporter as command
from marshal_dagster.errors import TopicNotFoundError
from marshal_dagster.exporter.exporter import Exporter
from tests.cli import call
from tests.conditions import WITHIN_S
from tests.fast.test_exporter import Scene
from tests.fast.test_extras import uninstall

BROKERS = ("-b", "127.0.0.1:1")


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Let the command read a log in memory, in which run1 holds partition 0 of topic orders."""
    scene = Scene()
    scene.own(offset=40)
    monkeypatch.setattr(command, "open_reader", lambda *_: scene.open())
    monkeypatch.setattr(command, "Topics", lambda *_, **__: nullcontext(scene.cluster))
    return scene


def ask(address: str, path: str) -> tuple[int, str]:
    """Send a request, and return its status and body."""
    with urllib.request.urlopen(f"http://{address}{path}", timeout=WITHIN_S) as answer:
        return answer.status, answer.read().decode()


@pytest.mark.slow
def test_it_serves_until_a_signal(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The metrics of the log are served, the probes answer, and SIGTERM ends it with exit code 0."""
    answers: dict[str, Any] = {}
    refresh = Exporter._refresh_or_raise

    def refresh_and_ask(exporter: Exporter) -> None:
        address = json.loads(capsys.readouterr().out.splitlines()[0])["listen"]
        refresh(exporter)
        answers.update({path: ask(address, path) for path in ("/live", "/ready", "/metrics")})
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Exporter, "_refresh_or_raise", refresh_and_ask)
    ended = call(capsys, "exporter", "--json", "--listen", "0", "--topic", "orders", *BROKERS)
    assert (ended.code, ended.lines[-1]["event"]) == (0, "stopped")
    assert (answers["/live"][0], answers["/ready"][0], answers["/metrics"][0]) == (200, 200, 200)
    assert 'marshal_partition_position_offset{group="g",partition="0",topic="orders"} 40.0' in answers["/metrics"][1]
    assert scene.opened == 1


@pytest.mark.slow
def test_an_error_at_the_start_ends_it(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    """It is one line on stderr, with the exit code of that error."""
    scene.broker.delete()
    ended = call(capsys, "exporter", "--listen", "0", *BROKERS)
    assert ended.code != 0
    assert str(TopicNotFoundError("topic '__marshal' does not exist")) in ended.err


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--listen", "x"], "--listen: 'x' is not an address"),
        (["--topic", "a/b"], "--topic"),
        (["--interval", "0"], "--interval"),
    ],
)
def test_wrong_options_are_named(options: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is connected before."""
    ended = call(capsys, "exporter", *options, *BROKERS)
    assert ended.code != 0
    assert error in ended.err


def test_without_the_extra_it_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the extra."""
    uninstall(monkeypatch, "opentelemetry.exporter")
    ended = call(capsys, "exporter", *BROKERS)
    assert "pip install 'marshal-dagster[prometheus]'" in ended.err
