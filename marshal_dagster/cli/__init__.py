"""The command line: what a person at a terminal, or a script, sees of the coordination log.

It is the top layer. `main` holds the commands, their options and what becomes of errors; it imports nothing
heavy, so that `--help` answers at once. Each command's work is in a module of its own name, imported when it is called:
that calls lower layers, and hands values to `output`, the only place that writes.
"""
