"""Steps that several of these tests share: members with a given client id, and members that send heartbeats."""

from marshal_dagster.coordination.claimer import Claimer, Member
from marshal_dagster.coordination.heartbeats import Heartbeats
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import MarshalError
from marshal_dagster.protocol.messages import GroupSettings
from tests.members import GROUP, SETTINGS, TOPIC, Site


def member_named(site: Site, client: str, instance: str, *, group: str = GROUP, topic: str = TOPIC) -> Claimer:
    """Return a member with this client id and instance id, after it has written the settings."""
    rationalizer = Rationalizer(site.log(), topics=[topic], clock=site.clock)
    claimer = Claimer(rationalizer, Member(group, client, instance), topic, SETTINGS, clock=site.clock)
    claimer.ensure_group_settings()
    return claimer


def stay(site: Site, member: Claimer, duration_ms: float) -> None:
    """Let `member` send heartbeats for this time, as its thread does."""
    heartbeats = Heartbeats(member, _ignore, seed=1)
    until_ms = site.clock.lease_ms() + duration_ms
    while (left_ms := until_ms - site.clock.lease_ms()) > 0:
        site.clock.advance(min(left_ms, heartbeats.step() * 1_000))


def beats_ms(site: Site) -> list[int]:
    """Return the broker's times of all heartbeats in the log."""
    return [at_ms for _, at_ms, value in site.broker.records(site.home) if (value or b"").startswith(b"Heartbeat/")]


def site_of(heartbeat_interval_ms: int) -> tuple[Site, Claimer]:
    """Return a coordination topic, and a member that holds partition 0 in a group with this interval."""
    site = Site()
    return site, site.owner_of(0, settings=GroupSettings(heartbeat_interval_ms))


def _ignore(_: MarshalError) -> None:
    """Ignore the loss."""
