"""The asset check that an outbox's rows are published soon."""

from typing import TYPE_CHECKING

from dagster import (
    AssetCheckExecutionContext,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetCheckSeverity,
    AssetKey,
    AssetsDefinition,
    asset_check,
)

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.resources.claimer import resource_of
from marshal_dagster.resources.outbox import OutboxResource, backlog_metadata, backlog_text

if TYPE_CHECKING:
    from marshal_dagster.outbox.status import OutboxStatus


def build_outbox_check(
    asset: AssetsDefinition | AssetKey | str,
    *,
    max_age_s: float = 60.0,
    max_parked: int = 0,
    blocking: bool = False,
    name: str = "outbox_backlog",
    outbox_key: str = "outbox",
) -> AssetChecksDefinition:
    """Build the check, of an asset whose events go through the outbox, that these are published.

    It fails when the oldest row has waited for longer than `max_age_s` seconds, or when more than `max_parked` are set
    aside: as an error where it is `blocking`, else as a warning. Raises `ConfigurationError`.
    """
    if max_age_s < 0 or max_parked < 0:
        raise ConfigurationError(f"max_age_s is {max_age_s}, max_parked is {max_parked}; they must be 0 or more")

    def check(context: AssetCheckExecutionContext) -> AssetCheckResult:
        status = resource_of(OutboxResource, context.resources, outbox_key).status()
        problems = _problems(status, max_age_s, max_parked)
        return AssetCheckResult(
            passed=not problems,
            severity=AssetCheckSeverity.ERROR if blocking else AssetCheckSeverity.WARN,
            description="; ".join(problems) or backlog_text(status),
            metadata=backlog_metadata(status),
        )

    return asset_check(
        asset=asset,
        name=name,
        description="The outbox's rows are published soon.",
        blocking=blocking,
        required_resource_keys={outbox_key},
    )(check)


def _problems(status: "OutboxStatus", max_age_s: float, max_parked: int) -> list[str]:
    problems = []
    if status.oldest_age_s is not None and status.oldest_age_s > max_age_s:
        problems.append(
            f"the oldest of {status.rows} rows has waited for {status.oldest_age_s:.0f} s, more than {max_age_s:g} s: "
            "is a harvester running?"
        )
    if status.parked > max_parked:
        problems.append(f"{status.parked} rows are set aside: `marshal-dagster outbox parked list` shows why")
    return problems
