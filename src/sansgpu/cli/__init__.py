"""Command-line entry point. Imports almost nothing, so that Ctrl-C is handled from the start."""

from __future__ import annotations

import io
import sys
import threading

from sansgpu.cli.signals import CODE, handle_interrupts, stop_handling_interrupts
from sansgpu.events.escape import SUBSTITUTE
from sansgpu.machine.launch import make_deterministic, set_openmp
from sansgpu.machine.untrusted.user_code import exit_soon

__all__ = ["main", "run"]


def main() -> None:
    """Runs the command line and exits with its code. Errors are printed as one sentence on stderr."""
    try:
        handle_interrupts()
        set_openmp()
        make_deterministic()
        _accept_every_character()
        if "--debug" not in sys.argv:
            threading.excepthook = _warn_of_thread
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # Ctrl-C before `run` installs its handler
        code = CODE
        sys.stderr.write("sansgpu: interrupted.\n")
    stop_handling_interrupts()
    exit_soon(code)


def _accept_every_character() -> None:
    """Lets stdout print, and stdin read, characters that their encoding lacks; Python would raise an exception."""
    for stream, errors in ((sys.stdout, SUBSTITUTE), (sys.stdin, "replace")):
        if isinstance(stream, io.TextIOWrapper):  # None under pythonw
            stream.reconfigure(errors=errors)


def _warn_of_thread(failed: threading.ExceptHookArgs) -> None:
    """Prints the exception of a background thread without a traceback, e.g. TensorBoard's if the disk is full."""
    from sansgpu.cli.options import warn

    if failed.exc_type is not SystemExit:
        warn(f"a background thread failed: {failed.exc_type.__name__}: {failed.exc_value}.")


def run(arguments: list[str]) -> int:
    from sansgpu.cli.running import run  # importing it takes 0.1 s

    return run(arguments)
