"""Download of jars from a Maven repository, once, with the Ivy that PySpark ships.

Ivy downloads into a temporary folder beside the final one. The folder is renamed only after the download is complete
and a manifest of file names and sizes is written. So a folder with the final name was complete once, and the manifest
shows whether it was damaged later.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from marshal_dagster._internal.extras import Extra, require_extra
from marshal_dagster._internal.file_lock import locked
from marshal_dagster._internal.java import Java, java_environment
from marshal_dagster.errors import ConfigurationError, UnavailableError

DOWNLOAD_TIMEOUT_S: Final = 900.0

_MANIFEST: Final = "manifest.json"
_SETTINGS_VARIABLE: Final = "MARSHAL_IVY_SETTINGS"
_REASONS: Final = (
    "erver access error",
    "SERVER ERROR",
    "Host ",
    "invalid sha1",
    "Exception",
    "not found",
    "unresolved dependency",
    "download failed",
    "FAILED",
)
"""Texts that mark the line of Ivy's output that explains a failure, the most precise first."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class JarSet:
    """Jars that are downloaded together, and the folder that they are stored in."""

    title: str
    """The name of the set in messages."""
    megabytes: int
    """The size of the download, for messages."""
    coordinates: tuple[str, ...]
    """Maven coordinates, group:name:version or group:name:version:classifier. Their dependencies are downloaded too."""
    folder: Path
    """The final folder; the jars are in its subfolder `jars`."""
    excludes: tuple[str, ...] = ()
    """Dependencies that are not downloaded, as group:name."""
    required: frozenset[str] = frozenset()
    """Names of the files that a complete set has."""

    def jars(self) -> tuple[Path, ...]:
        """Return the paths of the downloaded jars; an empty tuple if any is missing or damaged."""
        return () if self._damage() else tuple(self.folder / "jars" / name for name in sorted(self._manifest()))

    def download(self, java: Java, report: Report | None, timeout_s: float = DOWNLOAD_TIMEOUT_S) -> tuple[Path, ...]:
        """Return the paths of the jars; download them first if they are missing or damaged.

        Several processes may call this at once: one downloads, the others wait. The environment variable
        MARSHAL_IVY_SETTINGS may name an Ivy settings file, for example to use a Maven mirror.

        Args:
            java: The Java that runs Ivy.
            report: Called with one line when a download starts, with the reason.
            timeout_s: How many seconds to wait for another process, and then for Ivy.

        Raises:
            UnavailableError: The jars could not be downloaded within `timeout_s`.
            ConfigurationError: PySpark, whose Ivy is needed, is not installed.
        """
        jars = self.jars()
        if jars:
            return jars
        try:
            with locked(self.folder.with_name(f"{self.folder.name}.lock"), timeout_s):
                damage = self._damage()
                if damage:
                    self._renew(damage, java, report, timeout_s)
                return self.jars()
        except TimeoutError as error:
            raise UnavailableError(
                f"another process has been fetching {self.title} for {timeout_s:g} s ({error}); wait for it, or stop it"
            ) from error
        except OSError as error:
            raise UnavailableError(
                f"{self.title} cannot be stored in {self.folder} ({error}); fix that, or set MARSHAL_CACHE to another "
                "folder"
            ) from error

    def _damage(self) -> str | None:
        """Return a short text on the first difference between folder and manifest; None if the folder is complete."""
        manifest = self._manifest()
        if not manifest or not manifest.keys() >= self.required:
            return "its manifest is missing or incomplete"
        for name, size_bytes in manifest.items():
            jar = self.folder / "jars" / name
            found_bytes = jar.stat().st_size if jar.is_file() else None
            if found_bytes is None:
                return f"{name} is missing"
            if found_bytes != size_bytes:
                return f"{name} has {found_bytes} bytes instead of {size_bytes}"
        return None

    def _manifest(self) -> dict[str, int]:
        try:
            entries = json.loads((self.folder / _MANIFEST).read_text(encoding="utf-8"))["jars"]
            return {str(name): int(size_bytes) for name, size_bytes in entries.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _renew(self, damage: str, java: Java, report: Report | None, timeout_s: float) -> None:
        if report is not None:
            why = f"{self.folder} is damaged ({damage}); " if self.folder.exists() else ""
            report(f"{why}fetching {self.title} ({self.megabytes} MB, once)")
        for failed in self.folder.parent.glob(f"{self.folder.name}.partial-*"):
            shutil.rmtree(failed, ignore_errors=True)
        # A new name each time: the Ivy of a killed process may still be writing to the previous folder.
        partial = Path(tempfile.mkdtemp(prefix=f"{self.folder.name}.partial-", dir=self.folder.parent))
        self._download_to(partial, java, timeout_s)
        shutil.rmtree(self.folder, ignore_errors=True)
        partial.chmod(0o755)
        partial.rename(self.folder)

    def _download_to(self, partial: Path, java: Java, timeout_s: float) -> None:
        (partial / "jars").mkdir()
        (partial / "ivy.xml").write_text(self._module(), encoding="utf-8")
        try:
            with _log(partial).open("wb") as output:
                done = subprocess.run(
                    self._command(partial, java),
                    env=java_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=timeout_s,
                    check=False,
                )
        except subprocess.TimeoutExpired as error:
            raise _failure(f"fetching {self.title} took more than {timeout_s:g} s", partial) from error
        if done.returncode != 0:
            reason = _reason(_log(partial)) or f"Ivy ended with exit code {done.returncode}"
            raise _failure(f"{self.title} could not be fetched ({reason})", partial)
        self._keep(partial)

    def _keep(self, partial: Path) -> None:
        jars = sorted((partial / "jars").glob("*.jar"))
        wrong = [f"{name} is missing" for name in sorted(self.required - {jar.name for jar in jars})]
        wrong += [f"{jar.name} is not a complete jar" for jar in jars if not zipfile.is_zipfile(jar)]
        if wrong or not jars:
            raise _failure(f"the download of {self.title} is incomplete ({(wrong or ['no jar'])[0]})", partial)
        # Ivy's own cache has a second copy of every jar.
        shutil.rmtree(partial / "ivy", ignore_errors=True)
        manifest = {"jars": {jar.name: jar.stat().st_size for jar in jars}}
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    def _command(self, partial: Path, java: Java) -> list[str]:
        own = partial / "ivy"
        settings = os.environ.get(_SETTINGS_VARIABLE)
        return [
            str(java.executable),
            f"-Divy.default.ivy.user.dir={own}",
            "-jar",
            str(_ivy()),
            *(("-settings", settings) if settings else ()),
            *("-cache", str(own)),
            *("-ivy", str(partial / "ivy.xml")),
            *("-confs", "default"),
            *("-types", "jar", "bundle"),
            *("-retrieve", str(partial / "jars" / "[artifact]-[revision](-[classifier]).[ext]")),
        ]

    def _module(self) -> str:
        from xml.sax.saxutils import quoteattr  # it imports an HTTP client

        classifiers: dict[tuple[str, ...], list[str]] = {}
        for coordinates in self.coordinates:
            *module, classifier = [*coordinates.split(":"), ""][:4]
            classifiers.setdefault(tuple(module), []).append(classifier)
        dependencies = "".join(
            f"<dependency org={quoteattr(group)} name={quoteattr(name)} rev={quoteattr(version)} "
            f'conf="default-&gt;default(compile)">{_artifacts(quoteattr(name), found)}</dependency>'
            for (group, name, version), found in classifiers.items()
        )
        unwanted = (map(quoteattr, coordinates.split(":")) for coordinates in self.excludes)
        excludes = "".join(f"<exclude org={group} module={name}/>" for group, name in unwanted)
        names = ' xmlns:m="http://ant.apache.org/ivy/maven"' if any(map(any, classifiers.values())) else ""
        return (
            f'<ivy-module version="2.0"{names}><info organisation="marshal" module="jars"/>'
            '<configurations><conf name="default"/></configurations>'
            f"<dependencies>{dependencies}{excludes}</dependencies></ivy-module>\n"
        )


def _artifacts(name: str, classifiers: Sequence[str]) -> str:
    """Return the artifacts of a module for Ivy; none if it is only the module's own jar."""
    from xml.sax.saxutils import quoteattr  # it imports an HTTP client

    if not any(classifiers):
        return ""
    named = (f" m:classifier={quoteattr(classifier)}" if classifier else "" for classifier in classifiers)
    return "".join(f'<artifact name={name} type="jar" ext="jar"{classifier}/>' for classifier in named)


def _ivy() -> Path:
    spec = importlib.util.find_spec("pyspark")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for jar in sorted(Path(place, "jars").glob("ivy-*.jar")):
            return jar
    require_extra(Extra.SPARK, "the download of jars, which PySpark's Ivy does,")
    raise ConfigurationError("this PySpark has no Ivy jar, which downloads jars: install it again")


def _log(partial: Path) -> Path:
    return partial / "ivy.log"


def _failure(what: str, partial: Path) -> UnavailableError:
    return UnavailableError(
        f"{what}; check the network and try again, or set {_SETTINGS_VARIABLE} to an Ivy settings file that names a "
        f"Maven mirror. Ivy's output: {_log(partial)}"
    )


def _reason(log: Path) -> str | None:
    """Return the line of Ivy's output that best explains the failure; None if there is no output."""
    lines = [line.strip(" \t:") for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    for reason in _REASONS:
        for line in lines:
            if reason in line:
                return line
    return next((line for line in reversed(lines) if line), None)
