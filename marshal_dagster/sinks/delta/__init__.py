"""The Delta sink: writes rows to a Delta table, and the positions of their ranges in the same commit."""
