"""A secret for Spark's tasks is in two shares, neither of which contains it."""

import pickle
from pathlib import Path
from typing import Any

import pyspark
import pytest

from marshal_dagster.spark.task_secret import TaskSecret, task_secret

SECRET = b"correct horse battery staple"


class Broadcast:
    """The value that Spark would hand to tasks, and whether it was destroyed."""

    def __init__(self, value: bytes) -> None:
        self.value, self.is_destroyed = value, False

    def destroy(self) -> None:
        """Delete the value."""
        self.is_destroyed = True


class Session:
    """A session of this process, which keeps its broadcasts."""

    def __init__(self) -> None:
        self.sparkContext = self
        self.made: list[Broadcast] = []

    def broadcast(self, value: bytes) -> Broadcast:
        """Make a broadcast."""
        self.made.append(Broadcast(value))
        return self.made[-1]


def test_a_broadcast_has_one_share_and_the_function_the_other() -> None:
    """Neither contains a part of the secret, and together they give it. The broadcast is deleted afterwards."""
    session: Any = Session()
    with task_secret(session, SECRET) as secret:
        (broadcast,) = session.made
        assert secret.value() == SECRET
        shown = pickle.dumps(TaskSecret(secret._share, "another process")) + broadcast.value + repr(secret).encode()
        assert not [word for word in SECRET.split() if word in shown]
    assert broadcast.is_destroyed


def test_the_broadcast_is_deleted_after_an_error_but_not_after_an_interrupt() -> None:
    """After an interrupt the JVM would answer only when its current job has ended."""
    session: Any = Session()
    with pytest.raises(ValueError, match="x"), task_secret(session, SECRET):
        raise ValueError("x")
    with pytest.raises(KeyboardInterrupt), task_secret(session, SECRET):
        raise KeyboardInterrupt
    assert [broadcast.is_destroyed for broadcast in session.made] == [True, False]


def test_a_connect_server_gets_a_file_with_one_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file is an artifact of the session, which tasks find by its name. No copy is left on this machine."""
    given: list[Path] = []

    def add(path: str, *, file: bool) -> None:
        assert file
        (tmp_path / Path(path).name).write_bytes(Path(path).read_bytes())
        given.append(Path(path))

    session: Any = Session()
    session.addArtifacts = add
    monkeypatch.setattr("marshal_dagster.spark.connect.is_connect", lambda _: True)
    monkeypatch.setattr(pyspark.SparkFiles, "get", lambda name: str(tmp_path / name))
    with task_secret(session, SECRET) as secret:
        assert secret.value() == SECRET
    assert not given[0].exists()
    assert not [word for word in SECRET.split() if word in (tmp_path / given[0].name).read_bytes()]
    assert session.made == []


def test_a_share_may_begin_with_zeros() -> None:
    """The secret has its length again."""
    session: Any = Session()
    with task_secret(session, bytes(20)) as secret:
        assert secret.value() == bytes(20)
