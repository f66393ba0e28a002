"""Tests of `tools.check_language`, which finds words to avoid in prose, and ignores code."""

from pathlib import Path

import pytest

from tools import check_language
from tools.check_language import (
    ALLOWED_USES,
    WORDS,
    AllowedUse,
    Finding,
    configuration_texts,
    findings,
    length_of,
    package_of,
    page_texts,
    sentences_of,
    texts_of,
)


def found(source: str, place: str = "marshal_dagster/code.py") -> list[tuple[int, str, str]]:
    """Return (line, kind, words found) of Python source."""
    results = findings(place, texts_of(source))
    return [(result.line, result.kind, result.found) for result in results if isinstance(result, Finding)]


@pytest.mark.parametrize(
    "text",
    [
        "The member is told of it",
        "It is read anew",
        "The offset that stands in the log",
        "where the group stands.",
        "The log says so",
        "It asks for a run",
        "a strange record",
        "that can be mended",
        "lest it ends",
        "what can befall it",
        "whoever claims",
        "nobody's claim",
        "It waits for ever",
        "in the midst of it",
        "in Kafka's words",
        "what became of it",
        "The run goes on",
        "It is begun with the first",
        "when a member was heard of",
        "the offsets behind it",
        "the records ahead of it",
        "all but for one",
        "the session time-outs",
        "Give the offset",
    ],
)
def test_each_word_is_found_in_a_docstring(text: str) -> None:
    """Each word is found once, in the docstring of a module, a function or a field."""
    assert [line for line, _, _ in found(f'"""{text}"""\n')] == [1]
    assert [line for line, _, _ in found(f'def load():\n    """{text}"""\n')] == [2]
    assert [line for line, _, _ in found(f'class Batch:\n    offset: int\n    """{text}"""\n')] == [3]


def test_each_word_has_an_example_here() -> None:
    """The previous test has an example of each word."""
    (mark,) = (mark for mark in test_each_word_is_found_in_a_docstring.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
    assert {word.name for word in WORDS} == {
        result.word.name
        for text in mark.args[1]
        for result in findings("code.py", texts_of(f'"""{text}"""'))
        if isinstance(result, Finding)
    }


def test_comments_and_messages_are_read_with_their_lines() -> None:
    """Comments are joined across lines; a joined string reports the line of its word; f-string values are ignored."""
    source = (
        "# What becomes\n"
        "# of it.\n"
        "told = 1  # told once\n"
        "raise ValueError(\n"
        '    f"topic {told!r} is gone, "\n'
        "    f\"and {'nobody knows' if told else 'it'} was told\"\n"
        ")\n"
    )
    results = found(source)
    assert (1, "comment", "becomes of") in results
    assert (3, "comment", "told") in results
    assert (6, "string", "told") in results
    assert [word for _, kind, word in results if kind == "string"] == ["told", "nobody"]
    assert len(results) == 4


def test_the_reason_after_a_noqa_is_read() -> None:
    """The codes of `noqa` and `type: ignore` are not prose, but a reason is."""
    source = "x = 1  # noqa: S101, E501 - told\ny = 2  # type: ignore[misc]\nz = 3  # told  # noqa: S101\n"
    assert [line for line, kind, _ in found(source) if kind == "comment"] == [1, 3]


def test_comments_of_configuration_are_read() -> None:
    """Comments after `#` are read in the Makefile and in configuration files; the rest is not prose."""
    content = 'told = "told"  # is told\n\n# What becomes\n# of it.\nlist: ## say it\n\t@# Say it.\n'
    results = [result for result in findings("Makefile", configuration_texts(content)) if isinstance(result, Finding)]
    assert sorted((result.line, result.word.name) for result in results) == [
        (1, "tell"),
        (3, "becomes of"),
        (5, "say"),
        (6, "say"),
    ]


@pytest.mark.parametrize(
    "source",
    [
        "told = ahead_of = says",
        'fields = {"told": "anew"}',
        '"""Reads `told` and ``what it says``."""',
        "x = 1  # noqa: S101",
        '"""The record that stands for it is foretold; understands swords."""',
        'text = "Give the offset"',
    ],
)
def test_names_and_code_are_no_prose(source: str) -> None:
    """Identifiers, keys, code in backticks and parts of other words are ignored."""
    assert found(source) == []


def test_an_allowed_use_gives_no_finding_and_is_reported_as_used() -> None:
    """Only the phrase of the entry is allowed, and only in its files and kinds of text."""
    allowed = AllowedUse("tests/*", check_language._phrase(r"behind a proxy"), "the network term")
    texts = list(texts_of('"""Runs behind a proxy, and behind it."""'))
    inside = list(findings("tests/code.py", texts, allowed=[allowed]))
    assert [result is allowed for result in inside] == [True, False]
    assert allowed not in list(findings("demo/code.py", texts, allowed=[allowed]))
    in_strings = AllowedUse("*", allowed.pattern, "the network term", frozenset({"string"}))
    assert in_strings not in list(findings("tests/code.py", texts, allowed=[in_strings]))


def test_each_allowed_use_has_a_reason() -> None:
    """Each entry has a reason, and no two are the same."""
    assert all(use.reason for use in ALLOWED_USES)
    assert len({(use.files, use.pattern.pattern) for use in ALLOWED_USES}) == len(ALLOWED_USES)


PAGE = """\
# What it says

It is told. See `told`, e.g. The first sentence has
[two](#told) lines.

```text
nobody
```

- One item.
- Another item goes on
  below.

| says |
"""


def test_pages_are_read_without_code_tables_and_headings() -> None:
    """Paragraphs and list items of a page are read."""
    results = [result for result in findings("notes.md", page_texts(PAGE)) if isinstance(result, Finding)]
    assert [(result.line, result.found) for result in results] == [(3, "told"), (11, "goes on")]


def test_sentences_are_counted_across_lines() -> None:
    """A sentence ends at a full stop before a capital letter. Links count with their text, code as one word."""
    assert list(sentences_of(PAGE)) == [
        (3, "It is told."),
        (3, "See `told`, e.g. The first sentence has two lines."),
        (10, "One item."),
        (11, "Another item goes on below."),
    ]
    assert length_of("See `a long name`, don't stop at 1.5 s (25%).") == 8


@pytest.mark.parametrize(
    ("place", "package"),
    [
        ("marshal_dagster/errors.py", "marshal_dagster"),
        ("marshal_dagster/spark/decoding/avro_codec.py", "marshal_dagster/spark"),
        ("tests/fast/test_faults.py", "tests/fast"),
        ("examples/outbox/run.py", "examples"),
        ("definitions.py", "definitions.py"),
    ],
)
def test_findings_are_counted_for_packages(place: str, package: str) -> None:
    """The library and the tests are counted by package, other folders as a whole."""
    assert package_of(place) == package


def test_the_command_reports_counts_and_fails_for_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Findings and unused entries make it exit with 1; counts and sentences are reports."""
    code, page = tmp_path / "marshal_dagster" / "outbox" / "code.py", tmp_path / "notes.md"
    other = tmp_path / "marshal_dagster_old" / "code.py"
    for path, text in {code: (told := '"""Read anew, and told."""\n'), other: told, page: "It says so.\n"}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(check_language, "__file__", f"{tmp_path}/tools/check_language.py")
    monkeypatch.setattr(check_language, "files", lambda _: [code, other, page])
    monkeypatch.setattr(check_language, "ALLOWED_USES", ())

    assert check_language.main([]) == 1
    assert [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "marshal_dagster/outbox/code.py:1",
        "marshal_dagster/outbox/code.py:1",
        "pages",
    ]
    assert check_language.main(["notes.md"]) == 1
    assert capsys.readouterr().out.startswith("notes.md:1: 'says' in a page: ")
    assert check_language.main(["--docs"]) == 1
    assert "notes.md:1: 'says' in a page: " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        check_language.main(["nowhere.py"])
    assert "no file of the repository matches nowhere.py" in capsys.readouterr().err
    assert check_language.main(["--counts"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "     2 marshal_dagster/outbox: tell 1, anew 1"
    assert check_language.main(["--sentences"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["1", "3", "0", "3", "notes.md"]

    code.write_text('"""Read again."""\n')
    assert check_language.main([]) == 0
    assert capsys.readouterr().out.startswith("pages: 1 sentences with a median of 3 words; 0 have more than 25 ")
    uses = [AllowedUse(files, check_language._phrase("behind a"), "x") for files in ("*.py", "*.md")]
    monkeypatch.setattr(check_language, "ALLOWED_USES", uses)
    assert check_language.main([]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "an entry of ALLOWED_USES allows nothing, remove it: *.py behind\\s+a"
    ]
