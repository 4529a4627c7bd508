"""Loads graph encoders from runs of task graph or exported folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from sansgpu.config import GRAPH, Config, ConfigError, problems
from sansgpu.data.mask_tokenizer import GraphCodec, MaskTokenizer
from sansgpu.jobs.loading import require_latest, run_snapshot
from sansgpu.machine.compiled import compiled_cache
from sansgpu.machine.probe import limit_tokenizer_threads, resolve_device, resolve_precision, resolve_threads
from sansgpu.models.graph_encoder import GraphEncoder
from sansgpu.models.graph_folder import is_graph_folder, load_graph_folder
from sansgpu.planning.kernels import load_kernels
from sansgpu.tasks.graph import GraphObjective, longest_span
from sansgpu.tasks.graph_corpus import names_of
from sansgpu.train.run_folders import open_run
from sansgpu.train.snapshots import Snapshot
from sansgpu.train.step import StepPlan

EXAMPLES = 16  # per micro-batch
UNKNOWN = "-"  # dataset name of an exported model


@dataclass(frozen=True)
class LoadedGraph:
    """A model with its tokenizer and relations. `snapshot` is None if the model is not a run's."""

    objective: GraphObjective
    codec: GraphCodec
    snapshot: Snapshot | None
    plan: StepPlan

    @property
    def config(self) -> Config:
        return self.objective.config

    @property
    def tokenizer(self) -> MaskTokenizer:
        return self.codec.tokenizer

    @property
    def relations(self) -> tuple[str, ...]:
        """Relation names. Relation ids start at 1."""
        return self.codec.relations

    @property
    def precision(self) -> str:
        return self.plan.precision


def is_graph(target: str) -> bool:
    """Returns whether this is a run of a GraphEncoder, or a folder exported from one."""
    folder = Path(target).expanduser()
    if (folder / "config.yaml").is_file():
        return open_run(folder)[0].kind == GRAPH
    return is_graph_folder(folder)


def load_graph(target: str, snapshot_name: str, warn: Callable[[str], None]) -> LoadedGraph:
    """Loads a graph encoder in fp32 and evaluation mode. Raises ConfigError if there is none or a weight is missing."""
    folder = Path(target).expanduser()
    if not is_graph(target):
        raise ConfigError(f"{target} is neither a run of task graph nor a folder exported from one.")
    snapshot, precision = None, "fp32"
    if (folder / "config.yaml").is_file():
        config, snapshot = run_snapshot(folder, snapshot_name, warn)
        model = GraphEncoder(config.model, seed=None, longest_span=longest_span(config))
        _load_whole(model, snapshot)
        codec, precision = GraphCodec.load(open_run(folder)[1].tokenizer), snapshot.state()["environment"]["precision"]
    else:
        require_latest(target, snapshot_name)
        (model, learned), codec = load_graph_folder(folder), GraphCodec.load(folder)
        config = _config_of(model, learned, folder)
    torch.set_num_threads(resolve_threads(config.training))
    limit_tokenizer_threads(config.data.preprocessing_num_workers)
    device = resolve_device(config.training)
    load_kernels(config.training.kernels, compiled_cache(warn), device, warn)
    if device.type != "cpu" or precision == "bf16":
        precision = resolve_precision(config.training, device)
    objective = GraphObjective(config, model.eval().float().to(device), names_of(codec))
    return LoadedGraph(objective, codec, snapshot, StepPlan(EXAMPLES, device, precision))


def _config_of(model: GraphEncoder, learned: dict[str, Any], folder: Path) -> Config:
    data = {"dataset_name": UNKNOWN, **learned.get("data", {})}
    try:
        return Config.model_validate({"task": GRAPH, "model": model.config.model_dump(), **learned, "data": data})
    except ValidationError as error:
        raise ConfigError(f"{folder}: config.json is not valid: {'; '.join(problems(error))}.") from None


def _load_whole(model: GraphEncoder, snapshot: Snapshot) -> None:
    try:
        model.load_state_dict(snapshot.weights(), assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{snapshot.folder} does not contain the whole model: {reason}") from None
