"""The command line: what a person at a terminal, or a script, sees of the coordination log.

Stands on top of all floors. `main` holds the commands, their options and what becomes of errors; it imports nothing
heavy, so that `--help` answers at once. Each command's work is in a module of its own name, imported when it is called:
that asks the floors below, and hands values to `output`, the only place that writes.
"""
