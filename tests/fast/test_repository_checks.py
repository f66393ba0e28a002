"""The checks of the repository find what they must find."""

import re
import zipfile
from pathlib import Path

import pytest

from tools import check_tree, check_wheel

TOP = Path(__file__).parents[2]
MACHINE = re.compile("/made-up-machine/")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("notes.md", "see /made-up-machine/checkout", "path of this machine"),
        ("pip.conf", "https://mirror.example/repository/" + "simple/", "package registry"),
        ("setup.md", "from py" + "pi.org", "package registry"),
        ("requirements.lock", "--find-links wheels", "index line"),
        ("code.py", "<" * 7 + " HEAD", "conflict"),
        ("uv.lock", "", "make lock"),
        ("data.csv", "x" * (check_tree.LARGEST_KIB * 1024 + 1), "larger than"),
    ],
)
def test_what_must_not_be_committed_is_found(tmp_path: Path, name: str, text: str, reason: str) -> None:
    """A file that must not be committed causes one finding with the reason."""
    path = tmp_path / name
    path.write_text(text)
    assert [reason in found for _, found in check_tree.findings(path, MACHINE)] == [True]


def test_ordinary_text_gives_no_finding(tmp_path: Path) -> None:
    """Relative paths, temporary folders and ordinary addresses are allowed."""
    path = tmp_path / "notes.md"
    path.write_text("~/x /tmp/y $HOME/z https://example.org/simple-words marshal_dagster/protocol\n=======\n")
    assert list(check_tree.findings(path, MACHINE)) == []


def test_homes_and_the_checkouts_own_place_are_machine_paths(tmp_path: Path) -> None:
    """The checkout's folder and any home folder match. A path that only ends like one does not."""
    pattern = check_tree.machine_paths(tmp_path / "checkout")
    assert pattern.search(f"in {tmp_path}/checkout/file")
    assert pattern.search("in /ho" + "me/somebody/file")
    assert not pattern.search(f"in build{tmp_path}/checkout/file")


def _wheel(folder: Path, *names: str) -> Path:
    path = folder / "marshal_dagster-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in names:
            wheel.writestr(name, "")
    return path


def test_a_wheel_with_more_than_the_library_is_found(tmp_path: Path) -> None:
    """Tests in the wheel, a missing type marker and a missing licence are each reported."""
    library = [
        f"marshal_dagster/{path.name}" for path in Path(check_wheel.__file__).parents[1].glob("marshal_dagster/*.py")
    ]
    problems = check_wheel.problems(_wheel(tmp_path, *library, "tests/__init__.py"))
    assert "tests/__init__.py does not belong in the wheel" in problems
    assert "marshal_dagster/py.typed is missing" in problems
    assert "the licence is missing" in problems


def test_the_hooks_of_commits_run_each_check_of_make_lint() -> None:
    """CI runs the hooks only."""
    targets = re.search(r"^lint: (.*?) ##", (TOP / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    hooks = re.findall(r"entry: make --silent (\S+)", (TOP / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert targets is not None
    assert sorted(hooks) == sorted(targets[1].split())
