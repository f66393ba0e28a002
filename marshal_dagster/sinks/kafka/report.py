"""Describes and checks a Kafka output by its notes, for `marshal-dagster sink describe|check`."""

from collections.abc import Iterator, Mapping

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.sinks.kafka.notes import GroupsNote, PositionNote
from marshal_dagster.sinks.report import StoredGeneration, stored_position

_GROUPS_PARTITION = -1
"""The partition in the key of the note of a topic's groups."""


def stored_generations(notes: Mapping[str, bytes], id_prefix: str) -> list[StoredGeneration]:
    """Return the position of each partition, and the offsets of which the topic may have records.

    Raises:
        SinkRejectedError: A note is damaged or was written by a newer version.
    """
    found = [(place, PositionNote.from_json(text, key)) for place, key, text in _placed(notes, id_prefix)]
    return [
        stored_position(
            place,
            note.position,
            start=note.covered[0][0] if note.covered else None,
            gaps=max(0, len(note.covered) - 1),
        )
        for place, note in sorted(found, key=lambda each: each[0])
    ]


def note_problems(notes: Mapping[str, bytes], id_prefix: str, topic_id: str) -> Iterator[str]:
    """Yield the notes that cannot be read, or that do not fit the output topic or each other."""
    groups: dict[str, tuple[str, ...]] = {}
    for key, text in sorted(notes.items()):
        place = _place(key, id_prefix)
        if place is None or place[2] != _GROUPS_PARTITION:
            continue
        try:
            groups[place[1]] = GroupsNote.from_json(text, f"the note {key}").groups
        except SinkRejectedError as error:
            yield str(error)
    for (group, topic, partition), key, text in _placed(notes, id_prefix):
        where = f"group {group!r}, {topic}/{partition}"
        try:
            note = PositionNote.from_json(text, f"the note {key}")
        except SinkRejectedError as error:
            yield str(error)
            continue
        if note.output_topic_id != topic_id:
            yield f"{where}: its note is of a former output topic, which was deleted and re-created"
        if topic in groups and group not in groups[topic]:
            yield f"{where}: the note of the topic's groups lacks this group"


def _placed(notes: Mapping[str, bytes], id_prefix: str) -> Iterator[tuple[tuple[str, str, int], str, bytes]]:
    """Yield group, topic and partition of each note of a position, its key and its text."""
    for key, text in sorted(notes.items()):
        place = _place(key, id_prefix)
        if place is not None and place[2] != _GROUPS_PARTITION:
            yield place, key, text


def _place(key: str, id_prefix: str) -> tuple[str, str, int] | None:
    """Return group, topic and partition of a note's key, None if it is another output's."""
    parts = key.removeprefix(id_prefix).rsplit("/", 2)
    if not key.startswith(id_prefix) or len(parts) != 3 or not parts[2].removeprefix("-").isdigit():  # noqa: PLR2004
        return None
    return parts[0], parts[1], int(parts[2])
