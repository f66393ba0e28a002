"""The members of a timeline: their numbers, names and fills."""

from typing import Any

from marshal_dagster.admin.texts import short_instance, without_suffix
from marshal_dagster.coordination.claims import is_operator
from marshal_dagster.timeline.lane_names import drawable
from marshal_dagster.timeline.model import Timeline
from marshal_dagster.timeline.palette import OPERATOR, RUNS


class Members:
    """The members that hold or send something: each has a number, a name and a fill."""

    def __init__(self, timeline: Timeline) -> None:
        senders = [*(bar.owner.instance for bar in timeline.bars), *(mark.instance for mark in timeline.marks)]
        self._numbers = {instance: number for number, instance in enumerate(dict.fromkeys(senders))}
        self._clients = {bar.owner.instance: bar.owner.client for bar in timeline.bars}
        runs = dict.fromkeys(without_suffix(each) for each in self._numbers if not is_operator(each))
        self._fills = {run: RUNS[number % len(RUNS)] for number, run in enumerate(runs)}

    def number(self, instance: str) -> int:
        """Return the number of a member."""
        return self._numbers[instance]

    def fill(self, instance: str) -> str:
        """Return the fill of a member's bars. All members of one run have the same."""
        return OPERATOR if is_operator(instance) else self._fills[without_suffix(instance)]

    def as_json(self) -> list[dict[str, Any]]:
        """Return the members as the page's script reads them, in the order of their numbers."""
        return [
            {
                "id": instance,
                "name": (name := short_instance(instance).removeprefix("run ")),
                "label": drawable(name),
                "client": self._clients.get(instance, ""),
            }
            for instance in self._numbers
        ]
