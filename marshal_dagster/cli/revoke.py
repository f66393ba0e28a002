"""`revoke`: revoke the claims of an owner that an operator knows to be dead."""

from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster.admin.position_spec import partitions_of
from marshal_dagster.admin.revoke import ClaimRevoker, HeldClaim, held_by, holds_nothing_text
from marshal_dagster.admin.texts import without_suffix
from marshal_dagster.cli import output
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.connections import READING, WRITING, connection_of, open_reader, operator_name
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.library_warnings import warnings_to_stderr
from marshal_dagster.cli.options import DryRun, GroupName, LogOptions, Partitions, TopicArgument, Yes
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.protocol.staleness import Freshness

_COLUMNS: Final = ("partition", "owner", "last heartbeat", "", "#epoch")

app = command_group("Revoke the claims of a dead owner.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeOptions(LogOptions):
    """The owner and the data topic of the claims, and whether to only show them."""

    group: GroupName
    topic: TopicArgument
    instance: Annotated[
        str,
        typer.Option(
            "--instance",
            "-i",
            metavar="ID",
            help="The owner's instance id or run id, or the first characters of it, such as 5b1c0d3e.",
        ),
    ]
    partitions: Partitions = None
    dry_run: DryRun = False
    yes: Yes = False


@command(
    app,
    "revoke",
    "Revoke the claims of a dead owner. Other members can then claim its partitions of a data topic at once, instead "
    "of waiting until the claims are stale. The command shows the claims and asks for confirmation. An owner that is "
    "alive is fenced: its next heartbeat or commit is refused. In a group that Go consumers share, claims cannot be "
    "revoked. Another instance takes each partition at its offset and releases it; a live Go owner takes it back with "
    "its next heartbeat. The exit code is 1 if not all claims were taken.",
    "revoke flights flights --instance 5b1c0d3e --dry-run",
    "revoke flights flights --instance 5b1c0d3e-8f6a-4e62-9d2c-1f0a7b3c4d5e.0f1e2d3c4b5a --partitions 0-3",
)
def revoke(options: RevokeOptions) -> ExitCode:
    """Show the owner's claims, ask for confirmation, and revoke them. Raises `MarshalError`."""
    if options.as_json and not (options.yes or options.dry_run):
        raise output.cannot_ask("with --dry-run")
    require_topic_name("TOPIC", options.topic)
    partitions = None if options.partitions is None else partitions_of(options.partitions, "--partitions")
    connection = connection_of(options)
    rights = READING if options.dry_run else WRITING

    def open_log(interval_ms: int) -> Rationalizer:
        return open_reader(connection, options.coordination_topic, interval_ms=interval_ms, rights=rights)

    revoker = ClaimRevoker(open_log, options.group, options.topic, operator_name())
    with warnings_to_stderr(), closing(revoker):
        held = revoker.look()
        claims = held_by(options.instance, held, partitions)
        if not claims:
            output.write_note(holds_nothing_text(options.instance, options.topic, held))
            if options.as_json:
                output.write_json(_to_json(options, (), ()))
            return ExitCode.PROBLEMS
        is_go = revoker.is_go
        _show(options, claims, is_go=is_go)
        if options.dry_run:
            taken: Sequence[HeldClaim] = ()
        elif options.yes or typer.confirm("Is this owner dead? Revoke these claims", err=True):
            taken = revoker.carry_out(claims)
        else:
            output.write_nothing_written()
            return ExitCode.PROBLEMS
        if is_go and taken:
            back = {claim.partition for claim in revoker.taken_back(taken)}
            taken = [claim for claim in taken if claim.partition not in back]
    _report(options, claims, taken, is_go=is_go)
    return ExitCode.OK if options.dry_run or len(taken) == len(claims) else ExitCode.PROBLEMS


def _listed(claims: Collection[HeldClaim]) -> str:
    return runs_text({claim.partition for claim in claims})


def _show(options: RevokeOptions, claims: Sequence[HeldClaim], *, is_go: bool) -> None:
    if not options.as_json:
        output.show(
            output.styled(f"Group {options.group}, topic {options.topic}", "bold"),
            output.Table(_COLUMNS, [_row(claim) for claim in claims], may_fold={"owner"}),
        )
    if is_go:
        output.write_note(
            f"Go consumers share group {options.group!r}, or may because it has no settings: a live Go owner takes its "
            "partitions back with its next heartbeat, within a minute. Stop it first"
        )
    elif any(claim.freshness is Freshness.FRESH for claim in claims):
        output.write_note(
            "the owner's last heartbeat is less than an interval old: if it is alive, two members do the same work "
            "until its next heartbeat or commit is refused"
        )


def _report(options: RevokeOptions, claims: Sequence[HeldClaim], taken: Collection[HeldClaim], *, is_go: bool) -> None:
    if options.as_json:
        output.write_json(_to_json(options, claims, taken))
    elif options.dry_run:
        output.show(output.DRY_RUN)
    elif taken:
        output.show(
            f"No member holds partitions {_listed(taken)} now; look again in a minute: a live Go owner would be back "
            "by then."
            if is_go
            else f"Revoked in partitions {_listed(taken)}: others can claim them."
        )
    left = [claim for claim in claims if claim not in taken]
    if left and not options.dry_run:
        output.write_note(
            f"partitions {_listed(left)} were not freed: they have no offset, changed hands meanwhile, or their owner "
            "is alive and took them back. They are free two minutes after its last heartbeat"
            if is_go
            else f"not revoked in partitions {_listed(left)}: they changed hands meanwhile, or the broker did not "
            "acknowledge it; look again"
        )


def _row(claim: HeldClaim) -> list[str | output.Line]:
    where = f"{claim.partition} [{claim.start}, {claim.end})" if claim.is_range else str(claim.partition)
    instance, client = claim.owner.instance, claim.owner.client
    owner = instance if client == without_suffix(instance) else f"{instance} ({client})"
    return [where, owner, output.utc(claim.last_beat_ms), str(claim.freshness), output.number(claim.owner.epoch)]


def _to_json(options: RevokeOptions, claims: Sequence[HeldClaim], taken: Collection[HeldClaim]) -> dict[str, Any]:
    return {
        "group": options.group,
        "topic": options.topic,
        "dry_run": options.dry_run,
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
