"""Where things are kept: fetched jars in the user's cache folder, a cluster in the user's state folder."""

import os
from collections.abc import Mapping
from pathlib import Path


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of what can be fetched again.

    That is MARSHAL_CACHE, else `marshal-dagster` in the user's cache folder.
    """
    own = environ.get("MARSHAL_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    return _user_folder(environ, "XDG_CACHE_HOME", ".cache") / "marshal-dagster"


def default_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of the user's one cluster.

    That is MARSHAL_KAFKA_DIR, else `marshal-dagster/kafka` in the user's state folder. It does not depend on
    the working directory, so that `status` and `down` find what `up` started from elsewhere; and it is not in
    the cache folder, because topics are data.
    """
    own = environ.get("MARSHAL_KAFKA_DIR")
    if own:
        return Path(own).expanduser().absolute()
    return _user_folder(environ, "XDG_STATE_HOME", ".local/state") / "marshal-dagster" / "kafka"


def _user_folder(environ: Mapping[str, str], variable: str, fallback: str) -> Path:
    value = Path(environ.get(variable, ""))
    # The XDG specification has relative values ignored.
    return value if value.is_absolute() else Path.home() / fallback
