"""The rights that the role of a PostgreSQL sink needs, and the statements that grant those it lacks.

docs/how-to/security.md has the same statements; a test compares them.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, LiteralString

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.database.dialect import POSITIONS, TAKEN

if TYPE_CHECKING:
    from marshal_dagster._internal.postgres import Connection

_DATABASE: Final = "DATABASE"
_SCHEMA: Final = "SCHEMA"
_TABLE: Final = "TABLE"

_MISSING: Final[LiteralString] = """
    SELECT format('GRANT %%s ON %%s TO %%I', string_agg(privilege, ', ' ORDER BY number), place, current_user)
    FROM (
        SELECT w.privilege, w.number, CASE w.kind
            WHEN 'DATABASE' THEN format('DATABASE %%I', current_database())
            WHEN 'SCHEMA' THEN format('SCHEMA %%I', w.name)
            ELSE format('%%I.%%I', %(schema)s, w.name) END AS place,
        CASE
            WHEN w.kind = 'DATABASE' THEN has_database_privilege(current_database(), w.privilege)
            WHEN w.kind = 'SCHEMA' THEN has_schema_privilege(n.oid, w.privilege)
            WHEN has_table_privilege(c.oid, w.privilege) THEN true
            WHEN w.privilege <> 'DELETE' THEN has_any_column_privilege(c.oid, w.privilege)
            ELSE c.oid IS NULL END AS is_granted
        FROM unnest(%(kinds)s::text[], %(names)s::text[], %(privileges)s::text[])
            WITH ORDINALITY AS w (kind, name, privilege, number)
        LEFT JOIN pg_catalog.pg_namespace AS n ON n.nspname = %(schema)s
        LEFT JOIN pg_catalog.pg_class AS c ON w.kind = 'TABLE' AND c.relnamespace = n.oid AND c.relname = w.name
    ) AS wanted
    WHERE NOT is_granted GROUP BY place ORDER BY min(number)
    """
"""Selects a statement for each object on which the role lacks rights. Objects that do not exist are left out."""


def missing_grants(connection: "Connection", schema: str, table: str, privileges: Sequence[str]) -> list[str]:
    """Return the statements that grant the rights which the role lacks, without the one to create tables.

    Args:
        connection: A connection of the role, with an open transaction.
        schema: The output's schema.
        table: The output's table.
        privileges: The privileges on the table.
    """
    kinds, names, wanted = map(list, zip(*_rights(schema, table, privileges), strict=True))
    found = connection.execute(_MISSING, {"schema": schema, "kinds": kinds, "names": names, "privileges": wanted})
    return [statement for (statement,) in found]


def _rights(schema: str, table: str, privileges: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    tables: dict[str, Sequence[str]] = {
        table: privileges,
        POSITIONS: ("SELECT", "INSERT", "UPDATE"),
        TAKEN: ("SELECT", "INSERT", "DELETE"),
    }
    yield _DATABASE, "", "TEMPORARY"
    yield _SCHEMA, schema, "USAGE"
    for name, wanted in tables.items():
        for privilege in wanted:
            yield _TABLE, name, privilege


def check_may_create_tables(connection: "Connection", output: str, schema: str, otherwise: str) -> None:
    """Check that the role may create tables in a schema.

    Args:
        connection: A connection of the role.
        output: The output, for the error message.
        schema: The schema.
        otherwise: What the user can do instead of granting the right, as the end of a sentence.

    Raises:
        ConfigurationError: It may not.
    """
    found = connection.execute(
        "SELECT format('GRANT CREATE ON SCHEMA %%I TO %%I', nspname, current_user) FROM pg_catalog.pg_namespace "
        "WHERE nspname = %s AND NOT has_schema_privilege(oid, 'CREATE')",
        (schema,),
    )
    for (grant,) in found:
        raise ConfigurationError(f"table {output}: the role may not create tables: execute `{grant}`, or {otherwise}")
