"""Reads the number of rows of a Parquet file from its footer, without a Parquet library.

The footer is a few kilobytes at the end of the file: a Thrift struct in the compact protocol. Each field begins with a
byte for its type and the difference to the previous field's id; integers are zigzag varints. Field 3 is the number of
rows; the fields before it are skipped.
"""

import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

_MAGIC = b"PAR1"
_TAIL = 8
_ROWS_FIELD = 3


class NotParquetError(ValueError):
    """The file does not end with a valid Parquet footer."""


def parquet_rows(path: Path) -> int:
    """Return the number of rows in the Parquet file at `path`. Raises `NotParquetError` if it has no valid footer."""
    with path.open("rb") as file:

        def read(start: int, end: int) -> bytes:
            file.seek(start)
            return file.read(end - start)

        return rows_in_footer(str(path), file.seek(0, os.SEEK_END), read)


def rows_in_footer(name: str, size: int, read: Callable[[int, int], bytes]) -> int:
    """Return the number of rows in a Parquet file that is read by ranges of its bytes.

    Args:
        name: The name of the file, for errors.
        size: Its size in bytes.
        read: Returns the bytes from a start to an end.

    Returns:
        The number of rows.

    Raises:
        NotParquetError: The file has no valid footer.
    """
    footer = _footer(name, size, read)
    try:
        return _Compact(footer).integer_field(_ROWS_FIELD)
    except (IndexError, OverflowError) as error:
        raise NotParquetError(f"{name} is not a complete Parquet file: its footer is truncated") from error


def _footer(name: str, size: int, read: Callable[[int, int], bytes]) -> bytes:
    if size < len(_MAGIC) + _TAIL:
        raise NotParquetError(f"{name} is not a Parquet file: it has only {size} bytes")
    tail = read(size - _TAIL, size)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or length > size - _TAIL:
        raise NotParquetError(f"{name} is not a complete Parquet file: it does not end with a Parquet footer")
    return read(size - _TAIL - length, size - _TAIL)


class _Compact:
    """A reader of one struct in Thrift's compact protocol."""

    def __init__(self, data: bytes) -> None:
        self._stream = BytesIO(data)

    def integer_field(self, wanted: int) -> int:
        """Return the integer in the struct's field `wanted`."""
        field_id = 0
        while (header := self._byte()) != 0:
            distance = header >> 4
            field_id = field_id + distance if distance else self._integer()
            if field_id == wanted:
                return self._integer()
            self._skip(header & 0x0F)
        raise NotParquetError(f"the footer has no field {wanted}")

    def _byte(self) -> int:
        return self._stream.read(1)[0]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004 - no continuation bit
                return value
            shift += 7

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _skip(self, kind: int, *, in_collection: bool = False) -> None:
        match kind:
            case 1 | 2:  # true, false
                self._stream.read(in_collection)
            case 3:  # a byte
                self._stream.read(1)
            case 4 | 5 | 6:  # an integer
                self._varint()
            case 7:  # a double
                self._stream.read(8)
            case 8:  # bytes
                self._stream.read(self._varint())
            case 9 | 10:  # a list, a set
                self._skip_list()
            case 11:
                self._skip_map()
            case 12:
                self._skip_struct()
            case _:
                raise NotParquetError(f"the footer has a field of unknown type {kind}")

    def _skip_list(self) -> None:
        header = self._byte()
        count = header >> 4
        if count == 0x0F:  # noqa: PLR2004 - too large for four bits, so the count follows
            count = self._varint()
        for _ in range(count):
            self._skip(header & 0x0F, in_collection=True)

    def _skip_map(self) -> None:
        count = self._varint()
        kinds = self._byte() if count else 0
        for _ in range(count):
            self._skip(kinds >> 4, in_collection=True)
            self._skip(kinds & 0x0F, in_collection=True)

    def _skip_struct(self) -> None:
        while (header := self._byte()) != 0:
            if not header >> 4:
                self._integer()
            self._skip(header & 0x0F)
