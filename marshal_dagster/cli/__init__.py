"""The command line `marshal-dagster`, which shows and maintains the coordination log.

This is the top layer of the library. `main` lists the commands and reports errors. It imports nothing heavy, so that
`--help` answers at once. Each command is in a module of its own name, which is imported when the command is called. A
command calls the lower layers and passes the results to `output`, the only module that writes to a terminal or a pipe.
"""
