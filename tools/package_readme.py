"""Write README.md into the package's metadata, as a package index shows it (a metadata hook of hatchling).

A package index has no files beside the page. So each relative link becomes a link into the repository, at the tag of
the version, if `[project.urls]` names a `Source`. Otherwise only its text remains, and pictures are left out.
"""

import re
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE: Final = re.compile(r"^!\[([^\]]*)\]\((?!https?:)([^)]+)\)\n\n?", re.MULTILINE)
_LINK: Final = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\((?!https?:|#)([^)]+)\)")


def description(readme: str, source: str | None, version: str) -> str:
    """Return the text for a package index.

    Args:
        readme: The text of README.md.
        source: The URL of the repository, or None.
        version: The version, whose tag is `v` and the version.
    """
    if source is None:
        return _LINK.sub(r"\1", _PICTURE.sub("", readme))
    base = f"{source.rstrip('/')}/blob/v{version}"
    raw = f"{source.rstrip('/')}/raw/v{version}"
    return _LINK.sub(rf"[\1]({base}/\2)", _PICTURE.sub(rf"![\1]({raw}/\2)\n\n", readme))


class CustomMetadataHook(MetadataHookInterface):
    """Sets the project's readme."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` in the metadata of the project."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        text = description(readme, source, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
