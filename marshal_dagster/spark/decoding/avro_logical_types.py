"""Comparison of the logical types of a writer's and a reader's Avro schema.

Avro's schema resolution ignores logical types. So a long of milliseconds would be read as one of microseconds, and a
decimal with another scale as another number.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

_MEANINGS: Final = frozenset(
    {"date", "decimal", "duration", "time-millis", "time-micros"}
    | {f"{name}-{unit}" for name in ("timestamp", "local-timestamp") for unit in ("millis", "micros", "nanos")}
)
"""The logical types that define the meaning of a number or of bytes."""
DIGITS_OF_A_LONG: Final = 18
"""Up to so many digits Spark reads a decimal as 64 bits, and drops further ones without an error."""
_MOST_DIGITS: Final = 38
"""The most digits of a decimal of Spark."""
_PROMOTED: Final[Mapping[str, frozenset[str]]] = {
    "int": frozenset({"long", "float", "double"}),
    "long": frozenset({"float", "double"}),
    "float": frozenset({"double"}),
    "string": frozenset({"bytes"}),
    "bytes": frozenset({"string"}),
}
_NAMED: Final = frozenset({"record", "error", "enum", "fixed"})
_Types = Mapping[str, Mapping[str, Any]]


def logical_type_conflict(writer: object, reader: object) -> str | None:
    """Return the first field that both schemas have with different logical types, with both types; None without one.

    Args:
        writer: The writer's schema, parsed, with all types that it uses.
        reader: The reader's schema, likewise.
    """
    writer, reader = with_full_names(writer), with_full_names(reader)
    pairs = _pairs(writer, reader, (named_types(writer), named_types(reader)), "", set())
    found = ((path, *_conflict(written, read)) for path, written, read in pairs)
    return next(
        (f"field {path} is {written}, but {read} in the reader's schema" for path, written, read in found if written),
        None,
    )


def _conflict(writer: Mapping[str, Any], reader: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the meanings of two types if they differ, else None twice."""
    written, read = _meaning(writer), _meaning(reader)
    return (None, None) if written is None or read is None or written == read else (written, read)


def with_whole_decimals(schema: Any) -> Any:  # noqa: ANN401 - a parsed schema
    """Return a reader's schema whose decimals have all digits that their bytes can hold, as far as Spark has them."""
    if isinstance(schema, list):
        return [with_whole_decimals(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: with_whole_decimals(schema[key]) for key in ("type", "items", "values") if key in schema}
    if "fields" in schema:
        changed["fields"] = [{**field, "type": with_whole_decimals(field["type"])} for field in schema["fields"]]
    digits = schema.get("precision")
    if schema.get("logicalType") == "decimal" and isinstance(digits, int) and digits <= DIGITS_OF_A_LONG:
        changed["precision"] = max(digits, _digits_of_bytes(schema.get("size")))
    return {**schema, **changed}


def _digits_of_bytes(count: int | None) -> int:
    """Return how many digits each number of a decimal can have, by the size of a fixed type; None is any size."""
    return _MOST_DIGITS if count is None else min(_MOST_DIGITS, math.floor((8 * count - 1) * math.log10(2)))


def with_full_names(schema: object) -> Any:  # noqa: ANN401 - a parsed schema
    """Return a schema in which each type is defined and used by its name with the namespace.

    Types of two namespaces may have the same short name.
    """
    return _with_full_names(schema, "", set())


def _with_full_names(schema: Any, namespace: str, defined: set[str]) -> Any:  # noqa: ANN401 - a parsed schema
    if isinstance(schema, list):
        return [_with_full_names(part, namespace, defined) for part in schema]
    if isinstance(schema, str):
        name = _full_name(schema, namespace)
        return name if name in defined else schema
    if not isinstance(schema, dict):
        return schema
    if str(schema.get("type")) not in _NAMED:
        inner = (key for key in ("type", "items", "values") if key in schema)
        return {**schema, **{key: _with_full_names(schema[key], namespace, defined) for key in inner}}
    name = _full_name(str(schema.get("name", "")), str(schema.get("namespace", namespace)))
    defined.add(name)
    changed: dict[str, Any] = {"name": name}
    if "fields" in schema:
        own = name.rpartition(".")[0]
        changed["fields"] = [
            {**field, "type": _with_full_names(field["type"], own, defined)} for field in schema["fields"]
        ]
    return {**schema, **changed}


def _full_name(name: str, namespace: str) -> str:
    return f"{namespace}.{name}" if namespace and "." not in name else name


def nodes(schema: object) -> Iterator[object]:
    """Yield a schema and all schemas inside it."""
    yield schema
    inner = list(schema) if isinstance(schema, list) else []
    if isinstance(schema, dict):
        inner = [schema[key] for key in ("type", "items", "values") if key in schema]
        inner += [field["type"] for field in schema.get("fields", ())]
    for part in inner:
        yield from nodes(part)


def named_types(schema: object) -> dict[str, dict[str, Any]]:
    """Return the records, enums and fixed types that a schema of `with_full_names` defines, by their names."""
    return {node["name"]: node for node in nodes(schema) if isinstance(node, dict) and "name" in node}


def short_name(name: object) -> str:
    """Return a name without its namespace."""
    return str(name or "").rpartition(".")[2]


def _pairs(
    writer: object, reader: object, types: tuple[_Types, _Types], path: str, done: set[tuple[str, str]]
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the path of each value, and its type in both schemas, as Avro's schema resolution combines them."""
    for written in _branches(writer, types[0]):
        read = _branch_for(written, _branches(reader, types[1]))
        if read is None:
            continue
        yield path, written, read
        for key, suffix in (("items", "[]"), ("values", "{}")):
            if key in written and key in read:
                yield from _pairs(written[key], read[key], types, f"{path}{suffix}", done)
        names = str(written.get("name")), str(read.get("name"))
        if "fields" not in written or "fields" not in read or names in done:
            continue
        done.add(names)
        own = {field.get("name"): field.get("type") for field in written["fields"]}
        for field in read["fields"]:
            wanted = field.get("name")
            name = next((name for name in (wanted, *field.get("aliases", ())) if name in own), None)
            yield from _pairs(own.get(name), field.get("type"), types, f"{path}.{wanted}".lstrip("."), done)


def _branches(node: object, types: _Types) -> list[Mapping[str, Any]]:
    """Return the types of a union, or the one type that `node` is, each as an object with its definition."""
    match node:
        case list():
            return [branch for part in node for branch in _branches(part, types)]
        case str():
            return [types.get(node, {"type": node})]
        case {"type": (list() | dict()) as inner}:
            return _branches(inner, types)
        case {"type": str(name)} if name in types:
            return [types[name]]
        case dict() if "type" in node:
            return [node]
    return []


def _branch_for(written: Mapping[str, Any], branches: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the reader's type for a writer's type: the same kind and name, else the same kind, else a wider number.

    A name without its namespace, or an alias of the reader's type, counts if no whole name is the same.
    """
    same = [branch for branch in branches if branch["type"] == written["type"]]
    exact = [branch for branch in same if branch.get("name") == written.get("name")]
    own = short_name(written.get("name"))
    named = [branch for branch in same if own in map(short_name, (branch.get("name"), *branch.get("aliases", ())))]
    wider = [branch for branch in branches if branch["type"] in _PROMOTED.get(written["type"], ())]
    return next(iter([*exact, *named, *same, *wider]), None)


def _meaning(node: Mapping[str, Any]) -> str | None:
    """Return the logical type, a decimal with its scale; None without one, or for one that changes no meaning."""
    logical = node.get("logicalType")
    if logical not in _MEANINGS:
        return None
    return f"decimal of scale {node.get('scale', 0)}" if logical == "decimal" else str(logical)
