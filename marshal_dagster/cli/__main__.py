"""Run the command line as `python -m marshal_dagster.cli`; this is the same as `marshal-dagster`."""

from marshal_dagster.cli.main import main

main()
