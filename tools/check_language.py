"""Find words and phrases that make texts of this project hard to read, and report how long its sentences are.

`WORDS` lists the words and phrases, each with what to write instead. The check reads prose and no code:

- Python: docstrings, comments, and strings that contain a blank, such as messages, help and descriptions;
- configuration files and the Makefile: comments;
- pages (Markdown), with `--docs` or if their paths are given: paragraphs and list items.

It ignores code in backticks. A correct use of a listed word has an entry with a reason in `ALLOWED_USES`. An entry that
allows nothing any more is a finding too.

    python -m tools.check_language [PATH ...]      print each finding, and exit with 1 if there is one
    python -m tools.check_language --docs          check the pages too
    python -m tools.check_language --counts        count the findings by word and by package, and exit with 0
    python -m tools.check_language --sentences     report the sentence length of each page, and exit with 0

A run over the whole repository also reports the sentence length of all pages in one line.
"""

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Final

from tools.check_tree import files

CODE: Final = (
    "marshal_dagster",
    "tests",
    "benchmarks",
    "tools",
    "demo",
    "examples",
    "jobs",
    "sensors",
    "definitions.py",
)
"""Folders and files whose Python code is checked."""
CONFIGURATION: Final = (".ci/run", ".pre-commit-config.yaml", "Makefile", "mkdocs.yml", "pyproject.toml")
"""Files whose comments are checked."""
LONGEST_SENTENCE: Final = 25
"""The maximum number of words that a sentence should have."""
_ALL_KINDS: Final = frozenset({"docstring", "comment", "string", "page"})


@dataclass(frozen=True, slots=True)
class Word:
    """A word or phrase to avoid."""

    name: str
    pattern: re.Pattern[str]
    advice: str
    """What to write instead."""
    kinds: frozenset[str] = _ALL_KINDS
    """The kinds of text in which it is searched."""


@dataclass(frozen=True, slots=True)
class AllowedUse:
    """A correct use of a word in `WORDS`."""

    files: str
    """The files, as an `fnmatch` pattern for the path from the top of the repository."""
    pattern: re.Pattern[str]
    """The phrase within which the word is allowed."""
    reason: str
    kinds: frozenset[str] = _ALL_KINDS
    """The kinds of text in which the word is allowed."""


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of prose and where it is."""

    kind: str
    """`docstring`, `comment`, `string` or `page`."""
    text: str
    lines: tuple[str, ...]
    """The lines of the file that contain the text."""
    first_line: int
    """The number of the first of these lines, from 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A word to avoid, and where it is used."""

    place: str
    line: int
    kind: str
    word: Word
    found: str

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.found!r} in a {self.kind}: {self.word.advice}"


def _phrase(pattern: str) -> re.Pattern[str]:
    """Compile a pattern, ignoring case, in which a blank matches any white space, line ends included."""
    return re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE)


WORDS: Final = (
    Word("tell", _phrase(r"\b(?:tells?|telling|told)\b"), "write log, report, notify or distinguish"),
    Word("anew", _phrase(r"\banew\b"), "write again; for a topic: deleted and re-created"),
    Word(
        "stand",
        _phrase(
            r"\b(?:stands?|stood|standing) (?:in|at|on|before|there|where|with)\b|\b(?:stands|stood)(?=[.,;:)]|\Z)"
        ),
        "write is recorded in, follows, or is at",
    ),
    Word("say", _phrase(r"\b(?:says?|said|saying)\b"), "write reports, states or shows"),
    Word("ask for", _phrase(r"\bask(?:s|ed|ing)? for\b"), "write request"),
    Word("strange", _phrase(r"\bstrange(?:ly|r)?\b"), "write unknown or unexpected"),
    Word("mend", _phrase(r"\bmend(?:s|ed|ing)?\b"), "write fix or repair"),
    Word("lest", _phrase(r"\blest\b"), "write so that ... not"),
    Word("befall", _phrase(r"\bbef(?:all(?:s|en|ing)?|ell)\b"), "write affect or happen to"),
    Word("whoever", _phrase(r"\bwho(?:m)?ever\b"), "name the actor: the process, the user, the member"),
    Word("nobody", _phrase(r"\b(?:no|some)body(?:'s)?\b"), "write no member, another process, an operator"),
    Word("for ever", _phrase(r"\bfor ever\b"), "write forever, or without a limit"),
    Word("in the midst", _phrase(r"\bin the midst\b"), "write during"),
    Word("words", _phrase(r"\bwords?\b"), "write messages, text or names"),
    Word("becomes of", _phrase(r"\bbec[oa]mes? of\b"), "write happens to"),
    Word("go on", _phrase(r"\b(?:go|goes|going|went|gone) on\b"), "write continue"),
    Word("begun with", _phrase(r"\bbegun with\b"), "write that it is started"),
    Word("heard of", _phrase(r"\bhea(?:rd?|rs) of\b"), "write last heartbeat, or received"),
    Word("behind", _phrase(r"\bbehind\b"), "write after"),
    Word("ahead of", _phrase(r"\bahead of\b"), "write before"),
    Word("but for", _phrase(r"\bbut for\b"), "write except"),
    Word("time-out", _phrase(r"\btime-outs?\b"), "write timeout"),
    Word(
        "docstring: Give",
        _phrase(r"\A(?:Give|Tell|Say)\b"),
        "start with Return, Report, Raise, Read or another ordinary verb",
        frozenset({"docstring"}),
    ),
)

_STRINGS: Final = frozenset({"string"})

ALLOWED_USES: Final = (
    AllowedUse("tools/check_language.py", _phrase(r"[\s\S]+"), "it lists the words and the allowed uses"),
    AllowedUse("tests/fast/test_check_language.py", _phrase(r"[\s\S]+"), "it tests the words"),
    AllowedUse("*/*check_pages.py", _phrase(r"\bwords\b"), "the check counts the words of sentences"),
    AllowedUse("*[/_]cli[/_]*", _phrase(r"\bask(?:s|ed)? for confirmation\b"), "the usual phrase for a prompt"),
    AllowedUse(
        "*[/_]cli[/_]*",
        _phrase(r"\b(?:ahead of|behind)(?: this| the broker| the sender|\Z)"),
        "the usual phrases for clocks",
    ),
    AllowedUse("marshal_dagster/outbox/store.py", _phrase(r"\bFROM gone ON CONFLICT\b"), "SQL: a table's name and ON"),
    AllowedUse("marshal_dagster/sinks/*", _phrase(r"\breserved word\b"), "the term in SQL"),
    AllowedUse(
        "tests/simulator/scenario.py", _phrase(r"[\s\S]+"), "names of faults, stored in tests/results", _STRINGS
    ),
    AllowedUse(
        "tests/fast/test_kafka_clients.py", _phrase(r"\Acertificate of nobody\Z"), "a made-up log line", _STRINGS
    ),
    AllowedUse("tests/fast/test_repository_checks.py", _phrase(r"/simple-words\b"), "a part of a URL", _STRINGS),
    AllowedUse("tests/real/test_cli_log.py", _phrase(r"\bgroup 'nobody'"), "the name of a group", _STRINGS),
    AllowedUse("tests/real/test_sink_postgres_values.py", _phrase(r'"words"'), "a value of a row", _STRINGS),
    AllowedUse("tests/real/test_spark_job_control.py", _phrase(r"\Ago on\Z"), "the name of a file", _STRINGS),
)
"""Correct uses of the words, with the reason."""


def texts_of(source: str) -> Iterator[Text]:
    """Yield the comments, docstrings and other strings of Python source."""
    lines = tuple(source.splitlines())
    yield from _comments(source, lines)
    tree = ast.parse(source)
    docstrings = set(_docstrings(tree))
    yield from _strings(tree, lines, docstrings)


def configuration_texts(content: str) -> Iterator[Text]:
    """Yield the comments of a file in which they begin with `#`; consecutive lines are one text."""
    block: list[str] = []
    for number, line in enumerate([*content.splitlines(), ""], start=1):
        comment = re.search(r"(?:^|[\s@])#+ (.*)", line)
        if comment is not None:
            block.append(comment[1])
        elif block:
            yield _comment(block, number - len(block))
            block = []


def page_texts(page: str) -> Iterator[Text]:
    """Yield each paragraph and list item of a Markdown page, without code blocks, tables and pictures."""
    for first, paragraph in _paragraphs(page):
        yield Text("page", "\n".join(paragraph), tuple(paragraph), first)


def findings(
    place: str, texts: Iterable[Text], words: Sequence[Word] = WORDS, allowed: Sequence[AllowedUse] | None = None
) -> Iterator[Finding | AllowedUse]:
    """Yield each finding in the texts of the file at `place`, or the entry that allows it.

    `allowed` is `ALLOWED_USES` by default.
    """
    here = [use for use in (ALLOWED_USES if allowed is None else allowed) if fnmatch(place, use.files)]
    for text in texts:
        prose = _without_code(text.text)
        uses = [use for use in here if text.kind in use.kinds]
        permitted = [(use, match.span()) for use in uses for match in use.pattern.finditer(prose)]
        for word in words:
            if text.kind not in word.kinds:
                continue
            for match in word.pattern.finditer(prose):
                by = (use for use, (start, end) in permitted if start <= match.start() and match.end() <= end)
                found = " ".join(match[0].split())
                yield next(by, None) or Finding(place, _line(text, match), text.kind, word, found)


def sentences_of(page: str) -> Iterator[tuple[int, str]]:
    """Yield (line number at which the paragraph starts, sentence) of a Markdown page."""
    for first, paragraph in _paragraphs(page):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(line.strip() for line in paragraph))
        text = re.sub(r"^(?:[-*+]|\d+\.) ", "", text)
        for sentence in re.split(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)[)*\"]*\s+(?=[*`\"(\[]*[A-Z]|[*\"(\[]*`)", text):
            if sentence:
                yield first, sentence


def length_of(sentence: str) -> int:
    """Return the number of words of a sentence; code in backticks is one word."""
    return len(re.findall(r"[\w'./%-]*\w", re.sub(r"`[^`]*`", "code", sentence)))


def package_of(place: str) -> str:
    """Return the package of a file for `--counts`: two folders of the path in the library, tests and docs, else one."""
    parts = PurePosixPath(place).parts
    depth = 2 if parts[0] in {"marshal_dagster", "tests", "docs"} else 1
    return "/".join(parts[: min(depth, max(len(parts) - 1, 1))])


def _comments(source: str, lines: tuple[str, ...]) -> Iterator[Text]:
    """Yield the comments of Python source; those on consecutive lines of their own are one text.

    Instructions to other tools (`noqa`, `type:`) are not prose, but the reason after a `noqa` is.
    """
    block: list[str] = []
    first = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, column = token.start
        text = re.sub(r"# ?(?:noqa|type:)[^#]*?(?= - |#|$)", "", token.string).lstrip("#!")
        own_line = not lines[row - 1][:column].strip()
        if block and not (own_line and row == first + len(block)):
            yield _comment(block, first)
            block = []
        if not block:
            first = row
        block.append(text)
        if not own_line:
            yield _comment(block, first)
            block = []
    if block:
        yield _comment(block, first)


def _comment(block: Sequence[str], first: int) -> Text:
    return Text("comment", "\n".join(block), tuple(block), first)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value


def _strings(node: ast.AST, lines: tuple[str, ...], docstrings: set[ast.Constant]) -> Iterator[Text]:
    """Yield the strings in a syntax tree; an f-string is one text, with `{}` for each value."""
    text = None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        pieces = [value.value if isinstance(value, ast.Constant) else "{}" for value in node.values]
        text = "".join(map(str, pieces))
    if text is not None and isinstance(node, ast.expr) and (node in docstrings or re.search(r"\s", text.strip())):
        kind = "docstring" if node in docstrings else "string"
        yield Text(kind, text, lines[node.lineno - 1 : node.end_lineno], node.lineno)
    if isinstance(node, ast.JoinedStr):
        children: Iterable[ast.AST] = [value.value for value in node.values if isinstance(value, ast.FormattedValue)]
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from _strings(child, lines, docstrings)


def _paragraphs(page: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the first line, lines) of each paragraph and list item."""
    fence, first = "", 0
    block: list[str] = []
    for number, line in enumerate([*page.splitlines(), ""], start=1):
        stripped = line.strip()
        mark = re.match(r"`{3,}|~{3,}", stripped)
        outside = not fence
        if mark is not None and (outside or stripped == fence):
            fence = mark[0] if outside else ""
            outside = False
        is_prose = outside and bool(stripped) and not re.match(r"[#|<]|:::|!!!|\?\?\?|!\[|---", stripped)
        begins = bool(re.match(r"(?:[-*+]|\d+\.) ", stripped))
        if block and (begins or not is_prose):
            yield first, block
            block = []
        if is_prose:
            first = first if block else number
            block.append(line)


def _without_code(text: str) -> str:
    """Replace code in backticks and the targets of links by bullets, so that positions and line ends stay the same."""
    return re.sub(r"(`+)[^`]+\1|(?<=\])\([^)]*\)", lambda code: re.sub(r"\S", "\N{BULLET}", code[0]), text)


def _line(text: Text, match: re.Match[str]) -> int:
    """Return the number of the line on which a match begins."""
    lines_before = match.string.count("\n", 0, match.start())
    if text.text.count("\n") == len(text.lines) - 1:
        return text.first_line + lines_before
    # The text differs from the source (joined strings, escaped line ends): search the source for the first word of the
    # match, together with the characters before it if possible.
    first_word = match[0].split()[0]
    before = match.string[max(match.start() - 12, 0) : match.start()].rpartition("}")[2]
    for wanted in (before + first_word, first_word):
        for number, line in enumerate(text.lines, start=text.first_line):
            if wanted in line:
                return number
    return text.first_line


def _texts_at(path: Path) -> Iterator[Text]:
    content = path.read_text(encoding="utf-8")
    reader = {".py": texts_of, ".md": page_texts}.get(path.suffix, configuration_texts)
    yield from reader(content)


def _print_counts(found: Sequence[Finding]) -> None:
    by_word = Counter(finding.word.name for finding in found)
    by_package: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for finding in found:
        by_package[package_of(finding.place)][finding.word.name] += 1
    print(f"{len(found)} findings, by word:")
    for name, count in by_word.most_common():
        print(f"{count:6} {name}")
    print("By package:")
    for package, words in sorted(by_package.items(), key=lambda entry: -entry[1].total()):
        most = ", ".join(f"{name} {count}" for name, count in words.most_common())
        print(f"{words.total():6} {package}: {most}")


def _lengths(path: Path) -> list[int]:
    """Return the number of words of each sentence of a page."""
    return [length_of(sentence) for _, sentence in sentences_of(path.read_text(encoding="utf-8"))]


def _print_sentences(pages: Iterable[tuple[str, Path]]) -> None:
    print(f"{'sentences':>9} {'median':>6} {f'over {LONGEST_SENTENCE}':>7} {'longest':>7}  page")
    for place, path in pages:
        if lengths := _lengths(path):
            long = sum(length > LONGEST_SENTENCE for length in lengths)
            print(f"{len(lengths):9} {statistics.median(lengths):6.0f} {long:7} {max(lengths):7}  {place}")


def _print_summary(pages: Iterable[Path]) -> None:
    lengths = [length for path in pages for length in _lengths(path)]
    if lengths:
        long = sum(length > LONGEST_SENTENCE for length in lengths)
        print(
            f"pages: {len(lengths):,} sentences with a median of {statistics.median(lengths):.0f} words; {long:,} have "
            f"more than {LONGEST_SENTENCE} (--sentences lists them by page)"
        )


def _is_code(place: str) -> bool:
    return place in CONFIGURATION or (place.endswith(".py") and place.partition("/")[0] in CODE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the checkout that holds this file."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.check_language", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="Files or folders to check (default: all).")
    parser.add_argument("--docs", action="store_true", help="Check the pages too.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--counts", action="store_true", help="Count the findings by word and by package.")
    mode.add_argument("--sentences", action="store_true", help="Report the sentence length of each page.")
    given = parser.parse_args(arguments)

    top = Path(__file__).resolve().parents[1]
    wanted = [PurePosixPath(path).as_posix() for path in given.paths]
    paths = {
        place: path
        for path in files(top)
        for place in [path.relative_to(top).as_posix()]
        if not wanted or any(place == name or place.startswith(f"{name}/") for name in wanted)
    }
    if not paths:
        parser.error(f"no file of the repository matches {' '.join(wanted)}: give paths from its top folder")
    pages = {place: path for place, path in paths.items() if path.suffix == ".md"}
    if given.sentences:
        _print_sentences(pages.items())
        return 0
    checked = {place: path for place, path in paths.items() if _is_code(place)}
    checked |= {place: path for place, path in pages.items() if given.docs or place in wanted}
    results = [result for place, path in checked.items() for result in findings(place, _texts_at(path))]
    found = [result for result in results if isinstance(result, Finding)]
    if given.counts:
        _print_counts(found)
        return 0
    for finding in found:
        print(finding)
    unused: list[AllowedUse] = []
    if not wanted:
        unused = [
            use for use in ALLOWED_USES if use not in results and any(fnmatch(name, use.files) for name in checked)
        ]
        _print_summary(pages.values())
    for use in unused:
        print(f"an entry of ALLOWED_USES allows nothing, remove it: {use.files} {use.pattern.pattern}")
    return 1 if found or unused else 0


if __name__ == "__main__":
    sys.exit(main())
