"""The folders of the user in which files are kept, by the XDG specification."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of what can be fetched again.

    That is MARSHAL_CACHE, else `marshal-dagster` in the user's cache folder.
    """
    return _folder(environ, "MARSHAL_CACHE", "XDG_CACHE_HOME", ".cache", "marshal-dagster")


def kafka_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the user's one Kafka cluster.

    That is MARSHAL_KAFKA_DIR, else `marshal-dagster/kafka` in the user's state folder. It does not depend on the
    working directory, so that `status` and `down` find what `up` started from elsewhere. It is not in the cache
    folder, because topics are data.
    """
    return _folder(environ, "MARSHAL_KAFKA_DIR", "XDG_STATE_HOME", ".local/state", "marshal-dagster/kafka")


def why_not_own(folder: Path) -> str | None:
    """Return why it is unsafe to write into `folder`; None if it is this user's own, or does not exist.

    In a folder that others may write into, they can put a link to a file of this user, which is then overwritten. The
    same holds for a folder of another user. Links in this user's own folder were made by this user.
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
    # The XDG specification has relative values ignored.
    return (users if users.is_absolute() else Path.home() / in_home) / ours
