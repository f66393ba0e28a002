"""Checks of user functions: their arguments when an op or asset is built, and their results in a run."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.sink import PARTITION_COLUMN

PROCESS_ARGUMENTS = ("context", "batch", "frame")
"""The arguments with which a run calls the function of an op or asset."""


def process_arguments(options: Mapping[str, Any]) -> Sequence[str]:
    """Return the arguments of the function of an op or asset with these `WorkOptions`."""
    return PROCESS_ARGUMENTS if options.get("with_frame", True) else PROCESS_ARGUMENTS[:-1]


def function_text(function: Callable[..., Any]) -> str:
    """Return the name of a user's function, with its file and line."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    return f"function {name!r}{place}"


def check_arguments(function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Raise `ConfigurationError` unless `function` can be called with these positional arguments.

    Generator and coroutine functions are rejected, because calling one returns before its body has run.
    """
    wanted = f"({', '.join(arguments)})"
    if not callable(function):
        raise ConfigurationError(f"{function!r} is not a function: pass one that takes {wanted}")
    if inspect.isgeneratorfunction(function):
        raise ConfigurationError(
            f"{function_text(function)} is a generator, which a run cannot use: return the result instead of yielding "
            "it"
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"{function_text(function)} is async: use a plain function, because a run does not await it"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function written in C
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{function_text(function)} takes {signature}, but a run calls it with {wanted}: {error}"
        ) from None


def require_rows(rows: object, function: str) -> None:
    """Raise `ConfigurationError` if `function`, whose op has a sink, returned None."""
    if rows is None:
        raise ConfigurationError(
            f"{function} returned None, but the sink writes the rows that the function returns: nothing was written or "
            "committed. Return the DataFrame"
        )


def require_no_rows(rows: object, function: str, op: str) -> None:
    """Raise `ConfigurationError` if `function`, whose op has no sink, returned anything but None."""
    if rows is not None:
        raise ConfigurationError(
            f"{function} of op {op!r} returned rows, but the op has no sink, so nothing was committed. Write the rows "
            "in the function and return None, or pass a sink"
        )


def check_rows(rows: object, function: str) -> None:
    """Raise `ConfigurationError` unless a sink can write `rows`, which `function` returned. Runs no Spark job."""
    require_rows(rows, function)
    columns = getattr(rows, "columns", None)
    if not isinstance(columns, list):  # pandas has an Index
        raise ConfigurationError(
            f"{function} returned a {type(rows).__module__}.{type(rows).__qualname__}, but the sink needs a Spark "
            "DataFrame: nothing was written or committed. Return a DataFrame"
        )
    if PARTITION_COLUMN not in {str(name).lower() for name in columns}:
        raise ConfigurationError(
            f"{function} returned rows without the column {PARTITION_COLUMN!r}, by which the sink assigns rows to "
            "ranges: nothing was written or committed. Keep the column, also in an aggregation: "
            f'groupBy("{PARTITION_COLUMN}", ...)'
        )
