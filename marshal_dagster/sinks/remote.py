"""The sink of a run whose script alone reaches the output (`marshal_dagster.run_with_pipes`)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict
from marshal_dagster.sinks.sink import BeforeCommit, OffsetsRead, WriteResult

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class RemoteSink:
    """Represents in the run the sink of a script, if the run cannot reach the output.

    The address goes to the script as `batch.output`, and the script builds its sink with it. The run hands every range
    of the batch over; the script's sink skips what the output has.

    Raises:
        ConfigurationError: `output` is empty or has a password in it.

    Example:
        ```python
        @marshal_asset(topic="orders", sink=RemoteSink("s3a://lake/orders"), with_frame=False)
        def orders(context, batch):
            run_with_pipes(context, batch, context.resources.emr, run_job_flow_params=JOB_FLOW)
        ```
    """

    def __init__(self, output: str, *, supports_unordered_ranges: bool = False) -> None:
        """Name the output of the script's sink.

        Args:
            output: The address, such as `s3a://lake/orders` or a table name. It must not contain secrets.
            supports_unordered_ranges: Whether the script's sink stores ranges in any order. Only groups that claim
                ranges need it.
        """
        if not output:
            raise ConfigurationError("RemoteSink: output is empty; name the output of the script's sink")
        if urlsplit(output).password is not None:
            raise ConfigurationError(
                "RemoteSink: output has a password in it, which would travel with the batch: leave it out, and let the "
                "script take it from its platform's secret store"
            )
        self.output = output
        self.supports_unordered_ranges = supports_unordered_ranges

    def __repr__(self) -> str:
        return f"RemoteSink({self.output!r})"

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> Mapping[ClaimedRange, Verdict]:
        """Return `TAKE` for each range, because only the script's sink knows what the output has.

        Args:
            ranges: The ranges of the batch.

        Returns:
            The verdict on each range.
        """
        return dict.fromkeys(ranges, Verdict.TAKE)

    def write(
        self,
        frame: "DataFrame",  # noqa: ARG002 - as `Sink`
        ranges: Sequence[ClaimedRange],  # noqa: ARG002
        offsets_read: OffsetsRead,  # noqa: ARG002
        before_commit: BeforeCommit = lambda: None,  # noqa: ARG002
    ) -> WriteResult:
        """Refuse to write, because the run does not reach the output.

        Args:
            frame: Not used.
            ranges: Not used.
            offsets_read: Not used.
            before_commit: Not used.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            f"{self!r} is written by a script only: start the script with run_with_pipes, or use the output's own sink "
            "in the run"
        )

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:  # noqa: ARG002 - as `Sink`
        """Return that the run cannot know it.

        Args:
            ranges: Not used.

        Returns:
            The reason.
        """
        return f"{self.output} is reached by scripts only, so this process cannot look into it: name the script's sink"
