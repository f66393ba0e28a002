"""Check for consumers of the Go library: whether the topic has records, or a broker, that they do not support."""

import shlex
from collections.abc import Collection, Iterator

from marshal_dagster.cli.doctor_checks.finding import Finding, ok, problem, warning
from marshal_dagster.kafka.inspection import FROM_4, Broker
from marshal_dagster.protocol.state import Group
from marshal_dagster.protocol.world import World

_NAME = "Go consumers"


def check_go_consumers(world: World, brokers: Collection[Broker], topic: str, at_ms: int) -> Iterator[Finding]:
    """Check that no other group writes records unknown to Go consumers, and that these can connect to the brokers.

    `at_ms` (unix ms) is the clock that decides whether a consumer is live.
    """
    groups = [(name, group) for partition in world.partitions.values() for name, group in partition.groups.items()]
    go = sorted({name for name, group in groups if _is_used_by_go(group)})
    if not go:
        yield ok(_NAME, f"none uses {topic}, judging by its log")
        return
    native = sorted({name for name, group in groups if group.settings_accepted and not group.is_go})
    named = f"groups of Go consumers: {', '.join(go)}"
    if native:
        allow = shlex.join(["marshal-dagster", "settings", "set", go[0], "--go-consumers-stopped", go[0]])
        report = problem if any(_has_live_owner(world, name, at_ms) for name in go) else warning
        yield report(
            _NAME,
            f"{named}; also groups with settings of this library: {', '.join(native)}",
            "a Go consumer that starts treats a coordination partition as fully read at the first record that it does "
            "not know, and may begin far before its group's offset",
            "use another coordination topic for one of the two: marshal-dagster topic create --name NEW; or stop the "
            f"Go consumers for good: {allow}",
        )
    else:
        yield ok(_NAME, f"{named}; no other group writes records that they do not know")
    if any(broker.version == FROM_4 for broker in brokers):
        yield problem(
            "Go consumers and brokers",
            f"{named}; a broker is of Kafka {FROM_4}",
            "Kafka 4 no longer supports the requests and the message format of the Go library's client: its consumers "
            "cannot connect",
            "keep the coordination topic and the data topics of these groups on Kafka 3.9 or older, or replace the Go "
            "consumers",
        )


def _is_used_by_go(group: Group) -> bool:
    """Return whether Go consumers use a group: it has no settings, or its settings have the rule set go."""
    is_by_record = (
        group.settings_accepted and group.is_go and any(key.offset is not None for key in group.keys.values())
    )
    return group.has_go_keys or is_by_record


def _has_live_owner(world: World, name: str, at_ms: int) -> bool:
    return any(
        any(True for _ in group.live_keys(group.advice_time_ms(partition.log_time_ms, at_ms)))
        for partition in world.partitions.values()
        if (group := partition.groups.get(name)) is not None
    )
