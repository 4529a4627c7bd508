"""Child processes that end with their parent."""

from __future__ import annotations

import os
import sys

# Requests SIGKILL at the parent's death (1: PR_SET_PDEATHSIG), which survives the exec of the command.
_EXEC_WITH_DEATH_SIGNAL = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def dying_with_parent(command: list[str]) -> list[str]:
    """Returns `command` wrapped so that the kernel kills it when the thread that starts it ends.

    Returns it unchanged on systems other than Linux, whose kernels lack this feature.
    """
    if not sys.platform.startswith("linux"):
        return command
    return [sys.executable, "-I", "-S", "-c", _EXEC_WITH_DEATH_SIGNAL, str(os.getpid()), *command]
