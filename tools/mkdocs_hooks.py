"""Hooks of `mkdocs build` that put the diagrams into the pages as SVG (see `mkdocs.yml`).

A block with the language `mermaid` becomes the SVG that `make diagrams` has rendered from it. An image that is
written as `![...](NAME.svg){ .diagram }` is put into the page too, so that it has the colours of the scheme.
"""

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.exceptions import PluginError

from tools.diagrams import BLOCK, DOCS, diagrams_of

_IMAGE: Final = re.compile(r"!\[(?P<about>[^\]]*)\]\((?P<file>[^)]+\.svg)\)\{ \.diagram \}")


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:  # noqa: ANN401 - a page of mkdocs
    """Return the page with its diagrams as SVG."""
    path = page.file.src_uri
    diagrams = iter(diagrams_of(path, markdown))

    def of_block(_: re.Match[str]) -> str:
        diagram = next(diagrams)
        if not diagram.is_current:
            raise PluginError(f"{path}: a diagram was changed and not rendered. Run: make diagrams")
        return _figure(diagram.file)

    def of_image(found: re.Match[str]) -> str:
        return _figure((DOCS / path).parent / found["file"])

    return _IMAGE.sub(of_image, BLOCK.sub(of_block, markdown))


def _figure(file: Path) -> str:
    """Return a figure with the SVG, in one line, because a blank line would end the HTML block."""
    svg = re.sub(r"<!--.*?-->", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    return f'<figure class="diagram">{" ".join(svg.split())}</figure>'
