"""The op that claims, processes and commits, batch after batch in one Spark session."""
