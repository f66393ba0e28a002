"""Errors of catalogs: their kind, and that they show no secret."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyiceberg")

from pyiceberg.exceptions import CommitFailedException, ForbiddenError, NoSuchNamespaceError, ServerError
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import IntegerType, LongType, NestedField, StringType

from marshal_dagster.errors import AuthorizationError, ConfigurationError, UnavailableError
from marshal_dagster.sinks import IcebergSink
from marshal_dagster.sinks.conformance.target import deliver, part
from marshal_dagster.sinks.hidden_secrets import secret_values
from marshal_dagster.sinks.iceberg.catalog_errors import commit_error, known_errors
from marshal_dagster.sinks.iceberg.table import check_catalog
from tests.iceberg_tables import IcebergTarget, create_table

SCHEMA = Schema(
    NestedField(1, "partition", IntegerType()),
    NestedField(2, "offset", LongType()),
    NestedField(3, "value", StringType()),
)


def foreign(name: str, module: str, code: str = "") -> Exception:
    """Return an error of a package that need not be installed."""
    error: Exception = type(name, (Exception,), {"__module__": module, "response": {"Error": {"Code": code}}})(
        "first line"
    )
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ForbiddenError("first line"), AuthorizationError),
        (foreign("NoCredentialsError", "botocore.exceptions"), AuthorizationError),
        (foreign("ClientError", "botocore.exceptions", code="AccessDeniedException"), AuthorizationError),
        (foreign("ClientError", "botocore.exceptions", code="ThrottlingException"), UnavailableError),
        (foreign("NoRegionError", "botocore.exceptions"), ConfigurationError),
        (foreign("OperationalError", "sqlalchemy.exc"), UnavailableError),
        (foreign("ProgrammingError", "sqlalchemy.exc"), ConfigurationError),
        (foreign("ArgumentError", "sqlalchemy.exc"), ConfigurationError),
        (foreign("TException", "thrift.Thrift"), UnavailableError),
        (NoSuchNamespaceError("first line"), ConfigurationError),
        (ServerError("first line"), UnavailableError),
        (OSError("first line"), UnavailableError),
        (ValueError("first line\nsecond line"), ConfigurationError),
    ],
)
def test_the_kind_of_a_catalogs_error(error: Exception, kind: type[Exception]) -> None:
    """It is configured wrongly, has refused the credentials, or is not reached."""
    with pytest.raises(kind, match=r"shop.orders: .*\(first line\)") as raised, known_errors("shop.orders", list):
        raise error
    assert "\n" not in str(raised.value)


def test_errors_that_are_not_the_catalogs_stay() -> None:
    """An error of code is raised as it is, and so is one of this library."""
    for error in (KeyError("x"), ConfigurationError("y"), UnavailableError("z")):
        with pytest.raises(type(error)) as raised, known_errors("shop.orders", list):
            raise error
        assert raised.value is error
        assert commit_error("shop.orders", [], error) is error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ForbiddenError("not allowed\nmore"), AuthorizationError),
        (CommitFailedException("not allowed\nmore"), UnavailableError),
        (ValueError("not allowed\nmore"), UnavailableError),
    ],
)
def test_a_refused_commit_is_one_line(
    error: Exception, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that may only read learns it at the commit."""
    create_table(tmp_path, SCHEMA)

    def refused(*_: Any, **__: Any) -> None:  # noqa: ANN401 - as pyiceberg's
        raise error

    monkeypatch.setattr(Table, "_do_commit", refused)
    with pytest.raises(kind, match=r"\(not allowed\)") as raised:
        deliver(IcebergTarget(tmp_path), "a", part(0, 0, 3))
    assert "\n" not in str(raised.value)


def test_which_values_are_hidden() -> None:
    """Those of keys that look secret, and long ones. A short one of another key may be part of any text."""
    long = "x" * 20
    properties = {"type": "hive", "token": "abc", "s3.secret-access-key": "k", "other": long, "warehouse": long + "y"}
    assert secret_values(properties, {"empty-token": "", "auth": {"basic": {"password": "p"}}}) == [
        "abc",
        "k",
        long,
        "p",
    ]


@pytest.mark.parametrize("uri", ["odd://user:pass-of-uri@host", "postgresql+none://user:pass-of-uri@host/catalog"])
def test_secrets_of_pyicebergs_configuration_are_not_shown(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are hidden as the sink's own properties are, also if only a part of the address is shown."""
    (tmp_path / ".pyiceberg.yaml").write_text(f"catalog:\n  lake:\n    uri: {uri}\n    token: pass-of-token\n")
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    error = ValueError(f"cannot open {uri} or xx://user:pass-of-uri@host with pass-of-token")

    def refused(*_: Any, **__: Any) -> None:  # noqa: ANN401 - as pyiceberg's
        raise error

    monkeypatch.setattr("pyiceberg.catalog.load_catalog", refused)
    with pytest.raises(ConfigurationError, match=r"cannot open \*\*\* or xx://\*\*\*@host with \*\*\*"):
        IcebergSink("shop.orders", catalog="lake").verdicts([part(0, 0, 1)])


def test_a_hive_catalog_is_refused() -> None:
    """Pyiceberg's commit to it is no compare-and-set."""
    hive = type("HiveCatalog", (SimpleNamespace,), {"__module__": "pyiceberg.catalog.hive"})
    own = type("OwnCatalog", (hive,), {"__module__": "own"})
    for catalog in (hive(), own()):
        with pytest.raises(ConfigurationError, match="Hive catalog without a compare-and-set"):
            check_catalog(catalog, "shop.orders")
    check_catalog(SimpleNamespace(), "shop.orders")  # type: ignore[arg-type]


@pytest.mark.parametrize("module", ["bigquery_metastore", "dynamodb"])
def test_catalogs_that_pyiceberg_does_not_commit_to_are_refused(module: str) -> None:
    """Before a row is written."""
    catalog = type("OddCatalog", (SimpleNamespace,), {"__module__": f"pyiceberg.catalog.{module}"})
    with pytest.raises(ConfigurationError, match="only reads tables of OddCatalog"):
        check_catalog(catalog(), "shop.orders")
