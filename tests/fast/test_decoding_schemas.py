"""Check the schemas of framed messages, which the driver requests from a registry or reads from files."""

import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marshal_dagster.errors import BadRecord, ConfigurationError, DecodeError, UnavailableError
from marshal_dagster.spark.decoding import confluent_wire_format
from marshal_dagster.spark.decoding.avro_codec import whole
from marshal_dagster.spark.decoding.schemas import Schema, SchemaFiles, SchemaKind, SchemaRegistry
from tests.avro_bytes import encode, record
from tests.registry import Registry, running_registry


@pytest.fixture
def registry() -> Iterator[Registry]:
    """Yield a schema registry for one test."""
    with running_registry() as registry:
        yield registry


def test_the_writer_of_the_tests_writes_what_the_specification_shows() -> None:
    """The examples are a record, longs, an array and a union with null."""
    assert encode(record("test", {"a": "long", "b": "string"}), {"a": 27, "b": "foo"}) == bytes.fromhex("3606666f6f")
    assert [encode("long", each).hex() for each in (0, -1, 1, -64, 64)] == ["00", "01", "02", "7f", "8001"]
    assert encode({"type": "array", "items": "long"}, [3, 27]) == bytes.fromhex("04063600")
    assert encode(["null", "string"], None) == b"\x00"
    assert encode(["null", "string"], "a") == bytes.fromhex("020261")


def test_a_schema_is_found_by_its_id_and_requested_once(registry: Registry) -> None:
    """The schema of an id never changes, so it is requested once."""
    number = registry.register("a", '"string"')
    schemas = SchemaRegistry(url=f"{registry.url}/")
    assert [schemas.by_id(number), schemas.by_id(number)] == [Schema(SchemaKind.AVRO, '"string"')] * 2
    assert registry.requested == [f"/schemas/ids/{number}"]


def test_an_id_that_the_registry_does_not_know_is_no_error(registry: Registry) -> None:
    """The record is bad; as the schema may be registered later, it is requested again."""
    schemas = SchemaRegistry(url=registry.url)
    assert schemas.by_id(7) is None
    assert schemas.by_id(7) is None
    assert len(registry.requested) == 2


@pytest.mark.parametrize("number", [2**31, 2**32 - 1])
def test_an_id_that_no_registry_can_give_is_not_known(registry: Registry, number: int) -> None:
    """A broken record may have such an id; for it, Confluent's registry answers that the path does not exist."""
    assert SchemaRegistry(url=registry.url).by_id(number) is None


def test_the_newest_schema_is_requested_each_time(registry: Registry) -> None:
    """A subject may get new versions."""
    schemas = SchemaRegistry(url=registry.url)
    registry.register("s", '"int"')
    assert schemas.latest("s").text == '"int"'
    registry.register("a/b c", '"string"')
    assert schemas.latest("a/b c") == Schema(SchemaKind.AVRO, '"string"')
    registry.register("s", "message A {}", kind="PROTOBUF", serialized=b"\x0a\x01a")
    assert schemas.latest("s") == Schema(SchemaKind.PROTOBUF, "CgFh")
    with pytest.raises(ConfigurationError, match="has no subject 'none': correct the name"):
        schemas.latest("none")


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_registry_that_cannot_answer_is_an_error(registry: Registry, status: int) -> None:
    """This is an error, not an unknown schema."""
    registry.status = status
    with pytest.raises(UnavailableError, match=str(status)):
        SchemaRegistry(url=registry.url).by_id(1)


def test_a_registry_that_is_down_is_an_error() -> None:
    """No server listens on the port."""
    with running_registry() as registry:
        pass
    with pytest.raises(UnavailableError, match="cannot be reached"):
        SchemaRegistry(url=registry.url).by_id(1)


def test_another_server_is_no_registry(registry: Registry) -> None:
    """A missing path of another server is not a missing schema."""
    with pytest.raises(ConfigurationError, match="does not answer as a schema registry"):
        SchemaRegistry(url=f"{registry.url}/other").by_id(1)


def test_who_logs_in_is_sent_and_shown_nowhere(registry: Registry) -> None:
    """The password is sent to the registry; the error of a wrong password does not show it."""
    registry.login = "etl:hunter2"
    number = registry.register("a", '"string"')
    right = SchemaRegistry(url=registry.url, username="etl", password="hunter2")
    assert right.by_id(number) is not None
    assert "hunter2" not in repr(right)
    with pytest.raises(ConfigurationError, match="rejects this user") as caught:
        SchemaRegistry(url=registry.url, username="etl", password="hunter3").by_id(number)
    assert "hunter3" not in str(caught.value)


def test_a_login_goes_to_no_other_server(registry: Registry) -> None:
    """A redirect is not followed."""
    with running_registry() as other:
        registry.redirect = other.url
        with pytest.raises(UnavailableError, match="302"):
            SchemaRegistry(url=registry.url, token="hunter2").by_id(1)
        assert other.requested == []


@pytest.mark.parametrize(
    "answered",
    [b"hello\r\n", b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n50\r\nshort"],
    ids=["no HTTP", "cut"],
)
def test_an_answer_that_is_cut_or_no_http_is_an_error(answered: bytes) -> None:
    """Another program may listen on the port, or the registry may stop during an answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as client:
                client.recv(1_000)
                client.sendall(answered)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UnavailableError, match="cannot be reached"):
            SchemaRegistry(url=f"http://127.0.0.1:{server.getsockname()[1]}").by_id(1)
        thread.join()


@pytest.mark.slow
def test_an_answer_that_comes_byte_by_byte_is_not_waited_for() -> None:
    """The timeout applies to the whole request."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def drip() -> None:
            with server.accept()[0] as client, contextlib.suppress(OSError):
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while not over.wait(0.05):
                    client.sendall(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(UnavailableError, match=r"did not answer within 0\.3 s"):
            SchemaRegistry(url=f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.3).by_id(1)
        over.set()
        thread.join()


def test_each_id_of_a_batch_is_looked_up_and_what_is_not_known_is_left_out(registry: Registry) -> None:
    """A thousand random ids do not fail a batch; ids above the registry's largest id are not requested."""
    number = registry.register("a", '"string"')
    other = registry.register("b", "{}", kind="JSON")
    schemas = SchemaRegistry(url=registry.url, largest_id=other)
    garbage = range(other + 1, other + 1_002)
    assert confluent_wire_format.load_schemas([number, other, 7, *garbage], schemas, SchemaKind.AVRO) == {
        number: Schema(SchemaKind.AVRO, '"string"'),
        other: f"schema id {other} is of type JSON, not AVRO",
    }
    assert registry.requested == [f"/schemas/ids/{each}" for each in (7, number, other)]


def test_look_ups_are_bounded(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of look-ups and their time are limited.

    Records whose schema could not be looked up are not bad; instead, the batch fails.
    """
    schemas = SchemaRegistry(url=registry.url)
    with pytest.raises(ConfigurationError, match="set largest_id of the registry"):
        confluent_wire_format.load_schemas(range(confluent_wire_format.MOST_LOOKUPS + 1), schemas, SchemaKind.AVRO)
    assert registry.requested == []
    seconds = itertools.count(step=6)
    monkeypatch.setattr(confluent_wire_format, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    with pytest.raises(UnavailableError, match=r"9 of the batch's 10000 schema ids were looked up in 60 s"):
        confluent_wire_format.load_schemas(range(confluent_wire_format.MOST_LOOKUPS), schemas, SchemaKind.AVRO)
    assert len(registry.requested) == 9
    monkeypatch.undo()
    registry.status = 503
    with pytest.raises(UnavailableError, match="503"):
        confluent_wire_format.load_schemas(range(2), schemas, SchemaKind.AVRO)


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "http://registry", "largest_id": 0},
        {"url": "http://registry", "largest_id": 2**31},
        {"url": "registry:8081"},
        {"url": "file:///etc/passwd"},
        {"url": "http://etl:hunter2@registry"},
        {"url": "http://registry", "username": "etl"},
        {"url": "http://registry", "username": "etl", "password": "x", "token": "y"},
        {"url": "http://registry", "token": "hunter2\n"},
        {"url": "http://registry", "token": "hunter2\u20ac"},
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    """The error comes before any request, and contains no secret."""
    with pytest.raises(ConfigurationError) as caught:
        SchemaRegistry(**settings)
    assert "hunter2" not in str(caught.value)


def test_files_know_the_ids_they_were_given(tmp_path: Path) -> None:
    """Other ids are unknown; a file that cannot be read is an error."""
    file = tmp_path / "one.avsc"
    file.write_text('"string"', encoding="utf-8")
    files = SchemaFiles({1: file, 2: tmp_path / "none.avsc"})
    assert files.by_id(1) == Schema(SchemaKind.AVRO, '"string"')
    assert files.by_id(3) is None
    assert files.largest_id == 2
    with pytest.raises(ConfigurationError, match=r"none\.avsc"):
        files.by_id(2)


def test_types_of_references_are_put_in_their_places(registry: Registry) -> None:
    """Each type is inserted at its first use, by full or short name; references may have references."""
    money = {"type": "record", "name": "shop.Money", "fields": [{"name": "cents", "type": "long"}]}
    line = record("Line", {"price": "Money", "rebate": ["null", "shop.Money"]})
    order = record("Order", {"lines": {"type": "array", "items": "Line"}, "paid": "shop.Money"})
    registry.register("money", json.dumps(money))
    registry.register("line", json.dumps(line), references={"shop.Money": ("money", 1)})
    number = registry.register("order", json.dumps(order), references={"shop.Line": ("line", 1)})
    found = SchemaRegistry(url=registry.url).by_id(number)
    assert found is not None
    expected: dict[str, Any] = record(
        "Order",
        {
            "lines": {
                "type": "array",
                "items": record("Line", {"price": {**money, "namespace": "shop"}, "rebate": ["null", "shop.Money"]}),
            },
            "paid": "shop.Money",
        },
    )
    assert json.loads(whole(found)) == expected


def test_the_error_of_bad_records_names_count_and_first_ones() -> None:
    """This is true after pickling too."""
    import pickle

    error = DecodeError(12, [BadRecord("orders", number, 7, "empty value") for number in range(7)])
    assert "12 records" in str(error)
    assert "orders/0 offset 7 (empty value)" in str(error)
    assert "orders/5" not in str(error)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - pickled by this test
    assert (str(again), again.count, again.first) == (str(error), 12, error.first)
