"""The checks of a release find what they must find (tools/release.py, tools/package_readme.py)."""

import re
import tomllib
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

from tools import check_wheel, release
from tools.package_readme import description

TOP = Path(__file__).parents[2]
PICTURE = "![A picture](pictures/a.svg)\n\n"
README = f"{PICTURE}See [the page `x`](docs/index.md#y), [Kafka](https://kafka.example) and [up](#z).\n"
SECTION = "## [Unreleased]\n\n{}\n\n## [0.2.0] - 2026-11-27\n\n- A change.\n"


def test_links_of_the_description_without_a_source() -> None:
    """Without the repository's URL, pictures and relative links are left out, and their text remains."""
    assert description(README, None, "0.2.0") == "See the page `x`, [Kafka](https://kafka.example) and [up](#z).\n"


def test_links_of_the_description_with_a_source() -> None:
    """With the repository's URL, they lead to the files of the version's tag."""
    text = description(README, "https://host.example/a/b/", "0.2.0")
    assert "![A picture](https://host.example/a/b/raw/v0.2.0/pictures/a.svg)" in text
    assert "[the page `x`](https://host.example/a/b/blob/v0.2.0/docs/index.md#y)" in text
    assert list(release.description_problems(text)) == []


def test_the_readme_has_no_relative_links_on_an_index() -> None:
    """What a package index shows has links that work there only."""
    text = description((TOP / "README.md").read_text(), None, "0.2.0")
    assert list(release.description_problems(text)) == []
    assert "](docs/" in (TOP / "README.md").read_text()


@pytest.mark.parametrize(
    ("changelog", "problem"),
    [
        (SECTION.format(""), ""),
        (SECTION.format("- Something else."), "has entries under [Unreleased]"),
        ("## [Unreleased]\n", "has no section '## [0.2.0] - DATE'"),
        ("## [0.2.0]\n", "has no section '## [0.2.0] - DATE'"),
    ],
)
def test_the_changelog_must_have_the_version(changelog: str, problem: str) -> None:
    """A dated section of the version is needed, and nothing may remain unreleased."""
    found = list(release.changelog_problems(changelog, "0.2.0"))
    assert len(found) == bool(problem)
    assert problem in "".join(found)


def test_a_draft_may_have_unreleased_entries() -> None:
    """In CI, changes after the last release are no problem."""
    assert list(release.changelog_problems(SECTION.format("- Something else."), "0.2.0", is_draft=True)) == []


def test_the_version_is_in_the_changelog_and_the_install_lines() -> None:
    """The version of pyproject.toml has a section in the changelog, and the pages name its wheel."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    assert re.search(rf"^## \[{re.escape(project['version'])}\] - ", (TOP / "CHANGELOG.md").read_text(), re.MULTILINE)
    wheels = {
        name
        for page in (TOP / "README.md", *TOP.glob("docs/**/*.md"))
        for name in re.findall(r"marshal_dagster-[\w.]+-py3-none-any\.whl", page.read_text())
    }
    assert wheels == {f"marshal_dagster-{project['version']}-py3-none-any.whl"}


def test_the_pythons_are_those_of_the_classifiers() -> None:
    """Each Python of the classifiers is tried, and none below `requires-python`."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    versions = release.python_versions(project)
    assert versions[0] == project["requires-python"].removeprefix(">=")
    assert len(versions) > 1


LICENCE = "marshal_dagster-0.2.0.dist-info/licenses/LICENSE"
PAGE = "marshal_dagster/timeline/page.css"


@pytest.mark.parametrize(
    ("left_out", "added", "problem"),
    [
        ("", "", []),
        (PAGE, "", [f"{PAGE} is missing"]),
        ("", "marshal_dagster/notes.txt", ["marshal_dagster/notes.txt does not belong in the wheel"]),
        ("", "tests/conftest.py", ["tests/conftest.py does not belong in the wheel"]),
        (LICENCE, "", ["the licence is missing"]),
    ],
)
def test_a_wheel_has_all_files_of_the_library_and_no_others(
    tmp_path: Path, left_out: str, added: str, problem: list[str]
) -> None:
    """Files that are no code must be there too, such as the style of a page."""
    names = {*check_wheel.library_files(), LICENCE, *filter(None, [added])} - {left_out}
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        for name in names:
            archive.writestr(name, "")
    assert check_wheel.problems(tmp_path / "a.whl") == problem
