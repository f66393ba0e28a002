"""Check the wheel and the sdist of a release, and install both into empty environments.

    python -m tools.release [--draft] UV FOLDER [VERSION ...]

`make release` builds both into FOLDER and calls this. Each VERSION is one of Python, such as 3.12 (default: those of
the classifiers in pyproject.toml). A Python that is not installed is reported and left out, except that at least one
must be there. With --draft the changelog may have entries under [Unreleased].

In each environment all modules are imported and the command line reports its version. Last, a part of the fast tests
runs from the files of the sdist.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from email import message_from_bytes
from pathlib import Path
from typing import Any, Final

from tests.platforms.environments import interpreter
from tools import check_wheel

_TOP: Final = Path(__file__).resolve().parents[1]
_NEEDED: Final = ("LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "tests/conftest.py", "tools/import_all.py")
"""Files that the sdist must contain, beside those of the library."""
_TESTS_OF_THE_SDIST: Final = (
    "tests/fast/test_docs.py",
    "tests/fast/test_assignment.py",
    "tests/fast/test_scenarios.py",
)
_VERSION_LINE: Final = re.compile(r"^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)


def changelog_problems(changelog: str, version: str, *, is_draft: bool = False) -> Iterator[str]:
    """Yield what is wrong with the changelog for a release of `version`; a draft may have unreleased entries."""
    dates = dict(_VERSION_LINE.findall(changelog))
    if not dates.get(version):
        yield f"CHANGELOG.md has no section '## [{version}] - DATE'"
    unreleased = changelog.partition("## [Unreleased]")[2].partition("\n## ")[0]
    if unreleased.strip() and not is_draft:
        yield f"CHANGELOG.md has entries under [Unreleased]: move them to [{version}]"


def description_problems(text: str) -> Iterator[str]:
    """Yield each relative link of the description, which leads nowhere on a package index."""
    for target in re.findall(r"\]\((?!https?:|#)([^)]+)\)", text):
        yield f"the description links to {target}, which a package index does not have"


def sdist_problems(sdist: Path, library: Iterable[str]) -> Iterator[str]:
    """Yield each file that is missing in `sdist`, and each that must not be in it."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    yield from (f"{name} is missing in {sdist.name}" for name in sorted({*library, *_NEEDED} - names))
    yield from (f"{name} does not belong in {sdist.name}" for name in sorted(names) if "__pycache__" in name)


def wheel_metadata(wheel: Path) -> tuple[str, str]:
    """Return the version and the description in the metadata of `wheel`."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(name))
    return metadata["Version"], str(metadata.get_payload())


def problems(wheel: Path, sdist: Path, version: str, *, is_draft: bool = False) -> list[str]:
    """Return a message for everything that is wrong with the two files."""
    found_version, description = wheel_metadata(wheel)
    found = [*check_wheel.problems(wheel), *description_problems(description)]
    if found_version != version:
        found.append(f"the wheel has version {found_version}, but pyproject.toml {version}")
    changelog = (_TOP / "CHANGELOG.md").read_text(encoding="utf-8")
    found += sdist_problems(sdist, check_wheel.library_files())
    return [*found, *changelog_problems(changelog, version, is_draft=is_draft)]


def python_versions(project: Mapping[str, Any]) -> list[str]:
    """Return the versions of Python in the classifiers."""
    return [found[1] for name in project["classifiers"] if (found := re.fullmatch(r".* :: Python :: (3\.\d+)", name))]


def try_installation(uv: str, python: str, package: Path, version: str) -> None:
    """Install a package into an empty environment, import all its modules, and run its command line."""
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        subprocess.run([uv, "venv", "--quiet", "--python", python, folder], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", folder, package], check=True)
        there = Path(folder) / "bin"
        # -I: nothing is imported from the checkout.
        subprocess.run([there / "python", "-I", _TOP / "tools" / "import_all.py"], check=True, cwd=folder)
        program: list[str | Path] = [there / "marshal-dagster", "--version"]
        reported = subprocess.run(program, check=True, capture_output=True, text=True, cwd=folder).stdout
    if version not in reported:
        raise RuntimeError(f"{package.name}: the command line reports {reported.strip()!r}, not {version}")


def run_tests_of(sdist: Path) -> None:
    """Run some fast tests from the files of the sdist, with the packages of this environment."""
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (unpacked,) = Path(folder).iterdir()
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *_TESTS_OF_THE_SDIST]
        subprocess.run(command, check=True, cwd=unpacked, env={**os.environ, "PYTHONPATH": str(unpacked)})


def main(arguments: Sequence[str]) -> int:
    """Check and install the wheel and the sdist. Returns 1 if something is wrong."""
    is_draft = "--draft" in arguments
    uv, folder, *wanted = (argument for argument in arguments if argument != "--draft")
    project = tomllib.loads((_TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project["version"]
    (wheel,), (sdist,) = (list(Path(folder).resolve().glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    found = problems(wheel, sdist, version, is_draft=is_draft)
    for problem in found:
        print(problem)
    if found:
        return 1
    pythons = {name: interpreter(name) for name in wanted or python_versions(project)}
    if not any(pythons.values()):
        print(f"none of the Pythons {', '.join(pythons)} is installed")
        return 1
    for name, python in pythons.items():
        if python is None:
            print(f"Python {name} is not installed: left out")
            continue
        for package in (wheel, sdist):
            try_installation(uv, python, package, version)
            print(f"{package.name} installs and starts on Python {name}")
    run_tests_of(sdist)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
