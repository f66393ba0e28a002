"""Checks of what users write: the arguments that a function takes, and what it returns."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.sink import PARTITION_COLUMN

PROCESS_ARGUMENTS = ("context", "batch", "frame")
"""What a run calls the function of an op or asset with."""


def function_text(function: Callable[..., Any]) -> str:
    """Return the name of a user's function, with its file and line."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    return f"function {name!r}{place}"


def check_arguments(function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Raise `ConfigurationError` unless `function` can be called with `arguments`, by position, and then runs.

    A call of a generator or coroutine function returns before its body has run.
    """
    wanted = f"({', '.join(arguments)})"
    if not callable(function):
        raise ConfigurationError(f"{function!r} is not a function: give one that takes {wanted}")
    if inspect.isgeneratorfunction(function):
        raise ConfigurationError(f"{function_text(function)} has a yield: a run calls it once, so return the result")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"{function_text(function)} is async: a run does not await it, so make it a plain function"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one written in C
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{function_text(function)} takes {signature}, but a run calls it with {wanted}: {error}"
        ) from None


def check_rows(rows: object, function: str) -> None:
    """Raise `ConfigurationError` unless a sink can take `rows`, which `function` returned. No Spark job runs."""
    if rows is None:
        raise ConfigurationError(
            f"{function} returned None, but the sink takes the rows that it returns: nothing is written and nothing is "
            "committed. Return the DataFrame"
        )
    columns = getattr(rows, "columns", None)
    if not isinstance(columns, list):  # pandas has an Index
        raise ConfigurationError(
            f"{function} returned a {type(rows).__module__}.{type(rows).__qualname__}, but the sink takes a Spark "
            "DataFrame: nothing is written and nothing is committed"
        )
    if PARTITION_COLUMN not in {str(name).lower() for name in columns}:
        raise ConfigurationError(
            f"{function} returned rows without the column {PARTITION_COLUMN!r}, by which the sink assigns rows to "
            "ranges: nothing is written and nothing is committed. Keep it, in an aggregation too: "
            f'groupBy("{PARTITION_COLUMN}", ...)'
        )
