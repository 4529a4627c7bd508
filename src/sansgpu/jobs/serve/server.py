"""Runs the web application until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn

from sansgpu.jobs.serve.app import Service, build_app
from sansgpu.machine.interrupt import Interrupt, write_line

DRAIN_SECONDS = 5  # after a signal: time for clients to read the last event
BACKLOG = 128  # connections that the system accepts before the server does


class HttpServer(uvicorn.Server):
    """A server whose signals are handled by `run`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(service: Service, listener: socket.socket, description: str, say: Callable[[str], None]) -> None:
    """Serves until SIGINT, SIGTERM or SIGHUP. Open answers then end with an error."""
    settings = uvicorn.Config(
        build_app(service),
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # clients get one sentence for each error, and the worker warns of its own failures
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    server = HttpServer(settings)

    def stop(_: str) -> None:
        write_line("stopping; press Ctrl-C again to stop now")
        service.worker.stop()
        server.should_exit = True

    with Interrupt(None, acknowledge=stop):
        host, port = listener.getsockname()[:2]
        listener.listen(BACKLOG)
        say(f"serving {service.name} at http://{f'[{host}]' if ':' in host else host}:{port} ({description})")
        service.worker.start()
        asyncio.run(server.serve(sockets=[listener]))
        service.worker.stop()
        service.worker.join(DRAIN_SECONDS)
