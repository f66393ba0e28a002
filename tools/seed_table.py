"""Write docs/verification/seed-protocol.md: each sentence of the seed protocol, with its test or replacing rule.

Run `python -m tools.seed_table` after a change to tests/fast/seed_protocol.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tests.fast.seed_protocol.sentences import NO_PROMISE, SECTIONS, SENTENCES, Sentence, Test

TOP = Path(__file__).resolve().parents[1]
FOLDER = "tests/fast/seed_protocol"
PAGE = TOP / "docs" / "verification" / "seed-protocol.md"

INTRODUCTION = f"""\
<!-- Made by `python -m tools.seed_table`; do not edit. -->

# The seed protocol, sentence by sentence

This library started from the description of the Marshal protocol that came with the public Go library: the *seed*.
[The protocol](docs/reference/protocol.md) of this project decides where the two differ. Each sentence of the seed that
promises something or describes a step has a test in `{FOLDER}`. The name of the test begins with the
section and the place. If the protocol differs or requires more, the table names its section and the reason. The test
then checks the rule that replaces the sentence.

A place such as "sentence 2" counts the prose of a section. Plain numbers are its steps, and other names the items of
its lists; "b" is the second sentence of an item. The wording of the sentences is this project's.
"""


def tests() -> Iterator[tuple[Test, Sentence]]:
    """Yield every test with its sentence, section by section, in the order of the source."""
    names = sorted(path.stem for path in (TOP / FOLDER).glob("test_*.py"))
    modules = [import_module(f"{FOLDER.replace('/', '.')}.{name}") for name in names]
    found = [(value, SENTENCES[value]) for module in modules for value in vars(module).values() if _is_marked(value)]
    yield from sorted(found, key=lambda each: SECTIONS.index(each[1].section))


def render() -> str:
    """Return the page."""
    marked = list(tests())
    replaced = sum(sentence.overridden_by is not None for _, sentence in marked)
    sentences = len({(sentence.section, sentence.number) for _, sentence in marked})
    lines = [INTRODUCTION.replace("](docs/", "](../")]
    lines.append(
        f"{sentences} sentences, {len(marked)} tests; {replaced} of them test a rule that replaces or extends one."
    )
    for section in SECTIONS:
        rows = [(test, sentence) for test, sentence in marked if sentence.section == section]
        if not rows:
            continue
        files = ", ".join(sorted({f"`{test.__module__.rpartition('.')[2]}.py`" for test, _ in rows}))
        lines += [
            f"\n## {section}\n",
            f"In {files}:\n",
            "| place | statement | decided by | test |",
            "| --- | --- | --- | --- |",
        ]
        lines += [_row(test, sentence) for test, sentence in rows]
    lines += ["\n## Sentences without a test\n", "They neither promise anything nor describe a step.\n"]
    lines += ["| section | place | statement |", "| --- | --- | --- |"]
    lines += [f"| {one.section} | {one.number} | {one.says} |" for one in NO_PROMISE]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(render())
    print(f"written: {PAGE.relative_to(TOP)}")
    return 0


def _is_marked(value: object) -> bool:
    return callable(value) and value in SENTENCES


def _row(test: Test, sentence: Sentence) -> str:
    override = sentence.overridden_by
    decided = "the seed" if override is None else f"{_citation(override.section)}: {override.reason}"
    return f"| {sentence.number} | {sentence.says} | {decided} | `{test.__name__}` |"


def _citation(section: str) -> str:
    """Return a section such as "6, Stay and Commit" or "4 and 6" in the form that `check_citations` reads."""
    number, _, names = section.partition(", ")
    word = "sections" if " and " in number else "section"
    quoted = " and ".join(f'"{name}"' for name in names.split(" and ")) if names else ""
    return f"protocol.md, {word} {number}{', ' if quoted else ''}{quoted}"


if __name__ == "__main__":
    sys.exit(main())
