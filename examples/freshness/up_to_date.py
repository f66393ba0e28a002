"""Check that a claimed asset is up to date, also without new messages."""

import time

import dagster as dg


def build_up_to_date_check(
    asset: dg.AssetsDefinition, within_s: float
) -> dg.AssetChecksDefinition:
    """Build a check that passes if the asset was up to date within `within_s` seconds.

    It was up to date when a batch was processed, or when the topic was drained.
    """

    @dg.asset_check(asset=asset, name="up_to_date")
    def up_to_date(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        recent = dg.AssetRecordsFilter(
            asset.key, after_timestamp=time.time() - within_s
        )
        batches = context.instance.fetch_materializations(recent, limit=1).records
        seen = [
            record.asset_observation
            for record in context.instance.fetch_observations(
                recent, limit=1_000
            ).records
        ]
        states = [
            str(one.metadata["state"].value)
            for one in seen
            if one is not None and "state" in one.metadata
        ]
        newest = "processed" if batches else next(iter(states), "no run")
        return dg.AssetCheckResult(
            passed=bool(batches) or "drained" in states, metadata={"newest": newest}
        )

    return up_to_date
