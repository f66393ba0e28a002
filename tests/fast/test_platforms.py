"""The versions that `tests.platforms` tests, its results, and the page that is written from them."""

import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from marshal_dagster.spark.packages import SparkBuild, kafka_package
from tests.platforms import environments, page, results, runner, targets
from tests.platforms.results import PlatformRow, newest_rows
from tests.platforms.targets import TARGETS, Kind, targets_of
from tests.soak_results import add_row

ROW = PlatformRow("spark", "3.5", "3.5.9", "abc", 8, 0, 61.7, "2.12", "3.11.7", left_out={"Spark Connect": "it is old"})


def test_the_page_and_the_rows_agree() -> None:
    """The page is what `make docs-platforms` writes from the results."""
    assert page.PAGE.read_text() == page.render(newest_rows())


def test_each_tested_spark_has_a_connector() -> None:
    """Each Spark in the list of targets has known jars."""
    for target in targets_of(Kind.SPARK):
        assert kafka_package(SparkBuild(target.version, "2.12" if target.version == "3.5" else "2.13"))


def test_each_test_of_a_version_exists() -> None:
    """The files and functions that the targets name are there."""
    for target in TARGETS:
        for name in {*target.tests, *target.short}:
            path, _, function = name.partition("::")
            if path.startswith("tests/"):
                assert (environments.TOP / path).exists(), name
                assert not function or f" {function}" in (environments.TOP / path).read_text(), name


def test_a_version_without_a_package_leaves_out_the_tests_that_need_it() -> None:
    """Delta Lake has no version for Spark 4.3. The row names the sink and the reason, and its other tests run."""
    found = {target.version: target for target in targets_of(Kind.SPARK)}
    assert found["4.0"].selection == ()
    assert found["4.1"].selection == ("-k", "not (delta)")
    assert found["4.2"].selection == ("-k", "not (delta)")
    assert found["4.3"].selection == ("-k", "not (delta)")
    assert found["4.3"].not_tested == {"the sink for Delta Lake": "no version for Spark 4.3 is known"}
    assert found["3.5"].selection == ("-k", "not (variants)")
    assert found["3.5"].not_tested.keys() == {"variants", "Spark Connect"}


def test_the_tutorial_runs_on_the_oldest_and_the_newest_pair() -> None:
    """Each target of the tutorial has its own Python, and no extra that its Spark lacks."""
    spark = {target.version: target for target in targets_of(Kind.SPARK)}
    found = [(target.requires, target.python) for target in targets_of(Kind.TUTORIAL)]
    assert found == [(("pyspark==3.5.*",), "3.11"), (("pyspark==4.2.*",), "3.13")]
    assert targets_of(Kind.TUTORIAL)[0].without_extras == spark["3.5"].without_extras


def test_the_newest_row_of_a_version_counts(tmp_path: Path) -> None:
    """A later row replaces an earlier one, but a short run does not replace a whole run of the same code."""
    file = tmp_path / "rows.jsonl"
    add_row(file, asdict(ROW))
    add_row(file, asdict(replace(ROW, is_short=True, passed=2)))
    assert newest_rows(file) == {("spark", "3.5"): ROW}
    other = replace(ROW, commit="def", is_short=True, failed=1, failures=("tests.a",))
    add_row(file, asdict(other))
    assert newest_rows(file) == {("spark", "3.5"): other}


def test_the_page_shows_what_failed_what_was_left_out_and_what_did_not_run() -> None:
    """A version without a row is `not run`."""
    text = page.render({("spark", "3.5"): replace(ROW, failed=1, failures=("tests.real.a",))})
    assert "| 3.5 | 1 failed | 9 | 62 | Spark 3.5.9, Scala 2.12, Python 3.11.7 | `abc` |" in text
    assert "| 4.2 | not run | | | | |" in text
    assert "- 3.5: without Spark Connect, because it is old." in text
    assert "- 3.5: `tests.real.a` failed." in text


def test_failed_and_skipped_tests_are_counted(tmp_path: Path) -> None:
    """A test with an error in its setup counts as failed, a skipped one not at all."""
    report = tmp_path / "tests.xml"
    cases = "".join(
        f"<testcase classname='{file}' name='{name}' time='0.5'>{result}</testcase>"
        for file, name, result in (
            ("a.b", "c", ""),
            ("a.b", "d", "<failure/>"),
            ("a.b.Rules", "e", "<error/>"),
            ("a.b", "f", "<skipped/>"),
            ("a.bc", "g", "<failure/>"),
        )
    )
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert runner.counts_in(report) == runner.Counts(1, ("a.b.d", "a.b.Rules.e", "a.bc.g"), 2.5)
    assert runner.counts_in(report, "a/b.py") == runner.Counts(1, ("a.b.d", "a.b.Rules.e"), 2.0)


def test_several_files_may_be_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file has its own result, so that only those with failures run again."""
    ran: list[list[str]] = []

    def run_pytest(_: Path, tests: list[str], __: object, files: tuple[str, ...]) -> dict[str, runner.Counts]:
        ran.append(list(tests))
        return dict.fromkeys(files, runner.Counts(1, (), 1.0))

    monkeypatch.setattr(runner, "_run_pytest", run_pytest)
    monkeypatch.setenv(runner.PREFIX, "nice")
    monkeypatch.setenv(runner.FILES, "2")
    found = runner.run_tests(Path("python"), ["a.py", "b.py::c", "b.py::d", "e.py", "-k", "not f"], {})
    assert ran == [["a.py", "b.py::c", "b.py::d", "-k", "not f"], ["e.py", "-k", "not f"]]
    assert found.keys() == {"a.py", "b.py", "e.py"}


def test_the_locks_versions_are_read(tmp_path: Path) -> None:
    """Extras, hashes and markers of a lock are left out."""
    lock = tmp_path / "a.lock"
    lock.write_text("a-b[c]==1.2 \\\n    --hash=sha256:0\nd==3 ; sys_platform == 'linux' \\\n# e==4\n")
    assert environments.pinned(lock) == {"a-b": "1.2", "d": "3"}
    assert "pyspark" in environments.pinned(environments.TOP / "requirements.lock")


def test_only_files_with_failures_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row joins their results with those of the files that did not fail."""
    ran: list[str] = []

    def run_tests(_: Path, tests: list[str], __: object) -> dict[str, runner.Counts]:
        ran.extend(tests)
        return {"tests/real/test_decoding.py": runner.Counts(34, (), 40.0)}

    for name in ("run_tests", "prepare", "_spark_of", "_installed", "_python_version"):
        monkeypatch.setattr(runner, name, run_tests if name == "run_tests" else lambda *_: "")
    (target,) = targets_of(Kind.SPARK, ["4.0"])
    target = replace(target, tests=("tests/real/test_decoding.py", "tests/real/test_spark_reader.py::test_a"))
    files = {
        "tests/real/test_decoding.py": asdict(runner.Counts(33, ("a.b",), 50.0)),
        "tests/real/test_spark_reader.py": asdict(runner.Counts(1, (), 2.0)),
    }
    row = runner.run(target, before=replace(ROW, files=files))
    assert ran == ["tests/real/test_decoding.py"]
    assert (row.passed, row.failed, row.seconds) == (35, 0, 42.0)


def test_an_interpreter_that_is_missing_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is reported as not run, and the others still run."""
    monkeypatch.setattr(runner, "interpreter", lambda _: None)
    with pytest.raises(runner.NotThereError, match=r"Python 3\.12 was not found"):
        runner.prepare(targets_of(Kind.PYTHON, ["3.12"])[0])


def test_a_version_that_is_no_target_is_refused() -> None:
    """The message lists the known versions."""
    with pytest.raises(SystemExit, match=r"not a version of spark: 9\.9; known are 3\.5"):
        targets.targets_of(Kind.SPARK, ["9.9"])


def test_the_extras_left_out_are_extras() -> None:
    """An extra that a version cannot have is one of the wheel's."""
    project = tomllib.loads((environments.TOP / "pyproject.toml").read_text())["project"]
    for target in TARGETS:
        assert target.without_extras <= project["optional-dependencies"].keys()
    assert results.RESULTS.parent.is_dir()
