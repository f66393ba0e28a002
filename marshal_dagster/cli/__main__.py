"""`python -m marshal_dagster.cli` is `marshal-dagster`."""

from marshal_dagster.cli.main import main

main()
