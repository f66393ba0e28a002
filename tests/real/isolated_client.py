"""A client of Dagster Pipes that starts its script in namespaces of its own (`isolated_script`)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import dagster as dg
import psutil
from dagster._core.pipes.context import PipesMessageHandler
from dagster._core.pipes.utils import extract_message_or_forward_to_stdout

from tests.conditions import wait_until
from tests.real.isolated_script import MESSAGES, IsolatedScript, kill

if TYPE_CHECKING:
    import subprocess


class LogReader(dg.PipesMessageReader):
    """Reads messages from the script's log after the script has ended, as clients of some platforms do."""

    handler: PipesMessageHandler

    @contextmanager
    def read_messages(self, handler: PipesMessageHandler) -> Iterator[Mapping[str, Any]]:
        """Let the script write its messages to its log."""
        self.handler = handler
        yield MESSAGES

    def no_messages_debug_text(self) -> str:
        """Return where messages were looked for."""
        return "in the script's log"


class IsolatedClient(dg.PipesClient):
    """A client of Pipes that starts a script in namespaces of its own."""

    def __init__(self, script: IsolatedScript, *, is_killed: bool = False) -> None:
        self.script, self.is_killed = script, is_killed
        self.variables: dict[str, str] = {}
        """The parameters of Pipes that the script got last."""

    def run(self, *, context: Any, extras: Any = None, **_: Any) -> dg.PipesClientCompletedInvocation:  # noqa: ANN401
        """Run the script. With `is_killed` it is killed when its JVM has started."""
        reader = LogReader()
        with dg.open_pipes_session(context, dg.PipesEnvContextInjector(), reader, extras) as session:
            self.variables = dict(session.get_bootstrap_env_vars())
            with self.script.running(self.variables) as process:
                if self.is_killed:
                    wait_until(lambda: process.poll() is not None or has_jvm(process), "the JVM has started")
                    kill(process)
                code = process.wait()
            for line in self.script.log.read_text().splitlines():
                extract_message_or_forward_to_stdout(reader.handler, line)
            if code != 0:
                raise ChildProcessError(f"the script ended with {code}: {self.script.log.read_text()}")
        return dg.PipesClientCompletedInvocation(session)


def has_jvm(process: "subprocess.Popen[bytes]") -> bool:
    """Return whether a script has started a JVM."""
    with suppress(psutil.NoSuchProcess):  # one may end meanwhile
        return any(each.name() == "java" for each in psutil.Process(process.pid).children(recursive=True))
    return False
