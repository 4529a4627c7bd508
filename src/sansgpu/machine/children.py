"""Processes that end with the one that started them."""

from __future__ import annotations

import os
import sys

# Asks the kernel for SIGKILL when the parent is gone (1: PR_SET_PDEATHSIG), and becomes the command, which keeps that.
_TIE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def ending_with_us(command: list[str]) -> list[str]:
    """`command` so that it is killed when the thread that starts it is no more, however that ends.

    Elsewhere than on Linux it stays as it is: the kernel cannot be asked.
    """
    if not sys.platform.startswith("linux"):
        return command
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]
