"""How many rows a Parquet file has, from its footer: a few kilobytes at the end, no library needed.

A footer is a Thrift struct in the compact protocol: each field a byte of type and distance to the last field's id,
integers as zigzag varints. Field 3 is the number of rows; what stands before it is skipped.
"""

import os
from pathlib import Path
from typing import BinaryIO

_MAGIC = b"PAR1"
_TAIL = 8
_ROWS_FIELD = 3
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)


class NotParquetError(ValueError):
    """The file does not end as a Parquet file must."""


def parquet_rows(path: Path) -> int:
    """Return the number of rows in the Parquet file at `path`; raises `NotParquetError` if it is not a whole one."""
    with path.open("rb") as file:
        footer = _footer(file)
    try:
        return _Compact(footer).integer_field(_ROWS_FIELD)
    except IndexError as error:
        raise NotParquetError(f"{path}: the footer is cut off") from error


def _footer(file: BinaryIO) -> bytes:
    size = file.seek(0, os.SEEK_END)
    if size < len(_MAGIC) + _TAIL:
        raise NotParquetError(f"{file.name}: {size} bytes are no Parquet file")
    file.seek(-_TAIL, os.SEEK_END)
    tail = file.read(_TAIL)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or length > size - _TAIL:
        raise NotParquetError(f"{file.name}: no Parquet footer at the end")
    file.seek(-_TAIL - length, os.SEEK_END)
    return file.read(length)


class _Compact:
    """A reader of one struct in Thrift's compact protocol."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def integer_field(self, wanted: int) -> int:
        """Return the integer in the struct's field `wanted`."""
        field_id = 0
        while (header := self._byte()) != 0:
            kind, distance = header & 0x0F, header >> 4
            field_id = field_id + distance if distance else self._integer()
            if field_id == wanted:
                return self._integer()
            self._skip(kind)
        raise NotParquetError(f"the footer has no field {wanted}")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004 - the continuation bit
                return value
            shift += 7

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _skip(self, kind: int, *, in_collection: bool = False) -> None:
        if kind in {_TRUE, _FALSE}:
            self._at += in_collection
        elif kind == _BYTE:
            self._at += 1
        elif kind in {_I16, _I32, _I64}:
            self._varint()
        elif kind == _DOUBLE:
            self._at += 8
        elif kind == _BINARY:
            length = self._varint()
            self._at += length
        elif kind in {_LIST, _SET}:
            self._skip_list()
        elif kind == _MAP:
            self._skip_map()
        elif kind == _STRUCT:
            self._skip_struct()
        else:
            raise NotParquetError(f"the footer has a field of unknown type {kind}")

    def _skip_list(self) -> None:
        header = self._byte()
        count = header >> 4
        if count == 0x0F:  # noqa: PLR2004 - too many for the half byte: the count follows
            count = self._varint()
        for _ in range(count):
            self._skip(header & 0x0F, in_collection=True)

    def _skip_map(self) -> None:
        count = self._varint()
        if not count:
            return
        kinds = self._byte()
        for _ in range(count):
            self._skip(kinds >> 4, in_collection=True)
            self._skip(kinds & 0x0F, in_collection=True)

    def _skip_struct(self) -> None:
        while (header := self._byte()) != 0:
            if not header >> 4:
                self._integer()
            self._skip(header & 0x0F)
