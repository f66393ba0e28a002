"""Write docs/reference/configuration.md: each option with its unit and default, read from the code.

Run `python -m tools.configuration_reference` after a change to an option, its default or its description. An option is
a field of a config class, a dataclass or a `TypedDict`, or a parameter of a function or class. Its description is the
field's description, its attribute docstring, or its entry in `Args:`.
"""

import ast
import dataclasses
import enum
import inspect
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import griffe

import marshal_dagster
from marshal_dagster.cli import options as cli_options
from marshal_dagster.cli import outbox as cli_outbox
from marshal_dagster.coordinator.group import GroupRules
from marshal_dagster.coordinator.service import CoordinatorOptions
from marshal_dagster.election.rules import Timing
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.ops.config import WorkOptions
from marshal_dagster.outbox.backoff import HarvestLimits
from marshal_dagster.outbox.options import HarvesterOptions

PAGE: Final = Path(__file__).parents[1] / "docs" / "reference" / "configuration.md"
INTRODUCTION: Final = """\
<!-- Made by `python -m tools.configuration_reference`; do not edit. -->

# Configuration

Each option of the library with its unit and default, by where you set it. The [API reference](api/resources.md) shows
the same options with examples, and [the command line](cli.md) has the options of commands. A dash as default means that
the option is not set. [The glossary](docs/concepts/glossary.md) explains the terms.
"""

_BY_NAME: Final = {
    "Connections and resources": (
        "KafkaConnectionConfig ClaimerResource RationalizerResource OutboxResource SparkConnectResource"
    ),
    "Ops, assets and jobs": (
        "WorkOptions marshal_asset build_claimed_batch_op build_topic_asset build_reprocess_asset "
        "build_claimed_batch_job build_claimed_batch_schedule build_reprocess_job build_outbox_drain_job "
        "kafka_partitions_def ClaimedTopicComponent"
    ),
    "Run config": (
        "ClaimedBatchConfig ReprocessWindowConfig ReprocessRangeConfig PauseConfig ResumeConfig SetPositionConfig "
        "ImportPositionsConfig RetryConfig RevokeConfig SettingsConfig"
    ),
    "Sensors and checks": (
        "build_stale_claim_sensor build_lag_sensor build_run_failure_sensors build_topic_sensor "
        "build_outbox_backlog_sensor build_group_member_sensor build_claim_checks build_exhausted_plans_check "
        "build_outbox_check"
    ),
    "Sinks": "FileSink DeltaSink IcebergSink PostgresSink MariaDBSink KafkaSink RemoteSink",
    "Spark and decoding": (
        "spark_settings delta_settings decode_json decode_avro decode_protobuf infer_json_schema SchemaRegistry"
    ),
    "Batches without Dagster": "GroupSettings BatchRequest RangeOptions",
    "Outbox": "Outbox OutgoingEvents HarvesterOptions HarvestLimits Timing",
    "Coordinator": "CoordinatedMember CoordinatorOptions GroupRules",
    "Probes and metrics of a service": "HealthServer",
}
WITHOUT_OPTIONS: Final = {
    "build_import_positions_job": "its options are those of `ImportPositionsConfig`",
    "build_pause_job": "its options are those of `PauseConfig`",
    "build_reprocess_range_job": "its options are those of `ReprocessRangeConfig`",
    "build_resume_job": "its options are those of `ResumeConfig`",
    "build_retry_job": "its options are those of `RetryConfig`",
    "build_revoke_job": "its options are those of `RevokeConfig`",
    "build_set_position_job": "its options are those of `SetPositionConfig`",
    "build_settings_job": "its options are those of `SettingsConfig`",
    "configured_in_code": "it takes resources",
    "pipes_parameters": "it passes a batch to a script",
    "run_with_pipes": "it passes a batch to a script",
    "submitted_batch": "it opens the batch in a script",
    "run_once": "it is a check of a sink",
    "start_session": "it takes the settings of `spark_settings`",
    "Sink": "it is the interface of sinks",
}
"""Public functions and classes that the page leaves out, each with the reason."""

_INTERNAL: Final = {
    kind.__name__: kind
    for kind in (WorkOptions, HarvesterOptions, HarvestLimits, Timing, CoordinatorOptions, GroupRules)
}
"""Classes that are not exported at top level."""

_UNIT_OF_SUFFIX: Final = {"_s": "seconds", "_ms": "milliseconds", "_bytes": "bytes"}
_UNIT_OF_NAME: Final = {
    "capacity": "relative weight",
    "end": "offset",
    "except_partitions": "partition numbers",
    "largest_id": "schema id",
    "last": "batches",
    "max_attempts": "attempts",
    "max_backlog_rows": "rows",
    "max_batches": "batches",
    "max_claims": "partitions",
    "max_failed_pings": "pings",
    "max_in_flight_records": "rows",
    "max_lag": "offsets",
    "max_lag_records": "offsets",
    "max_parked": "rows",
    "max_rebalance_retries": "retries",
    "max_records": "offsets",
    "max_runs_per_tick": "runs",
    "min_partitions": "Spark tasks",
    "partition": "partition number",
    "partitions": "partition numbers",
    "port": "TCP port",
    "prefetch_offsets": "offsets",
    "rearm_records": "offsets",
    "shift_by": "offsets",
    "size": "offsets",
    "start": "offset",
}
_SINKS: Final = "[Sinks](docs/how-to/sinks.md)"
_DECISION: Final = re.compile(r"docs/contributing/decisions/(\d{4})-[\w-]+\.md")
_NUMBERS: Final = re.compile(r"\b(?:int|float)\b")
_PLAIN_MODULES: Final = frozenset({"builtins", "collections.abc"})
"""The modules whose generic types are shown as common nouns, such as `sequence`."""
_STATED: Final = re.compile(r"\s*\(default: ((?:[^()]|\([^()]*\))*)\)")
"""The default in a description, such as `(default: all)`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """An option of the library."""

    name: str
    kind: str
    """Its type, for people."""
    unit: str
    default: str
    about: str


def sections() -> dict[str, list[Any]]:
    """Return the functions and classes with options, by the title of their section."""
    return {
        title: [_INTERNAL[name] if name in _INTERNAL else getattr(marshal_dagster, name) for name in names.split()]
        for title, names in _BY_NAME.items()
    }


def options_of(owner: Any) -> list[Option]:  # noqa: ANN401 - a class or function of any kind
    """Return the options of a class or function, in the order of the code.

    Raises:
        ValueError: An option has no description, or is a number without a unit.
    """
    if hasattr(owner, "model_fields"):
        found = list(_of_fields(owner))
    elif typing.is_typeddict(owner) or dataclasses.is_dataclass(owner):
        found = list(_of_attributes(owner))
    else:
        found = list(_of_parameters(owner))
    for option in found:
        if not option.about:
            raise ValueError(f"{owner.__name__}.{option.name} has no description")
        if _NUMBERS.search(option.kind) and not option.unit:
            raise ValueError(f"{owner.__name__}.{option.name} is a number without a unit: add it to _UNIT_OF_NAME")
    return found


def _of_fields(owner: Any) -> Iterator[Option]:  # noqa: ANN401 - a class of pydantic
    for name, field in owner.model_fields.items():
        default = inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
        yield _option(name, field.annotation, default, field.description or "")


def _of_attributes(owner: Any) -> Iterator[Option]:  # noqa: ANN401 - a dataclass or a TypedDict
    docstrings = _attribute_docstrings(owner)
    defaults = {}
    if dataclasses.is_dataclass(owner):
        for field in dataclasses.fields(owner):
            made = None if field.default_factory is dataclasses.MISSING else field.default_factory()
            unset = made if made is not None else inspect.Parameter.empty
            defaults[field.name] = unset if field.default is dataclasses.MISSING else field.default
    for name, hint in _hints(owner).items():
        if not name.startswith("_"):
            yield _option(name, hint, defaults.get(name), docstrings.get(name, ""))


def _of_parameters(owner: Callable[..., Any]) -> Iterator[Option]:
    texts = _described_arguments(inspect.getdoc(owner) or "")
    function = owner
    if inspect.isclass(owner):
        function = owner.__init__
        texts |= _described_arguments(inspect.getdoc(owner.__init__) or "")
    hints = _hints(function)
    for name, parameter in inspect.signature(owner).parameters.items():
        if parameter.kind not in {parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL}:
            yield _option(name, hints.get(name, parameter.annotation), parameter.default, texts.get(name, ""))


def _option(name: str, kind: Any, default: Any, about: str) -> Option:  # noqa: ANN401 - types and values of options
    text = " ".join(about.split())
    stated = _STATED.search(text)
    if kind is bool and stated is not None and stated[1] not in {"true", "false"}:
        stated = None
    if kind is bool and stated is None and default is None:
        default = False
    if stated is not None:
        text = text.replace(stated[0], "", 1)
    unit = next((word for suffix, word in _UNIT_OF_SUFFIX.items() if name.endswith(suffix)), "")
    if not unit and _NUMBERS.search(_type(kind)):
        unit = _UNIT_OF_NAME.get(name, "")
    shown = stated[1] if stated is not None and default in (None, (), inspect.Parameter.empty) else _value(default)
    return Option(name, _type(kind), unit, shown, text)


def _value(value: Any) -> str:  # noqa: ANN401 - the default of an option
    if value is inspect.Parameter.empty:
        return ""
    if isinstance(value, enum.Enum):
        return _choice(value)
    if value is None or (isinstance(value, list | tuple | frozenset | dict | Mapping) and not value):
        return "-"
    if isinstance(value, tuple):
        return ", ".join(map(_value, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:,}".removesuffix(".0")
    if dataclasses.is_dataclass(value):
        return f"`{type(value).__name__}()`"
    return f"`{getattr(value, '__name__', value)}`"


def _choice(member: enum.Enum) -> str:
    """Return how a user writes the member: its text, or its name if its value is only a number."""
    return f"`{member.value}`" if isinstance(member.value, str) else f"`{type(member).__name__}.{member.name}`"


def _type(kind: Any) -> str:  # noqa: ANN401 - a type of any form
    """Return the type for people, without None."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in {typing.Union, types.UnionType}:
        choices = [choice for choice in arguments if choice is not type(None)]
        if any(inspect.isclass(choice) and issubclass(choice, enum.Enum) for choice in choices):
            choices = [choice for choice in choices if choice is not str]
        return " or ".join(dict.fromkeys(_type(choice) for choice in choices))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return ", ".join(map(_choice, kind))
    if kind is bool:
        return "true or false"
    if isinstance(kind, typing.ForwardRef):
        return kind.__forward_arg__
    if origin is os.PathLike:
        return "path"
    if origin is not None and arguments and "Callable" not in str(origin):
        inner = ", ".join(_type(argument) for argument in arguments if argument is not Ellipsis)
        name = getattr(origin, "__name__", str(origin))
        return f"{name.lower() if origin.__module__ in _PLAIN_MODULES else name} of {inner}"
    if "Callable" in str(kind):
        return "function"
    text = re.sub(r"[\w.]+\.(\w+)", r"\1", getattr(kind, "__name__", str(kind)))
    return text.removesuffix(" | None").replace(" | ", " or ")


def _hints(owner: Any) -> dict[str, Any]:  # noqa: ANN401 - a class or function
    try:
        return typing.get_type_hints(owner)
    except NameError:  # a type that is imported for type checks only
        return dict(inspect.get_annotations(owner))


def _attribute_docstrings(owner: type) -> dict[str, str]:
    """Return the docstring below each attribute of a dataclass, its bases, or a `TypedDict`."""
    found: dict[str, str] = {}
    for base in (owner,) if typing.is_typeddict(owner) else reversed(owner.__mro__[:-1]):
        source = ast.parse(textwrap.dedent(inspect.getsource(base)))
        definition = next(node for node in source.body if isinstance(node, ast.ClassDef))
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = text
                case _:
                    pass
    return found


def _described_arguments(docstring: str) -> dict[str, str]:
    sections_of_it = griffe.Docstring(docstring).parse("google", warnings=False)
    return {
        argument.name: argument.description
        for section in sections_of_it
        if section.kind in {griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes}
        for argument in section.value
    }


def variables() -> list[tuple[str, str, str]]:
    """Return the environment variables: name, default and meaning."""
    fields = [
        (f"MARSHAL_{option.name.upper()}", option.default or "-", f"`{option.name}` of the connection")
        for option in options_of(marshal_dagster.KafkaConnectionConfig)
        if option.name in KafkaConnection.__dataclass_fields__
    ]
    return [
        *fields,
        ("MARSHAL_DATA_...", "-", "the same for the data topics' cluster, if it is another one"),
        ("MARSHAL_COORDINATION_TOPIC", "`__marshal`", "the coordination topic of commands"),
        (cli_options.COORDINATOR_TOPIC_VARIABLE, "`__marshal_coordinator`", "the coordinator's topic of commands"),
        (cli_outbox.DSN_VARIABLE, "-", "the connection string of the outbox's database, for commands"),
        ("MARSHAL_CACHE", "in the user's cache folder", "the folder for downloaded jars"),
        ("MARSHAL_KAFKA_DIR", "in the user's state folder", "the folder of the Kafka of `marshal-dagster kafka up`"),
        ("MARSHAL_IVY_SETTINGS", "-", "an Ivy settings file, for example for a Maven mirror"),
    ]


def render() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for title, owners in sections().items():
        parts.append(f"## {title}\n")
        for owner in owners:
            parts.append(f"### {owner.__name__}\n")
            parts.append(_first_sentence(owner) + "\n")
            parts.append(_table(options_of(owner)))
    rows = "".join(f"| `{name}` | {default} | {about} |\n" for name, default, about in variables())
    parts.append("## Environment variables\n")
    parts.append("Commands read them, and `KafkaConnectionConfig.from_environment` reads those of the connection.\n")
    parts.append(f"| variable | default | meaning |\n| --- | --- | --- |\n{rows}")
    return "\n".join(parts).replace("](docs/", "](../")  # from the top of the repository, or from the page


def _first_sentence(owner: Any) -> str:  # noqa: ANN401 - a class or function
    return " ".join((inspect.getdoc(owner) or "").partition("\n\n")[0].split())


def _table(options: list[Option]) -> str:
    head = "| option | type and unit | default | meaning |\n| --- | --- | --- | --- |\n"
    rows = []
    for option in options:
        kind = f"{option.kind}, {option.unit}" if option.unit else option.kind
        cells = " | ".join(map(_cell, (kind, option.default or "required", option.about)))
        rows.append(f"| `{option.name}` | {cells} |\n")
    return head + "".join(rows)


def _cell(text: str) -> str:
    text = _DECISION.sub(r"[decision \1](\g<0>)", text)
    return text.replace("|", "\\|").replace("docs/how-to/sinks.md", _SINKS)


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")
    print(f"written: {PAGE.relative_to(PAGE.parents[2])}")


if __name__ == "__main__":
    main()
