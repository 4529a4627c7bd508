"""Runs the web application until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import uvicorn

from sansgpu.config import ConfigError
from sansgpu.config.wording import first_line
from sansgpu.events.progress import Warn
from sansgpu.jobs.serve.app import Service, build_app
from sansgpu.jobs.serve.connections import BoundedConnection, detect_lost_clients
from sansgpu.machine.interrupt import Interrupt, write_line
from sansgpu.machine.probe import free_descriptors

DRAIN_SECONDS = 5  # after a signal: time for clients to read the last event
BACKLOG = 128  # connections that the system accepts before the server does
MAX_CONNECTIONS = 512
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


def run(
    service: Service,
    listener: socket.socket,
    limits: ConnectionLimits,
    description: str,
    warn: Warn,
    say: Callable[[str], None],
) -> None:
    """Serves until SIGINT, SIGTERM or SIGHUP. Open answers then end with an error."""
    warn_once = lru_cache(warn)  # the same attack may repeat a warning endlessly
    protocol: Any = partial(BoundedConnection, limit=limits.connections, warn=warn_once)
    settings = uvicorn.Config(
        build_app(service),
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

    def stop(_: str) -> None:
        write_line("stopping; press Ctrl-C again to stop now")
        service.worker.stop()
        server.should_exit = True

    # asyncio logs each write to a client that has disconnected.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: warn_once(_problem(context)))
        await server.serve(sockets=[listener])

    with Interrupt(None, acknowledge=stop):
        host, port = listener.getsockname()[:2]
        detect_lost_clients(listener)
        listener.listen(BACKLOG)
        say(f"serving {service.name} at http://{f'[{host}]' if ':' in host else host}:{port} ({description})")
        service.worker.start()
        asyncio.run(serve())
        service.worker.stop()
        service.worker.join(DRAIN_SECONDS)


class ConnectionLimits(NamedTuple):
    """The maximum number of open connections, and of those that are accepted in a row."""

    connections: int
    accepted: int


def connection_limits() -> ConnectionLimits:
    """Returns limits that fit the process's limit of open files. Raises ConfigError if it leaves too few."""
    free = free_descriptors()
    if free is None:
        return ConnectionLimits(MAX_CONNECTIONS, BACKLOG)
    room = free - RESERVED_FILES
    if room < 2 * ACCEPT_ROUNDS:
        raise ConfigError(f"this process may open only {free} more files, too few to serve; raise `ulimit -n`.")
    accepted = min(BACKLOG, room // (2 * ACCEPT_ROUNDS))
    return ConnectionLimits(min(MAX_CONNECTIONS, room - ACCEPT_ROUNDS * accepted), accepted)


def _problem(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"{context['message']} ({first_line(error)})" if error is not None else str(context["message"])
