"""Keeps the claims of one batch alive, cancels its Spark jobs if the claims are lost, and releases the claims.

`ClaimedBatch` has one guard. It combines `Heartbeats`, the claimer and Spark's job tags.
"""

import logging
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from marshal_dagster.coordination.claimer import Claimer
from marshal_dagster.coordination.heartbeats import Heartbeats, ReasonToStop
from marshal_dagster.coordination.range_claimer import RangeClaimer
from marshal_dagster.errors import ClaimLostError, MarshalError
from marshal_dagster.spark import job_control

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

AnyClaimer = Claimer | RangeClaimer


class ReleaseState(StrEnum):
    """The progress of the release of a batch's claims, which an interrupt may stop."""

    HELD = "held"
    RELEASING = "releasing"
    RELEASED = "released"


class ClaimGuard:
    """The heartbeats and Spark jobs of one batch, from its claims to their release.

    `claimer` holds the batch's claims; it must be set before the heartbeats start.
    """

    def __init__(self, claimer: AnyClaimer, reasons_to_stop: Sequence[ReasonToStop]) -> None:
        self.claimer = claimer
        self.heartbeats: Heartbeats | None = None
        self.spark: SparkSession | None = None
        """The session in which the batch was read."""
        self.stack: Final = ExitStack()
        self._reasons_to_stop = reasons_to_stop
        self._state = ReleaseState.HELD

    @property
    def batch_id(self) -> str:
        """The instance id under which the claims are held."""
        return self.claimer.member.instance

    @property
    def lost(self) -> MarshalError | None:
        """The error with which the heartbeats have ended, or None."""
        return None if self.heartbeats is None else self.heartbeats.error

    def start_heartbeats(self) -> None:
        """Start the heartbeats, if they were not started before.

        Before that, each key with an offset must have its data topic's id (protocol.md, section 6).
        """
        if self.heartbeats is not None:
            return
        self.heartbeats = Heartbeats(self.claimer, self._cancel_lost_jobs, reasons_to_stop=self._reasons_to_stop)
        self.stack.push(self.heartbeats)  # before they start: an interrupt may come in between
        self.heartbeats.__enter__()

    def run_jobs_in(self, spark: "SparkSession") -> bool:
        """Tag the following Spark jobs with the batch id, so that they can be cancelled.

        Returns:
            False if that was done before.
        """
        if self.spark is not None:
            return False
        self.spark = spark
        self.stack.enter_context(job_control.batch_jobs(spark, self.batch_id))
        self.stack.enter_context(job_control.interruptible_calls(spark))
        return True

    def cancel_jobs(self, why: str) -> None:
        """Cancel the Spark jobs of the batch, if it has any."""
        if self.spark is not None:
            job_control.cancel(self.spark, self.batch_id, why)

    def check_heartbeats(self, partitions: Collection[int]) -> None:
        """Raise the error with which the heartbeats have ended, if they have; `partitions` are those of the batch."""
        lost = self.lost
        if lost is not None:
            raise self.with_present_owner(lost, partitions)

    def check_claims(self, partitions: Collection[int]) -> None:
        """Raise `ClaimLostError`, which names the present owners, unless `partitions` are held under a lease."""
        try:
            self.claimer.check(partitions)
        except ClaimLostError as lost:
            raise self.with_present_owner(lost, partitions) from None

    def with_present_owner(self, lost: MarshalError, partitions: Collection[int]) -> MarshalError:
        """Return the error of a lost claim with the present owner, or `lost` itself if the log cannot be read."""
        if not isinstance(lost, ClaimLostError):
            return lost
        try:
            self.claimer.rationalizer.catch_up()
            self.claimer.check(partitions)
        except ClaimLostError as newer:
            return newer
        except MarshalError as error:
            logger.warning(
                "group %r: the present owners of partitions of %r could not be read: %s",
                self.claimer.member.group,
                self.claimer.topic,
                error,
            )
        return lost

    def release(self) -> None:
        """Stop the heartbeats and release the claims. A claim whose release fails goes stale.

        Call it again after an interrupt. Otherwise a second call does nothing.
        """
        if self._state is ReleaseState.RELEASED:
            return
        if self._state is ReleaseState.RELEASING and self.heartbeats is not None:
            self.stack.push(self.heartbeats)  # an interrupt may have come before the stack had stopped them
        self._state = ReleaseState.RELEASING
        try:
            self.stack.close()
        except Exception:
            logger.warning(
                "batch %s: its heartbeats or Spark jobs did not end cleanly; its claims are released",
                self.batch_id,
                exc_info=True,
            )
        finally:
            self.claimer.release()
        self._state = ReleaseState.RELEASED

    def _cancel_lost_jobs(self, error: MarshalError) -> None:
        """Cancel the batch's Spark jobs, because its claim may be lost; called by a heartbeat thread."""
        if self.spark is None:
            return
        logger.error("cancelling the Spark jobs of batch %s: %s", self.batch_id, error)
        job_control.cancel(self.spark, self.batch_id)
