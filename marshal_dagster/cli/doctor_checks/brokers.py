"""Check the brokers: which are alive, whether their replicas are in sync, and whether a quota delays this client."""

from collections.abc import Sequence

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster.cli.doctor_checks.finding import Finding, ok, problem, warning
from marshal_dagster.coordination.log import NO_TOPIC_ID
from marshal_dagster.kafka.inspection import Broker, TopicInfo


def versions(brokers: Sequence[Broker], topic_id: str) -> Finding:
    """Report how many brokers are alive, and their versions if their settings can be read."""
    known = sorted({broker.version for broker in brokers if broker.version is not None})
    version = " and ".join(f"Kafka {each}" for each in known)
    found = f"{len(brokers)} alive; {version or 'version not reported (that takes DescribeConfigs on the cluster)'}"
    if topic_id == NO_TOPIC_ID:
        return problem(
            "brokers",
            f"{found}; topics have no ids",
            "a topic that was deleted and re-created looks like the old one: its claims and commits still count",
            "upgrade the brokers to Kafka 2.8 or newer, with inter.broker.protocol.version 2.8 or newer",
        )
    return ok("brokers", found)


def replicas(topic_info: TopicInfo, least_in_sync: int, servers: str) -> Finding:
    """Check whether each coordination partition can be written to now, and after one more broker fails."""
    partitions = topic_info.replicas.items()
    blocked = [number for number, at in partitions if not at.has_leader or at.in_sync < least_in_sync]
    out_of_sync = [number for number, at in partitions if at.in_sync < at.assigned]
    fix = (
        f"kafka-topics --bootstrap-server {servers} --describe --topic {topic_info.name} (shows which brokers are "
        "missing; start them, or check their logs)"
    )
    if blocked:
        return problem(
            "replicas",
            f"coordination partitions {runs_text(blocked)} of {topic_info.name} have no leader, or fewer replicas in "
            f"sync than min.insync.replicas={least_in_sync}",
            "no record can be written there (acks=all): owners lose their leases, and nothing is claimed or committed",
            fix,
        )
    if out_of_sync:
        return warning(
            "replicas",
            f"coordination partitions {runs_text(out_of_sync)} of {topic_info.name} have replicas that are not in sync",
            "records can be written now, but perhaps not after another broker fails",
            fix,
        )
    return ok("replicas", f"all replicas of {topic_info.name} are in sync")


def throttling(throttled_s: float, servers: str) -> Finding:
    """Check whether a quota delayed the requests of this command, which has the members' own client id.

    Quotas themselves cannot be looked up: the client library has no request for them.
    """
    show = f"kafka-configs --bootstrap-server {servers} --describe --entity-type clients (and the same with users)"
    if throttled_s <= 0:
        return ok("quotas", f"no answer to doctor was delayed; a quota on bytes shows only under load: {show}")
    return warning(
        "quotas",
        f"a broker delayed doctor by {throttled_s:.3g} s because of a quota",
        "heartbeats and commits are delayed too: after a quarter of the heartbeat interval they are abandoned, and a "
        "claim whose lease ends is lost with its work",
        f"{show}; then raise request_percentage and producer_byte_rate for this user or client",
    )
