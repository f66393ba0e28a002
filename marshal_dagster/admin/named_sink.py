"""Import of the sink that an operator names as `module:name`.

Before positions of a group are set, the sink reports whether it can replace its output.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.sink import Sink


def named_sink(text: str, source: str) -> Sink:
    """Return the sink of that name, or the one that the function of that name returns.

    Raises `ConfigurationError` if there is none; its message begins with `source`, the name of the option.
    """
    module, colon, name = text.rpartition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ConfigurationError(f"{source}: {text!r}; give it as module:name")
    try:
        with _working_folder_first():
            found: Any = getattr(import_module(module), name)
            made = found() if callable(found) and not hasattr(found, "can_replace") else found
    except Exception as error:
        raise ConfigurationError(f"{source}: {text!r} failed to load: {type(error).__name__}: {error}") from error
    if isinstance(made, type) or not callable(getattr(made, "can_replace", None)):
        raise ConfigurationError(
            f"{source}: {text!r} is not a sink: name an object with `can_replace`, or a function without arguments "
            "that returns one"
        )
    return made  # type: ignore[no-any-return] # only `can_replace` is used here


@contextmanager
def _working_folder_first() -> Iterator[None]:
    """Find modules in the working folder, as `python -m` does."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
