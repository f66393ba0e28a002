"""Java property files: rendering of names and values, for the `server.properties` of a broker."""

from collections.abc import Mapping

from marshal_dagster.errors import ConfigurationError

_LAST_ASCII = 0x7E
_ESCAPED = {"\\": "\\\\", "\t": "\\t", "\f": "\\f"}
_ENDS_NAME = frozenset(" :=#!")


def render_properties(properties: Mapping[str, str]) -> str:
    """Return the ASCII text of a file from which Java reads `properties`.

    Raises:
        ConfigurationError: A name is empty, or a name or a value has a line break.
    """
    for name, value in properties.items():
        if not name or {"\n", "\r"} & set(name + value):
            raise ConfigurationError(
                f"setting {name!r}: the name must not be empty, and name and value must not contain line breaks"
            )
    return "".join(f"{_name(name)}={_value(value)}\n" for name, value in properties.items())


def _name(name: str) -> str:
    return "".join(f"\\{sign}" if sign in _ENDS_NAME else _escape(sign) for sign in name)


def _value(value: str) -> str:
    escaped = "".join(map(_escape, value))
    return f"\\{escaped}" if escaped.startswith(" ") else escaped


def _escape(sign: str) -> str:
    if sign in _ESCAPED:
        return _ESCAPED[sign]
    if ord(sign) <= _LAST_ASCII:
        return sign
    units = sign.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
