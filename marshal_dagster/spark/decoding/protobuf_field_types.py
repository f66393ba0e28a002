"""Comparison of the types of fields in a writer's and a reader's Protobuf message.

Protobuf reads a field by its number and ignores what the writer's schema calls its type. So an `int64` would be cut to
an `int32`, an `int32` read as another number by a `sint32`, and of a repeated field only the last value would be kept.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

Messages = Mapping[str, "DescriptorProto"]
"""Messages by their full names."""

_EXACT: Final[Mapping[str, frozenset[str]]] = {
    "int32": frozenset({"int64", "enum"}),
    "uint32": frozenset({"uint64", "int64"}),
    "sint32": frozenset({"sint64"}),
    "bool": frozenset({"int32", "int64", "uint32", "uint64"}),
    "enum": frozenset({"int32", "int64"}),
    "string": frozenset({"bytes"}),
    "bytes": frozenset({"string", "message"}),
    "message": frozenset({"bytes"}),
}
"""For each type of a writer the other types that read all its values unchanged, or reject them."""


def field_type_conflict(writer: "DescriptorProto", reader: "Descriptor", messages: Messages) -> str | None:
    """Return the first field that the reader's message would read as another value, with both types; None without one.

    Args:
        writer: The writer's message.
        reader: The reader's message, which does not contain itself.
        messages: The messages of the writer's files. A message that is missing here is not compared.
    """
    return next(_conflicts(writer, reader, messages, ""), None)


def messages_of(files: "Iterable[FileDescriptorProto]") -> dict[str, "DescriptorProto"]:
    """Return the messages of files by their full names, with those inside messages."""
    return {name: message for file in files for name, message in _named(file.message_type, file.package)}


def _named(messages: "Iterable[DescriptorProto]", prefix: str) -> "Iterator[tuple[str, DescriptorProto]]":
    for message in messages:
        name = f"{prefix}.{message.name}".lstrip(".")
        yield name, message
        yield from _named(message.nested_type, name)


def _conflicts(writer: "DescriptorProto", reader: "Descriptor", messages: Messages, above: str) -> Iterator[str]:
    for field in writer.field:
        known = reader.fields_by_number.get(field.number)
        if known is None:
            continue
        path, written, read = f"{above}{known.name}", _shown(field), _shown(known)
        kind, wanted = written.removeprefix("repeated "), read.removeprefix("repeated ")
        loses_values = written != kind and read == wanted
        if loses_values or (kind != wanted and wanted not in _EXACT.get(kind, ())):
            yield f"field {path} is {written}, but {read} in the reader's schema"
        elif known.message_type is not None and (inner := messages.get(field.type_name.lstrip("."))) is not None:
            yield from _conflicts(inner, known.message_type, messages, f"{path}.")


def _shown(field: "FieldDescriptorProto | FieldDescriptor") -> str:
    """Return the type of a field as its file has it, such as `repeated int64`."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto

    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    kind = "message" if kind == "group" else kind  # another encoding of a message, which editions set elsewhere
    return f"repeated {kind}" if is_repeated(field) else kind


def is_repeated(field: Any) -> bool:  # noqa: ANN401 - of two classes, which have no common type
    """Return whether a field is a list or a map."""
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto

    return bool(field.label == FieldDescriptorProto.LABEL_REPEATED)  # a part of a file, or Protobuf before 6.31
