"""Which process of how many this is."""

from __future__ import annotations

import os

from sansgpu.config import ConfigError

# World size by torchrun, Open MPI, MPICH and Intel MPI, Slurm (whose SLURM_NTASKS also stands in plain batch jobs).
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def require_single_process() -> None:
    """Refuse a launcher's several processes: each would train for itself into the same folder."""
    for name in _SIZES:
        if int(os.environ.get(name) or 1) > 1:
            raise ConfigError(f"{name} is {os.environ[name]}, but several processes are not supported; start one.")
