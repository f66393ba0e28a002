"""The PostgreSQL sink: writes rows to a table, and the ranges they belong to in the same transaction."""
