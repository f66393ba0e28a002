"""The Java runtime for Spark 4 and for the local Kafka 4 of `devkafka`: where it is, and whether it is new enough."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from marshal_dagster.errors import ConfigurationError

OLDEST_JAVA = 17
_ADVICE = f"install Java {OLDEST_JAVA} or newer and put it on PATH, or set JAVA_HOME to it"
# Java 8 and older report versions as 1.8.
_VERSION = re.compile(r'version "(?P<version>(?:1\.)?(?P<major>\d+)[^"]*)"')
_ANSWER_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime: the path of its `java`, and its version as `java -version` reports it, such as `17.0.15`."""

    executable: Path
    version: str
    major: int


def find_java(environ: Mapping[str, str] = os.environ) -> Java:
    """Return the Java of JAVA_HOME or, if that is not set, the first one on PATH.

    A JAVA_HOME without `bin/java` is an error even if there is a Java on PATH, because Spark uses JAVA_HOME and fails.

    Raises `ConfigurationError` if there is no Java, it does not run, or it is older than 17.
    """
    executable = _locate(environ)
    output = _ask_version(executable)
    match = _VERSION.search(output)
    if match is None:
        printed = output.strip().partition("\n")[0] or "nothing"
        raise ConfigurationError(f"{executable} reports no Java version (it printed: {printed}); {_ADVICE}")
    java = Java(executable, match["version"], int(match["major"]))
    if java.major < OLDEST_JAVA:
        raise ConfigurationError(
            f"{executable} is Java {java.version}, but Kafka and Spark need {OLDEST_JAVA} or newer; {_ADVICE}"
        )
    return java


def java_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a Java process: `environ` with a UTF-8 locale, so that Java can open any file name."""
    return {**environ, "LC_ALL": "C.UTF-8"}


def _locate(environ: Mapping[str, str]) -> Path:
    home = environ.get("JAVA_HOME")
    if home:
        executable = Path(home) / "bin" / "java"
        if os.access(executable, os.X_OK):
            return executable
        raise ConfigurationError(f"JAVA_HOME is {home}, but {executable} is not an executable file; {_ADVICE}")
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path is None:
        raise ConfigurationError(f"no Java found (JAVA_HOME is not set and PATH has no `java`); {_ADVICE}")
    return Path(on_path)


def _ask_version(executable: Path) -> str:
    try:
        done = subprocess.run(
            [executable, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{executable} does not run ({error}); {_ADVICE}") from error
    return done.stderr + done.stdout
