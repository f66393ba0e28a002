"""Test `revoke` as a user calls it, on an in-memory log."""

from functools import partial

import pytest

from marshal_dagster.admin.revoke import ClaimRevoker
from marshal_dagster.cli import revoke
from marshal_dagster.cli.connections import WRITING, operator_name
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ClaimLostError
from marshal_dagster.kafka.acls import Right
from marshal_dagster.kafka.connection import KafkaConnection
from tests.admin_fixtures import act, at_work_on, site_now
from tests.members import GROUP, HI_MS, TOPIC, Site

REVOKE = ("revoke", GROUP, TOPIC, "--instance")


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    """An empty coordination topic."""
    site = site_now()
    monkeypatch.setattr(revoke, "ClaimRevoker", partial(ClaimRevoker, clock=site.clock))
    at_work_on(site, monkeypatch, revoke)
    return site


@pytest.mark.parametrize("by_run", [True, False])
def test_what_an_owner_holds_is_taken(site: Site, capsys: pytest.CaptureFixture[str], by_run: bool) -> None:
    """The owner is named by its instance or its run; the claims of others remain."""
    dead, other = site.owner_of(0, 1, at=50), site.owner_of(2, at=7)
    dead.plan({0: 60})
    site.clock.advance(HI_MS + 1)
    name = dead.member.instance.rpartition(".")[0] if by_run else dead.member.instance
    answer = act(capsys, *REVOKE, name, "--yes")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines()[-1] == "Revoked in partitions 0-1: others can claim them."
    rows = [line.split() for line in answer.out.splitlines()[2:-1]]
    assert [(row[0], row[1], row[-2]) for row in rows] == [(n, dead.member.instance, "unknown") for n in ("0", "1")]
    assert [site.owner(number) for number in range(3)] == [None, None, other.member.instance]
    assert (site.key(0).offset, site.key(0).generation) == (50, 0)
    dead.rationalizer.catch_up()
    with pytest.raises(ClaimLostError, match=rf"{TOPIC}/0: an operator \({operator_name()}\) revoked it; by"):
        dead.commit({0: 60})


def test_some_partitions_are_taken(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the named partitions are revoked."""
    dead = site.owner_of(0, 1, 2)
    assert act(capsys, *REVOKE, dead.member.instance, "--yes", "--partitions", "0,2").code == 0
    assert [site.owner(number) for number in range(3)] == [None, dead.member.instance, None]


def test_ranges_are_taken_too(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Each range is revoked by its own epoch; a plan remains for the next owner."""
    site.begin(0, 1, at=50)
    dead = site.holder_of({0: (50, 60), 1: (50, 70)}, plans=True)
    other = site.holder_of({0: (60, 80)})
    answer = act(capsys, *REVOKE, dead.member.instance, "--yes", "--json")
    assert answer.code == 0
    assert [(row["partition"], row["start"], row["end"], row["revoked"]) for row in answer.json["claims"]] == [
        (0, 50, 60, True),
        (1, 50, 70, True),
    ]
    assert [range_.owner.instance if range_.owner else None for range_ in site.key(0).ranges] == [
        None,
        other.member.instance,
    ]
    assert site.ranges(1) == [(50, 70, "planned")]


def test_who_was_heard_of_a_moment_ago_is_warned_of(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The owner may be alive, so a warning precedes the prompt."""
    owner = site.owner_of(0)
    answer = act(capsys, *REVOKE, owner.member.instance, "--dry-run")
    assert (answer.code, "the owner's last heartbeat is less than an interval old" in answer.error) == (0, True)
    assert site.owner(0) == owner.member.instance


@pytest.mark.parametrize("agreed", [True, False])
def test_a_person_says_that_the_owner_is_dead(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, agreed: bool
) -> None:
    """Without consent nothing changes; with JSON there is no prompt."""
    owner = site.owner_of(0)
    before = site.values()
    monkeypatch.setattr("typer.confirm", lambda *_, **__: agreed)
    assert act(capsys, *REVOKE, owner.member.instance, "--json").code == 2
    assert site.values() == before
    assert act(capsys, *REVOKE, owner.member.instance).code == (0 if agreed else 1)
    assert (site.values() == before) == (not agreed)


def test_a_dry_run_revokes_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run shows the result."""
    owner = site.owner_of(0)
    before = site.values()
    answer = act(capsys, *REVOKE, owner.member.instance, "--dry-run", "--json")
    assert [(row["partition"], row["revoked"]) for row in answer.json["claims"]] == [(0, False)]
    assert (answer.code, answer.json["dry_run"], site.values()) == (0, True, before)


def test_a_topic_that_the_group_does_not_have_is_reported_with_those_that_it_has(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name is probably misspelt, so it is no answer about claims: the exit code is 2."""
    owner = site.owner_of(0)
    answer = act(capsys, "revoke", GROUP, TOPIC[:-1], "--instance", owner.member.instance, "--yes")
    text = f"group {GROUP!r} has no partition of topic {TOPIC[:-1]!r}; it has {TOPIC!r}. There is nothing to revoke"
    assert (answer.code, text in answer.err) == (2, True)


def test_the_beginning_of_an_id_has_four_characters(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A shorter one could name another owner by a slip, so the message shows what is needed."""
    owner = site.owner_of(0)
    answer = act(capsys, *REVOKE, owner.member.instance[:3], "--yes")
    text = f"'run' is too short for the beginning of an id: give 4 characters. Owners: {owner.member.instance!r}"
    assert (answer.code, text in answer.err, site.owner(0)) == (1, True, owner.member.instance)


@pytest.mark.parametrize("more", [(), ("--partitions", "1"), ("--json", "--yes")], ids=str)
def test_who_holds_nothing_is_reported_with_who_does(
    site: Site, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """The name may be misspelt, or the claim was released meanwhile: the exit code is 1."""
    owner = site.owner_of(0)
    before = site.values()
    name = owner.member.instance if "--partitions" in more else "nobody.1"
    answer = act(capsys, *REVOKE, name, *more)
    assert answer.code == 1
    assert f"{name!r} has no claim of topic 'orders'" in answer.error
    assert repr(owner.member.instance) in answer.error
    assert site.values() == before
    if "--json" in more:
        assert answer.json["claims"] == []


def test_what_changed_hands_meanwhile_is_not_taken(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revocation applies to the claim that was shown, not to that of a later owner."""
    owner = site.owner_of(0, 1)
    successors: list[str] = []

    def agree(*_: object, **__: object) -> bool:
        owner.release([0])
        successors.append(site.owner_of(0).member.instance)
        return True

    monkeypatch.setattr("typer.confirm", agree)
    answer = act(capsys, *REVOKE, owner.member.instance)
    assert (answer.code, "not revoked in partitions 0: they changed hands" in answer.err) == (1, True)
    assert [site.owner(0), site.owner(1)] == [successors[0], None]


def test_a_group_that_the_log_does_not_name_has_no_owners(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The group's name is most likely misspelt."""
    site.owner_of(0)
    answer = act(capsys, "revoke", "other", TOPIC, "--instance", "x", "--yes")
    assert (answer.code, "the log has no group 'other'" in answer.error) == (2, True)


def test_nothing_is_revoked_by_a_log_that_shows_no_epochs(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The log can only be observed."""
    owner = site.owner_of(0)
    site.broker.retain_from(site.home, 1)
    answer = act(capsys, *REVOKE, owner.member.instance, "--yes")
    assert (answer.code, "marshal-dagster recover" in answer.err.splitlines()[-1]) == (1, True)


def test_a_log_without_its_beginning_does_not_show_that_a_name_is_misspelt(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """Retention may have deleted all records that name the group, so the log has to be recovered first."""
    site.owner_of(0)
    site.overtake()
    answer = act(capsys, *REVOKE, "x", "--yes")
    assert (answer.code, "marshal-dagster recover" in answer.err.splitlines()[-1]) == (1, True)


def test_revocations_are_written_as_the_groups_members_write(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record may wait only as long as the group's heartbeat interval allows."""
    requested: list[int] = []

    def open_reader(
        connection: KafkaConnection, topic: str, *, interval_ms: int, rights: tuple[Right, ...]
    ) -> Rationalizer:
        requested.append(interval_ms)
        assert (connection.bootstrap_servers, topic, rights) == ("somewhere:1", "__marshal", WRITING)
        return Rationalizer(site.log(), clock=site.clock)

    owner = site.owner_of(0)
    monkeypatch.setattr(revoke, "open_reader", open_reader)
    assert act(capsys, *REVOKE, owner.member.instance, "--yes").code == 0
    assert requested[-1] == HI_MS


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=str)
def test_the_first_characters_of_an_owner_are_enough(
    site: Site, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """They must fit one owner only, and be at least four."""
    for number, instance in enumerate(("5b1c0d3e-8f6a.0f1e2d3c4b5a", "5b1c77aa-8f6a.0f1e2d3c4b5a")):
        claimer = site.claimer(instance=instance)
        claimer.ensure_group_settings()
        claimer.claim([number])
    ambiguous = act(capsys, *REVOKE, "5b1c", "--yes", *more)
    assert ambiguous.code == 2
    assert "several owners begin with '5b1c': '5b1c0d3e-8f6a', '5b1c77aa-8f6a'. Give more" in ambiguous.error
    assert act(capsys, *REVOKE, "5b1").code == 1
    assert act(capsys, *REVOKE, "5b1c0", "--yes", *more).code == 0
    left = "5b1c0d3e-8f6a.0f1e2d3c4b5a" if more else None
    assert (site.owner(0), site.owner(1)) == (left, "5b1c77aa-8f6a.0f1e2d3c4b5a")


def test_a_dot_in_an_id_does_not_make_two_owners_one(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The ids of Go consumers have no random suffix, so `host.1` and `host.2` are two owners that `host` fits."""
    for number, instance in enumerate(("host.1", "host.2")):
        claimer = site.claimer(instance=instance)
        claimer.ensure_group_settings()
        claimer.claim([number])
    ambiguous = act(capsys, *REVOKE, "host", "--yes")
    assert (ambiguous.code, "several owners begin with 'host': 'host.1', 'host.2'" in ambiguous.error) == (2, True)
    assert act(capsys, *REVOKE, "host.1", "--yes").code == 0
    assert (site.owner(0), site.owner(1)) == (None, "host.2")


def test_a_client_id_that_is_the_run_id_is_shown_once(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """It is so by default, and two ids of 36 characters each would not fit a terminal."""
    claimer = site.claimer(instance="client1.0f1e2d3c4b5a")
    claimer.ensure_group_settings()
    claimer.claim([0])
    assert claimer.member.client == "client1"
    assert act(capsys, *REVOKE, "client1", "--dry-run").out.count("client1") == 1
