"""Check the form of the pages: the length of sentences, and code blocks that can be read and copied.

- A sentence has at most 40 words, and those of a page have at most 18 words on average.
- A line of a code block has at most 88 columns. Outputs (`text` blocks) and the grammar of records may be wider.
- Commands are in `bash` blocks, without a prompt. Their output is in a `text` block.

Each exception is listed with a reason in `LONG_SENTENCES` and `LONG_PAGES`. An exception that allows nothing any more
is a finding too.

    python -m tools.check_pages             print each finding, and exit with 1 if there is one
"""

import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.check_language import length_of, sentences_of
from tools.check_tree import files

MAX_WORDS: Final = 40
MAX_MEAN_WORDS: Final = 18
FEWEST_SENTENCES: Final = 10
"""A page with fewer sentences has no average that means anything."""
MAX_COLUMNS: Final = 88
OUTPUTS: Final = frozenset({"text", "mermaid", "grammar"})
"""The languages of blocks that may be wider."""


@dataclass(frozen=True, slots=True)
class LongSentence:
    """A sentence that may be longer, by the words at its beginning."""

    page: str
    begins: str
    reason: str


LONG_SENTENCES: Final[tuple[LongSentence, ...]] = ()
LONG_PAGES: Final[dict[str, str]] = {
    "CHANGELOG.md": "an entry names everything that a user searches for",
}
"""Pages whose sentences may be longer on average, and why."""


WIDE_CODE: Final = {
    "docs/reference/protocol.md": "snapshots as they are in Kafka, which tests read",
}
"""Pages whose code blocks may be wider, and why."""


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of a page."""

    language: str
    first_line: int
    lines: tuple[str, ...]


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the code blocks of a Markdown page, without the indentation of their fences."""
    fence: re.Match[str] | None = None
    lines: list[str] = []
    first = 0
    for number, line in enumerate(page.splitlines(), start=1):
        if fence is None:
            fence = re.match(r"( *)(`{3,})(\w*)", line)
            lines, first = [], number + 1
        elif line.strip() == fence[2]:
            yield Block(fence[3], first, tuple(lines))
            fence = None
        else:
            lines.append(line.removeprefix(fence[1]))


def code_problems(place: str, page: str) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) of each code block."""
    may_be_wide = place in WIDE_CODE
    for block in blocks_of(page):
        if block.language == "console":
            yield block.first_line - 1, "a console block: put commands into a bash block, and outputs into a text block"
        for number, line in enumerate(block.lines, start=block.first_line):
            if len(line) > MAX_COLUMNS and not (may_be_wide or block.language in OUTPUTS):
                yield number, f"{len(line)} columns of code, at most {MAX_COLUMNS} are allowed"
            if block.language == "bash" and line.startswith("$ "):
                yield number, "a prompt, which would be copied with the command: leave it out"


def sentence_problems(
    place: str, page: str, allowed: Sequence[LongSentence] = LONG_SENTENCES
) -> Iterator[tuple[int, str] | LongSentence]:
    """Yield (line, problem) of each long sentence or the entry that allows it, and of pages with long sentences."""
    lengths = []
    for line, sentence in sentences_of(page):
        lengths.append(length_of(sentence))
        if lengths[-1] <= MAX_WORDS:
            continue
        entry = next((entry for entry in allowed if entry.page == place and sentence.startswith(entry.begins)), None)
        yield entry or (line, f"{lengths[-1]} words, at most {MAX_WORDS} are allowed: {sentence[:60]}...")
    mean = statistics.mean(lengths) if len(lengths) >= FEWEST_SENTENCES else 0
    if mean > MAX_MEAN_WORDS and place not in LONG_PAGES:
        yield 1, f"its sentences have {mean:.1f} words on average, at most {MAX_MEAN_WORDS} are allowed"


def main() -> int:
    """Check the pages of the checkout that holds this file."""
    top = Path(__file__).resolve().parents[1]
    pages = {path.relative_to(top).as_posix(): path for path in files(top) if path.suffix == ".md"}
    found: list[str] = []
    used: set[LongSentence] = set()
    for place, path in sorted(pages.items()):
        page = path.read_text(encoding="utf-8")
        for result in [*sentence_problems(place, page), *code_problems(place, page)]:
            if isinstance(result, LongSentence):
                used.add(result)
            else:
                found.append(f"{place}:{result[0]}: {result[1]}")
    found += [
        f"an entry of LONG_SENTENCES allows nothing, remove it: {entry.page}, {entry.begins!r}"
        for entry in LONG_SENTENCES
        if entry not in used
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
