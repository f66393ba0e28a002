"""Measure what the core and each extra of the wheel take, and write the table of docs/how-to/install.md."""

import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TOP = Path(__file__).resolve().parents[1]
PAGE: Final = _TOP / "docs" / "how-to" / "install.md"
BEGIN: Final = "<!-- begin: written by `make extras` -->\n"
END: Final = "<!-- end: written by `make extras` -->\n"
_MB: Final = 1_000_000
_INSTALLATIONS: Final = 4
"""The first fills uv's cache. The shortest of the others counts, because other work on the machine delays some."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What an installation takes."""

    name: str
    packages: int
    size_mb: float
    took_s: float


def measure(uv: str, wheel: Path, extra: str | None) -> Measured:
    """Install the wheel with an extra several times, and measure how long it takes if uv has the packages."""
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    with tempfile.TemporaryDirectory(prefix="extras-") as folder:
        took_s = []
        for _ in range(_INSTALLATIONS):
            subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True)
            began_s = time.monotonic()
            command = [uv, "pip", "install", "--quiet", "--link-mode", "copy", "--python", folder, wanted]
            subprocess.run(command, check=True)
            took_s.append(time.monotonic() - began_s)
        installed = next(Path(folder).glob("lib/python*/site-packages"))
        size = sum(path.stat().st_size for path in installed.rglob("*") if path.is_file() and not path.is_symlink())
        packages = len(list(installed.glob("*.dist-info")))
        if extra is None:
            python = Path(folder) / "bin" / "python"
            subprocess.run([python, "-m", "tools.import_all"], check=True, cwd=_TOP)
    return Measured(f"`{extra}`" if extra else "core", packages, size / _MB, min(took_s[1:]))


def table(measured: Iterable[Measured]) -> str:
    """Return the table as Markdown; the numbers of an extra include the core."""
    rows = [f"| {found.name} | {found.packages} | {found.size_mb:,.0f} | {found.took_s:.1f} |" for found in measured]
    return "\n".join(["| installed | packages | MB | seconds |", "| --- | --- | --- | --- |", *rows]) + "\n"


def replaced(page: str, block: str) -> str:
    """Return the page with the block between its two marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE.name} lacks the marks between which the table belongs")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def main(uv: str, folder: str) -> None:
    """Measure the only wheel in `folder`, and write the page."""
    (wheel,) = Path(folder).resolve().glob("*.whl")
    project = tomllib.loads((_TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    measured = [measure(uv, wheel, extra) for extra in (None, *project["optional-dependencies"])]
    block = table(measured)
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), block), encoding="utf-8")
    print(block, end="")


if __name__ == "__main__":
    main(*sys.argv[1:3])
