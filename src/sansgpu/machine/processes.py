"""Local multi-process launcher for `sansgpu train --processes`, on top of torch elastic."""

from __future__ import annotations

import logging
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sansgpu.config import ConfigError
from sansgpu.config.parse import whole_number
from sansgpu.config.wording import truncate
from sansgpu.machine import cores
from sansgpu.machine.distributed.world import SHUTDOWN_TIMEOUT
from sansgpu.machine.interrupt import LIKE_SIGTERM, meaning

MAX_PROCESSES_PER_CPU = 8  # a typo must not start thousands of processes
SAVING_SECONDS = 600  # time to save after SIGTERM


def processes(requested: str) -> int:
    """Parses --processes; `auto` is one per NUMA node or socket. Raises ConfigError if it is invalid or too large."""
    if requested == "auto":
        return cores.count_memory_domains()
    most = MAX_PROCESSES_PER_CPU * len(cores.cpus())
    if not (number := whole_number(requested, most)):
        raise ConfigError(f"--processes is {truncate(requested)}, but must be a number from 1 to {most:,}, or auto.")
    return number


def _signals() -> list[str]:
    """Returns the signals to forward to the processes, except ignored ones, such as SIGHUP under nohup."""
    numbers = [signal.SIGTERM, signal.SIGINT, *LIKE_SIGTERM]
    numbers += [signal.SIGQUIT] if hasattr(signal, "SIGQUIT") else []
    return [signal.Signals(n).name for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]


def launch(number: int, arguments: list[str]) -> int:
    """Runs `sansgpu ARGUMENTS` in `number` processes and returns the exit code. A failing process ends all others."""
    logging.disable(logging.CRITICAL)  # each process reports its own errors
    os.environ.setdefault(SHUTDOWN_TIMEOUT, str(SAVING_SECONDS))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=number,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        signals_to_handle=",".join(_signals()),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "sansgpu", *arguments)
        return 0
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 128 + meaning(int(error.sigval))
