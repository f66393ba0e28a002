"""Secrets of a connection: texts that are never shown, and the files and variables that they come from."""

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from marshal_dagster.errors import ConfigurationError

FILE_OF: Final[Mapping[str, str]] = {
    "password": "password_file",
    "oauth_client_secret": "oauth_client_secret_file",
    "ssl_key_password": "ssl_key_password_file",
    "ssl_keystore_password": "ssl_keystore_password_file",
}
"""For each secret field the field that names a file with the secret, such as a mounted Kubernetes secret."""

_REFERENCE: Final = re.compile(r"env:(?P<variable>[A-Za-z_]\w*)|file:(?P<path>/.+)")


class SecretText:
    """A text that `repr` and `str` do not show. Two are equal if their texts are equal."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretText) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def get_secret_value(self) -> str:
        """Return the text."""
        return self._text

    def __repr__(self) -> str:
        return "SecretText(...)"


def secret_of(fields: Mapping[str, Any], name: str) -> str | None:
    """Return a connection's secret in plain text, or None if it has none.

    A file is read at each call, so a rotated secret is used by the next client.

    Args:
        fields: The connection's fields.
        name: The name of the secret's field.

    Returns:
        The text of the field, or of the file that its `_file` field names.

    Raises:
        ConfigurationError: The file cannot be read, or is not one line of text.
    """
    secret, path = fields.get(name), fields.get(FILE_OF.get(name, ""))
    if isinstance(secret, SecretText):
        return secret.get_secret_value()
    return None if path is None else read_secret_file(path, FILE_OF[name])


def read_secret_file(path: str, name: str) -> str:
    """Return the secret in a file, without the line break at its end.

    Args:
        path: The path of the file.
        name: The setting that names the file, for the error message.

    Returns:
        The secret.

    Raises:
        ConfigurationError: The file cannot be read, or is not one line of text.
    """
    text = _file_text(path, f"{name}: {path!r} cannot be read").rstrip("\r\n")
    if not text or not text.isprintable():
        raise ConfigurationError(f"{name}: {path!r} must contain the secret as one line of text")
    return text


def read_pem_file(path: str, name: str) -> str:
    """Return the text of a PEM file.

    Args:
        path: The path of the file.
        name: The setting that names the file, for the error message.

    Returns:
        The text.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    return _file_text(path, f"{name}: {path!r} cannot be read as a PEM file")


def is_reference(value: str) -> bool:
    """Return whether a setting's value names where the value is: `env:NAME` or `file:/PATH`."""
    return _REFERENCE.fullmatch(value) is not None


def dereferenced(settings: Mapping[str, str], field: str) -> dict[str, str]:
    """Return settings with the values of the variables and files that they name.

    Args:
        settings: Settings by name. A value may be `env:NAME` or `file:/PATH`.
        field: The connection's field that has the settings, for the error message.

    Returns:
        The settings with plain values.

    Raises:
        ConfigurationError: A variable is not set, or a file cannot be read.
    """
    return {name: _value(value, f"{field}[{name!r}]") for name, value in settings.items()}


def _value(value: str, place: str) -> str:
    reference = _REFERENCE.fullmatch(value)
    if reference is None:
        return value
    if reference["variable"] is None:
        path = reference["path"]
        return _file_text(path, f"{place} names the file {path!r}, which cannot be read").rstrip("\r\n")
    text = os.environ.get(reference["variable"])
    if not text:
        raise ConfigurationError(f"{place} names the environment variable {reference['variable']}, which is not set")
    return text


def _file_text(path: str, problem: str) -> str:
    """Return the text of a file; `problem` begins the error if it cannot be read."""
    from pathlib import Path

    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"{problem}: {reason}") from None
