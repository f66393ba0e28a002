"""The marks that connect tests with sentences of the seed protocol, and the sentences that need no test."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

Test = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Override:
    """A section of docs/reference/protocol.md that replaces or extends a sentence, and the reason."""

    section: str
    reason: str


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence of the seed: its section, its place there, and a paraphrase.

    `number` is the number of a step ("3.1"), or a kind and a number. "sentence 2" counts the prose of a section.
    "parameter", "constant" and "message" count the items of its lists. A "b" is the second sentence of an item.
    """

    section: str
    number: str
    says: str
    overridden_by: Override | None = None

    @property
    def prefix(self) -> str:
        """The beginning of the name of its test."""
        return f"test_{_slug(self.section)}_{_slug(self.number)}_"


SENTENCES: Final[dict[Test, Sentence]] = {}
"""The sentence of each test, for the modules imported so far."""


def sentence(
    section: str, number: str, says: str, *, overridden_by: tuple[str, str] | None = None
) -> Callable[[Test], Test]:
    """Mark the test of a sentence; `overridden_by` is a section of docs/reference/protocol.md and the reason."""

    def mark(test: Test) -> Test:
        override = None if overridden_by is None else Override(*overridden_by)
        SENTENCES[test] = Sentence(section, number, says, override)
        return test

    return mark


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


SECTIONS: Final = (
    "Kafka Only Consumer Coordination",
    "Synopsis",
    "Protocol Messages",
    "Determining World State",
    "Heartbeats",
    "Partition Assignment for Consumption",
    "Consuming a New Partition",
    "Consuming Recently Used Partitions on Restart",
    "Consumption",
    "At Most Once",
    "At Least Once",
    "Consumer Failure",
    "TODO",
)
"""The seed's sections that hold sentences, in its order."""

NO_PROMISE: Final = (
    Sentence("Kafka Only Consumer Coordination", "sentence 1", "Describes the subject"),
    Sentence("Synopsis", "sentence 6", "Speed is not the aim"),
    Sentence("Protocol Messages", "sentence 1", "Introduces the messages"),
    Sentence("Protocol Messages", "sentence 2", "Introduces the names of the parameters"),
    Sentence("Protocol Messages", "parameter 2b", "Advises how a team may name its groups"),
    Sentence("Protocol Messages", "sentence 3", "Introduces the constants"),
    Sentence("Protocol Messages", "sentence 4", "Introduces the list of messages"),
    Sentence("Determining World State", "sentence 1", "Explains how much depends on this part"),
    Sentence("Partition Assignment for Consumption", "sentence 1", "Explains how much depends on this part"),
    Sentence("Partition Assignment for Consumption", "sentence 2", "States that the problem is not trivial"),
    Sentence("Consuming a New Partition", "sentence 1", "States when the steps apply"),
    Sentence("Consuming Recently Used Partitions on Restart", "sentence 1", "Explains the purpose of the optimization"),
    Sentence("Consumption", "sentence 1", "Introduces two flows (the protocol has a third, effectively once)"),
    Sentence("At Least Once", "sentence 1", "Repeats that there is a claim, see Consumption, sentence 2"),
    Sentence("TODO", "sentence 2", "Gives the wish of sentence 1 as an example"),
    Sentence("TODO", "sentence 3", "Considers what else the wish of sentence 1 would allow"),
)
"""Sentences that neither promise anything nor give a step."""
