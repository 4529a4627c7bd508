"""The command `sansgpu studio`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sansgpu.cli.options import option, show, warn
from sansgpu.cli.serve import SERVER


def studio(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder for data, configurations and runs. It may be new.")
    ] = Path(),
    host: Annotated[
        str, option("Address to listen on. Others than this machine's own need a password.", SERVER)
    ] = "127.0.0.1",
    port: Annotated[int, option("Port to listen on. 0: any free port.", SERVER, min=0, max=65535)] = 7860,
    password: Annotated[
        str | None,
        option(
            "Password that a browser must give. Set the variable rather than the flag: other users of this machine see "
            "flags in the list of processes.",
            SERVER,
            envvar="SANSGPU_STUDIO_PASSWORD",
        ),
    ] = None,
) -> None:
    """Lead from a file to a model in use, in a browser.

    Prints the address to open. Runs go on when it is stopped with Ctrl-C.

    Example: sansgpu studio first-model
    """
    from sansgpu.studio import StudioRequest
    from sansgpu.studio import studio as job

    job(StudioRequest(folder, host, port, password), warn)(show)
