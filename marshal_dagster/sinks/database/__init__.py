"""Sinks for databases: they write rows to a table, and the ranges they belong to in the same transaction.

- `sink`: the course of a write, the same for every engine. It uses `ranges`, the tables of what was written.
- `dialect`: what an engine provides: connections, SQL, locks, types, and a staging table for a batch's rows.
- `value_text`, `frame_lines`: rendering of values and rows in Spark, for both databases.
- `postgres`: PostgreSQL's dialect, with `column_types`, `postgres_rights`, `pg_copy`, `pg_binary`, `batch_copy`,
  `staged_rows` and `task_rows`.
- `mariadb`: MariaDB's dialect, with `mariadb_connection`, `mariadb_types` and `mariadb_rows`.
"""
