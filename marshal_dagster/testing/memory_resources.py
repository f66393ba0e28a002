"""The resources of a run in memory, which take the place of those that connect to Kafka."""

import json
from typing import TYPE_CHECKING, Any, Final, Unpack, cast

from dagster import EnvVar, ResourceDefinition
from pydantic import PrivateAttr

from marshal_dagster.batches import BatchSession
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.resources.claimer import ClaimerResource, MemberOptions
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.testing.crashes import MortalLog, MortalProcess
from marshal_dagster.testing.memory_kafka import MemoryKafka
from marshal_dagster.testing.memory_log import MemoryLog
from marshal_dagster.testing.memory_reader import MemoryReader

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics

_NOWHERE: Final = KafkaConnectionConfig(bootstrap_servers="kafka-in-memory:9092")
_CONNECTIONS: Final = {
    "connection": _NOWHERE,
    "coordination_connection": None,
    "data_connection": None,
    "member": None,  # there is no coordinator in memory
}


class MemoryClaimer(ClaimerResource):
    """A claimer whose sessions use a `MemoryKafka`, in the simulated process of one run."""

    _kafka: MemoryKafka = PrivateAttr()
    _process: MortalProcess = PrivateAttr()

    @classmethod
    def of(cls, claimer: ClaimerResource, kafka: MemoryKafka, process: MortalProcess) -> "MemoryClaimer":
        """Return a claimer with the group and settings of `claimer`."""
        made = cls(**_fields(claimer))
        made._kafka, made._process = kafka, process
        return made

    def _open_session(self, **member: Unpack[MemberOptions]) -> BatchSession:
        return BatchSession(
            log=MortalLog(MemoryLog(self._kafka.coordination), self._process),
            data=cast("Topics", self._kafka.topics),
            connection=self.data(),
            group=self.group,
            settings=self.settings,
            clock=self._kafka.clock,
            reader=MemoryReader(self._kafka.topics, self._process),
            **member,
        )

    def rationalizer(self) -> Rationalizer:
        """Return a reader of the coordination log in memory."""
        return Rationalizer(MemoryLog(self._kafka.coordination), clock=self._kafka.clock)

    def open_data(self) -> "Topics":
        """Return the data topics in memory."""
        return cast("Topics", self._kafka.topics)


class MemoryRationalizer(RationalizerResource):
    """A reader of the coordination log of a `MemoryKafka`."""

    _kafka: MemoryKafka = PrivateAttr()

    @classmethod
    def of(cls, rationalizer: RationalizerResource, kafka: MemoryKafka) -> "MemoryRationalizer":
        """Return a rationalizer in place of `rationalizer`."""
        made = cls(**_fields(rationalizer))
        made._kafka = kafka
        return made

    def rationalizer(self) -> Rationalizer:
        """Return a reader of the coordination log in memory."""
        return Rationalizer(MemoryLog(self._kafka.coordination), clock=self._kafka.clock)

    def open_data(self) -> "Topics":
        """Return the data topics in memory."""
        return cast("Topics", self._kafka.topics)


def memory_claimer(group: str, delivery: str) -> ClaimerResource:
    """Return the claimer of a run without one, still to be replaced by a `MemoryClaimer`."""
    return ClaimerResource(connection=_NOWHERE, group=group, delivery=delivery)  # type: ignore[arg-type] # checked by it


def resource_in_job(resource: object) -> object:
    """Return the claimer or rationalizer from which a job's resource definition was made; other resources as they are.

    The definition keeps the fields of the resource as the default of its config, which Dagster's pages show.
    """
    made_from = getattr(resource, "configurable_resource_cls", None)
    for kind in (ClaimerResource, RationalizerResource):
        if isinstance(made_from, type) and issubclass(made_from, kind):
            given = json.loads(cast("Any", resource).config_schema.default_value_as_json_str)
            known = kind.model_fields.keys() - _CONNECTIONS.keys()
            fields: dict[str, Any] = {name: _from_config(value) for name, value in given.items() if name in known}
            return kind(connection=_NOWHERE, **fields)
    return resource


def in_memory(resource: object, kafka: MemoryKafka, process: MortalProcess) -> object:
    """Return the resource that takes the place of `resource` in memory: itself, unless it connects to Kafka."""
    if isinstance(resource, ClaimerResource):
        claimer = MemoryClaimer.of(resource, kafka, process)
        process.opened.callback(claimer.close)  # Dagster does not close a hardcoded resource
        return ResourceDefinition.hardcoded_resource(claimer)
    if isinstance(resource, RationalizerResource):
        return ResourceDefinition.hardcoded_resource(MemoryRationalizer.of(resource, kafka))
    return resource


def _fields(resource: ClaimerResource | RationalizerResource) -> dict[str, Any]:
    """Return the fields of a resource, without its connections, and with the values of environment variables."""
    fields = (ClaimerResource if isinstance(resource, ClaimerResource) else RationalizerResource).model_fields
    given = {name: value_of(resource.__dict__[name]) for name in fields}
    return {**given, **{name: value for name, value in _CONNECTIONS.items() if name in fields}}


def _from_config(given: object) -> object:
    return EnvVar(given["env"]).get_value() if isinstance(given, dict) and given.keys() == {"env"} else given


def value_of(given: object) -> object:
    """Return the value of a field, which may be in an environment variable."""
    return given.get_value() if isinstance(given, EnvVar) else given
