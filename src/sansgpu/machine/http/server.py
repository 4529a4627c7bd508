"""Runs the web application until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from sansgpu.config import ConfigError
from sansgpu.config.wording import first_line
from sansgpu.events.progress import Warn
from sansgpu.machine.http.connections import BoundedConnection, detect_lost_clients
from sansgpu.machine.interrupt import Interrupt, write_line

DRAIN_SECONDS = 5  # after a signal: time for clients to read the last event
BACKLOG = 128  # connections that the system accepts before the server does
MAX_CONNECTIONS = 512
REQUEST_SECONDS = 60  # limit for a complete request to arrive, from the start of the connection or the last answer
ACCEPT_ROUNDS = 4  # times that the event loop accepts connections until a closed connection has freed its descriptor
RESERVED_FILES = 8  # file descriptors for the child process that renders chat templates, and for reading files


class HttpServer(uvicorn.Server):
    """A server whose signals are handled by `run`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio's `backlog` is also the number of connections that it accepts in a row


def run_app(
    app: Starlette,
    listener: socket.socket,
    limits: ConnectionLimits,
    warn: Warn,
    start: Callable[[], None],
    stop: Callable[[], None],
    request_seconds: float | None = None,
) -> None:
    """Serves a web application until SIGINT, SIGTERM or SIGHUP.

    Calls `start` once connections are accepted, and `stop` as soon as a signal arrives. A request must be complete
    after `request_seconds`, by default REQUEST_SECONDS.
    """
    warn_once = lru_cache(warn)  # the same attack may repeat a warning endlessly
    protocol: Any = partial(
        BoundedConnection,
        limit=limits.connections,
        seconds=request_seconds or REQUEST_SECONDS,
        busy=limits.busy,
        warn=warn_once,
    )
    settings = uvicorn.Config(
        app,
        loop="asyncio",
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # clients get one sentence for each error, and the worker warns of its own failures
        access_log=False,
        server_header=False,
        backlog=limits.accepted,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    server = HttpServer(settings)

    def end(_: str) -> None:
        write_line("stopping; press Ctrl-C again to stop now")
        server.should_exit = True
        stop()

    # asyncio logs each write to a client that has disconnected.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: warn_once(_problem(context)))
        await server.serve(sockets=[listener])

    with Interrupt(None, acknowledge=end):
        detect_lost_clients(listener)
        listener.listen(BACKLOG)
        start()
        asyncio.run(serve())


class ConnectionLimits(NamedTuple):
    """The maximum number of open connections, and of those that are accepted in a row; `busy` answers the rest."""

    connections: int
    accepted: int
    busy: ASGIApp


def connection_limits(busy: ASGIApp) -> ConnectionLimits:
    """Returns limits that fit the process's limit of open files. Raises ConfigError if it leaves too few."""
    free = _free_descriptors()
    if free is None:
        return ConnectionLimits(MAX_CONNECTIONS, BACKLOG, busy)
    room = free - RESERVED_FILES
    if room < 2 * ACCEPT_ROUNDS:
        raise ConfigError(f"this process may open only {free} more files, too few to serve; raise `ulimit -n`.")
    accepted = min(BACKLOG, room // (2 * ACCEPT_ROUNDS))
    return ConnectionLimits(min(MAX_CONNECTIONS, room - ACCEPT_ROUNDS * accepted), accepted, busy)


def _free_descriptors() -> int | None:
    """Returns how many more files and connections this process may open; None: there is no limit, or it is unknown."""
    try:
        import resource  # not on Windows

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return None if limit == resource.RLIM_INFINITY else limit - len(os.listdir("/dev/fd"))
    except (ImportError, OSError):
        return None


def _problem(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"{context['message']} ({first_line(error)})" if error is not None else str(context["message"])
