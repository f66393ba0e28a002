"""Tags, asset keys and names that jobs, assets and sensors share."""

import hashlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from dagster import AssetKey

if TYPE_CHECKING:
    from dagster import AssetExecutionContext, OpExecutionContext

    RunContext = OpExecutionContext | AssetExecutionContext


GROUP_TAG: Final = "marshal/group"
TOPIC_TAG: Final = "marshal/topic"
OUTCOME_TAG: Final = "marshal/outcome"
"""Tags on runs: whose batches they work on, and what a run came to that had nothing to do."""


ASSET_KEY_TAG: Final = "marshal/asset_key"
"""Tag of an op whose batches materialize an asset with another name than the op."""


def run_of(instance_id: str) -> str:
    """Return the run id that an instance id begins with: all before its last dot, or nothing."""
    return instance_id.rpartition(".")[0]


def topic_asset_key(topic: str) -> AssetKey:
    """Return the asset key under which Dagster shows a data topic, unless a translator gives it another."""
    return AssetKey(["kafka", topic])


def announcements_key(topic: str) -> AssetKey:
    """Return the asset key under which runs announce what they are about to commit, and report what was dropped.

    Not the data topic's own: an observation without a data version would make those start that wait for new messages.
    """
    return AssetKey(["kafka", topic, "announcements"])


def tag_run(context: "RunContext", tags: Mapping[str, str]) -> None:
    """Tag the run of an op, where Dagster's storage knows it."""
    if context.instance.has_run(context.run_id):
        context.instance.add_run_tags(context.run_id, dict(tags))


DEFAULT_INTERVAL_S: Final = 30
"""How often a sensor is evaluated by default, in seconds."""
_LOG: Final = logging.getLogger(__name__)
_NAMED: Final[dict[str, str]] = {}
"""What each sensor of this process is named after."""


def as_name(text: str) -> str:
    """Return `text` with `_` in place of each character that a Dagster name must not have."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in text)


def unique_name(text: str) -> str:
    """Return the same, distinguished from what other texts become: `a.b` and `a-b` are two topics."""
    name = as_name(text)
    return name if name == text else f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def sensor_name(text: str, what: str) -> str:
    """Name a sensor after a group or topic; its dashes alone become `_` as they are.

    That gives `a-b` and `a_b` one name, and Dagster reports only that two sensors share one: so both are logged.
    """
    plain = text.replace("-", "_")
    name = f"{plain if plain == as_name(text) else unique_name(text)}_{what}"
    other = _NAMED.setdefault(name, text)
    if other != text:
        _LOG.warning(
            "a sensor of %r and one of %r are both named %s: where they meet in one deployment, give one a `name`",
            other,
            text,
            name,
        )
    return name
