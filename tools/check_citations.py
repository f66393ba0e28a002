"""Find citations of documents, sections and named paragraphs that do not exist.

The specification is cited as `protocol.md, section 6`, `protocol.md, sections 2 to 5`, or with names as
`protocol.md, section 6, "Claim"`. A name is a heading, or the text in bold at the start of a paragraph, list item or
table row. In code, and in the specification itself, the file name may be left out.

The check reads every file that git tracks or would add. It prints a line for each finding and exits with 1 if there is
one.
"""

import posixpath
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from tools.check_tree import files

SPECIFICATION: Final = "docs/reference/protocol.md"
SUFFIXES: Final = frozenset({".md", ".py", ".svg", ".toml", ".yml"})
LEFT_OUT: Final = frozenset({"tests/fast/test_check_citations.py"})
"""The test of this check, which contains invalid citations on purpose."""
MADE_BY_TESTS: Final = frozenset({"notes.md", "setup.md"})
"""Files that tests write to temporary folders."""

Sections = Mapping[str, Collection[str]]
"""The names in each section and its subsections, by the number of the section."""

_HEADING: Final = re.compile(r"#+ (?:(?P<number>\d+(?:\.\d+)*)\.? )?(?P<title>.*?)(?: \{#[\w-]+\})?")
_BOLD: Final = re.compile(r"(?:[-*] |\| *|\d+\. )?\*\*(?P<name>[^*]+?)[.:]?\*\*")
_GAP: Final = r"(?:[ \t]|\n[ \t]*(?:#[ \t]*)?)+"
_NUMBER: Final = r"\d+(?:\.\d+)*"
_NAME: Final = r'"[^"]{1,80}"'
_NUMBERS: Final = rf"{_NUMBER}(?:(?:,{_GAP}|{_GAP}and{_GAP}|{_GAP}to{_GAP}){_NUMBER})*"
_NAMES: Final = rf",{_GAP}{_NAME}(?:{_GAP}and{_GAP}{_NAME})*"
_SECTION: Final = re.compile(
    rf"(?P<other>\b[A-Z]{{3,}}[ -]?\d+,?{_GAP})?"
    rf"(?P<cited>\bprotocol(?:\.md)?`?,{_GAP})?"
    rf"\b[Ss]ections?{_GAP}(?P<numbers>{_NUMBERS})(?P<names>{_NAMES})?"
)
_OLD_FORM: Final = re.compile(rf'\bprotocol\.md`?(?:,?{_GAP}\d|,{_GAP}")')
_DOCUMENT: Final = re.compile(r"(?<![\w./}-])(?!//)[\w./-]*[\w-]\.md\b")


def sections_of(specification: str) -> Sections:
    """Return the sections of the specification and the names in each."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    current, in_code = "", False
    for line in specification.splitlines():
        in_code ^= line.startswith("```")
        heading, bold = (None, None) if in_code else (_HEADING.fullmatch(line), _BOLD.match(line))
        if heading is not None:
            current = heading["number"] or current
        name = heading["title"] if heading is not None else bold["name"] if bold is not None else None
        if name is not None and current:
            parts = current.split(".")
            for depth in range(1, len(parts) + 1):
                found[".".join(parts[:depth])].add(name.replace("`", ""))
    return found


def findings(place: str, text: str, sections: Sections, documents: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, what is wrong) for the file at `place`, a path from the top of the repository.

    `documents` are the paths of all files there.
    """
    may_leave_out = place.endswith(".py") or place == SPECIFICATION
    wrong: list[tuple[int, str]] = []
    for cited in _SECTION.finditer(text):
        if cited["other"] is None and (cited["cited"] is not None or may_leave_out):
            wrong += [(cited.start(), reason) for reason in _unknown(cited["numbers"], cited["names"] or "", sections)]
    form = 'cite the specification as: protocol.md, section N, "Name"'
    wrong += [(cited.start(), form) for cited in _OLD_FORM.finditer(text)]
    wrong += [
        (named.start(), f"there is no document {named[0]}")
        for named in _DOCUMENT.finditer(text)
        if named[0] not in MADE_BY_TESTS and not _exists(place, named[0], documents)
    ]
    for start, reason in sorted(wrong):
        yield text.count("\n", 0, start) + 1, reason


def _unknown(numbers: str, names: str, sections: Sections) -> Iterator[str]:
    known: set[str] = set()
    for number in re.findall(_NUMBER, numbers):
        if number in sections:
            known.update(sections[number])
        else:
            yield f"there is no section {number} in {SPECIFICATION}"
    for quoted in re.findall(_NAME, names):
        name = re.sub(_GAP, " ", quoted.strip('"'))
        if name not in known:
            yield f'there is no "{name}" in section {re.sub(_GAP, " ", numbers)} of {SPECIFICATION}'


def _exists(place: str, name: str, documents: Collection[str]) -> bool:
    """Return whether a document exists: relative to the file or to the top, or by the end of its path."""
    beside = posixpath.normpath(posixpath.join(posixpath.dirname(place), name))
    rest = name.lstrip("/")
    return beside in documents or any(path == rest or path.endswith(f"/{rest}") for path in documents)


def main() -> int:
    """Check the checkout that holds this file."""
    top = Path(__file__).resolve().parents[1]
    paths = {path.relative_to(top).as_posix(): path for path in files(top)}
    sections = sections_of((top / SPECIFICATION).read_text())
    found = 0
    for place, path in paths.items():
        if PurePosixPath(place).suffix in SUFFIXES and place not in LEFT_OUT:
            for number, reason in findings(place, path.read_text(), sections, paths.keys()):
                print(f"{place}:{number}: {reason}")
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
