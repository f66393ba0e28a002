"""The JSON that commands write has a version, and the form that the schema in the documentation has.

Each call with --json in a test is checked by `tests.json_schemas.check_json`. These tests check the schema itself.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from marshal_dagster.cli import output
from tests.json_schemas import WITHOUT_VERSION, check_json, command_of, commands_with_json, schemas


def objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all schemas of objects in a schema."""
    if "object" in schema.get("type", ()):
        yield schema
    inner = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    for each in inner:
        if isinstance(each, dict):
            yield from objects(each)


def test_each_command_with_json_has_a_schema() -> None:
    """A new command needs one; a removed command leaves none."""
    assert set(schemas()["$defs"]) == commands_with_json()


@pytest.mark.slow
def test_the_schema_is_a_schema() -> None:
    """It follows the draft that it names."""
    Draft202012Validator.check_schema(schemas())
    for schema in schemas()["$defs"].values():
        Draft202012Validator.check_schema(schema)


def test_no_object_may_have_a_field_that_the_schema_lacks() -> None:
    """A field that a command adds must be added to the schema; a map has the schema of its values."""
    for command, schema in schemas()["$defs"].items():
        for each in objects(schema):
            allowed = each["additionalProperties"]
            assert allowed is False or (isinstance(allowed, dict) and "properties" not in each), command


def test_each_object_of_a_command_has_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs can refuse a version that they do not know."""
    output.write_json({"a": 1})
    assert json.loads(capsys.readouterr().out) == {"format_version": output.JSON_VERSION, "a": 1}
    for command in commands_with_json() - WITHOUT_VERSION:
        schema = schemas()["$defs"][command]
        assert schema["properties"]["format_version"] == {"const": output.JSON_VERSION}
        assert "format_version" in schema["required"]


@pytest.mark.parametrize(
    "changed", [{"more": 1}, {"partitions": [{"group": "g"}]}, {"format_version": 2}, {"at_ms": "now"}]
)
def test_another_form_is_found(changed: dict[str, object]) -> None:
    """A field too many, one that is missing, another version and another type all fail."""
    right = {"format_version": 1, "at_ms": 5, "partitions": []}
    check_json(["lag", "--json"], json.dumps(right))
    with pytest.raises(ValidationError):
        check_json(["lag", "--json"], json.dumps(right | changed))


OUTBOX = {"format_version": 1, "outbox": "o", "schema": "public", "uid": "u", "version": 1}
MOVED = {"format_version": 1, "group": "g", "topic": "t", "dry_run": False}


@pytest.mark.parametrize(
    ("command", "value"),
    [
        (
            "outbox status",
            OUTBOX
            | {"rows": 0, "oldest_age_s": None, "parked": 0, "session": 0, "leader": None, "led_since": None}
            | {"blocked_by": [{"pid": 1, "user": "u", "application": None, "state": None, "open_s": 2.5}]},
        ),
        ("outbox init", OUTBOX | {"notifies": True, "topics": {"leader": "l", "notes": "n"}}),
        (
            "outbox parked list",
            {
                "format_version": 1,
                "parked": 1,
                "rows": [{"id": 1, "topic": "t", "key": None, "value_bytes": 2, "reason": "r", "parked_at": "2026"}],
            },
        ),
        (
            "position import",
            MOVED
            | {
                "positions": [
                    {"partition": 0, "log_start": 0, "log_end": 9, "before": 3, "after": 4, "set": True}
                    | {"generation": 1, "notes": []}
                ]
            },
        ),
        ("reprocess", MOVED | {"partitions": [], "left_out": {"0": "it has no record", "7": "it has no position"}}),
    ],
)
def test_values_that_are_seldom_fit(command: str, value: dict[str, object]) -> None:
    """An outbox without rows and harvester, a parked row without a key, a second import, any partition left out."""
    check_json([*command.split(), "--json"], json.dumps(value))


def test_the_command_is_found_in_the_arguments() -> None:
    """Groups of commands have several levels."""
    assert command_of(["outbox", "parked", "list", "--json"]) == "outbox parked list"
    assert command_of(["position", "get", "g", "t"]) == "position get"
    assert command_of(["lag"]) == "lag"
    assert command_of(["kafka"]) is None
