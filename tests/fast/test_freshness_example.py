"""Check the recipe of docs/how-to/assets.md for the freshness of an asset whose topic is drained."""

import runpy
from pathlib import Path

import dagster as dg
import pytest

from tests.conditions import WITHIN_S
from tests.fast.test_dagster_assets import Shop, own_instance, shop
from tests.fast.test_dagster_ops import instance, stand

__all__ = ["instance", "own_instance", "shop", "stand"]

RECIPE = Path(__file__).parents[2] / "examples" / "freshness" / "up_to_date.py"


def is_up_to_date(shop: Shop, within_s: float) -> tuple[bool, str]:
    """Evaluate the check; return whether it passed, and what was newest."""
    check = runpy.run_path(str(RECIPE))["build_up_to_date_check"](shop.asset, within_s)
    job = dg.Definitions(
        assets=[shop.asset],
        asset_checks=[check],
        jobs=[dg.define_asset_job("judge", dg.AssetSelection.checks(check))],
        resources=shop.resources(),
    ).resolve_job_def("judge")
    (found,) = job.execute_in_process(instance=shop.instance).get_asset_check_evaluations()
    return found.passed, str(found.metadata["newest"].value)


@pytest.mark.slow
def test_a_drained_topic_is_fresh(shop: Shop) -> None:
    """A batch counts, and so does a run that finds nothing new, even if there is no recent batch."""
    assert is_up_to_date(shop, WITHIN_S) == (False, "no run")
    assert shop.run().success
    assert is_up_to_date(shop, WITHIN_S) == (True, "processed")
    with dg.DagsterInstance.ephemeral() as later:  # it has no batch
        shop.instance = later
        assert shop.run().success
        assert is_up_to_date(shop, WITHIN_S) == (True, "drained")


@pytest.mark.slow
def test_a_paused_group_is_not_fresh(shop: Shop) -> None:
    """Runs that may not process anything do not count."""
    shop.stand.scene.pause()
    assert shop.run().success
    passed, newest = is_up_to_date(shop, WITHIN_S)
    assert (passed, newest) == (False, "paused")
