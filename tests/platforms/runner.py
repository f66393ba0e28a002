"""Runs the tests of a version in its environment, and returns the row of the result."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from marshal_dagster.spark.packages import SparkBuild, build_in
from tests.platforms.brokers import running_broker
from tests.platforms.environments import FOLDER, TOP, environment, installed_version, interpreter, pinned
from tests.platforms.results import PlatformRow
from tests.platforms.targets import Kind, Target
from tests.soak_results import ALL_CODE, code_version

BROKER_VARIABLE: Final = "MARSHAL_TEST_BROKER"
"""The environment variable with which the fixtures of `tests/real` use a broker that is running already."""
PREFIX: Final = "RUN_WITH"
"""The environment variable with a command that runs each pytest, such as `nice`."""
FILES: Final = "RUN_FILES"
"""The environment variable with the number of files of each such run (default: one)."""
AT_ONCE: Final = "RUN_AT_ONCE"
"""The environment variable with the number of such runs at once (default: one)."""
_NO_TESTS: Final = 5
_WITH_SPARK: Final = (Kind.SPARK, Kind.TUTORIAL)
_FREE: Final = {Kind.SPARK: ("pyspark", "py4j"), Kind.TUTORIAL: ("pyspark", "py4j"), Kind.DAGSTER: ("dagster",)}
"""The beginnings of the names of packages that a target chooses the versions of."""


class NotThereError(Exception):
    """What the version needs is not on this machine."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The result of one run of pytest."""

    passed: int
    failures: tuple[str, ...]
    seconds: float


def run(
    target: Target, *, is_short: bool = False, only: Sequence[str] = (), before: PlatformRow | None = None
) -> PlatformRow:
    """Run a version's tests.

    Args:
        target: The version.
        is_short: Whether to run only its short list.
        only: Tests that run instead.
        before: A row of the same code, whose files without failures do not run again.

    Returns:
        The row of the result.

    Raises:
        NotThereError: The machine lacks the interpreter.
    """
    wanted = only or (target.short if is_short and target.short else target.tests)
    kept = {file: Counts(**fields) for file, fields in (before.files if before else {}).items()}
    kept = {file: counts for file, counts in kept.items() if not counts.failures}
    tests = [*(test for test in wanted if test.partition("::")[0] not in kept), *target.selection]
    python = prepare(target)
    build = _spark_of(python)
    if target.kind is Kind.BROKER:
        with (
            tempfile.TemporaryDirectory(prefix="marshal-broker-") as folder,
            running_broker(target.version, Path(folder)) as servers,
        ):
            results = run_tests(python, tests, {BROKER_VARIABLE: servers})
        installed = target.version
    else:
        results = run_tests(python, tests, {})
        installed = _installed(target, python, build)
    results = kept | results
    counts = total(results.values())
    return PlatformRow(
        kind=target.kind,
        version=target.version,
        installed=installed,
        commit=code_version(ALL_CODE),
        passed=counts.passed,
        failed=len(counts.failures),
        seconds=round(counts.seconds, 1),
        scala=build.scala if build and target.kind in _WITH_SPARK else "",
        python=_python_version(python),
        is_short=is_short or bool(only),
        failures=counts.failures,
        left_out=target.not_tested,
        files={file: asdict(found) for file, found in results.items() if file},
    )


def prepare(target: Target) -> Path:
    """Return the interpreter that runs a version's tests; its environment is made first if it is missing.

    Raises:
        NotThereError: The machine lacks the interpreter.
    """
    if target.kind is Kind.BROKER:
        return Path(sys.executable)
    found = interpreter(target.python)
    if found is None:
        raise NotThereError(f"Python {target.python} was not found")
    lowest = pinned(TOP / "requirements-lowest.lock")["dagster"]
    requires = [requirement.format(lowest=lowest) for requirement in target.requires]
    free = _FREE.get(target.kind, ())
    return environment(
        f"{target.kind}-{target.version}", found, requires, without_extras=target.without_extras, free=free
    )


def run_tests(python: Path, tests: Sequence[str], variables: Mapping[str, str]) -> dict[str, Counts]:
    """Run pytest in an environment; its output goes to the terminal.

    With a command in `RUN_WITH`, each file of real tests is a run of its own, or `RUN_FILES` of them are.

    Returns:
        The result of each file if there were several runs, else that of all tests under the name of none.
    """
    if any(test.startswith("tests/fast") for test in tests):
        arguments = ("-n", os.environ.get("WORKERS", "auto"), "-W", "ignore::DeprecationWarning", *tests)
        return _run_pytest(python, arguments, variables)
    if PREFIX not in os.environ:
        return _run_pytest(python, tests, variables)
    options = tuple(tests[tests.index("-k") :]) if "-k" in tests else ()
    files: dict[str, list[str]] = {}
    for test in tests[: len(tests) - len(options)]:
        files.setdefault(test.partition("::")[0], []).append(test)

    def run_piece(piece: Sequence[str]) -> dict[str, Counts]:
        names = [name for file in piece for name in files[file]]
        return _run_pytest(python, (*names, *options), variables, piece)

    with ThreadPoolExecutor(int(os.environ.get(AT_ONCE, "1"))) as pool:
        found = pool.map(run_piece, batched(files, int(os.environ.get(FILES, "1"))))
        return {file: counts for results in found for file, counts in results.items()}


def batched(names: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    """Yield the names in pieces of a size; the last may be shorter. Python has such a function from 3.12 on."""
    given = iter(names)
    while piece := tuple(islice(given, size)):
        yield piece


def total(results: Iterable[Counts]) -> Counts:
    """Return the result of several runs together."""
    found = list(results)
    failures = tuple(name for counts in found for name in counts.failures)
    return Counts(sum(counts.passed for counts in found), failures, sum(counts.seconds for counts in found))


def _run_pytest(
    python: Path, arguments: Sequence[str], variables: Mapping[str, str], files: Sequence[str] = ("",)
) -> dict[str, Counts]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        report = Path(folder) / "tests.xml"
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(report), *arguments]
        environ = os.environ | {"PYTHONPATH": str(TOP), **variables}
        done = subprocess.run([*shlex.split(os.environ.get(PREFIX, "")), *command], cwd=TOP, env=environ, check=False)
        if done.returncode == _NO_TESTS:
            return dict.fromkeys(files, Counts(0, (), 0))
        if not report.exists():
            return {
                file: Counts(0, (f"{file or arguments[0]} ended with exit code {done.returncode}",), 0)
                for file in files
            }
        return {file: counts_in(report, file) for file in files}


def counts_in(report: Path, file: str = "") -> Counts:
    """Return the result that pytest wrote as JUnit XML, of all tests or of those of a file."""
    root = ET.parse(report).getroot()  # noqa: S314 - our own file
    module = file.removesuffix(".py").replace("/", ".")
    cases = [case for case in root.iter("testcase") if f"{case.get('classname')}.".startswith(module and f"{module}.")]
    seconds = sum(float(case.get("time", 0)) for case in cases)
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = tuple(dict.fromkeys(f"{case.get('classname')}.{case.get('name')}" for case in failed))
    return Counts(len(cases) - len(failed) - len(skipped), names, seconds)


def _spark_of(python: Path) -> SparkBuild | None:
    homes = (python.parent.parent / "lib").glob("python*/site-packages/pyspark")
    return next(filter(None, map(build_in, homes)), None)


def _installed(target: Target, python: Path, build: SparkBuild | None) -> str:
    if target.kind in _WITH_SPARK:
        return build.release if build else "unknown"
    return installed_version(python, "dagster") if target.kind is Kind.DAGSTER else _python_version(python)


def _python_version(python: Path) -> str:
    code = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def remove_environment(target: Target) -> None:
    """Remove the environment of a version."""
    shutil.rmtree(FOLDER / f"{target.kind}-{target.version}", ignore_errors=True)
    (FOLDER / f"{target.kind}-{target.version}.ready").unlink(missing_ok=True)
