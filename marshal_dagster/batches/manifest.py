"""What a run and a script exchange about a batch that the script processes: the manifest and the outcome.

Both are plain JSON, which Dagster Pipes carries: the manifest in the extras of the context, the outcome as a custom
message. Neither contains a secret, or a file that both sides would have to share.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from marshal_dagster.errors import BatchAbortedError, ConfigurationError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.sinks.sink import WriteResult, joined

logger = logging.getLogger(__name__)

EXTRAS_KEY: Final = "marshal_batch"
"""The key of the manifest in the extras of a Pipes context."""
MESSAGE_KEY: Final = "marshal_outcome"
"""The only key of a custom message that has an outcome."""
VERSION: Final = 1
"""The version of both forms; a reader refuses any other."""

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BatchManifest:
    """The description of a claimed batch, with which a script in any place can process it."""

    batch_id: str
    """The instance id of the claims."""
    mode: DeliveryMode
    """The delivery mode of the group."""
    coordination_topic: str
    """The name of the coordination topic, in which the script reads whether the claims hold."""
    ranges: tuple[ClaimedRange, ...]
    """The ranges to process, of one group and topic, by partition; there is at least one."""
    output: str | None = None
    """The address of the output that only the script reaches (`RemoteSink`), or None."""

    def to_extras(self) -> dict[str, Any]:
        """Return the manifest as extras of a Pipes context."""
        first = self.ranges[0]
        manifest = {
            "version": VERSION,
            "batch_id": self.batch_id,
            "delivery": self.mode.value,
            "coordination_topic": self.coordination_topic,
            "coordination_topic_id": first.coordination_topic_id,
            "group": first.group,
            "topic": first.topic,
            "data_topic_id": first.data_topic_id,
            "in_any_order": first.in_any_order,
            "output": self.output,
            # Short, because a context may travel in one environment variable or argument.
            "ranges": [_numbers(part) for part in self.ranges],
        }
        return {EXTRAS_KEY: manifest}

    @classmethod
    def from_extras(cls, extras: object) -> Self:
        """Read the manifest from the extras of a Pipes context.

        Raises:
            ConfigurationError: The extras have no manifest, or one of another version.
        """
        manifest = extras.get(EXTRAS_KEY) if isinstance(extras, Mapping) else None
        if not isinstance(manifest, Mapping):
            raise ConfigurationError(
                "the Pipes context has no claimed batch: let a run start this script with "
                "marshal_dagster.run_with_pipes, and open Pipes with the params loader of the platform "
                "(docs/how-to/pipes.md)"
            )
        if manifest.get("version") != VERSION:
            raise ConfigurationError(
                f"the batch of this script has a manifest of version {manifest.get('version')!r}, but this "
                f"marshal-dagster reads version {VERSION}: install the same version for the run and for the script"
            )
        shared = ("coordination_topic_id", "group", "topic", "data_topic_id", "in_any_order")
        of_all = {name: manifest[name] for name in shared}
        names = ("partition", "generation", "epoch", "start", "end", "first_readable")
        return cls(
            batch_id=manifest["batch_id"],
            mode=DeliveryMode(manifest["delivery"]),
            coordination_topic=manifest["coordination_topic"],
            ranges=tuple(ClaimedRange(**of_all, **dict(zip(names, part, strict=True))) for part in manifest["ranges"]),
            output=manifest["output"],
        )


@dataclass(frozen=True, slots=True)
class ScriptOutcome:
    """What a script reports at the end of its batch."""

    batch_id: str
    """The batch of the manifest."""
    attempt: str
    """A random name of the script's process, because a platform may start a script again."""
    result: WriteResult
    """What the sink took and skipped. Without a sink, `taken` has all ranges."""
    metadata: JsonObject = field(default_factory=dict)
    """Metadata that the script adds to the batch, as JSON."""

    def to_message(self) -> dict[str, Any]:
        """Return the outcome as the payload of a custom message.

        It is short, because platforms cut long lines of a log: partitions are intervals, and a digest stands for the
        ranges, which the run knows.
        """
        result = self.result
        ranges = sorted((*result.taken, *result.skipped), key=lambda part: part.partition)
        outcome = {
            "version": VERSION,
            "batch_id": self.batch_id,
            "attempt": self.attempt,
            "ranges": _digest(ranges),
            "taken": joined((part.partition, part.partition + 1) for part in result.taken),
            "rows": [result.rows.get(part.partition) for part in ranges],
            "note": result.note,
            "metadata": json.loads(json.dumps(dict(self.metadata), default=str)),  # an odd value must not fail a batch
        }
        return {MESSAGE_KEY: outcome}

    @classmethod
    def from_message(cls, message: object, manifest: BatchManifest) -> Self | None:
        """Read the outcome of a batch in a custom message, or return None if the message is another one.

        The outcome of another batch is logged: readers of messages may give those of the client's earlier script again.

        Args:
            message: The payload.
            manifest: The batch.

        Raises:
            BatchAbortedError: The outcome is malformed, or is not about exactly the ranges of the batch.
        """
        outcome = message.get(MESSAGE_KEY) if isinstance(message, Mapping) else None
        if outcome is None:
            return None
        ranges = manifest.ranges
        try:
            if outcome["batch_id"] != manifest.batch_id:
                logger.warning("an outcome of another batch is ignored: %s", outcome["batch_id"])
                return None
            if outcome["version"] != VERSION:
                raise ValueError(f"it has version {outcome['version']!r}")  # noqa: TRY301 - reported below
            if outcome["ranges"] != _digest(ranges):
                raise ValueError("its ranges are not those of the batch")  # noqa: TRY301
            taken = {part for part in ranges for start, end in outcome["taken"] if start <= part.partition < end}
            numbers = [part.partition for part in ranges]
            counts = zip(numbers, outcome["rows"], strict=True)
            result = WriteResult(
                taken=tuple(part for part in ranges if part in taken),
                skipped=tuple(part for part in ranges if part not in taken),
                rows={partition: int(rows) for partition, rows in counts if rows is not None},
                note=None if outcome["note"] is None else str(outcome["note"]),
            )
            return cls(str(outcome["batch_id"]), str(outcome["attempt"]), result, dict(outcome["metadata"]))
        except (KeyError, TypeError, ValueError) as error:
            raise BatchAbortedError(
                f"the outcome that the script reported cannot be used ({type(error).__name__}: {error}), so nothing is "
                "committed. Install the same marshal-dagster for the run and for the script"
            ) from error


def _digest(ranges: Sequence[ClaimedRange]) -> str:
    """Return a digest of ranges in ascending order of their partitions."""
    return hashlib.sha256(json.dumps([_numbers(part) for part in ranges]).encode()).hexdigest()[:16]


def _numbers(part: ClaimedRange) -> list[int]:
    return [part.partition, part.generation, part.epoch, part.start, part.end, part.first_readable]


def judge_outcomes(manifest: BatchManifest, messages: Sequence[object]) -> ScriptOutcome:
    """Return the outcome of a batch from the custom messages of its script.

    A message may arrive twice, and a platform may start a script again. A second attempt of a script finds in the sink
    what the first one has written, and skips it.

    Args:
        manifest: The batch that the script was given.
        messages: The payloads of all custom messages.

    Raises:
        BatchAbortedError: There is no outcome, one that is malformed, or two that contradict each other.
    """
    outcomes: dict[str, ScriptOutcome] = {}
    for message in messages:
        outcome = ScriptOutcome.from_message(message, manifest)
        if outcome is None:
            continue
        if outcomes.setdefault(outcome.attempt, outcome) != outcome:
            raise BatchAbortedError(
                f"batch {manifest.batch_id}: its script reported two different outcomes, so nothing is committed. Use "
                "submitted_batch() once in a script"
            )
    if not outcomes:
        raise BatchAbortedError(
            f"batch {manifest.batch_id}: its script ended without an outcome, so nothing is committed. Process the "
            "batch in a block of submitted_batch(), and see the script's log"
        )
    return _joined(manifest, list(outcomes.values()))


def _joined(manifest: BatchManifest, outcomes: Sequence[ScriptOutcome]) -> ScriptOutcome:
    """Return what all attempts of a script did together; `outcomes` has one for each."""
    if len(outcomes) == 1 or manifest.mode is DeliveryMode.AT_LEAST_ONCE:
        return outcomes[-1]
    taken = [part for outcome in outcomes for part in outcome.result.taken]
    if len(taken) > len(set(taken)):
        raise BatchAbortedError(
            f"batch {manifest.batch_id}: two attempts of its script both wrote a range, so nothing is committed. All "
            "attempts must write to the same output, with a sink that stores ranges"
        )
    results = [outcome.result for outcome in outcomes]
    notes = [result.note for result in results if result.note is not None]
    return ScriptOutcome(
        manifest.batch_id,
        outcomes[-1].attempt,
        WriteResult(
            taken=tuple(taken),
            skipped=tuple(part for part in manifest.ranges if part not in taken),
            rows={partition: rows for result in results for partition, rows in result.rows.items()},
            note=notes[-1] if notes else None,
        ),
        {name: value for outcome in outcomes for name, value in outcome.metadata.items()},
    )
