"""Schemas by Confluent's client: what it is asked, and how its errors are reported. The registry is the tests' own."""

from collections.abc import Iterator
from typing import Any

import pytest

from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.spark.decoding.confluent_schemas import ConfluentSchemas
from marshal_dagster.spark.decoding.schemas import Schema, SchemaKind, SchemaRegistry
from tests.registry import Registry, running_registry

pytest.importorskip("confluent_kafka", minversion="2.10", reason="older clients take no number of retries")
SchemaRegistryClient = pytest.importorskip(
    "confluent_kafka.schema_registry", reason="the environments of the lowest versions lack its packages"
).SchemaRegistryClient
AVRO = '{"type": "long"}'


@pytest.fixture
def registry() -> Iterator[Registry]:
    """A registry on loopback."""
    with running_registry() as registry:
        yield registry


def schemas(registry: Registry, **settings: Any) -> ConfluentSchemas:  # noqa: ANN401 - Confluent's
    """Return the schemas of a registry by Confluent's client, which does not retry."""
    return ConfluentSchemas(SchemaRegistryClient({"url": registry.url, "max.retries": 0, **settings}))


@pytest.mark.slow
def test_schemas_are_those_of_our_own_client(registry: Registry) -> None:
    """Both clients give the same schemas of each language, with references. A schema is requested once."""
    part = registry.register("part", AVRO)
    avro = registry.register("avro", '{"type": "record"}', references={"Part": ("part", 1)})
    protobuf = registry.register("protobuf", 'syntax = "proto3";', kind="PROTOBUF", serialized=b"descriptor")
    json_schema = registry.register("json", '{"type": "object"}', kind="JSON")
    found, ours = schemas(registry), SchemaRegistry(url=registry.url)
    for number in (part, avro, protobuf, json_schema):
        assert found.by_id(number) == ours.by_id(number)
    assert found.latest("avro") == Schema(
        SchemaKind.AVRO, '{"type": "record"}', {"Part": Schema(SchemaKind.AVRO, AVRO)}
    )
    assert found.latest("protobuf") == ours.latest("protobuf")
    registry.requested.clear()
    assert found.by_id(part) is not None
    assert registry.requested == []


@pytest.mark.slow
def test_the_newest_schema_is_requested_each_time(registry: Registry) -> None:
    """A schema that is registered later is found, though the client keeps others."""
    registry.register("orders", AVRO)
    found = schemas(registry)
    assert found.latest("orders").text == AVRO
    registry.register("orders", '"string"')
    assert found.latest("orders").text == '"string"'


def test_an_unknown_id_is_none_and_an_unknown_subject_is_an_error(registry: Registry) -> None:
    """Only a registry that definitely has none makes a record bad. An id above the largest one is not requested."""
    found = schemas(registry)
    assert found.by_id(7) is None
    requested = len(registry.requested)
    assert ConfluentSchemas(found.client, largest_id=10).by_id(11) is None
    assert len(registry.requested) == requested
    with pytest.raises(ConfigurationError, match="the schema registry has no subject 'orders': correct the name"):
        found.latest("orders")


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (401, ConfigurationError, "rejects this user"),
        (403, ConfigurationError, "rejects this user"),
        (404, ConfigurationError, "does not answer as a schema registry"),
        (500, UnavailableError, "cannot be used"),
    ],
)
def test_an_error_of_the_registry_fails_the_batch(
    registry: Registry, status: int, error: type[Exception], words: str
) -> None:
    """Each error is one line, and no record is bad because of it."""
    registry.status = status
    with pytest.raises(error, match=words):
        schemas(registry).by_id(1)


def test_a_registry_that_cannot_be_reached_fails_the_batch(registry: Registry) -> None:
    """The error has the client's reason."""
    with pytest.raises(UnavailableError, match="ConnectError"):
        schemas(registry, url="http://127.0.0.1:1").by_id(1)


def test_the_clients_own_credentials_are_used_and_not_shown(registry: Registry) -> None:
    """The client authenticates, and no text of the adapter has its password."""
    registry.login = "etl:hunter2"
    number = registry.register("orders", AVRO)
    found = schemas(registry, **{"basic.auth.user.info": registry.login})
    assert found.by_id(number) is not None
    assert "hunter2" not in repr(found)
    with pytest.raises(ConfigurationError, match="rejects this user"):
        schemas(registry).by_id(number)


def test_a_client_that_has_kept_protobuf_as_text_is_refused(registry: Registry) -> None:
    """The client keeps the form of the first request. Text in place of a descriptor is an error and no bad record."""
    number = registry.register("protobuf", 'syntax = "proto3";', kind="PROTOBUF", serialized=b"descriptor")
    found = schemas(registry)
    found.client.get_schema(number)
    with pytest.raises(ConfigurationError, match="give ConfluentSchemas a client of its own"):
        found.by_id(number)
