"""Pass a changed password to the clients that are connected with it, so that nothing restarts when a secret rotates.

One thread of the process looks at the password files every few seconds. A client uses the new password the next time
that it authenticates. `set_sasl_credentials` must not be called in a client's callback, which would end the process.
"""

import logging
import threading
import time
from typing import Any, Final
from weakref import WeakKeyDictionary

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.secret_text import secret_of

CHECKED_EVERY_S: Final = 2.0
"""How often the files are read."""

_LOG = logging.getLogger(__name__)
_lock = threading.Lock()
"""Held while a client gets a password, so that it is not closed at the same time."""
_watched: "WeakKeyDictionary[Any, tuple[KafkaConnection, str | None]]" = WeakKeyDictionary()
"""The clients whose password comes from a file, each with its connection and its present password."""
_thread: threading.Thread | None = None


def can_rotate(connection: KafkaConnection) -> bool:
    """Return whether clients of the connection can get another password while they are connected."""
    return connection.password_file is not None


def watch(client: Any, connection: KafkaConnection) -> None:  # noqa: ANN401 - a client of any kind
    """Pass the client each new password of the connection's file from now on."""
    global _thread  # noqa: PLW0603 - one thread for all clients of the process
    with _lock:
        _watched[client] = (connection, secret_of(vars(connection), "password"))
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="password rotation", daemon=True)
            _thread.start()


def forget(client: Any) -> None:  # noqa: ANN401 - a client of any kind
    """Stop watching for a client that is about to be closed. When this returns, it is not called any more."""
    with _lock:
        for watched in [watched for watched in _watched if watched is client]:
            del _watched[watched]


def rotate_all() -> None:
    """Read the password files, and give each changed password to its clients."""
    with _lock:
        for client, (connection, present) in list(_watched.items()):
            try:
                password = secret_of(vars(connection), "password")
                if password is None or password == present:
                    continue
                client.set_sasl_credentials(connection.username, password)
            except ConfigurationError as error:  # a file may be missing for a moment while it is replaced
                _LOG.warning("the present password stays in use: %s", error)
            else:
                _watched[client] = (connection, password)
                _LOG.info("a client of %s has the new password of its file", connection.bootstrap_servers)


def _run() -> None:
    global _thread  # noqa: PLW0603 - as above
    while True:
        time.sleep(CHECKED_EVERY_S)
        rotate_all()
        with _lock:
            if not _watched:
                _thread = None
                return
