"""Links between a run that did not finish a batch and the run that repeats it."""

from collections.abc import Iterator
from dataclasses import dataclass

import dagster as dg
import pytest

from marshal_dagster.protocol.messages import ClaimingPartition, ReleasingPartition, RevokingClaim
from marshal_dagster.protocol.state import Owner
from marshal_dagster.runs.linked_runs import REPEATED_BY_TAG, REPEATS_TAG, link_repeated_runs
from tests.members import HI_MS, Site, about


@dataclass
class Context:
    """The parts of an op's context that are used."""

    instance: dg.DagsterInstance
    run: dg.DagsterRun

    @property
    def run_id(self) -> str:
        """Return the id of the run."""
        return self.run.run_id


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    """One Dagster instance for all tests; each test creates its own runs."""
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


def new_run(instance: dg.DagsterInstance) -> dg.DagsterRun:
    """Create a run in Dagster's storage."""
    return instance.add_run(dg.DagsterRun(job_name="work"))


def tags(instance: dg.DagsterInstance, run: dg.DagsterRun) -> dict[str, str]:
    """Return a run's tags as they are stored."""
    stored = instance.get_run_by_id(run.run_id)
    assert stored is not None
    return dict(stored.tags)


def links(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[tuple[str, object, object]]:
    """Return text, linked run and path of each link in a run's events."""
    events = [entry.dagster_event for entry in instance.all_logs(run.run_id)]
    found: list[tuple[str, object, object]] = []
    for event in events:
        if event is not None and event.event_type is dg.DagsterEventType.ENGINE_EVENT:
            metadata = event.engine_event_data.metadata
            found.append((event.message or "", metadata["run"].value, metadata["path"].value))
    return found


def test_both_runs_show_the_other_one(instance: dg.DagsterInstance) -> None:
    """Tags can be filtered by; the events have a link to the other run's page."""
    dead, other, now = (new_run(instance) for _ in range(3))
    link_repeated_runs(Context(instance, now), [dead.run_id, other.run_id, now.run_id, "gone"], "b1")  # type: ignore[arg-type]
    assert tags(instance, now)[REPEATS_TAG] == ",".join(sorted([dead.run_id, other.run_id]))
    assert tags(instance, dead)[REPEATED_BY_TAG] == tags(instance, other)[REPEATED_BY_TAG] == now.run_id
    ((text, run_id, path),) = links(instance, dead)
    assert (text, run_id) == (f"Run {now.run_id} repeats a batch that this run did not finish.", now.run_id)
    assert path == f"/runs/{now.run_id}"
    assert {run_id for _, run_id, _ in links(instance, now)} == {dead.run_id, other.run_id}


def test_without_an_earlier_run_nothing_is_written(instance: dg.DagsterInstance) -> None:
    """A run that is not in the storage cannot be linked."""
    now = new_run(instance)
    link_repeated_runs(Context(instance, now), ["gone"], "b1")  # type: ignore[arg-type]
    assert REPEATS_TAG not in tags(instance, now)
    assert links(instance, now) == []


def test_a_storage_that_fails_ends_no_batch(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The batch continues, and a warning has the ids."""
    dead, now = new_run(instance), new_run(instance)

    def fail(*_: object) -> None:
        raise RuntimeError("the database is locked")

    monkeypatch.setattr(instance, "add_run_tags", fail)
    link_repeated_runs(Context(instance, now), [dead.run_id], "b1")  # type: ignore[arg-type]
    assert dead.run_id in caplog.text


@pytest.mark.parametrize("end", ["released", "revoked", "stale"])
def test_the_reader_knows_who_held_a_partition_before(end: str) -> None:
    """It does not matter how the claim ended. A later owner is the former one of the next."""
    site = Site()
    first = site.owner_of(0)
    epoch = first.claims[0].epoch
    if end == "released":
        site.say(about(ReleasingPartition, first.member.instance, offset=0))
    elif end == "revoked":
        site.say(about(RevokingClaim, "ops.1", epoch=epoch))
    else:
        site.clock.advance(2 * HI_MS + 1)
    site.say(about(ClaimingPartition, "run2.0"))
    key = site.key(0)
    assert key.owner is not None
    assert key.owner.instance == "run2.0"
    assert key.former_owner == Owner(first.member.instance, first.member.client, epoch)
