"""The Java that PySpark would start."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from marshal_dagster.errors import ConfigurationError

OLDEST_JAVA = 17
_ANSWERS_WITHIN_S = 30.0
_ADVICE = f"install Java {OLDEST_JAVA} or newer and put it on PATH, or set JAVA_HOME to it"
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


def find_java(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the launcher that JAVA_HOME or PATH leads to; raises `ConfigurationError` if there is none."""
    home = environ.get("JAVA_HOME")
    if home:
        java = Path(home) / "bin" / "java"
        if os.access(java, os.X_OK):
            return java
        raise ConfigurationError(f"JAVA_HOME is {home}, but there is no {java} to run; {_ADVICE}")
    found = shutil.which("java", path=environ.get("PATH", ""))
    if found is None:
        raise ConfigurationError(f"no Java found (JAVA_HOME is not set and PATH has no `java`); {_ADVICE}")
    return Path(found)


def check_java(environ: Mapping[str, str] = os.environ) -> None:
    """Raise `ConfigurationError` unless the Java that PySpark would start is there and is 17 or newer."""
    java = find_java(environ)
    try:
        told = subprocess.run(
            [java, "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWERS_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{java} does not run ({error}); {_ADVICE}") from error
    version = _VERSION.search(told.stderr + told.stdout)
    if version is None:
        raise ConfigurationError(f"{java} does not tell its version; {_ADVICE}")
    if int(version[1]) < OLDEST_JAVA:
        raise ConfigurationError(f"{java} is Java {version[1]}, too old for Spark 4.0; {_ADVICE}")
