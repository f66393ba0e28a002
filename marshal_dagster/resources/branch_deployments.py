"""Refuses to claim in a branch deployment of Dagster+, which has the code and often the settings of production."""

import os
from collections.abc import Mapping
from typing import Final

from marshal_dagster.errors import ConfigurationError

_IS_BRANCH: Final = "DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT"
_DEPLOYMENT: Final = "DAGSTER_CLOUD_DEPLOYMENT_NAME"


def require_own_group(group: str, *, allowed: bool, environment: Mapping[str, str] = os.environ) -> None:
    """Raise `ConfigurationError` in a branch deployment whose name is not part of the group's name.

    With `allowed`, any group may be used.
    """
    deployment = environment.get(_DEPLOYMENT, "")
    if allowed or environment.get(_IS_BRANCH) != "1" or (deployment and deployment in group):
        return
    raise ConfigurationError(
        f"group {group!r} is not used in the branch deployment {deployment!r}, because its runs would take messages "
        f"from the group's other deployments. Put {_DEPLOYMENT} into the group's name, or set allow_branch_deployments "
        "of the claimer"
    )
