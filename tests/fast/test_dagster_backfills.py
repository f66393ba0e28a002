"""Check backfills of assets with a Dagster partition for each Kafka partition, with Dagster's own daemon code."""

import logging
import time
from collections.abc import Iterator

import dagster as dg
import pytest
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from dagster._core.instance.ref import InstanceRef
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.storage.dagster_run import RunsFilter
from dagster._core.test_utils import create_test_daemon_workspace_context
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget
from dagster._daemon.backfill import execute_backfill_iteration

from marshal_dagster.assets.reprocess import build_reprocess_asset
from tests.admin_fixtures import FakeTopics
from tests.batch_fixtures import TOPIC
from tests.fast import backfill_location
from tests.fast.test_dagster_admin_jobs import MINUTES, at_minutes
from tests.fast.test_dagster_admin_jobs import Stand as AdminStand
from tests.fast.test_dagster_assets import Shop
from tests.fast.test_dagster_ops import Stand, instance, stand

__all__ = ["instance", "stand"]

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from Dagster's own code
    pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.BetaWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # Dagster leaves files open
]
MOST_ITERATIONS = 12


@pytest.fixture
def launching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    """Yield a Dagster instance that runs launched jobs at once, in this process."""
    home = str(tmp_path_factory.mktemp("dagster"))
    launcher = {"module": "dagster._core.launcher.sync_in_memory_run_launcher", "class": "SyncInMemoryRunLauncher"}
    coordinator = {"module": "dagster._core.run_coordinator", "class": "DefaultRunCoordinator"}
    overrides = {"run_launcher": launcher, "run_coordinator": coordinator}
    with dg.DagsterInstance.from_ref(InstanceRef.from_dir(home, overrides=overrides)) as made:
        yield made


def backfill(shop: Shop, partitions: list[str], monkeypatch: pytest.MonkeyPatch) -> PartitionBackfill:
    """Backfill these partitions of the shop's asset; stop when the backfill is over or makes no progress."""
    here = dg.Definitions(assets=[shop.asset, shop.topic], resources=shop.resources(), executor=dg.in_process_executor)
    return backfill_asset(here, shop.key, shop.instance, partitions, monkeypatch)


def backfill_asset(
    here: dg.Definitions,
    key: dg.AssetKey,
    instance: dg.DagsterInstance,
    partitions: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> PartitionBackfill:
    """Backfill these partitions of an asset as the daemon does, which loads the definitions by their module."""
    monkeypatch.setattr(backfill_location, "DEFINITIONS", here)
    target = LoadableTargetOrigin(module_name=backfill_location.__name__, attribute="definitions")
    origin = InProcessCodeLocationOrigin(loadable_target_origin=target, location_name="shop")
    wanted = InProcessWorkspaceLoadTarget(origin)
    with create_test_daemon_workspace_context(wanted, instance) as process:
        asset_graph = process.create_request_context().asset_graph
        instance.add_backfill(
            PartitionBackfill.from_asset_partitions(
                backfill_id="again",
                asset_graph=asset_graph,
                partition_names=partitions,
                asset_selection=[key],
                backfill_timestamp=time.time(),
                tags={},
                dynamic_partitions_store=instance,
                all_partitions=False,
                title=None,
                description=None,
                run_config=None,
            )
        )
        found = None
        for _ in range(MOST_ITERATIONS):
            errors = list(execute_backfill_iteration(process, logging.getLogger("backfill")))
            assert not any(errors), errors
            found = instance.get_backfill("again")
            if found is not None and found.status is not BulkActionStatus.REQUESTED:
                break
    assert found is not None
    return found


def test_a_backfill_with_an_idle_partition_succeeds(
    stand: Stand, launching: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition without messages is materialized; otherwise the backfill would wait for it."""
    stand.instance = launching
    shop = Shop(stand, launching, per_partition=True)
    shop.observe()
    assert shop.run(partition_key="1").success
    found = backfill(shop, ["0", "1", "2"], monkeypatch)
    assert found.status is BulkActionStatus.COMPLETED_SUCCESS
    (idle,) = (
        record.asset_materialization
        for record in launching.fetch_materializations(
            dg.AssetRecordsFilter(shop.key, asset_partitions=["1"]), limit=1
        ).records
    )
    assert idle is not None
    reported = {name: value.value for name, value in idle.metadata.items()}
    assert (reported["state"], reported["topic"], "offsets" in reported) == ("drained", TOPIC, False)
    assert len(launching.get_runs(RunsFilter(tags={"dagster/backfill": "again"}))) == 3


def test_a_backfill_of_a_paused_group_fails_and_says_why(
    stand: Stand, launching: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions of a paused group are not shown as materialized, and the backfill ends."""
    stand.instance = launching
    shop = Shop(stand, launching, per_partition=True)
    shop.observe()
    stand.scene.pause()
    found = backfill(shop, ["0", "1"], monkeypatch)
    assert found.status is BulkActionStatus.COMPLETED_FAILED


def test_outside_of_a_backfill_an_idle_partition_is_not_materialized(
    stand: Stand, launching: dg.DagsterInstance
) -> None:
    """Assets downstream of the partition are skipped."""
    stand.instance = launching
    shop = Shop(stand, launching, per_partition=True)
    shop.observe()
    assert shop.run(partition_key="1").success
    again = shop.run(partition_key="1")
    assert again.success
    assert shop.recorded(again) == []


def test_a_backfill_over_adjacent_windows_of_time_is_one_run(
    launching: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group processes the messages of both windows again, and each window is materialized."""
    site = AdminStand(launching)
    site.site.owner_of(0, 1, at=50).release()
    monkeypatch.setattr(FakeTopics, "offsets_at", at_minutes)
    site.work_in_sleeps(monkeypatch, up_to=45)
    again = build_reprocess_asset(TOPIC, partitions_def=MINUTES)
    here = dg.Definitions(assets=[again], resources={"claimer": site.claimer()}, executor=dg.in_process_executor)
    windows = ["1970-01-01-00:00", "1970-01-01-00:01"]
    found = backfill_asset(here, again.key, launching, windows, monkeypatch)
    assert found.status is BulkActionStatus.COMPLETED_SUCCESS
    assert len(launching.get_runs(RunsFilter(tags={"dagster/backfill": "again"}))) == 1
    assert launching.get_materialized_partitions(again.key) == set(windows)
    assert (site.offsets(), site.is_paused()) == ([50, 50, None], {False})
