"""The MariaDB sink over TLS: which certificates it accepts, and its own certificate."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pymysql
import pytest

from marshal_dagster.errors import ConfigurationError
from tests.real.certificates import Identity, self_signed, signed_by
from tests.real.mariadb_server import running_mariadb
from tests.sink_conformance import deliver, part, rows_of
from tests.sink_outputs import TABLE, FakeMariaDBSink, MariaDBOutput, own_schema

PASSWORD = "hunter2"


@dataclass(frozen=True)
class Site:
    """An output of a server that has a certificate for 127.0.0.1, and files with certificates."""

    output: MariaDBOutput
    folder: Path

    def sink(self, user: str, host: str = "127.0.0.1", **files: str) -> FakeMariaDBSink:
        """Return a sink that connects as a user, with the files of these names as the parameters of its URL."""
        parameters = "&".join(f"{name}={self.folder / file}" for name, file in files.items())
        place = self.output.dsn.replace("root@127.0.0.1", f"{user}:{PASSWORD}@{host}")
        return FakeMariaDBSink(f"{place}?{parameters}" if parameters else place, TABLE)

    def refused(self, sink: FakeMariaDBSink) -> str:
        """Return the error of a sink that cannot connect."""
        with pytest.raises(ConfigurationError) as error:
            deliver(self.output, "a", part(0, 0, 3), sink=sink)
        assert "\n" not in str(error.value)
        assert PASSWORD not in str(error.value)
        assert self.output.rows() == []
        return str(error.value)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with certificates and keys."""
    with tempfile.TemporaryDirectory(prefix="marshal-mariadb-tls-") as folder:
        place = Path(folder)
        clients = self_signed("authority of clients")
        write(place, "server", self_signed("server", ("127.0.0.1",)))
        write(place, "another", self_signed("another", ("127.0.0.1",)))
        write(place, "clients", clients)
        write(place, "client", signed_by(clients, "client"))
        yield place


def write(folder: Path, name: str, identity: Identity) -> None:
    """Write a certificate and its key."""
    (folder / f"{name}.pem").write_text(identity.certificate)
    (folder / f"{name}.key").write_text(identity.key)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """A server whose user `encrypted` needs TLS, and whose user `known` needs a certificate."""
    data = folder / "server"
    data.mkdir()
    files = {"cert": "server.pem", "key": "server.key", "ca": "clients.pem"}
    with running_mariadb(data, *(f"--ssl-{name}={folder / file}" for name, file in files.items())) as url:
        admin = MariaDBOutput(url, own_schema())
        for user, needed in (("encrypted", "SSL"), ("known", "X509")):
            admin.execute(
                f"CREATE USER {user}@'%' IDENTIFIED BY '{PASSWORD}' REQUIRE {needed}", f"GRANT ALL ON *.* TO {user}@'%'"
            )
        yield url


@pytest.fixture
def site(server: str, folder: Path) -> Site:
    """An empty output."""
    return Site(MariaDBOutput(server, own_schema()), folder)


def test_rows_are_sent_over_tls(site: Site) -> None:
    """The server's certificate is verified, and the server accepts that of the client."""
    sink = site.sink("encrypted", ssl_ca="server.pem")
    with sink._transaction() as connection, connection.cursor() as cursor:
        cursor.execute("SHOW STATUS LIKE 'Ssl_version'")
        assert cursor.fetchall()[0][1].startswith("TLSv1.")
    known = site.sink("known", ssl_ca="server.pem", ssl_cert="client.pem", ssl_key="client.key")
    for start, writer in ((0, sink), (3, known)):
        assert deliver(site.output, "a", part(0, start, start + 3), sink=writer).taken
    assert site.output.rows() == rows_of("a", part(0, 0, 6))


def test_another_server_is_refused(site: Site) -> None:
    """Its certificate is of another authority, or for another host. The error names the parameter to check."""
    for sink in (
        site.sink("encrypted", ssl_ca="another.pem"),
        site.sink("encrypted", "localhost", ssl_ca="server.pem"),
    ):
        error = site.refused(sink)
        assert "certificate verify failed" in error
        assert "ssl_ca" in error


def test_a_user_that_needs_tls_is_refused_without(site: Site) -> None:
    """The server refuses a plain connection, and one without the certificate of the client."""
    assert "Access denied for user 'encrypted'" in site.refused(site.sink("encrypted"))
    assert "Access denied for user 'known'" in site.refused(site.sink("known", ssl_ca="server.pem"))


@pytest.mark.parametrize("name", ["ssl_ca", "ssl_cert"])
def test_a_file_that_is_not_there_is_one_line(site: Site, name: str) -> None:
    """It is found when the sink connects."""
    assert f"{name}" in site.refused(site.sink("encrypted", **{name: "nowhere.pem"}))


def test_a_server_that_starts_leaves_the_temporary_tables_of_another(mariadb: str, tmp_path: Path) -> None:
    """Each worker of the tests has a server, and one that starts deletes the tables in its temporary folder."""
    place = urlsplit(mariadb)
    connection = pymysql.connect(host=place.hostname, port=place.port, user=place.username)
    with connection, connection.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE test.kept (number int) ENGINE=Aria")
        with running_mariadb(tmp_path):
            pass
        cursor.execute("DROP TEMPORARY TABLE test.kept")
