"""Render the Mermaid diagrams of the documentation as SVG files: `make diagrams`.

A diagram is text in a page, in a block with the language `mermaid`. Its SVG is in docs/images/diagrams, named for the
page and the place of the block in it, and has the digest of the text. So the built site shows diagrams without
JavaScript, without a network, and in the colours of the light and the dark scheme. `tools/mkdocs_hooks.py` puts each
SVG into its page. The renderer is mermaidx, which only this command needs.
"""

import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[1] / "docs"
FOLDER: Final = DOCS / "images" / "diagrams"
BLOCK: Final = re.compile(r"^```mermaid\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)

_COLOURS: Final = {
    "#a00001": "var(--diagram-box)",
    "#a00002": "var(--diagram-line)",
    "#a00003": "var(--md-default-fg-color)",
    "#a00004": "var(--md-default-bg-color)",
    "#a00005": "var(--diagram-note)",
    "#a00006": "var(--diagram-group)",
}
"""The variables of docs/stylesheets/extra.css and of the theme, by the colours with which a diagram is rendered."""

_BOX, _LINE, _TEXT, _PAGE, _NOTE, _GROUP = _COLOURS
_THEME: Final = {
    "primaryColor": _BOX,
    "mainBkg": _BOX,
    "primaryTextColor": _TEXT,
    "primaryBorderColor": _LINE,
    "nodeBorder": _LINE,
    "lineColor": _LINE,
    "textColor": _TEXT,
    "titleColor": _TEXT,
    "edgeLabelBackground": _PAGE,
    "clusterBkg": _GROUP,
    "clusterBorder": _LINE,
    "actorBkg": _BOX,
    "actorBorder": _LINE,
    "actorTextColor": _TEXT,
    "actorLineColor": _LINE,
    "signalColor": _LINE,
    "signalTextColor": _TEXT,
    "labelBoxBkgColor": _BOX,
    "labelBoxBorderColor": _LINE,
    "labelTextColor": _TEXT,
    "loopTextColor": _TEXT,
    "noteBkgColor": _NOTE,
    "noteBorderColor": _LINE,
    "noteTextColor": _TEXT,
    "sequenceNumberColor": _PAGE,
    "transitionColor": _LINE,
    "transitionLabelColor": _TEXT,
    "stateLabelColor": _TEXT,
    "stateBkg": _BOX,
    "labelBackgroundColor": _PAGE,
    "specialStateColor": _LINE,
    "fontFamily": "DejaVu Sans",
    "fontSize": "15px",
}


@dataclass(frozen=True, slots=True)
class Diagram:
    """A Mermaid diagram of a page."""

    name: str
    """The name of its SVG file without the suffix."""
    text: str

    @property
    def file(self) -> Path:
        """The SVG file."""
        return FOLDER / f"{self.name}.svg"

    @property
    def mark(self) -> str:
        """The comment by which the SVG file shows the text that it was rendered from."""
        return f"<!-- of the text with SHA-256 {hashlib.sha256(self.text.encode()).hexdigest()} -->"

    @property
    def is_current(self) -> bool:
        """Whether the SVG file exists and was rendered from this text."""
        return self.file.exists() and self.file.read_text(encoding="utf-8").startswith(self.mark)


def diagrams_of(page: str, markdown: str) -> list[Diagram]:
    """Return the diagrams of a page; `page` is its path in `docs`, such as `concepts/outbox.md`."""
    stem = page.removesuffix(".md").replace("/", "-")
    return [Diagram(f"{stem}-{place}", found["text"]) for place, found in enumerate(BLOCK.finditer(markdown), 1)]


def all_diagrams() -> Iterator[Diagram]:
    """Yield the diagrams of all pages."""
    for path in sorted(DOCS.rglob("*.md")):
        yield from diagrams_of(path.relative_to(DOCS).as_posix(), path.read_text(encoding="utf-8"))


def _render(diagram: Diagram) -> str:
    import mermaidx

    config = {
        "themeVariables": _THEME,
        "sequence": {"mirrorActors": False, "messageMargin": 34, "actorMargin": 30, "width": 110},
        "state": {"nodeSpacing": 70, "rankSpacing": 130},
        "flowchart": {"nodeSpacing": 40, "rankSpacing": 60},
    }
    svg: str = mermaidx.render(diagram.text, theme="base", config=config).svg()
    for colour, variable in _COLOURS.items():
        red, green, blue = bytes.fromhex(colour[1:])
        svg = re.sub(rf"{colour}|rgba?\({red}, {green}, {blue}(?:, [\d.]+)?\)", variable, svg, flags=re.IGNORECASE)
    svg = svg.replace("my-svg", f"diagram-{diagram.name}").replace("font-family:DejaVu Sans", "font-family:inherit")
    return f"{diagram.mark}\n{svg}\n"


def main() -> int:
    """Render each diagram whose SVG file is not current, and delete the files of those that no longer exist."""
    diagrams = list(all_diagrams())
    FOLDER.mkdir(parents=True, exist_ok=True)
    for diagram in diagrams:
        if "--all" in sys.argv or not diagram.is_current:
            diagram.file.write_text(_render(diagram), encoding="utf-8")
            print(f"rendered: {diagram.name}")
    for path in set(FOLDER.glob("*.svg")) - {diagram.file for diagram in diagrams}:
        path.unlink()
        print(f"deleted: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
