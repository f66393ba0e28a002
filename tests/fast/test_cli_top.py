"""`top`: what it shows of an in-memory log, how it refreshes, and how it ends."""

import html
import os
import pty
import re
import select
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from marshal_dagster.cli import attention, output, top, watching, world_reader
from marshal_dagster.cli.position_rates import WINDOW_S, PositionRates
from marshal_dagster.cli.top import TopReader
from marshal_dagster.cli.world_reader import WorldReader
from marshal_dagster.cli.world_view import EVERYTHING, ViewFilter, WorldView, world_view
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import CoordinationLogChangedError
from marshal_dagster.protocol.open_plans import OpenPlan
from tests import top_image
from tests.admin_fixtures import END, NOBODYS, FakeTopics, act, at_work_on, site_now
from tests.cli import REPOSITORY, environ
from tests.conditions import WITHIN_S
from tests.faulty_log import FaultyLog
from tests.members import GROUP, HI_MS, RANGES, TOPIC, TOPIC_ID, Site

TOPICS = FakeTopics(partitions=tuple(range(5)))


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    """An empty coordination topic, with waits only on its clock."""
    site = site_now()
    at_work_on(site, monkeypatch, world_reader, topics=TOPICS)
    monkeypatch.setattr(world_reader, "SystemClock", lambda: site.clock)
    return site


def reader_of(site: Site, log: FaultyLog | None = None, wanted: ViewFilter = EVERYTHING) -> TopReader:
    """Open a reader of the site's log."""
    rationalizer = Rationalizer(log or site.log(), clock=site.clock)
    return TopReader(WorldReader(rationalizer, TOPICS, wanted, site.clock, NOBODYS))  # type: ignore[arg-type]


def shown(view: WorldView, **options: object) -> str:
    """Return a page as text."""
    return "\n".join(map(str, top.page(view, PositionRates(), **options)))  # type: ignore[arg-type]


def test_it_is_seen_who_works_on_what_and_how_fast(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page has owner, age of its last heartbeat, lag, and how far the position moved between looks."""
    owner = site.owner_of(0, at=30)

    def commits(seconds: float) -> None:
        assert seconds == 4
        owner.plan({0: 70})
        owner.commit({0: 70})
        site.clock.advance(4_000)

    monkeypatch.setattr(output, "wait", commits)
    answer = act(capsys, "top", "--interval", 4)
    assert (answer.code, answer.err) == (0, "")
    lines = [line.split() for line in answer.out.splitlines()]
    assert lines[2] == [GROUP, "1", "1", "1", "0", "30", "391", "d", "6", "h", "10.0", "-"]
    assert " ".join(lines[5]) == (f"orders/0 {owner.member.instance} (client1) fresh, 4 s 70 30 391 d 6 h 10.0")


def test_one_look_as_json_has_what_status_has_and_more(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is written to standard output."""
    owner = site.owner_of(0, at=30)
    monkeypatch.setattr(output, "wait", lambda seconds: site.clock.advance(1_000 * seconds))
    (row,) = act(capsys, "top", "--json").json["groups"][GROUP]["partitions"]
    assert (row["owner_instance"], row["freshness"], row["silent_ms"]) == (owner.member.instance, "fresh", 2_000)
    assert (row["offset"], row["lag"], row["per_second"]) == (30, END - 30, 0)


def test_top_writes_nothing(site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes neither to the log nor to Kafka's own offsets."""
    site.owner_of(0, at=30)
    before = [site.broker.records(number) for number in range(site.partitions)]
    monkeypatch.setattr(output, "wait", lambda _: None)
    assert act(capsys, "top", "--once").code == 0
    assert [site.broker.records(number) for number in range(site.partitions)] == before
    assert TOPICS.committed == {}


def test_what_is_stale_and_what_is_paused_stands_out(site: Site) -> None:
    """Both are marked, next to an owner that is fresh."""
    site.owner_of(0)
    site.clock.advance(2 * HI_MS + 1)
    site.owner_of(1)
    site.pause(60)
    page = shown(reader_of(site).look())
    assert page.splitlines()[3].split()[:6] == [GROUP, "2", "2", "2", "1", "160"]
    assert "by ops" in page
    assert "stale, 20 s" in page


def test_ranges_are_watched_too(site: Site) -> None:
    """Each range has its owner."""
    site.begin(0, settings=RANGES)
    holder = site.holder_of({0: (10, 20)}, plans=True)
    page = shown(reader_of(site).look())
    assert f"orders/0 [10, 20) planned  {holder.member.instance}" in page
    assert page.splitlines()[2].split()[1:4] == ["1", "1", "1"]


def test_a_small_terminal_shows_what_matters_first(site: Site) -> None:
    """Stale owners come first, then the largest lags; a line has the number of the others."""
    site.owner_of(4, at=90)
    site.clock.advance(2 * HI_MS + 1)
    site.owner_of(0, 1, 2, at=60)
    site.owner_of(3, at=20)
    looked = reader_of(site).look()
    assert [n for n in range(5) if f"orders/{n}" in shown(looked)] == [0, 1, 2, 3, 4]
    assert [n for n in range(5) if f"orders/{n}" in shown(looked, lines=11)] == [0, 1, 2, 3, 4]
    page = shown(looked, lines=9)
    assert [n for n in range(5) if f"orders/{n}" in page] == [3, 4]
    assert "3 more with less lag" in page


def test_of_many_exhausted_plans_ten_have_a_line_of_their_own(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables must stay on the screen."""
    plans = [OpenPlan(GROUP, TOPIC, number, 0, 10, 5) for number in range(12)]
    monkeypatch.setattr(attention, "plans_of", lambda _: plans)
    lines = attention.exhausted_lines(world_view(site.world()))
    assert len(lines) == 11
    shown_lines = [str(line) for line in attention.urgent_lines(world_view(site.world()))]
    assert sum("marshal-dagster retry" in line for line in shown_lines) == 1
    assert lines[-1] == f"exhausted: 2 more plans; fix the cause and run `marshal-dagster retry {GROUP} {TOPIC}`"


def test_an_unknown_group_is_reported(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names that exist are shown, as by `status` and `lag`."""
    site.owner_of(0)
    monkeypatch.setattr(output, "wait", lambda _: None)
    answer = act(capsys, "top", "--once", "--group", "elt")
    assert (answer.code, f"The log has no group 'elt'; it has '{GROUP}'." in answer.out, answer.err) == (1, True, "")


def test_a_log_without_groups_is_watched(site: Site) -> None:
    """The page is shown until the log has groups."""
    assert shown(reader_of(site).look()).splitlines()[1] == "The log has no group."
    assert shown(reader_of(site, wanted=ViewFilter("other")).look()).splitlines()[1] == (
        "The log has no group 'other' and no other group."
    )


def test_a_broker_that_goes_away_is_one_line(site: Site) -> None:
    """The last state stays on the page, which refreshes when the broker is back."""
    log = site.log()
    site.owner_of(0, at=30)
    watched = reader_of(site, log)
    pages: list[str] = []
    downs = [True, True, False]

    def wait() -> bool:
        if downs:
            log.is_down = downs.pop(0)
            return False
        return True

    watching.watch(watched.look(), watched.look, lambda view, problem: pages.append(shown(view, problem=problem)), wait)
    assert ["the broker does not answer" in page for page in pages] == [False, True, True, False]
    assert {page.count("orders/0") for page in pages} == {1}
    assert len({len(page.splitlines()) for page in pages[1:3]}) == 1


def test_an_error_that_does_not_pass_by_itself_ends_it(site: Site) -> None:
    """An example is a log that was re-created."""

    def look() -> WorldView:
        raise CoordinationLogChangedError("re-created")

    with pytest.raises(CoordinationLogChangedError):
        watching.watch(reader_of(site).look(), look, lambda *_: None, lambda: False)


def test_a_position_that_was_set_is_no_rate(site: Site) -> None:
    """A set position starts a new generation. The rate counts later moves, over the last minute."""
    watched = reader_of(site)
    owner = site.owner_of(0, at=30)

    def rate(at: int, seconds: float) -> float | None:
        if site.key().offset != at:
            owner.plan({0: at})
            owner.commit({0: at})
        site.clock.advance(round(1_000 * seconds))
        watched.look()
        return watched.rates.per_second(GROUP, (TOPIC, 0))

    assert (rate(30, 0), rate(40, 2), rate(40, 3)) == (None, 5, 2)
    owner.release()
    site.pause(3_600)
    operator = site.claimer(instance="ops.1")
    assert operator.claim([0])
    operator.set_positions({0: 90}, TOPIC_ID)
    site.pause(-1)
    watched.look()
    assert watched.rates.per_second(GROUP, (TOPIC, 0)) is None
    owner = site.member()
    owner.claim([0])
    assert [rate(90 + 10 * turn, 5) for turn in range(1, 30)][-1] == pytest.approx(2)
    assert len(watched.rates._seen[GROUP, (TOPIC, 0)]) == WINDOW_S / 5 + 1


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["in colour", "without"])
@pytest.mark.thorough
def test_a_terminal_is_filled_and_given_back(environment: dict[str, str], tmp_path: Path) -> None:
    """`q` ends it and restores the terminal; with NO_COLOR there is no colour."""
    script = tmp_path / "watching.py"
    script.write_text(WATCHING)
    ours, theirs = pty.openpty()
    try:
        before = termios.tcgetattr(theirs)
        process = subprocess.Popen(
            [sys.executable, script],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            cwd=REPOSITORY,
            env=environ({"TERM": "xterm-256color", "PYTHONPATH": str(REPOSITORY)} | environment),
        )
        written = b""
        while written.count(b"orders/0") < 2:
            assert select.select([ours], [], [], WITHIN_S)[0]
            written += os.read(ours, 65_536)
        os.write(ours, b"xq")
        _, errors = process.communicate(timeout=WITHIN_S)
        assert (process.returncode, errors) == (0, b"")
        assert termios.tcgetattr(theirs) == before
        while select.select([ours], [], [], 0)[0]:
            written += os.read(ours, 65_536)
    finally:
        os.close(ours)
        os.close(theirs)
    assert written.endswith(b"\x1b[?1049l")
    assert (b"\x1b[1;31m" in written) == (not environment)


WATCHING = """
import sys
from unittest import mock
from marshal_dagster.cli import world_reader
from marshal_dagster.cli.main import run
from marshal_dagster.coordination.rationalizer import Rationalizer
from tests.members import HI_MS
from tests.admin_fixtures import FakeTopics, site_now

site = site_now()
site.owner_of(0)
site.clock.advance(3 * HI_MS)
with (
    mock.patch.object(world_reader, "open_reader", lambda *_, **__: Rationalizer(site.log(), clock=site.clock)),
    mock.patch.object(world_reader, "Topics", lambda *_, **__: FakeTopics()),
    mock.patch.object(world_reader, "SystemClock", lambda: site.clock),
):
    sys.exit(run(["top", "-b", "somewhere:1", "--interval", "0.1"]))
"""


def test_the_picture_in_the_docs_is_what_top_shows() -> None:
    """`python -m tests.top_image` writes it again."""
    (described,) = re.findall(r"<desc>(.*?)</desc>", top_image.IMAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert html.unescape(described) == top_image.text(top_image.screen())
    assert re.findall(r"https?://(?!www\.w3\.org/)", top_image.IMAGE.read_text(encoding="utf-8")) == []
