"""Tells a launcher's pseudo-terminal from the user's terminal."""

from __future__ import annotations

import os
from typing import IO


def is_forwarded(stream: IO[str]) -> bool:
    """Returns whether a stream is a pseudo-terminal whose output a launcher forwards, possibly to a file.

    Open MPI gives each of its processes one. `isatty` accepts it, but it is not the controlling terminal of the
    process, as the user's terminal is.
    """
    if not stream.isatty() or not hasattr(os, "tcgetpgrp"):  # Windows has none
        return False
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return True
    try:
        os.tcgetpgrp(stream.fileno())
    except OSError:
        return True
    return False
