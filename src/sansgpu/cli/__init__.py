"""The command line: argv -> one job. Importing this loads nothing else, so that Ctrl-C is handled from the start."""

from __future__ import annotations

import sys

from sansgpu.cli.signals import CODE, handle_interrupts, stop_handling_interrupts
from sansgpu.machine.launch import settle_randomness, share_cores

__all__ = ["main", "run"]


def main() -> None:
    """Run the command line; errors are one sentence on stderr."""
    try:
        handle_interrupts()
        share_cores()
        settle_randomness()
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before `run` could say so
        code = CODE
        sys.stderr.write("sansgpu: interrupted.\n")
    stop_handling_interrupts()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    from sansgpu.cli.running import run  # takes a tenth of a second to import

    return run(arguments)
