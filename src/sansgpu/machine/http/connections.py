"""Bounds how many connections are open and how long each may take, so that no client keeps the others out."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from sansgpu.events.progress import Warn

SILENCE_SECONDS = 60  # time in which a client must confirm received data; its machine or network may be down
PROBES = 3  # packets without a reply before a connection counts as lost


class BoundedConnection(H11Protocol):
    """A connection that is closed if its next request is not complete in time.

    If `limit` connections are open, the one that has waited longest for the rest of its request is closed. If all
    others are being answered, `busy` answers a new one. uvicorn's limit_concurrency would count closed ones for a
    while.
    """

    _deadline: asyncio.TimerHandle | None = None  # set while the client has to send something

    def __init__(self, *arguments: Any, limit: int, seconds: float, busy: ASGIApp, warn: Warn, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limit, self._seconds, self._busy, self._warn = limit, seconds, busy, warn

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self._limit:
            self._warn(f"{self._limit:,} connections are open; those that do not complete a request are closed")
            if not self._close_oldest():
                self.app = self._busy

    def _close_oldest(self) -> bool:
        """Closes the other connection that has waited longest. Returns False if none is waiting."""
        waiting = {
            one: one._deadline.when()
            for one in self.connections
            if isinstance(one, BoundedConnection) and one._deadline is not None and one is not self
        }
        if not waiting:
            return False
        oldest = min(waiting, key=waiting.__getitem__)
        oldest.transport.abort()
        self.connections.discard(oldest)  # it is removed only later, and would be closed again for the next one
        return True

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def _watch(self) -> None:
        if self.transport.is_closing() or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._seconds, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def detect_lost_clients(listener: socket.socket) -> None:
    """Makes the system close connections whose clients have vanished without closing them, or read no answers."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    values = {
        "TCP_KEEPIDLE": SILENCE_SECONDS,
        "TCP_KEEPINTVL": SILENCE_SECONDS // PROBES,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": SILENCE_SECONDS * 1000,  # milliseconds
    }
    for name, value in values.items():
        if hasattr(socket, name):  # not all systems have all of them
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
