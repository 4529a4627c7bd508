"""Which process of how many this is."""

from __future__ import annotations

import os

import torch.distributed

from sansgpu.config import ConfigError

# World size by torchrun, Open MPI, MPICH and Intel MPI, Slurm (whose SLURM_NTASKS also stands in plain batch jobs).
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def require_single_process(backend: str) -> None:
    """Refuse a launcher's several processes: each would train for itself into the same folder.

    Refuse a backend that this torch was built without, too.
    """
    if not torch.distributed.is_backend_available(backend):
        raise ConfigError(f"training.distributed_backend is {backend}, which this torch has not; set it to gloo.")
    for name in _SIZES:
        if int(os.environ.get(name) or 1) > 1:
            raise ConfigError(f"{name} is {os.environ[name]}, but several processes are not supported; start one.")
