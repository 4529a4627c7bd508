"""Loads transformers models from fine-tuning runs, Hugging Face folders or Hub names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sansgpu.config import Config, ConfigError
from sansgpu.jobs.loading import require_latest, run_snapshot
from sansgpu.machine.compiled import compiled_cache
from sansgpu.machine.probe import has_native_bf16, resolve_device, resolve_threads
from sansgpu.models.pretrained import Head, load_tokenizer_of
from sansgpu.planning.kernels import load_kernels
from sansgpu.tasks.fine_tuning import FineTuning
from sansgpu.tasks.masked_lm import MaskedObjective
from sansgpu.tasks.qa import QAObjective
from sansgpu.tasks.sft import SFTObjective
from sansgpu.train.snapshots import Snapshot

_OBJECTIVES: dict[Head, Callable[[Config], FineTuning]] = {
    "causal": SFTObjective,
    "qa": QAObjective,
    "masked": MaskedObjective,
}
HEADS: dict[str, Head] = {"sft": "causal", "qa": "qa", "masked": "masked"}  # by kind of run
_TASKS: dict[Head, str] = {"causal": "sft", "qa": "qa", "masked": "graph"}


@dataclass(frozen=True)
class FineTuned:
    """A model with its tokenizer. `snapshot` is None if the model is not a run's."""

    objective: FineTuning
    tokenizer: Any
    config: Config
    snapshot: Snapshot | None


def load_fine_tuned(
    target: str, head: Head, snapshot_name: str, warn: Callable[[str], None], remote_code: bool = False
) -> FineTuned:
    """Loads a model in fp32 and evaluation mode. Raises ConfigError if there is none with this head.

    `remote_code` allows the model's own Python code to run.
    """
    folder, snapshot = Path(target).expanduser(), None
    if (folder / "config.yaml").is_file():
        config, snapshot = run_snapshot(folder, snapshot_name, warn)
        if HEADS.get(config.kind) != head:
            raise ConfigError(
                f"{target} is a run of task {config.task}, but this command needs one of task {_TASKS[head]}."
            )
    else:
        require_latest(target, snapshot_name)
        given = {"task": _TASKS[head], "model": {"name_or_path": target}, "data": {"dataset_name": "-"}}
        config = Config.model_validate(given)
    config = config.model_copy(update={"model": config.model.model_copy(update={"trust_remote_code": remote_code})})
    torch.set_num_threads(resolve_threads(config.training))
    load_kernels(config.training.kernels, compiled_cache(warn), resolve_device(config.training), warn)
    objective = _OBJECTIVES[head](config)
    tokenizer = load_tokenizer_of(config.model, config.data.chat_template)
    if snapshot is not None:
        objective.load(snapshot.weights())
    objective.model.eval().float()
    return FineTuned(objective, tokenizer, config, snapshot)


def narrow_where_faster(model: torch.nn.Module) -> None:
    """Converts matrices to bf16 if this CPU computes it natively, because each generated token reads all of them."""
    dtype = torch.bfloat16 if has_native_bf16() else torch.float32
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype if parameter.ndim > 1 else torch.float32)
