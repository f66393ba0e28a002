"""Check that the diagrams of the documentation are rendered from their text, and how they get into the pages."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

exceptions = pytest.importorskip("mkdocs.exceptions")

from tools import diagrams, mkdocs_hooks  # noqa: E402 - they import MkDocs, which not every environment has

DIAGRAMS = list(diagrams.all_diagrams())
TEXT = "flowchart LR\n    a --> b\n"
PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="concepts/outbox.md"))


@pytest.mark.parametrize("diagram", DIAGRAMS, ids=lambda diagram: diagram.name)
def test_a_diagram_is_rendered_from_its_text(diagram: diagrams.Diagram) -> None:
    """The SVG file has the digest of the text; to update it: make diagrams."""
    assert diagram.is_current


def test_no_file_is_left_of_a_deleted_diagram() -> None:
    """Each file belongs to a diagram."""
    assert set(diagrams.FOLDER.glob("*")) == {diagram.file for diagram in DIAGRAMS}


@pytest.mark.parametrize(
    "path", sorted((diagrams.DOCS / "images").rglob("*.svg")), ids=lambda path: path.relative_to(diagrams.DOCS).name
)
def test_a_picture_loads_nothing(path: Path) -> None:
    """The built site shows it without a network and without scripts."""
    svg = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
    assert not re.findall(r"https?://|<script|@import|url\((?!#)", svg)


def test_a_block_becomes_its_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The page has the SVG in one line, because a blank line would end the HTML."""
    monkeypatch.setattr(diagrams, "FOLDER", tmp_path)
    (diagram,) = diagrams.diagrams_of("concepts/outbox.md", f"```mermaid\n{TEXT}```\n")
    assert diagram.file == tmp_path / "concepts-outbox-1.svg"
    diagram.file.write_text(f"{diagram.mark}\n<svg>\n\n<g/></svg>\n", encoding="utf-8")
    page = mkdocs_hooks.on_page_markdown(f"before\n\n```mermaid\n{TEXT}```\n\nafter", page=PAGE)
    assert page == 'before\n\n<figure class="diagram"><svg> <g/></svg></figure>\n\nafter'


def test_a_changed_block_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The build names the command that renders it."""
    monkeypatch.setattr(diagrams, "FOLDER", tmp_path)
    (diagram,) = diagrams.diagrams_of("concepts/outbox.md", f"```mermaid\n{TEXT}```\n")
    diagram.file.write_text(f"{diagram.mark}\n<svg/>\n", encoding="utf-8")
    with pytest.raises(exceptions.PluginError, match="make diagrams"):
        mkdocs_hooks.on_page_markdown(f"```mermaid\n{TEXT}    b --> c\n```\n", page=PAGE)


def test_an_image_with_the_class_is_put_into_the_page() -> None:
    """Its colours then follow the scheme; other images stay images."""
    markdown = "![A time line](../images/lease.svg){ .diagram }\n\n![B](../images/ranges.svg)"
    page = mkdocs_hooks.on_page_markdown(markdown, page=PAGE)
    assert page.startswith('<figure class="diagram"><svg ')
    assert page.endswith("</svg></figure>\n\n![B](../images/ranges.svg)")
