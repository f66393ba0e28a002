"""Check the package's public names, and which packages its import loads."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import marshal_dagster
from marshal_dagster import sinks

HEAVY = ("dagster", "dagster_pyspark", "confluent_kafka", "pyspark", "psycopg", "pandas", "pyarrow", "typer", "rich")


def _loaded_by(code: str) -> set[str]:
    """Return the heavy packages that a fresh interpreter has loaded after `code`."""
    reported = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*(set({HEAVY!r}) & sys.modules.keys()))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(reported.stdout.split())


def test_importing_the_package_alone_brings_nothing_heavy() -> None:
    """`import marshal_dagster` imports neither Dagster nor a Kafka client nor Spark."""
    assert _loaded_by("import marshal_dagster") == set()


@pytest.mark.slow
def test_a_process_that_only_claims_never_imports_dagster() -> None:
    """Code that only claims batches needs no Dagster, and no Spark until it uses a session."""
    assert _loaded_by("from marshal_dagster import BatchSession, BatchRequest, FileSink") == set()


@pytest.mark.thorough
def test_the_dagster_floor_brings_no_kafka_client_and_no_spark() -> None:
    """Building ops, jobs, sensors and resources imports Dagster, but no Kafka client and no Spark."""
    names = "ClaimerResource, build_set_position_job, build_stale_claim_sensor"
    assert _loaded_by(f"from marshal_dagster import {names}") == {"dagster"}


@pytest.mark.thorough
def test_all_public_names_bring_no_kafka_client_and_no_spark() -> None:
    """A code location that looks up each public name imports Dagster, but no client before it is needed."""
    assert _loaded_by("import marshal_dagster as m; [getattr(m, name) for name in m.__all__]") == {"dagster"}


@pytest.mark.parametrize("name", marshal_dagster.__all__)
def test_every_public_name_is_there(name: str) -> None:
    """Each name of `__all__` exists, has documentation, and is listed by `dir`."""
    assert getattr(marshal_dagster, name).__doc__
    assert name in dir(marshal_dagster)


def test_a_name_that_is_not_public_is_an_error() -> None:
    """An unknown name is an AttributeError that names it; nothing is imported."""
    name = "transitions"
    with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
        getattr(marshal_dagster, name)


@pytest.mark.parametrize("package", [marshal_dagster, sinks], ids=lambda package: package.__name__)
def test_type_checkers_see_each_public_name_and_no_other(package: ModuleType) -> None:
    """The imports for type checkers have the same names, of the same objects, as the mapping of public names."""
    tree = ast.parse(Path(str(package.__file__)).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names if alias.name == alias.asname}
    assert sorted(seen) == sorted(package.__all__)
    for name, module in seen.items():
        assert getattr(package, name) is getattr(import_module(str(module)), str(name))


@pytest.mark.thorough
def test_a_sink_does_not_load_the_others() -> None:
    """A run whose batches have one sink, or none, does not load the modules of the others."""
    program = (
        "import sys; from marshal_dagster import BatchRequest, FileSink; "
        "print(*[name for name in sys.modules if name.startswith('marshal_dagster.sinks.')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    packages = {name.split(".")[2] for name in done.stdout.split()}
    assert "files" in packages
    assert not packages & {"database", "delta", "iceberg", "kafka"}


SETTINGS = """
[mypy]
strict = true
follow_imports = skip
[mypy-marshal_dagster]
follow_imports = silent
"""


@pytest.mark.thorough
def test_a_misspelt_import_is_an_error_of_the_type_checker(tmp_path: Path) -> None:
    """The type checker reports a name that is not public, and accepts one that is.

    It reads the package's `__init__` alone, because to read all that this imports takes ten times as long.
    """
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text("from marshal_dagster import FileSink\n")
    wrong.write_text("from marshal_dagster import Filesink\n")
    top = Path(__file__).parents[2]
    settings = tmp_path / "mypy.ini"
    settings.write_text(
        "[mypy]\nstrict = true\nfollow_imports = skip\n[mypy-marshal_dagster]\nfollow_imports = silent\n"
    )
    options = ["--config-file", str(settings), f"--cache-dir={tmp_path / 'cache'}"]
    found = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(right), str(wrong)],
        cwd=top,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1
    errors = [line for line in found.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1, found.stdout
    assert "wrong.py:1" in errors[0]
    assert '"Filesink"' in errors[0]
