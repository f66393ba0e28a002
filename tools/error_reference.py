"""Write docs/reference/errors.md: what each error means, what causes it, and what to do.

The texts are the docstrings of the public error classes, those of marshal_dagster/errors.py and of
marshal_dagster/devkafka/errors.py. A docstring has this form, in which `More:` and `Example:` may be absent:

    One line that states what happened.

    Meaning:
        What the error means for the work that was under way.

    Cause:
        Why it is raised.

    Action:
        What a user or an operator does about it.

    More:
        docs/operate/runbook.md#claimlosterror

    Example:
        Code.

Every other exception that the library defines or raises is listed here with the reason why it is not public. Run
`python -m tools.error_reference` after a change to an error class, or to a heading that one names under `More:`.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Final

import marshal_dagster
from marshal_dagster import errors
from marshal_dagster.cli.exit_codes import ExitCode, code_of
from marshal_dagster.devkafka import errors as devkafka_errors

TOP: Final = Path(__file__).resolve().parents[1]
LIBRARY: Final = TOP / "marshal_dagster"
PAGE: Final = TOP / "docs" / "reference" / "errors.md"

PUBLIC_MODULES: Final = {"errors": errors, "devkafka.errors": devkafka_errors}
"""The modules whose error classes are public, by name within the package."""

INTERNAL: Final = {
    "cli.output.PipeClosedError": "The command line ends with exit code 141 when the reader of its output has gone.",
    "coordination.log.PositionLostError": (
        "Readers of the coordination log catch it, and load a snapshot, start again or raise a public error."
    ),
    "coordinator.state_machine.IllegalTransitionError": "Raised only by a defect of the coordinator itself.",
    "kafka.connection._ConnectionConfigurationError": (
        "A `ConfigurationError` that also lists the fields, so that each caller names them in its own way."
    ),
    "kafka.transactions.ProducerFencedError": "The Kafka sink and the outbox translate it.",
    "kafka.transactions.RecordRejectedError": "The Kafka sink and the outbox translate it.",
    "kafka.transactions.TransactionStillOpenError": (
        "An `UnavailableError` with which the Kafka sink recognises a transaction that it may end."
    ),
    "outbox.harvest.LeadershipLostError": "The harvester catches it and waits for its next term as leader.",
    "outbox.interfaces.BatchUnsettledError": "The harvester catches it and starts its session again.",
    "outbox.interfaces.PublisherFencedError": "The harvester catches it and starts its session again.",
    "outbox.interfaces.RowRejectedError": "The harvester catches it and sets the row aside.",
    "outbox.interfaces.SessionSupersededError": "The harvester catches it and starts its session again.",
    "outbox.interfaces.TopicRejectedError": "The harvester catches it and holds the rows of that topic back.",
    "protocol.messages.InvalidError": "The parser of records catches it and returns the reason.",
    "protocol.replay.MalformedLogError": "Only `marshal-dagster replay` reads stored logs; it exits with code 4.",
    "protocol.snapshots._RejectedError": "The parser of snapshots catches it and returns the reason.",
    "sinks.conformance.cases.ClaimGoneError": "A case of the conformance kit raises and catches it.",
    "sinks.conformance.generations.TopicRecreatedError": "A case of the conformance kit raises and catches it.",
    "sinks.conformance.interrupts.SimulatedDeathError": "The conformance kit ends a writer with it.",
    "sinks.database.sink._OffsetsNeededError": "A database sink catches it, reads the offsets and tries again.",
    "sinks.database.dialect.LocksOutdatedError": "A database sink catches it and tries again.",
    "sinks.database.dialect.TransactionConflictError": "A database sink catches it and begins again.",
    "sinks.database.dialect.ValueRejectedError": "A database sink catches it and names the row.",
    "sinks.database.pg_binary.OutOfRangeError": "A task catches it and reports that the row is doubtful.",
    "sinks.database.batch_copy.DoubtfulRowError": "A task reports it, or the driver catches it and copies lines.",
    "sinks.files.storage.PublishOutcomeUnknownError": (
        "An `OSError` with which the file sink recognises that a file may still be published."
    ),
    "sinks.kafka.arrow_rows.UnorderedError": "A task catches it and reports that the rows of its range must be sorted.",
    "sinks.files.parquet_footer.NotParquetError": "A `ValueError` of the file sink's own check of what it has written.",
    "testing.crashes.SimulatedCrash": "`run_in_memory` raises it in a run that it crashes, and catches it.",
}
"""Exception classes of the library that are not public, with the reason, by module and name within the package."""

SHOWN: Final = {
    "dagster.Failure": "a run that found nothing it may process, or did not process everything; the message states why",
    "dagster.RetryRequested": "the function of an op or asset raised it, and an error of the library had replaced it",
    "OSError": "a file system that cannot be read or written, Hadoop's file systems included",
    "RuntimeError": "a call of an object that is closed or not ready yet",
    "ValueError": "an argument that is never right, such as a range that ends before its start",
}
"""Exceptions of Python and of other packages that callers may see, and what they are raised for."""

HIDDEN: Final = {
    "AssertionError": "A defect of this library, or a sink that does not pass the conformance kit.",
    "AttributeError": "A name that `marshal_dagster` does not have; Python requires this class.",
    "BadParameter": "Typer shows a wrong option with it and exits with code 2.",
    "Exit": "Typer ends a command with it.",
    "KafkaException": "Translated into a `MarshalError` before it reaches the caller.",
    "KeyError": "Raised and caught where Protobuf descriptors are read.",
    "LookupError": "Raised and reported where a client requests a token and AWS's SDK finds no credentials.",
    "NotImplementedError": "A method that subclasses define.",
    "TimeoutError": "A lock file that another process holds; an `OSError`.",
    "TypeError": "Raised and caught where a stored value has another type than expected.",
}
"""Exceptions of Python and of other packages that are raised inside the library only, with the reason."""

_REQUIRED: Final = ("Meaning", "Cause", "Action")
_OPTIONAL: Final = ("More", "Example")
_SECTION: Final = re.compile(r"^(\w+):$", re.MULTILINE)

INTRODUCTION: Final = """\
<!-- Made by `python -m tools.error_reference`; do not edit. -->

# Errors A to Z

Every error that the library raises on purpose is a `MarshalError`. Import the classes from `marshal_dagster`. Each
message names the group, topic and partition concerned, and what to do. `help(marshal_dagster.ClaimLostError)` shows the
same text as this page.

A run that does no work can also succeed, or fail without an error of this library:
[What a run can report](docs/how-to/use.md#what-a-run-can-report). A command that ends with an error has the [exit
code](docs/reference/cli.md#exit-codes) in the table. For steps by symptom, see the [runbook](docs/operate/runbook.md).
"""

DEVKAFKA: Final = """\
## The Kafka for one machine

`marshal_dagster.devkafka` and [`marshal-dagster kafka`](docs/reference/cli.md#a-kafka-for-this-machine) raise these.
"""

OTHERS: Final = """\
## Exceptions of Python and of other packages

These are not subclasses of `MarshalError`.

| exception | raised for |
| --- | --- |
"""


@dataclass(frozen=True, slots=True)
class ErrorEntry:
    """The description of an error class."""

    name: str
    base: str
    """Name of the class from which it derives."""
    exit_code: int
    """The exit code of a command that ends with this error."""
    summary: str
    meaning: str
    cause: str
    action: str
    more: tuple[str, ...] = ()
    """Places in the documentation, such as `docs/operate/runbook.md#claimlosterror`."""
    example: str = ""
    attributes: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Type and description of each documented attribute."""


def error_classes(module: ModuleType) -> list[type[Exception]]:
    """Return the error classes that `module` defines, from A to Z."""
    found = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Exception)]
    return sorted((kind for kind in found if kind.__module__ == module.__name__), key=lambda kind: kind.__name__)


def entry_of(kind: type[Exception]) -> ErrorEntry:
    """Return the entry of an error class.

    Raises:
        ValueError: Its docstring does not have the form that is described at the head of this file.
    """
    summary, *rest = _SECTION.split(inspect.cleandoc(kind.__doc__ or ""))
    summary = summary.strip()
    titles, texts = tuple(rest[::2]), [textwrap.dedent(text).strip() for text in rest[1::2]]
    if titles[: len(_REQUIRED)] != _REQUIRED or set(titles[len(_REQUIRED) :]) - set(_OPTIONAL):
        raise ValueError(f"{kind.__name__}: the docstring has the sections {titles}, not {_REQUIRED}")
    if not summary or "\n" in summary or not all(texts):
        raise ValueError(f"{kind.__name__}: the first line or a section of the docstring is empty or too long")
    sections = dict(zip(titles, texts, strict=True))
    return ErrorEntry(
        name=kind.__name__,
        base=kind.__bases__[0].__name__,
        exit_code=code_of(kind.__new__(kind)) or ExitCode.BUG,
        summary=summary,
        meaning=sections["Meaning"],
        cause=sections["Cause"],
        action=sections["Action"],
        more=tuple(sections.get("More", "").split()),
        example=sections.get("Example", ""),
        attributes=_attributes(kind),
    )


def _attributes(kind: type[Exception]) -> dict[str, tuple[str, str]]:
    """Return the type and the docstring of each attribute that the class declares."""
    source = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    definition = next(node for node in source.body if isinstance(node, ast.ClassDef))
    found = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name), annotation=annotation),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = ast.unparse(annotation), inspect.cleandoc(text)
            case _:
                pass
    return found


def render() -> str:
    """Return the page."""
    public = [entry_of(kind) for kind in error_classes(errors)]
    local = [entry_of(kind) for kind in error_classes(devkafka_errors)]
    parts = [INTRODUCTION, _overview(public), *(_entry(entry, "##", "marshal_dagster.errors") for entry in public)]
    parts += [DEVKAFKA, *(_entry(entry, "###", "marshal_dagster.devkafka.errors") for entry in local)]
    parts.append(OTHERS + "".join(f"| `{name}` | {reason} |\n" for name, reason in SHOWN.items()))
    return "\n".join(parts).replace("](docs/", "](../")  # from the top of the repository, or from the page


def _overview(entries: list[ErrorEntry]) -> str:
    rows = [f"| [`{entry.name}`](#{slug(entry.name)}) | {entry.summary} | {entry.exit_code} |" for entry in entries]
    return "\n".join(["| error | what happened | exit code |", "| --- | --- | --- |", *rows]) + "\n"


def _entry(entry: ErrorEntry, level: str, module: str) -> str:
    # The first line is an anchor to which the `Raises:` sections of the API reference link (mkdocs-autorefs).
    parts = [f"[](){{#{module}.{entry.name}}}", f"{level} {entry.name}", entry.summary]
    if entry.base not in {"Exception", errors.MarshalError.__name__}:
        parts.append(f"A kind of [`{entry.base}`](#{slug(entry.base)}).")
    parts += [f"**Meaning.** {entry.meaning}", f"**Cause.** {entry.cause}", f"**Action.** {entry.action}"]
    if entry.example:
        parts.append(entry.example)
    if entry.attributes:
        rows = [f"- `{name}` (`{kind}`): {text}" for name, (kind, text) in entry.attributes.items()]
        parts.append("\n".join(["**Attributes.**", "", *rows]))
    if entry.more:
        parts.append(f"**More.** {', '.join(map(_link, entry.more))}")
    return "\n\n".join(parts) + "\n"


def _link(place: str) -> str:
    """Return a link to a place such as `docs/operate/runbook.md#claimlosterror`, named for its headings."""
    path, _, anchor = place.partition("#")
    titles = {slug(title): title for title in _headings((TOP / path).read_text(encoding="utf-8"))}
    if anchor and anchor not in titles:
        raise ValueError(f"{path} has no heading with the anchor {anchor}")
    page = next(iter(titles.values()))
    text = f"{page}: {titles[anchor]}" if anchor else page
    return f"[{text}]({place})"


def _headings(text: str) -> Iterator[str]:
    is_code = False
    for line in text.splitlines():
        is_code ^= line.startswith("```")
        if not is_code and (heading := re.fullmatch(r"#+ (.+)", line)):
            yield heading[1]


def slug(heading: str) -> str:
    """Return the anchor that MkDocs gives to a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def defined_errors() -> set[str]:
    """Return the exception classes that the library defines, by module and name within the package."""
    return {
        f"{module}.{node.name}"
        for module, node in _nodes()
        if isinstance(node, ast.ClassDef) and any(_is_error(ast.unparse(base)) for base in node.bases)
    }


def raised_names() -> set[str]:
    """Return the names of all exception classes in the `raise` statements of the library."""
    found = set()
    for _, node in _nodes():
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            found.add(ast.unparse(raised).rpartition(".")[2])
    return {name for name in found if name.lstrip("_")[:1].isupper()}


def _nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(LIBRARY.rglob("*.py")):
        module = ".".join(path.relative_to(LIBRARY).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield module, node


def _is_error(base: str) -> bool:
    return base.rpartition(".")[2].endswith(("Error", "Exception"))


def public_errors() -> set[str]:
    """Return the error classes of `PUBLIC_MODULES`, by module and name within the package."""
    return {f"{name}.{kind.__name__}" for name, module in PUBLIC_MODULES.items() for kind in error_classes(module)}


def exported_errors() -> set[str]:
    """Return the names of all error classes that `marshal_dagster` exports."""
    values = {name: getattr(errors, name, None) for name in marshal_dagster.__all__}
    return {name for name, value in values.items() if isinstance(value, type) and issubclass(value, Exception)}


def main() -> int:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")
    print(f"written: {PAGE.relative_to(TOP)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
