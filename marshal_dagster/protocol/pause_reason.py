"""The reason of a pause, for people: the header of its records and its text (protocol.md, section 1.8).

No rule depends on it. A reader that does not know the header, or that cannot read it, has the same state otherwise.
"""

from typing import Final

REASON_HEADER: Final = "marshal-pause-reason"
"""The name of the Kafka header of a `ReleaseGroup` record that has the reason, as UTF-8."""
MOST_CHARACTERS: Final = 200
"""The length of a reason, in code points."""
_MOST_BYTES: Final = 4 * MOST_CHARACTERS


def is_reason(text: str) -> bool:
    """Return whether `text` may be a reason: 1 to 200 code points of one line, none of them invisible."""
    return 0 < len(text) <= MOST_CHARACTERS and text.isprintable() and text == text.strip()


def encode_reason(reason: str) -> bytes:
    """Return the value of the header.

    Raises:
        ValueError: `reason` is not one; see `is_reason`.
    """
    if not is_reason(reason):
        raise ValueError(reason)
    return reason.encode()


def decode_reason(value: bytes | None) -> str | None:
    """Return the reason in a header's value, or None if it has none. Never raises."""
    if value is None or len(value) > _MOST_BYTES:
        return None
    try:
        reason = value.decode()
    except UnicodeDecodeError:
        return None
    return reason if is_reason(reason) else None
