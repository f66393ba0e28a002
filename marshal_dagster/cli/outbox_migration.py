"""The options and output of `outbox migrate`."""

import shlex
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from marshal_dagster.cli import output
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.outbox.migration import MigrationPlan, OutboxMigration
from marshal_dagster.outbox.old_tables import (
    DebeziumTable,
    GoharvestTable,
    KeyConverter,
    Level,
    OldTable,
)
from marshal_dagster.outbox.options import DEFAULT_OPTIONS

_DEFAULTS: Final = DebeziumTable()
_STYLES: Final = {Level.OK: "", Level.WARNING: "yellow", Level.PROBLEM: "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OldTableOptions:
    """The table to move, and how Debezium's event router is configured."""

    source: Annotated[
        str,
        typer.Option("--from", metavar="SOFTWARE", help="Whose table it is: goharvest or debezium."),
    ]
    table: Annotated[
        str,
        typer.Option(
            "--table", metavar="[SCHEMA.]TABLE", help="The table that its writers insert into. A view gets this name."
        ),
    ]
    columns: Annotated[
        str,
        typer.Option(
            "--columns",
            metavar="NAME=COLUMN,...",
            help="Debezium: columns with other names than id, aggregatetype, aggregateid and payload, such as "
            "aggregateid=order_id.",
        ),
    ] = ""
    topic_template: Annotated[
        str,
        typer.Option(
            "--topic-template", metavar="TEMPLATE", help="Debezium: the router's route.topic.replacement, in quotes."
        ),
    ] = _DEFAULTS.topic_template
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header",
            metavar="COLUMN[=NAME]",
            help="Debezium: a column that becomes a header, as in table.fields.additional.placement. Can be repeated.",
        ),
    ] = None
    key_converter: Annotated[
        str,
        typer.Option(
            "--key-converter", metavar="NAME", help="Debezium: the connector's key.converter, string or json."
        ),
    ] = _DEFAULTS.key_converter.value
    order_by: Annotated[
        str | None,
        typer.Option(
            "--order-by",
            metavar="COLUMN",
            help="Debezium: also move the rows of the table, in the order of this column, because no connector has "
            "read them. By default they stay in the renamed table.",
        ),
    ] = None

    def old_table(self) -> OldTable:
        """Return the old table. Raises `ConfigurationError`."""
        if self.source == "goharvest":
            self._refuse_router_options()
            return GoharvestTable()
        if self.source != "debezium":
            raise ConfigurationError(f"--from: {self.source!r}; give goharvest or debezium")
        names = _pairs("--columns", [pair for pair in self.columns.split(",") if pair])
        fields = {"id": "event_id", "aggregatetype": "routed_by", "aggregateid": "event_key", "payload": "payload"}
        unknown = [name for name, _ in names if name not in fields]
        if unknown:
            raise ConfigurationError(f"--columns: {unknown[0]!r}; give {', '.join(fields)}")
        columns: dict[str, Any] = {fields[name]: column for name, column in names}
        headers = [(column, name or column) for column, _, name in (text.partition("=") for text in self.header or ())]
        return DebeziumTable(
            topic_template=self.topic_template,
            headers=headers,
            key_converter=KeyConverter.of(self.key_converter),
            order_by=self.order_by,
            **columns,
        )

    def _refuse_router_options(self) -> None:
        own = (self.columns, self.topic_template, self.header, self.key_converter, self.order_by)
        if own != ("", _DEFAULTS.topic_template, None, _DEFAULTS.key_converter.value, None):
            raise ConfigurationError(
                "--columns, --topic-template, --header, --key-converter and --order-by are for --from debezium: leave "
                "them out"
            )

    def place(self) -> tuple[str | None, str]:
        """Return the schema, if one is given, and the name of the table."""
        schema, dot, table = self.table.partition(".")
        return (schema, table) if dot else (None, schema)


def _pairs(option: str, texts: list[str]) -> list[tuple[str, str]]:
    pairs = [(name.strip(), value.strip()) for name, _, value in (text.partition("=") for text in texts)]
    if any(not name or not value for name, value in pairs):
        raise ConfigurationError(f"{option}: {','.join(texts)!r}; give NAME=COLUMN,NAME=COLUMN")
    return pairs


def show_plan(plan: MigrationPlan, *, with_statements: bool) -> None:
    """Show the checks, and the statements if wanted."""
    rows = [(check.name, output.styled(check.level, _STYLES[check.level]), check.text) for check in plan.checks]
    output.show(output.Table(("check", "result", "what was found"), rows, may_fold={"what was found"}))
    if with_statements:
        output.show("", "BEGIN;", *_lines(plan), "COMMIT;", "")


def _lines(plan: MigrationPlan) -> list[str]:
    """Return the statements without control characters, which `output` would escape."""
    return [line for statement in plan.statements for line in f"{statement};".split("\n")]


def question(migration: OutboxMigration, old: OldTable, *, is_undo: bool) -> str:
    """Return the question before a migration: what the command cannot check."""
    if is_undo:
        return f"Give {migration.shown} back to {old.owner}, which is still stopped?"
    if isinstance(old, GoharvestTable):
        return f"Are all goharvest processes that read {migration.shown} stopped, also the standbys?"
    if old.order_by is not None:
        return f"Is the connector that reads {migration.shown} stopped, and were its rows not published?"
    return f"Does the connector read {migration.shown} now, and does no harvester of this outbox run?"


def show_next(plan: MigrationPlan, migration: OutboxMigration, old: OldTable, name: str, *, is_undo: bool) -> None:
    """Show what was done, and which commands come next."""
    if is_undo:
        output.show(
            f"{migration.shown} is the table of {old.owner} again.",
            f"Next: `{_next_command('drain', name, old)}`, then start {old.owner}.",
        )
        return
    output.show(
        f"Rows that were moved: {plan.rows}. Rows inserted into {migration.shown} are written to the outbox now; the "
        f"old table is {migration.renamed}."
    )
    if not isinstance(old, GoharvestTable) and old.order_by is None:
        output.show(
            f"The change is at {plan.position} in the database's log. Stop the connector when its slot has read that:",
            "  SELECT slot_name, confirmed_flush_lsn FROM pg_replication_slots;",
        )
    output.show(f"Next: `{_next_command('harvest', name, old)}`")


def _next_command(command: str, name: str, old: OldTable) -> str:
    is_usual = old.partitioner == DEFAULT_OPTIONS.partitioner
    partitioner = () if is_usual else ("--partitioner", old.partitioner)
    return shlex.join(["marshal-dagster", "outbox", command, "--name", name, *partitioner])


def plan_to_json(plan: MigrationPlan, old: OldTable, *, dry_run: bool) -> dict[str, Any]:
    """Return a plan as JSON."""
    return {
        "dry_run": dry_run,
        "done_before": plan.is_done,
        "rows": plan.rows,
        "partitioner": old.partitioner.value,
        "checks": [{"check": check.name, "result": check.level.value, "text": check.text} for check in plan.checks],
        "statements": list(plan.statements),
        "position": plan.position,
    }
