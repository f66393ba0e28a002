"""Which groups may write to an output: of each data topic one, and those that follow on it, unless groups share it."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange


@dataclass(frozen=True, slots=True)
class OutputGroups:
    """The rule of one output. The sink gives what it has of each group: its ranges record who took the first."""

    output: str
    """The output's name in errors, such as `table public.orders`."""
    shared_by_groups: bool = False
    """Whether several groups write here, each with ranges of its own."""
    previous_group: str | None = None
    """The group that wrote here before; a new one may follow on its ranges."""

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` for options that exclude each other."""
        if self.shared_by_groups and self.previous_group is not None:
            raise ConfigurationError(
                "previous_group: with shared_by_groups no group follows on another; give one of them"
            )

    def others(self, wanted: ClaimedRange, groups: Collection[str]) -> Sequence[str]:
        """Return which of `groups` must not have rows where `wanted` has; all but its own, unless they share."""
        return [] if self.shared_by_groups else sorted(set(groups) - {wanted.group})

    def check(
        self,
        wanted: Sequence[ClaimedRange],
        groups: Collection[str],
        held: Callable[[Sequence[ClaimedRange]], Iterable[ClaimedRange]],
    ) -> None:
        """Raise `SinkRejectedError` for what `refusal` gives."""
        if reason := self.refusal(wanted, groups, held):
            raise SinkRejectedError(reason)

    def refusal(
        self,
        wanted: Sequence[ClaimedRange],
        groups: Collection[str],
        held: Callable[[Sequence[ClaimedRange]], Iterable[ClaimedRange]],
    ) -> str | None:
        """Return why the group of the ranges `wanted` may not write them, None if it may.

        `groups` are those of which the output has ranges of this topic. `held` returns those of the ranges given to it
        at which the output has rows of the range's own group, whatever their generation.
        """
        others = self.others(wanted[0], groups) if wanted else []
        if not others:
            return None
        group, topic = wanted[0].group, wanted[0].topic
        if group not in groups and self.previous_group not in others:
            first, named = others[0], ", ".join(map(repr, others))
            return (
                f"{self.output} has ranges of topic {topic!r} from group {named}: group {group!r} would write the same "
                f"offsets again, and nothing was written. If {group!r} takes over from {first!r}, stop {first!r}, run "
                f"`marshal-dagster position import {group} {topic} --consumer-group {first}` (`position reset` if it "
                f"has positions already) and give the sink previous_group={first!r}; if both are to write all offsets, "
                "give it shared_by_groups=True"
            )
        for other in others:
            for range_ in held([replace(range_, group=other) for range_ in wanted]):
                return (
                    f"{range_} of group {group!r}: {self.output} has rows of group {other!r} at these offsets, which "
                    f"{group!r} would write again, and nothing was written. Set the position of {group!r} after them "
                    f"(`marshal-dagster position reset {group} {topic}`), write to a new output, or give the sink "
                    "shared_by_groups=True if both are to write all offsets"
                )
        return None
