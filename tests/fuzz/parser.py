"""The parser: it agrees with the reference reader about each value, and renders a message to the same bytes."""

from typing import Any, Final

from marshal_dagster.protocol import messages
from marshal_dagster.protocol.messages import GroupSettings, GroupSettingsRecord, InvalidMessage, Message, type_name
from tests import reference_reader
from tests.fuzz.promises import hold, in_time

FIELDS_OF_ALL: Final = ("instance", "client", "group", "topic", "partition")
TAILS: Final = {
    "Heartbeat": ("offset", "offset"),
    "ReleasingPartition": ("offset", "offset"),
    "ClaimingMessages": ("plan_end", "offset"),
    "RevokingClaim": ("epoch", "epoch"),
    "ReleaseGroup": ("expiry_s", "expiry"),
    "DataTopic": ("topic_id", "data_topic_id"),
}
"""The name of the tail in the library's message and in the reference reader's record."""


def check(data: bytes) -> int:
    """Read the bytes as one value; return the number of records read."""
    check_value(data)
    return 1


def check_value(value: bytes | None) -> None:
    """Compare the library's reading of a value with that of the reference reader."""
    message = in_time("reading a value", lambda: messages.parse(value))
    # With one coordination partition, all topics belong to it.
    plain = reference_reader.parse(value, 0, 1)
    if plain is None:
        hold(isinstance(message, InvalidMessage), "what section 1 calls invalid is invalid", value, message)
        return
    if not isinstance(message, Message):
        hold(False, "what section 1 calls valid is a message", value, message)
        return
    hold(fields_of(message) == plain, "the fields are those of section 1", value, message, plain)
    hold(messages.render(message) == value, "what was read is written back byte for byte", value, message)
    hold(messages.parse(value) == message, "reading again gives the same", value)


def fields_of(message: Message) -> dict[str, Any]:
    """Return a message in the form of the reference reader."""
    kind = type_name(message)
    fields: dict[str, Any] = {"type": kind} | {name: getattr(message, name) for name in FIELDS_OF_ALL}
    if kind in TAILS:
        ours, plain = TAILS[kind]
        fields[plain] = getattr(message, ours)
    if isinstance(message, GroupSettingsRecord):
        fields["settings"] = settings_of(message.settings)
    return fields


def settings_of(settings: GroupSettings) -> dict[str, Any]:
    """Return settings in the form of the reference reader."""
    return {
        "heartbeat_interval_ms": settings.heartbeat_interval_ms,
        "rules": str(settings.rule_set),
        "delivery": str(settings.delivery),
        "features": list(settings.features),
    }
