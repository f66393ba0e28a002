"""`revoke`: takes from an owner who is dead what it holds; a person says that it is."""

from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import typer

from marshal_dagster.admin.position_spec import partitions_of
from marshal_dagster.admin.revoke import ClaimRevoker, HeldClaim, held_by, holds_nothing_text
from marshal_dagster.cli import output, world_view
from marshal_dagster.cli.connections import READING, WRITING, check_topic, connection_of, open_reader, operator_name
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.library_warnings import warnings_to_stderr
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.protocol.state import Freshness

_COLUMNS: Final = ("partition", "owner", "last beat", "", "#epoch")


@dataclass(frozen=True, slots=True)
class RevokeRequest:
    """Whose claims, of which partitions."""

    connection: ConnectionOptions
    coordination_topic: str
    group: str
    topic: str
    instance: str
    partitions: str | None = None
    dry_run: bool = False
    yes: bool = False
    as_json: bool = False


def run(request: RevokeRequest) -> ExitCode:
    """Show what the owner holds, ask, and revoke it. Raises `MarshalError`."""
    if request.as_json and not (request.yes or request.dry_run):
        raise output.cannot_ask("with --dry-run")
    check_topic("TOPIC", request.topic)
    named = None if request.partitions is None else partitions_of(request.partitions, "--partitions")
    connection = connection_of(request.connection)
    rights = READING if request.dry_run else WRITING

    def open_log(interval_ms: int) -> Rationalizer:
        return open_reader(connection, request.coordination_topic, interval_ms=interval_ms, rights=rights)

    with warnings_to_stderr(), closing(ClaimRevoker(open_log, request.group, request.topic, operator_name())) as work:
        held = work.look()
        claims = held_by(request.instance, held, named)
        if not claims:
            return _nothing(request, held)
        is_go = work.is_go
        _show(request, claims, is_go=is_go)
        if not request.dry_run and not (request.yes or _agreed()):
            output.write_nothing_written()
            return ExitCode.PROBLEMS
        taken = [] if request.dry_run else work.carry_out(claims)
        if is_go and taken:
            back = {each.partition for each in work.taken_back(taken)}
            taken = [each for each in taken if each.partition not in back]
    return _report(request, claims, taken, is_go=is_go)


def _agreed() -> bool:
    return typer.confirm("Is this owner dead, and is what it holds to be taken from it?", err=True)


def _nothing(request: RevokeRequest, held: Sequence[HeldClaim]) -> ExitCode:
    output.write_note(holds_nothing_text(request.instance, request.topic, held))
    if request.as_json:
        output.write_json(_to_json(request, (), ()))
    return ExitCode.PROBLEMS


def _show(request: RevokeRequest, claims: Sequence[HeldClaim], *, is_go: bool) -> None:
    if not request.as_json:
        output.show(
            output.styled(f"Group {request.group}, topic {request.topic}", "bold"),
            output.Table(_COLUMNS, [_row(each) for each in claims], may_fold={"owner"}),
        )
    if is_go:
        output.write_note(
            f"Go consumers share group {request.group!r}, or may because it has no settings: a live Go owner takes its "
            "partitions back with its next heartbeat, within a minute. Stop it first"
        )
    elif any(claim.freshness is Freshness.FRESH for claim in claims):
        output.write_note(
            "it was heard of within a heartbeat interval: should it live, two work on the same until its next "
            "heartbeat or commit is refused"
        )


def _report(
    request: RevokeRequest, claims: Sequence[HeldClaim], taken: Collection[HeldClaim], *, is_go: bool
) -> ExitCode:
    left = [claim for claim in claims if claim not in taken]
    if request.as_json:
        output.write_json(_to_json(request, claims, taken))
    elif request.dry_run:
        output.show("A dry run: nothing was written.")
    elif taken:
        numbers = world_view.listed({each.partition for each in taken})
        output.show(
            f"Nobody holds partitions {numbers} now; look again in a minute: a live Go owner would be back by then."
            if is_go
            else f"Revoked in partitions {numbers}: others can claim them."
        )
    if request.dry_run or not left:
        return ExitCode.OK
    if is_go:
        output.write_note(
            f"partitions {world_view.listed({each.partition for each in left})} were not freed: they have no offset, "
            "changed hands meanwhile, or their owner lives and took them back. They are free two minutes after its "
            "last heartbeat"
        )
        return ExitCode.PROBLEMS
    output.write_note(
        f"not revoked in partitions {world_view.listed({each.partition for each in left})}: they changed hands "
        "meanwhile, "
        "or the broker did not acknowledge it; look again"
    )
    return ExitCode.PROBLEMS


def _row(each: HeldClaim) -> list[str | output.Line]:
    where = f"{each.partition} [{each.start}, {each.end})" if each.is_range else str(each.partition)
    owner = f"{each.owner.instance} ({each.owner.client})"
    return [where, owner, output.utc(each.last_beat_ms), str(each.freshness), output.number(each.owner.epoch)]


def _to_json(request: RevokeRequest, claims: Sequence[HeldClaim], taken: Collection[HeldClaim]) -> dict[str, Any]:
    return {
        "group": request.group,
        "topic": request.topic,
        "dry_run": request.dry_run,
        "claims": [
            {
                "partition": claim.partition,
                "start": claim.start,
                "end": claim.end,
                "instance": claim.owner.instance,
                "client": claim.owner.client,
                "epoch": claim.owner.epoch,
                "last_beat_ms": claim.last_beat_ms,
                "freshness": claim.freshness,
                "revoked": claim in taken,
            }
            for claim in claims
        ],
    }
