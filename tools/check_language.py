"""Find words and turns of phrase that readers of this project stumble over, and report how long sentences are.

The words are those of `WORDS`, each with what to write instead. The check reads docstrings, comments and the text of
string literals: messages, help, descriptions. It leaves out code in backticks and strings without a blank, which are
names. A use that is right has an entry with its reason in `ALLOWED_USES`; one that excuses nothing is reported too.

    python -m tools.check_language [PATH ...]      print each finding; exit with 1 if there is one
    python -m tools.check_language --docs          look at the pages (Markdown) too
    python -m tools.check_language --counts        count the findings by word and by package, and exit with 0
    python -m tools.check_language --sentences     report the length of the sentences of each page, and exit with 0
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
LONGEST_SENTENCE: Final = 25
"""The words that a sentence should have at most."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word or turn of phrase that is not used."""

    name: str
    pattern: re.Pattern[str]
    instead: str
    kinds: frozenset[str] = frozenset({"docstring", "comment", "string", "page"})
    """Where it is looked for."""


@dataclass(frozen=True, slots=True)
class AllowedUse:
    """A use of a word that is right."""

    place: str
    """The files, as a pattern of `fnmatch` for the path from the top of the repository."""
    pattern: re.Pattern[str]
    """The phrase; a finding within it is excused."""
    reason: str


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of prose and where it is."""

    kind: str
    """Docstring, comment, string or page."""
    text: str
    lines: tuple[str, ...]
    """The lines of the file that it stems from."""
    first_line: int
    """The number of the first of them, from 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A use of a word that is not used."""

    place: str
    line: int
    kind: str
    word: Word
    found: str

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.found!r} in a {self.kind}: {self.word.instead}"


def _phrase(pattern: str) -> re.Pattern[str]:
    """Compile a pattern in which a blank stands for any white space, a line's end included."""
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
    Word(
        "docstring: Give",
        _phrase(r"\A(?:Give|Tell|Say)\b"),
        "start with Return, Report, Raise, Read or another ordinary verb",
        frozenset({"docstring"}),
    ),
)

ALLOWED_USES: Final = (
    AllowedUse("tools/check_language.py", _phrase(r"[\s\S]+"), "it has the words and their exceptions"),
    AllowedUse("tests/fast/test_check_language.py", _phrase(r"[\s\S]+"), "it tests the words"),
    AllowedUse("*", _phrase(r"\bin other words\b"), "ordinary English"),
    AllowedUse("*", _phrase(r"\breserved words?\b"), "the term of SQL"),
)


def texts_of(source: str) -> Iterator[Text]:
    """Yield the comments, docstrings and other strings of Python source."""
    lines = tuple(source.splitlines())
    yield from _comments(source, lines)
    tree = ast.parse(source)
    docstrings = set(_docstrings(tree))
    yield from _strings(tree, lines, docstrings)


def page_texts(page: str) -> Iterator[Text]:
    """Yield the prose of a Markdown page, a paragraph each: no code block, table or picture."""
    for first, paragraph in _paragraphs(page):
        yield Text("page", "\n".join(paragraph), tuple(paragraph), first)


def findings(
    place: str, texts: Iterable[Text], words: Sequence[Word] = WORDS, allowed: Sequence[AllowedUse] | None = None
) -> Iterator[Finding | AllowedUse]:
    """Yield each finding in the texts of the file at `place`, and each allowed use as often as it excuses one.

    `allowed` is `ALLOWED_USES` unless given.
    """
    here = [use for use in (ALLOWED_USES if allowed is None else allowed) if fnmatch(place, use.place)]
    for text in texts:
        prose = _without_code(text.text)
        excused = [(use, match.span()) for use in here for match in use.pattern.finditer(prose)]
        for word in words:
            if text.kind not in word.kinds:
                continue
            for match in word.pattern.finditer(prose):
                by = next((use for use, (start, end) in excused if start <= match.start() and match.end() <= end), None)
                found = " ".join(match[0].split())
                yield by or Finding(place, _line(text, match), text.kind, word, found)


def sentences_of(page: str) -> Iterator[tuple[int, str]]:
    """Yield (number of the paragraph's first line, sentence) of a Markdown page."""
    for first, paragraph in _paragraphs(page):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(line.strip() for line in paragraph))
        text = re.sub(r"^(?:[-*+]|\d+\.) ", "", text)
        for sentence in re.split(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)[)*\"]*\s+(?=[*`\"(\[]*[A-Z])", text):
            if sentence:
                yield first, sentence


def length_of(sentence: str) -> int:
    """Return the number of words of a sentence; code in backticks is one word."""
    return len(re.findall(r"[\w'./%-]*\w", re.sub(r"`[^`]*`", "code", sentence)))


def package_of(place: str) -> str:
    """Return the package that a file is counted for: two folders deep in the library and the tests, else one."""
    parts = PurePosixPath(place).parts
    depth = 2 if parts[0] in {"marshal_dagster", "tests", "docs"} else 1
    return "/".join(parts[: min(depth, max(len(parts) - 1, 1))])


def _comments(source: str, lines: tuple[str, ...]) -> Iterator[Text]:
    """Yield comments; those on consecutive lines of their own are one text."""
    block: list[str] = []
    first = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, column = token.start
        text = token.string.lstrip("#!").partition("# noqa")[0].partition("# type:")[0]
        if text.strip().startswith(("noqa", "type:")):
            continue
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
    """Yield the docstrings of modules, classes and functions, and those that follow an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value


def _strings(node: ast.AST, lines: tuple[str, ...], docstrings: set[ast.Constant]) -> Iterator[Text]:
    """Yield the strings under a node; an f-string is one text, in which each value is `{}`."""
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
    """Replace code in backticks and targets of links by a sign that no pattern matches, keeping length and lines."""
    return re.sub(r"(`+)[^`]+\1|(?<=\])\([^)]*\)", lambda code: re.sub(r"\S", "\N{BULLET}", code[0]), text)


def _line(text: Text, match: re.Match[str]) -> int:
    """Return the number of the line on which a match begins."""
    lines_before = match.string.count("\n", 0, match.start())
    if text.text.count("\n") == len(text.lines) - 1:
        return text.first_line + lines_before
    # Its pieces are joined, or line ends are escapes: look for the match's first word, after the text before it.
    first_word = match[0].split()[0]
    before = match.string[max(match.start() - 12, 0) : match.start()].rpartition("}")[2]
    for wanted in (before + first_word, first_word):
        for number, line in enumerate(text.lines, start=text.first_line):
            if wanted in line:
                return number
    return text.first_line


def _texts_at(path: Path) -> Iterator[Text]:
    content = path.read_text(encoding="utf-8")
    yield from texts_of(content) if path.suffix == ".py" else page_texts(content)


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


def _print_sentences(pages: Iterable[tuple[str, Path]]) -> None:
    print(f"{'sentences':>9} {'median':>6} {f'over {LONGEST_SENTENCE}':>7} {'longest':>7}  page")
    for place, path in pages:
        lengths = [length_of(sentence) for _, sentence in sentences_of(path.read_text(encoding="utf-8"))]
        if lengths:
            long = sum(length > LONGEST_SENTENCE for length in lengths)
            print(f"{len(lengths):9} {statistics.median(lengths):6.0f} {long:7} {max(lengths):7}  {place}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the checkout that holds this file."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.check_language", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="Files or folders to check (default: all).")
    parser.add_argument("--docs", action="store_true", help="Check the Markdown pages too.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--counts", action="store_true", help="Count the findings by word and by package.")
    mode.add_argument("--sentences", action="store_true", help="Report the length of the sentences of each page.")
    given = parser.parse_args(arguments)

    top = Path(__file__).resolve().parents[1]
    wanted = [PurePosixPath(path).as_posix() for path in given.paths]
    paths = {
        place: path
        for path in files(top)
        for place in [path.relative_to(top).as_posix()]
        if not wanted or any(place == name or place.startswith(f"{name}/") for name in wanted)
    }
    pages = {place: path for place, path in paths.items() if path.suffix == ".md"}
    if given.sentences:
        _print_sentences(pages.items())
        return 0
    checked = {place: path for place, path in paths.items() if path.suffix == ".py" and place.startswith(CODE)}
    if given.docs:
        checked |= pages
    results = [result for place, path in checked.items() for result in findings(place, _texts_at(path))]
    found = [result for result in results if isinstance(result, Finding)]
    if given.counts:
        _print_counts(found)
        return 0
    for finding in found:
        print(finding)
    unused = [] if wanted else [use for use in ALLOWED_USES if use not in results]
    for use in unused:
        print(f"an allowed use excuses nothing, remove it: {use.place} {use.pattern.pattern}")
    return 1 if found or unused else 0


if __name__ == "__main__":
    sys.exit(main())
