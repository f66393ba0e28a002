"""`check_citations` finds citations of documents, sections and names that do not exist, and no others.

The check ignores this file, which is full of them.
"""

from pathlib import Path

import pytest

from tools import check_citations
from tools.check_citations import SPECIFICATION, findings, sections_of

SPECIMEN = """\
# Protocol

See section 2.1, "Stay".

## 1. Wire format

**Number.** A number has digits.

- **Record key.** It is null.

```text
## 7. Not a heading
```

| record | effect |
| --- | --- |
| **Heartbeat**(o) | none |

## 2. What a member does

### 2.1 Stay

### 2.2 `Mark` {#mark}
"""
DOCUMENTS = [SPECIFICATION, "docs/how-to/sinks.md", "docs/contributing/decisions/0001-locks.md", "README.md"]
CITED = "protocol.md"


def found(text: str, place: str = "marshal_dagster/code.py") -> list[tuple[int, str]]:
    """Check one text against the sample page."""
    return list(findings(place, text, sections_of(SPECIMEN), DOCUMENTS))


def test_the_sections_and_their_names_are_those_of_the_page() -> None:
    """A section includes the names of its subsections; code blocks are ignored."""
    assert sections_of(SPECIMEN) == {
        "1": {"Wire format", "Number", "Record key", "Heartbeat"},
        "2": {"What a member does", "Stay", "Mark"},
        "2.1": {"Stay"},
        "2.2": {"Mark"},
    }


@pytest.mark.parametrize(
    "text",
    [
        f'"""Keep a claim ({CITED}, section 2, "Stay")."""',
        f"# ({CITED}, sections 1 and 2)",
        f'# ({CITED}, sections 1, 2 and 2.1, "Number" and "Stay")',
        f'# A comment that ends in ({CITED}, section\n# 1, "Record\n# key") and continues.',
        "# Section 2.2: without the file's name.",
        "# RFC 8259, section 77, is another document.",
        "# docs/how-to/sinks.md, ../docs/how-to/sinks.md, decisions/0001-locks.md and README.md are there.",
        "https://example.org/elsewhere.md",
        'f"{name}.md"',
    ],
)
def test_a_citation_of_what_exists_gives_no_finding(text: str) -> None:
    """Existing sections, names and documents may be cited, on one line or on several."""
    assert found(text) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"# ({CITED}, section 9)", f"there is no section 9 in {SPECIFICATION}"),
        (f"# ({CITED}, sections 1 to 9)", f"there is no section 9 in {SPECIFICATION}"),
        (f"# ({CITED}, section 2.3)", f"there is no section 2.3 in {SPECIFICATION}"),
        (f'# ({CITED}, section 1, "Stay")', f'there is no "Stay" in section 1 of {SPECIFICATION}'),
        (f'# ({CITED}, section 2, "Stay" and "Go")', f'there is no "Go" in section 2 of {SPECIFICATION}'),
        ("# as section 9 requires", f"there is no section 9 in {SPECIFICATION}"),
        ("# PROTOCOL.md", "there is no document PROTOCOL.md"),
        ("# docs/range-claims.md", "there is no document docs/range-claims.md"),
        (f"# ({CITED} 2)", 'cite the specification as: protocol.md, section N, "Name"'),
        (f'# ({CITED}, "Stay")', 'cite the specification as: protocol.md, section N, "Name"'),
    ],
)
def test_a_citation_of_what_does_not_exist_is_found(text: str, reason: str) -> None:
    """A made-up document, section or name is reported with its line."""
    assert found(f"first line\n{text}\n") == [(2, reason)]


def test_a_page_must_name_the_specification() -> None:
    """Section numbers of another page are not checked, but its citations of the specification are."""
    assert found("as section 77 of the law", "docs/how-to/sinks.md") == []
    assert found("[protocol, section 77](reference/protocol.md)", "docs/how-to/sinks.md") != []
    assert found("as section 77 requires", SPECIFICATION) != []


def test_the_check_fails_for_a_citation_that_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints file, line and reason and exits with 1; without a wrong citation it exits with 0."""
    page, code = tmp_path / SPECIFICATION, tmp_path / "code.py"
    page.parent.mkdir(parents=True)
    page.write_text(SPECIMEN)
    monkeypatch.setattr(check_citations, "__file__", f"{tmp_path}/tools/check_citations.py")
    monkeypatch.setattr(check_citations, "files", lambda _: [page, code])
    code.write_text(f"# ({CITED}, section 9)\n")
    assert check_citations.main() == 1
    assert capsys.readouterr().out == f"code.py:1: there is no section 9 in {SPECIFICATION}\n"
    code.write_text(f"# ({CITED}, section 1)\n")
    assert check_citations.main() == 0
