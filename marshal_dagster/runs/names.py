"""Tags, asset keys and names that ops, assets, jobs and sensors share."""

import hashlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from dagster import AssetKey

if TYPE_CHECKING:
    from dagster import AssetExecutionContext, OpExecutionContext

    RunContext = OpExecutionContext | AssetExecutionContext


GROUP_TAG: Final = "marshal/group"
"""Tag of a run: the group for which it processes batches."""
TOPIC_TAG: Final = "marshal/topic"
"""Tag of a run, job or op: the data topic."""
OUTCOME_TAG: Final = "marshal/outcome"
"""Tag of a run: its outcome (`ExecutionOutcome`)."""
TIMELINE_TAG: Final = "marshal/timeline"
"""Tag of a run that repeats a dead run's work: the command that draws what happened before."""


ASSET_KEY_TAG: Final = "marshal/asset_key"
"""Tag of an op: the asset that its batches materialize, if it has another name than the op."""


def run_of(instance_id: str) -> str:
    """Return the run id in an instance id: the text before its last dot, or an empty text."""
    return instance_id.rpartition(".")[0]


def topic_asset_key(topic: str) -> AssetKey:
    """Return the default asset key of a data topic; a translator can set another one."""
    return AssetKey(["kafka", topic])


def announcements_key(topic: str) -> AssetKey:
    """Return the asset key under which runs announce ranges before a commit, and report dropped ranges.

    It is not the key of the data topic's asset, because these observations have no data version. They would trigger the
    automation conditions of assets that wait for new messages.
    """
    return AssetKey(["kafka", topic, "announcements"])


def tag_run(context: "RunContext", tags: Mapping[str, str]) -> None:
    """Add tags to the run of an op, if the run is in Dagster's storage."""
    if context.instance.has_run(context.run_id):
        context.instance.add_run_tags(context.run_id, dict(tags))


DEFAULT_INTERVAL_S: Final = 30
"""The default minimum time between two ticks of a sensor, in seconds."""
_LOG: Final = logging.getLogger(__name__)
_NAMED: Final[dict[str, str]] = {}
"""The group or topic from which each sensor name of this process was made."""


def as_name(text: str) -> str:
    """Return `text` with `_` instead of each character that Dagster does not allow in a name."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in text)


def unique_name(text: str) -> str:
    """Return `as_name(text)`, with a digest if `text` was changed, because `a.b` and `a-b` are different topics."""
    name = as_name(text)
    return name if name == text else f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def sensor_name(text: str, what: str) -> str:
    """Return the name of a sensor for a group or topic; dashes become `_` without a digest.

    So `a-b` and `a_b` get the same name. Dagster's error about duplicate names does not show which groups collide, so a
    warning is logged.
    """
    plain = text.replace("-", "_")
    name = f"{plain if plain == as_name(text) else unique_name(text)}_{what}"
    other = _NAMED.setdefault(name, text)
    if other != text:
        _LOG.warning(
            "the sensors of %r and of %r are both named %s; in one code location, pass `name` to one of them",
            other,
            text,
            name,
        )
    return name
