"""Creates topics on clusters whose operators forbid some settings of topics, or ignore them."""

import logging
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marshal_dagster.errors import ConfigurationError, MarshalError

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TopicCreation:
    """The result of creating a topic."""

    created: bool
    """Whether the topic was created; false if it existed already. An existing topic is not changed."""
    refused: Mapping[str, str]
    """The settings without which the topic was created, with the brokers' reason for each."""


def create_with_allowed_settings(
    topics: "Topics",
    name: str,
    partitions: int,
    replication: int,
    settings: Mapping[str, str],
    *,
    required: Collection[str] = (),
) -> TopicCreation:
    """Create a topic with those of `settings` that the brokers accept.

    Settings that an error names are left out. If an error names none, each setting is left out in turn, and then all.
    Settings in `required` are never left out.

    Raises `ConfigurationError` with the brokers' reason if that does not help, `AuthorizationError` and
    `UnavailableError`.
    """
    wanted, refused = dict(settings), dict[str, str]()
    while True:
        try:
            return TopicCreation(topics.create(name, partitions, replication, wanted), refused)
        except ConfigurationError as error:
            optional = [setting for setting in wanted if setting not in required]
            named = [setting for setting in optional if _names(error, setting)]
            if not optional or any(_names(error, setting) for setting in required):
                raise
            reason = error
        if not named:
            break
        for setting in named:
            del wanted[setting]
            refused[setting] = str(reason)
    for left_out in [*([setting] for setting in optional), optional]:
        kept = {setting: value for setting, value in wanted.items() if setting not in left_out}
        with suppress(ConfigurationError):
            created = topics.create(name, partitions, replication, kept)
            return TopicCreation(created, {**refused, **dict.fromkeys(left_out, str(reason))})
    raise reason


def create_and_warn(
    topics: "Topics",
    name: str,
    partitions: int,
    replication: int,
    settings: Mapping[str, str],
    *,
    required: Collection[str] = (),
) -> bool:
    """Create a topic as `create_with_allowed_settings`, and log each setting that it does not have, with the reason.

    Returns whether the topic was created. Raises as `create_with_allowed_settings`.
    """
    creation = create_with_allowed_settings(topics, name, partitions, replication, settings, required=required)
    if not creation.created:
        return False
    for setting, reason in creation.refused.items():
        logger.warning("topic %r was created without %s=%s: %s", name, setting, settings[setting], reason)
    try:
        found = topics.settings(name)
    except MarshalError as error:
        logger.info("the settings of topic %r, which was created, cannot be checked: %s", name, error)
        return True
    for setting, value in settings.items():
        if setting not in creation.refused and setting in found and found[setting] != value:
            logger.warning("the brokers ignored %s=%s of topic %r: it is %s", setting, value, name, found[setting])
    return True


def _names(error: ConfigurationError, setting: str) -> bool:
    """Return whether the text of an error has the name of a setting as a whole."""
    return re.search(rf"(?<![\w.-]){re.escape(setting)}(?![\w-]|\.\w)", str(error)) is not None
