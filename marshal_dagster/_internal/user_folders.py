"""The cache and state folders of the current user, by the XDG Base Directory specification."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for files that can be downloaded again, such as jars.

    It is MARSHAL_CACHE or, if that is not set, `marshal-dagster` in the user's cache folder.
    """
    return _folder(environ, "MARSHAL_CACHE", "XDG_CACHE_HOME", ".cache", "marshal-dagster")


def kafka_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the default folder of the local Kafka cluster.

    It is MARSHAL_KAFKA_DIR or, if that is not set, `marshal-dagster/kafka` in the user's state folder. It does
    not depend on the working directory, so that `status` and `down` find what `up` started from elsewhere. It is not in
    the cache folder, because topics are data.
    """
    return _folder(environ, "MARSHAL_KAFKA_DIR", "XDG_STATE_HOME", ".local/state", "marshal-dagster/kafka")


def why_not_own(folder: Path) -> str | None:
    """Return why it is unsafe to write into `folder`; None if it belongs to this user only, or does not exist.

    If others own the folder or can write into it, they can put a link there to a file of this user. A write would then
    overwrite that file. Links in this user's own folder were created by this user.
    """
    try:
        found = folder.stat()
    except FileNotFoundError:
        return f"{folder} is a link to nothing" if folder.is_symlink() else None
    if found.st_uid != os.geteuid():
        return f"{folder} belongs to another user"
    if found.st_mode & stat.S_IWOTH:
        return f"all users may write into {folder}"
    return None


def _folder(environ: Mapping[str, str], own: str, xdg: str, in_home: str, ours: str) -> Path:
    named = environ.get(own)
    if named:
        return Path(named).expanduser().absolute()
    users = Path(environ.get(xdg, ""))
    # The XDG specification requires relative values to be ignored.
    return (users if users.is_absolute() else Path.home() / in_home) / ours
