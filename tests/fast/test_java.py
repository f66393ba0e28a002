"""Check which Java is found for Spark and Kafka, and the errors if none is suitable."""

from pathlib import Path

import pytest

from marshal_dagster._internal.java import find_java, java_environment
from marshal_dagster.errors import ConfigurationError


def fake_java(home: Path, says: str) -> Path:
    """Create `home`/bin/java, a script that prints `says` to its standard error, as Java does."""
    launcher = home / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{says}\nEND\n", encoding="utf-8")
    launcher.chmod(0o755)
    return launcher


@pytest.mark.parametrize(
    ("says", "version", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment', "17.0.15", 17),
        ('java version "21" 2023-09-19 LTS', "21", 21),
        ('openjdk version "25-ea" 2025-09-16', "25-ea", 25),
        ('Picked up JAVA_TOOL_OPTIONS: -Da="1"\nopenjdk version "18.0.2.1"', "18.0.2.1", 18),
    ],
)
def test_a_java_that_fits_is_found_with_its_version(tmp_path: Path, says: str, version: str, major: int) -> None:
    """Versions are read in all forms that Java prints."""
    launcher = fake_java(tmp_path, says)
    java = find_java({"JAVA_HOME": str(tmp_path), "PATH": ""})
    assert (java.executable, java.version, java.major) == (launcher, version, major)


def test_java_home_goes_before_path(tmp_path: Path) -> None:
    """JAVA_HOME is used even if PATH has another Java."""
    chosen = fake_java(tmp_path / "home", 'openjdk version "17.0.1"')
    other = fake_java(tmp_path / "other", 'openjdk version "21.0.1"')
    assert find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(other.parent)}).executable == chosen


@pytest.mark.parametrize("environ", [{}, {"JAVA_HOME": ""}])
def test_path_is_searched_without_java_home(tmp_path: Path, environ: dict[str, str]) -> None:
    """If JAVA_HOME is missing or empty, PATH is searched."""
    launcher = fake_java(tmp_path, 'openjdk version "17.0.1"')
    assert find_java({**environ, "PATH": f"{tmp_path}:{launcher.parent}"}).executable == launcher


@pytest.mark.parametrize(("version", "reported"), [("1.8.0_402", "1.8.0_402"), ("11.0.22", "11.0.22"), ("16", "16")])
def test_an_old_java_is_refused_by_version_and_path(tmp_path: Path, version: str, reported: str) -> None:
    """The error has the version found, its path, the required version and how to configure it."""
    launcher = fake_java(tmp_path, f'java version "{version}"')
    with pytest.raises(ConfigurationError) as refused:
        find_java({"JAVA_HOME": str(tmp_path)})
    assert str(refused.value) == (
        f"{launcher} is Java {reported}, but Kafka and Spark need 17 or newer; "
        "install Java 17 or newer and put it on PATH, or set JAVA_HOME to it"
    )


def test_no_java_at_all_is_one_line_with_the_cure(tmp_path: Path) -> None:
    """The one-line message mentions JAVA_HOME and PATH, and what to install."""
    with pytest.raises(
        ConfigurationError, match=r"^no Java found \(JAVA_HOME is not set .*; install Java 17 or newer .*$"
    ):
        find_java({"PATH": str(tmp_path)})


def test_a_java_home_without_java_is_named_and_not_passed_over(tmp_path: Path) -> None:
    """Spark would use JAVA_HOME, so a wrong JAVA_HOME is an error even if PATH has a Java."""
    good = fake_java(tmp_path / "good", 'openjdk version "17.0.1"')
    with pytest.raises(
        ConfigurationError, match=f"^JAVA_HOME is {tmp_path}, but {tmp_path}/bin/java is not an executable"
    ):
        find_java({"JAVA_HOME": str(tmp_path), "PATH": str(good.parent)})


def test_a_java_that_is_something_else_is_refused_with_its_words(tmp_path: Path) -> None:
    """A launcher that prints no version is refused, with its output."""
    fake_java(tmp_path, "The operation couldn't be completed. Unable to locate a Java Runtime.")
    with pytest.raises(ConfigurationError, match=r"it printed: The operation couldn't be completed\.") as refused:
        find_java({"JAVA_HOME": str(tmp_path)})
    assert "\n" not in str(refused.value)


def test_a_java_that_cannot_be_executed_is_refused(tmp_path: Path) -> None:
    """A launcher that the system cannot run causes this library's error, not a traceback."""
    launcher = fake_java(tmp_path, "")
    launcher.write_bytes(b"\x7fELF broken")
    with pytest.raises(ConfigurationError, match=r"bin/java does not run \("):
        find_java({"JAVA_HOME": str(tmp_path)})


def test_java_runs_in_a_locale_that_knows_all_letters() -> None:
    """The environment is passed on, with a UTF-8 locale in place of the user's."""
    assert java_environment({"LC_ALL": "C", "HOME": "/h"}) == {"LC_ALL": "C.UTF-8", "HOME": "/h"}
