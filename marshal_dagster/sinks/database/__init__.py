"""Sinks for databases: they write rows to a table, and the ranges they belong to in the same transaction.

- `sink`: the course of a write, the same for every engine. It uses `ranges`, the tables of what was written.
- `dialect`: what an engine provides: connections, SQL, locks, types, and a staging table for a batch's rows.
- `postgres`: PostgreSQL's dialect, with `column_types`, `pg_copy` and `staged_rows`.
"""
