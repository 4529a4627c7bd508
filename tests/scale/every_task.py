"""Run under torchrun: several short runs, one after the other. Arguments: JSON of {folder: overrides}."""

from __future__ import annotations

import json
import sys

import torch.distributed as dist

import sansgpu


def fit_all(runs: dict[str, list[str]]) -> None:
    """Trains each run in its folder."""
    for folder, overrides in runs.items():
        sansgpu.fit(None, folder, overrides=overrides, quiet=True)
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    fit_all(json.loads(sys.argv[1]))
