"""The rule which consumer groups may write to an output.

Each data topic of an output belongs to one group. A renamed group can follow it, or groups can share the output.
Every sink applies this rule (docs/how-to/sinks.md, "Another group").
"""

import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange


@dataclass(frozen=True, slots=True)
class OutputGroups:
    """The rule for one output; the sink passes in which groups the output has ranges of.

    Raises:
        ConfigurationError: Both `shared_by_groups` and `previous_group` are set.

    Example:
        ```python
        groups = OutputGroups("table public.orders", previous_group="shops")
        groups.check(ranges, groups_with_ranges, ranges_with_rows)
        ```
    """

    output: str
    """The output's name in errors, such as `table public.orders`."""
    shared_by_groups: bool = False
    """Whether several groups write all offsets of a topic to this output, each with ranges of its own."""
    previous_group: str | None = None
    """The group that wrote to this output before; the new group continues after its ranges."""

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` if both options are set."""
        if self.shared_by_groups and self.previous_group is not None:
            raise ConfigurationError(
                f"{self.output}: previous_group cannot be combined with shared_by_groups, because groups that share an "
                "output do not follow one another. Use one of the two"
            )

    def others(self, wanted: ClaimedRange, groups: Collection[str]) -> Sequence[str]:
        """Return which of `groups` must not have rows at the offsets of `wanted`.

        Args:
            wanted: The range to be written.
            groups: The groups that have ranges of this topic in the output.

        Returns:
            All groups except that of `wanted`, sorted; empty if groups share the output.
        """
        return [] if self.shared_by_groups else sorted(set(groups) - {wanted.group})

    def check(
        self,
        wanted: Sequence[ClaimedRange],
        groups: Collection[str],
        held: Callable[[Sequence[ClaimedRange]], Iterable[ClaimedRange]],
    ) -> None:
        """Raise an error if the group of the ranges must not write them.

        Args:
            wanted: The ranges to be written, all of one group and topic.
            groups: The groups that have ranges of this topic in the output.
            held: Returns those of the given ranges at which the output has rows of the range's own group.

        Raises:
            SinkRejectedError: With the reason that `refusal` returns.
        """
        if reason := self.refusal(wanted, groups, held):
            raise SinkRejectedError(reason)

    def refusal(
        self,
        wanted: Sequence[ClaimedRange],
        groups: Collection[str],
        held: Callable[[Sequence[ClaimedRange]], Iterable[ClaimedRange]],
    ) -> str | None:
        """Return why the group of the ranges must not write them, or None if it may.

        Args:
            wanted: The ranges to be written, all of one group and topic.
            groups: The groups that have ranges of this topic in the output.
            held: Returns those of the given ranges at which the output has rows of the range's own group, of any
                generation.

        Returns:
            The reason with the steps that resolve it, or None.
        """
        others = self.others(wanted[0], groups) if wanted else []
        if not others:
            return None
        group, topic = wanted[0].group, wanted[0].topic
        if group not in groups and self.previous_group not in others:
            first, named = others[0], ", ".join(map(repr, others))
            move = ["marshal-dagster", "position", "import", group, topic, "--consumer-group", first]
            return (
                f"{self.output} has ranges of topic {topic!r} from group {named}: group {group!r} would write the same "
                f"offsets again, so nothing was written. If {group!r} replaces {first!r}, stop {first!r}, run "
                f"`{shlex.join(move)}` (`position reset` if "
                f"{group!r} has positions already) and give the sink previous_group={first!r}; if both groups should "
                "write all offsets, give it shared_by_groups=True"
            )
        for other in others:
            for range_ in held([replace(range_, group=other) for range_ in wanted]):
                reset = shlex.join(["marshal-dagster", "position", "reset", group, topic])
                return (
                    f"{range_} of group {group!r}: {self.output} has rows of group {other!r} at these offsets, which "
                    f"{group!r} would write again, so nothing was written. Set the position of {group!r} after them "
                    f"(`{reset}`), write to a new output, or give the sink "
                    "shared_by_groups=True if both groups should write all offsets"
                )
        return None
