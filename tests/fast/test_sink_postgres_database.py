"""The connection string of a PostgreSQL database that another process uses."""

import pickle

import pytest
from psycopg.conninfo import conninfo_to_dict

from marshal_dagster._internal.postgres import Database


def elsewhere(database: Database, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Return the parameters of a pickled database in a process without this process's variables."""
    pickled = pickle.dumps(database)
    for name in ("PGPASSWORD", "PGHOST", "PGUSER"):
        monkeypatch.delenv(name, raising=False)
    loaded = pickle.loads(pickled)  # noqa: S301 - made above
    assert isinstance(loaded, Database)
    return dict(conninfo_to_dict(loaded._dsn))


def test_variables_of_this_process_are_sent_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executors of Spark do not have them. The connection string itself takes precedence."""
    monkeypatch.setenv("PGPASSWORD", "it's secret")
    monkeypatch.setenv("PGHOST", "elsewhere")
    database = Database("postgresql://me@db:5433/shop?options=-c%20a%3Db", connect_timeout_s=7)
    expected = {"user": "me", "host": "db", "port": "5433", "dbname": "shop", "options": "-c a=b"}
    assert elsewhere(database, monkeypatch) == expected | {"password": "it's secret"}


def test_a_complete_connection_string_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is added to it but what a variable gives."""
    for name in ("PGPASSWORD", "PGHOST", "PGUSER"):
        monkeypatch.delenv(name, raising=False)
    dsn = "host=a,b user=me password=x dbname=shop"
    assert elsewhere(Database(dsn), monkeypatch) == dict(conninfo_to_dict(dsn))
