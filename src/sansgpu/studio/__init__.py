"""The studio: the way from a file to a model in use, in a browser. Each of its buttons runs a `sansgpu` command."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sansgpu.config import ConfigError
from sansgpu.config.errors import require
from sansgpu.events.progress import Warn
from sansgpu.files.atomic import make_folder, write_failures_as

UPLOAD_SECONDS = 3600.0  # limit for a file to arrive


@dataclass(frozen=True)
class StudioRequest:
    """The options of `sansgpu studio`."""

    folder: Path
    host: str
    port: int
    password: str | None


def studio(request: StudioRequest, warn: Warn) -> Callable[[Callable[[str], None]], None]:
    """Makes the folder and reserves the port. Returns a function that serves the pages until it is interrupted.

    That function takes one that prints a line. Raises ConfigError if the folder, the address or an option cannot be
    used.
    """
    require("sansgpu studio", "starlette", "uvicorn", "plotly")
    from sansgpu.machine.http.hosts import address_of, bind, is_this_machine
    from sansgpu.machine.http.server import connection_limits, run_app
    from sansgpu.studio.access import Access
    from sansgpu.studio.app import build_app, busy
    from sansgpu.studio.project import Project
    from sansgpu.studio.using import serving

    if request.password is not None and not request.password.strip():
        raise ConfigError("--password is empty; choose one that others do not guess.")
    if request.password is None and not is_this_machine(request.host):
        raise ConfigError(
            f"--host {request.host} lets other machines use this folder and run commands here; set --password or "
            "SANSGPU_STUDIO_PASSWORD."
        )
    with write_failures_as(ConfigError, request.folder, "FOLDER"):
        make_folder(request.folder)
    listener, limits = bind(request.host, request.port), connection_limits(busy())
    access = Access(secrets.token_urlsafe(24), request.password, listener.getsockname()[1])
    project = Project(request.folder.resolve())
    app = build_app(project, access)

    def stop() -> None:
        project.commands.stop()
        for server in serving(project):
            server.stop()

    def serve(say: Callable[[str], None]) -> None:
        address = address_of(listener)
        opened = address if request.password else f"{address}/?token={access.token}"
        said = f"studio of {project.root}: {opened}"
        run_app(app, listener, limits, warn, lambda: say(said), stop, UPLOAD_SECONDS)

    return serve
