"""The brokers: which are alive, whether they keep up, and whether they hold this client back."""

from collections.abc import Sequence

from marshal_dagster.cli import world_view
from marshal_dagster.cli.doctor_checks.finding import CheckState, Finding
from marshal_dagster.kafka.inspection import Broker, TopicInfo

NO_TOPIC_ID = "A" * 22
"""The id of all zeros, in the log's writing: a broker older than Kafka 2.8 gives topics none."""


def versions(brokers: Sequence[Broker], topic_id: str) -> Finding:
    """Tell how many brokers are alive and of which version, as far as their settings tell."""
    known = sorted({broker.version for broker in brokers if broker.version is not None})
    version = " and ".join(f"Kafka {each}" for each in known)
    found = f"{len(brokers)} alive; {version or 'version not told (that takes DescribeConfigs on the cluster)'}"
    if topic_id == NO_TOPIC_ID:
        return Finding(
            "brokers",
            CheckState.PROBLEM,
            f"{found}; topics have no ids",
            "a topic that was deleted and made anew looks like the old one: what was claimed and done in that counts",
            "upgrade the brokers to Kafka 3.0 or newer",
        )
    return Finding("brokers", CheckState.OK, found)


def replicas(topic_info: TopicInfo, least_in_sync: int, servers: str) -> Finding:
    """Tell whether each coordination partition can be written to now, and with how much to spare."""
    each = topic_info.replicas.items()
    blocked = [number for number, at in each if not at.has_leader or at.in_sync < least_in_sync]
    behind = [number for number, at in each if at.in_sync < at.assigned]
    mend = (
        f"kafka-topics --bootstrap-server {servers} --describe --topic {topic_info.name} (which brokers are missing: "
        "start them, or look at their logs)"
    )
    if blocked:
        return Finding(
            "replicas",
            CheckState.PROBLEM,
            f"coordination partitions {world_view.listed(blocked)} of {topic_info.name} have no leader, or fewer "
            "replicas in "
            f"sync than min.insync.replicas={least_in_sync}",
            "no record is taken there (acks=all): owners lose their leases, and nothing can be claimed or committed",
            mend,
        )
    if behind:
        return Finding(
            "replicas",
            CheckState.WARNING,
            f"coordination partitions {world_view.listed(behind)} of {topic_info.name} have replicas that are not in "
            "sync",
            "it works, but the next broker that fails may stop it",
            mend,
        )
    return Finding("replicas", CheckState.OK, f"all replicas of {topic_info.name} are in sync")


def throttling(throttled_s: float, servers: str) -> Finding:
    """Tell whether a quota held back what was just asked, by a client with the members' own client id.

    Quotas themselves cannot be looked up: the client library has no request for them.
    """
    show = f"kafka-configs --bootstrap-server {servers} --describe --entity-type clients (and the same with users)"
    if throttled_s <= 0:
        return Finding(
            "quotas",
            CheckState.OK,
            f"no answer to doctor was held back; a quota on bytes shows only to who writes as much: {show}",
        )
    return Finding(
        "quotas",
        CheckState.WARNING,
        f"a broker had doctor wait for {throttled_s:.3g} s because of a quota",
        "heartbeats and commits wait as well: past a quarter of the heartbeat interval they are given up, and a claim "
        "whose lease ends is lost with its work",
        f"{show}; then raise request_percentage and producer_byte_rate for this user or client",
    )
