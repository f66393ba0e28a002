"""Kafka's jars: fetched once by Maven coordinates, kept whole in the user's cache folder.

Ivy downloads into a folder beside the final one, which gets its name only when it is complete and has a
manifest of names and sizes. So what stands under the final name was whole once, and the manifest shows when
it no longer is.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from marshal_dagster.java import Java, java_environment

from .errors import DownloadFailed
from .locks import locked
from .places import cache_directory

KAFKA_VERSION = "4.3.1"
# Kafka's own jars bring this log4j-core and slf4j 1.7; what is missing is the binding between the two.
_LOG4J_VERSION = "2.25.4"
_NEEDED = (
    f"kafka_2.13-{KAFKA_VERSION}.jar",
    f"kafka-clients-{KAFKA_VERSION}.jar",
    f"log4j-slf4j-impl-{_LOG4J_VERSION}.jar",
)
_MODULE = f"""<ivy-module version="2.0">
  <info organisation="marshal" module="kafka"/>
  <configurations><conf name="default"/></configurations>
  <dependencies defaultconf="default->default">
    <dependency org="org.apache.kafka" name="kafka_2.13" rev="{KAFKA_VERSION}"/>
    <dependency org="org.apache.logging.log4j" name="log4j-slf4j-impl" rev="{_LOG4J_VERSION}"/>
  </dependencies>
</ivy-module>
"""
_MANIFEST = "manifest.json"
_SETTINGS_VARIABLE = "MARSHAL_IVY_SETTINGS"
# What Ivy says of a failure, most telling first.
_TELLING = ("erver access error", "Host ", "invalid sha1", "Exception", "not found", "FAILED")

Report = Callable[[str], None]


def ensure_jars(java: Java, *, report: Report | None = None, timeout_s: float = 900.0) -> tuple[Path, ...]:
    """Return Kafka's jars, after fetching them where they are missing or damaged (some 30 s and 44 MB, once).

    `report` is told, in one line, why a download starts. Several processes may call at once: one downloads,
    the others wait. The environment variable MARSHAL_IVY_SETTINGS may name an Ivy settings file, for a mirror
    of one's own.

    Raises:
        DownloadFailed: they could not be fetched within `timeout_s`; the message says why and what to try.
    """
    folder = cache_directory() / f"kafka-{KAFKA_VERSION}"
    if _damage(folder) is None:
        return _jars(folder)
    try:
        with locked(folder.with_name(f"{folder.name}.lock"), timeout_s):
            damage = _damage(folder)
            if damage is not None:
                _renew(folder, damage, java, report, timeout_s)
            return _jars(folder)
    except TimeoutError as error:
        raise DownloadFailed(
            f"another process has been fetching Kafka for {timeout_s:.0f} s ({error}); wait for it, or end it"
        ) from error
    except OSError as error:
        raise DownloadFailed(
            f"Kafka's jars cannot be kept in {folder} ({error}); mend that, or set MARSHAL_CACHE"
        ) from error


def _renew(folder: Path, damage: str, java: Java, report: Report | None, timeout_s: float) -> None:
    if report is not None:
        why = f"{folder} is damaged ({damage}); " if folder.exists() else ""
        report(f"{why}fetching Kafka {KAFKA_VERSION} (44 MB, once)")
    for left in folder.parent.glob(f"{folder.name}.partial-*"):
        shutil.rmtree(left, ignore_errors=True)
    # A name of its own each time: the Ivy of a fetcher that was killed may still be writing to the last one.
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    _download(partial, java, timeout_s)
    shutil.rmtree(folder, ignore_errors=True)
    partial.chmod(0o755)
    partial.rename(folder)


def _jars(folder: Path) -> tuple[Path, ...]:
    return tuple(folder / "jars" / name for name in sorted(_manifest(folder)))


def _damage(folder: Path) -> str | None:
    """Say in a few words what `folder` lacks by its manifest; None when it is whole."""
    manifest = _manifest(folder)
    if not manifest.keys() >= set(_NEEDED):
        return "its manifest is missing or not whole"
    for name, size_bytes in manifest.items():
        jar = folder / "jars" / name
        found_bytes = jar.stat().st_size if jar.is_file() else None
        if found_bytes is None:
            return f"{name} is missing"
        if found_bytes != size_bytes:
            return f"{name} has {found_bytes} bytes instead of {size_bytes}"
    return None


def _manifest(folder: Path) -> dict[str, int]:
    try:
        entries = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["jars"]
        return {str(name): int(size_bytes) for name, size_bytes in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _download(partial: Path, java: Java, timeout_s: float) -> None:
    (partial / "jars").mkdir()
    _run_ivy(partial, java, timeout_s)
    jars = sorted((partial / "jars").glob("*.jar"))
    wrong = [f"{name} is missing" for name in _NEEDED if not (partial / "jars" / name).is_file()]
    wrong += [f"{jar.name} is no whole jar" for jar in jars if not zipfile.is_zipfile(jar)]
    if wrong:
        raise DownloadFailed(_advise(f"the download of Kafka {KAFKA_VERSION} is not whole ({wrong[0]})", partial))
    # Ivy's own cache holds every jar a second time.
    shutil.rmtree(partial / "ivy", ignore_errors=True)
    manifest = {"jars": {jar.name: jar.stat().st_size for jar in jars}}
    (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _run_ivy(partial: Path, java: Java, timeout_s: float) -> None:
    log = _ivy_log(partial)
    try:
        with log.open("wb") as output:
            done = subprocess.run(
                _ivy_command(partial, java),
                env=java_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        message = _advise(f"fetching Kafka {KAFKA_VERSION} took more than {timeout_s:g} s", partial)
        raise DownloadFailed(message) from error
    if done.returncode != 0:
        reason = _telling_line(log) or f"Ivy ended with code {done.returncode}"
        raise DownloadFailed(_advise(f"Kafka {KAFKA_VERSION} could not be fetched ({reason})", partial))


def _ivy_command(partial: Path, java: Java) -> list[str]:
    module = partial / "ivy.xml"
    module.write_text(_MODULE.replace("->", "-&gt;"), encoding="utf-8")
    own = partial / "ivy"
    settings = os.environ.get(_SETTINGS_VARIABLE)
    return [
        str(java.executable),
        f"-Divy.default.ivy.user.dir={own}",
        "-jar",
        str(_ivy_jar()),
        *(("-settings", settings) if settings else ()),
        *("-cache", str(own)),
        *("-ivy", str(module)),
        *("-confs", "default"),
        *("-types", "jar", "bundle"),
        *("-retrieve", str(partial / "jars" / "[artifact]-[revision](-[classifier]).[ext]")),
    ]


def _ivy_jar() -> Path:
    spec = importlib.util.find_spec("pyspark")
    places = (spec.submodule_search_locations or []) if spec else []
    for place in places:
        for jar in sorted(Path(place, "jars").glob("ivy-*.jar")):
            return jar
    raise DownloadFailed(
        "Kafka is fetched by the Ivy that PySpark ships, and there is none; install pyspark into this environment"
    )


def _ivy_log(partial: Path) -> Path:
    return partial / "ivy.log"


def _advise(what: str, partial: Path) -> str:
    return (
        f"{what}; check the network and try again, or set {_SETTINGS_VARIABLE} to an Ivy settings file that "
        f"names a Maven mirror; all that Ivy said: {_ivy_log(partial)}"
    )


def _telling_line(log: Path) -> str | None:
    lines = [line.strip(" \t:") for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    for tell in _TELLING:
        for line in lines:
            if tell in line:
                return line
    return next((line for line in reversed(lines) if line), None)
