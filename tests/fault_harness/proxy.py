"""A TCP proxy between a member and the brokers that can cut, slow down or silence connections one way or both.

A link is one member's way to all brokers. It forwards bytes and does not know Kafka's protocol. The brokers have a
listener for each link, which advertises the link's own ports.
"""

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from marshal_dagster._internal.ports import HOST

_CHUNK_BYTES = 65_536
_START_WITHIN_S = 10.0


class Way(StrEnum):
    """The direction of bytes."""

    TO_BROKER = "to broker"
    TO_MEMBER = "to member"


@dataclass(frozen=True, slots=True)
class LinkState:
    """The state of a link: `is_cut` resets and refuses connections; in a `held` direction no bytes pass."""

    is_cut: bool = False
    delay_s: float = 0.0
    held: frozenset[Way] = frozenset()


HEALTHY = LinkState()


@dataclass(slots=True, eq=False)
class Link:
    """One member's way to the brokers; `ports` are the ports of the brokers.

    Bytes that were held arrive late, once the link is healthy again. Without `delivers_late` they never arrive, because
    their connection is reset.
    """

    state: LinkState = HEALTHY
    delivers_late: bool = True
    ports: dict[int, int] = field(default_factory=dict)
    connections: set[asyncio.StreamWriter] = field(default_factory=set)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    held_back: int = 0
    """Chunks that wait for another state of the link."""

    def refuses(self) -> bool:
        """Return whether connections are refused."""
        return self.state.is_cut

    async def pass_on(self, way: Way) -> bool:
        """Wait until a chunk may pass; return False if its connection must end instead."""
        was_held = False
        async with self.changed:
            while way in self.state.held:
                was_held = True
                self.held_back += 1
                try:
                    await self.changed.wait()
                finally:
                    self.held_back -= 1
        if was_held and not self.delivers_late:
            return False
        if self.state.delay_s:
            await asyncio.sleep(self.state.delay_s)
        return True

    def reset_all(self) -> None:
        """Reset all connections."""
        for writer in self.connections:
            writer.transport.abort()


class Proxy:
    """Links from free ports of this machine to brokers, in a separate thread."""

    def __init__(self, targets: Sequence[Mapping[int, int]]) -> None:
        """Prepare a link for each element of `targets`, which maps brokers to their ports."""
        self._targets = targets
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._servers: list[asyncio.Server] = []
        self.links: list[Link] = []

    def start(self) -> None:
        """Start to listen."""
        self._thread.start()
        self._call(self._listen())

    def stop(self) -> None:
        """End all connections."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_WITHIN_S)
        self._loop.close()

    def change(self, link: int, state: LinkState, *, delivers_late: bool = True) -> None:
        """Change a link's state, also for open connections."""
        self._call(self._change(self.links[link], state, delivers_late))

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_WITHIN_S)

    async def _change(self, link: Link, state: LinkState, delivers_late: bool) -> None:
        async with link.changed:
            link.state, link.delivers_late = state, delivers_late
            link.changed.notify_all()
        if state.is_cut:
            link.reset_all()

    async def _listen(self) -> None:
        for brokers in self._targets:
            link = Link()
            self.links.append(link)
            for broker, port in brokers.items():
                server = await asyncio.start_server(_connector(link, port), HOST, 0)
                self._servers.append(server)
                link.ports[broker] = server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for link in self.links:
            link.reset_all()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def _connector(link: Link, port: int) -> Any:  # noqa: ANN401 - asyncio names no type for it
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if link.refuses():
            writer.transport.abort()
            return
        try:
            broker_reader, broker_writer = await asyncio.open_connection(HOST, port)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        both = {writer, broker_writer}
        if link.refuses():  # the state changed during the connection to the broker
            for each in both:
                each.transport.abort()
            return
        link.connections |= both
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(_pump(link, Way.TO_BROKER, reader, broker_writer))
                pumps.create_task(_pump(link, Way.TO_MEMBER, broker_reader, writer))
        except* (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            link.connections -= both
            for each in both:
                each.transport.abort()

    return connect


async def _pump(link: Link, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward until one side closes; then the other side is closed too."""
    while True:
        chunk = await reader.read(_CHUNK_BYTES)
        if not await link.pass_on(way) or not chunk:
            raise EOFError
        writer.write(chunk)
        with suppress(ConnectionError):
            await writer.drain()
