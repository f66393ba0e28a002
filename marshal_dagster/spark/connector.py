"""The Kafka connector's jars: fetched once, by Maven coordinates, with the Ivy that PySpark ships.

They are kept in the user's cache folder. Spark can fetch them itself at each start (`spark.jars.packages`); that costs
most of a second and forty lines of output every time, and two sessions that begin together in an empty cache may spoil
each other's download. So they are fetched here, under a lock, and a session is given the files.
"""

import errno
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.java import find_java

CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0"
"""Maven coordinates of the connector. Its version need not equal Spark's own within 4.0."""
EXCLUDES = ("org.apache.hadoop:hadoop-client-api", "org.apache.hadoop:hadoop-client-runtime")
"""What the connector asks for and PySpark already ships: 60 MB that are not fetched."""

_SETTINGS_VARIABLE = "MARSHAL_IVY_SETTINGS"
_MANIFEST = "manifest.json"
_POLL_S = 0.1
_TELLING = ("unresolved dependency", "Host ", "download failed", "SERVER ERROR", "Server access error", "Exception")

Report = Callable[[str], None]


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of what can be fetched again: MARSHAL_CACHE, else our own in the user's cache folder."""
    own = environ.get("MARSHAL_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    users = Path(environ.get("XDG_CACHE_HOME", ""))
    return (users if users.is_absolute() else Path.home() / ".cache") / "marshal-dagster"


def connector_jars(connector: str = CONNECTOR, folder: Path | None = None) -> tuple[Path, ...]:
    """Return the jars that `fetch_connector` has fetched, none if it has not or some are gone."""
    place = _place(connector, folder)
    try:
        sizes = json.loads((place / _MANIFEST).read_text(encoding="utf-8"))
        whole = all((place / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return ()
    return tuple(place / name for name in sorted(sizes)) if whole else ()


def fetch_connector(
    connector: str = CONNECTOR,
    *,
    folder: Path | None = None,
    report: Report | None = None,
    timeout_s: float = 900.0,
) -> tuple[Path, ...]:
    """Return the connector's jars, after fetching them where they are missing or damaged (10 s and 14 MB, once).

    They are kept in `folder`, by default one in the user's cache folder. Several processes may call at once: one
    fetches, the others wait. `report` is told when a download starts. MARSHAL_IVY_SETTINGS may name an Ivy settings
    file, for a mirror of one's own. Raises `UnavailableError` when they cannot be fetched within `timeout_s`, and
    `ConfigurationError` for coordinates that are none, or without a fitting Java.
    """
    jars = connector_jars(connector, folder)
    if jars:
        return jars
    place = _place(connector, folder)
    try:
        with _locked(place.with_name(f"{place.name}.lock"), timeout_s):
            jars = connector_jars(connector, folder)
            if not jars:
                if report is not None:
                    report(f"fetching {connector} (14 MB, once)")
                _fetch(connector, place, timeout_s)
            return jars or connector_jars(connector, folder)
    except OSError as error:
        raise UnavailableError(
            f"{connector} cannot be kept in {place} ({error}): mend that, or set MARSHAL_CACHE"
        ) from error


def fetch_beside(package: str, connector: str = CONNECTOR, *, folder: Path | None = None) -> tuple[Path, ...]:
    """Return the jars of another package of Spark's, fetched in the same way, less those that the connector has too.

    Spark refuses, loudly, a second jar of the same name. Raises as `fetch_connector` does.
    """
    ours = {jar.name for jar in fetch_connector(connector, folder=folder)}
    return tuple(jar for jar in fetch_connector(package, folder=folder) if jar.name not in ours)


def _place(connector: str, folder: Path | None) -> Path:
    parts = connector.split(":")
    if len(parts) != 3 or not all(part and not set(part) & set("/\\ \n\t") for part in parts):  # noqa: PLR2004
        raise ConfigurationError(f"connector: {connector!r}; give Maven coordinates, group:name:version")
    return (folder or cache_folder()) / "-".join(parts[1:])


def _fetch(connector: str, place: Path, timeout_s: float) -> None:
    # A name of its own each time: the Ivy of a fetcher that was killed may still be writing to the last one.
    partial = Path(tempfile.mkdtemp(prefix=f"{place.name}.partial-", dir=place.parent))
    try:
        _run_ivy(connector, partial, timeout_s)
        jars = sorted(partial.glob("*.jar"))
        if not jars or not all(map(zipfile.is_zipfile, jars)):
            raise UnavailableError(f"{connector} was fetched, but not whole: check the network and try again")
        sizes = {jar.name: jar.stat().st_size for jar in jars}
        (partial / _MANIFEST).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)
        partial.chmod(0o755)
        partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _run_ivy(connector: str, partial: Path, timeout_s: float) -> None:
    module = partial / "ivy.xml"
    module.write_text(_module(connector), encoding="utf-8")
    settings = os.environ.get(_SETTINGS_VARIABLE)
    work = partial / "ivy"
    command = [
        str(find_java().executable),
        f"-Divy.default.ivy.user.dir={work}",
        "-jar",
        str(_ivy()),
        *(("-settings", settings) if settings else ()),
        *("-cache", str(work)),
        *("-ivy", str(module)),
        *("-confs", "default"),
        *("-types", "jar", "bundle"),
        *("-retrieve", str(partial / "[artifact]-[revision](-[classifier]).[ext]")),
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(_advise(connector, f"no end within {timeout_s:g} s")) from error
    shutil.rmtree(work, ignore_errors=True)
    if done.returncode != 0:
        raise UnavailableError(_advise(connector, _telling_line(done.stdout)))


def _module(connector: str) -> str:
    from xml.sax.saxutils import quoteattr  # it imports an HTTP client

    group, name, version = map(quoteattr, connector.split(":"))
    excludes = "".join(
        f"<exclude org={quoteattr(each.split(':')[0])} module={quoteattr(each.split(':')[1])}/>" for each in EXCLUDES
    )
    return (
        '<ivy-module version="2.0"><info organisation="marshal" module="connector"/>'
        '<configurations><conf name="default"/></configurations><dependencies>'
        f'<dependency org={group} name={name} rev={version} conf="default-&gt;default(compile)"/>{excludes}'
        "</dependencies></ivy-module>\n"
    )


def _ivy() -> Path:
    spec = importlib.util.find_spec("pyspark")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for jar in sorted(Path(place, "jars").glob("ivy-*.jar")):
            return jar
    raise ConfigurationError(
        "the connector is fetched by the Ivy that PySpark ships, and there is none: install pyspark"
    )


def _advise(connector: str, reason: str) -> str:
    return (
        f"{connector} could not be fetched ({reason}): check the network and try again, or set {_SETTINGS_VARIABLE} to "
        "an Ivy settings file that names a Maven mirror"
    )


def _telling_line(output: str) -> str:
    lines = [line.strip(" \t:") for line in output.splitlines()]
    found = (line for tell in _TELLING for line in lines if tell in line)
    return next(found, next((line for line in reversed(lines) if line), "Ivy says nothing"))


@contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock on the file `path`; the kernel lets go of it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in {errno.EAGAIN, errno.EACCES}:
                    raise
            if time.monotonic() >= deadline:
                raise UnavailableError(f"another process has been fetching the connector for {timeout_s:g} s: end it")
            time.sleep(_POLL_S)
        yield
