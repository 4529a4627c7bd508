"""Loads trained models from runs, Hugging Face folders, GGUF files or Hub names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from sansgpu.config import FINE_TUNING, GRAPH, MASKED, PRETRAIN, Config, ConfigError
from sansgpu.data.tokenizer import (
    Tokenizer,
    load_tokenizer,
    load_tokenizer_of_model,
    parsed_tokenizer,
    special_tokens_around,
)
from sansgpu.models import TransformerLM
from sansgpu.models.gguf_file import is_gguf, open_gguf
from sansgpu.models.graph_folder import is_graph_folder, is_masked_lm_folder
from sansgpu.models.huggingface import HuggingFaceLM, decoder_config, load_decoder, load_gguf_decoder
from sansgpu.train.run_folders import open_run
from sansgpu.train.snapshots import Snapshot, find_snapshot

UNBOUNDED_CONTEXT = 1024  # tokens, for models without a maximum context length


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer. `config` and `snapshot` are None if the model is not a run's."""

    model: nn.Module
    tokenizer: Tokenizer
    config: Config | None = None
    snapshot: Snapshot | None = None

    @property
    def decoder(self) -> TransformerLM:
        """The model as a TransformerLM. Raises ConfigError if its architecture is not supported."""
        if not isinstance(self.model, TransformerLM):
            raise ConfigError(
                "this model's architecture is not supported for generating text; use one with the layout of Qwen3, "
                "Llama, GPT-2 or Apertus (with ReLU squared)."
            )
        return self.model

    @property
    def context(self) -> int:
        """Maximum context length in tokens."""
        if isinstance(self.model, TransformerLM):
            return self.model.config.max_seq_len
        assert isinstance(self.model, HuggingFaceLM)
        return self.model.context or UNBOUNDED_CONTEXT


def run_snapshot(folder: Path, name: str, warn: Callable[[str], None]) -> tuple[Config, Snapshot]:
    """Returns a run's configuration and the snapshot called `name`. Raises ConfigError if there is none."""
    config, paths = open_run(folder)
    snapshot = find_snapshot(paths.snapshots, name, warn)
    if snapshot is None:
        raise ConfigError(f"{folder} has no snapshot yet.")
    return config, snapshot


def require_latest(target: str, name: str) -> None:
    """Raises ConfigError if a snapshot is requested of a target that is not a run."""
    if name != "latest":
        raise ConfigError(f"{target} is not a run, so it has no snapshots; leave out --snapshot.")


def is_fine_tuning(target: str) -> bool:
    folder = Path(target).expanduser()
    return (folder / "config.yaml").is_file() and open_run(folder)[0].kind in FINE_TUNING


def is_filling(target: str) -> bool:
    """Returns whether this is a run of task graph, or the folder of a masked language model."""
    folder = Path(target).expanduser()
    if (folder / "config.yaml").is_file():
        return open_run(folder)[0].task == GRAPH
    return is_graph_folder(folder) or is_masked_lm_folder(folder)


def is_ours(target: str) -> bool:
    """Returns whether TransformerLM can load this: a pretraining run, or a folder or GGUF file in its layouts.

    Raises ConfigError for masked language models and graph encoders.
    """
    folder = Path(target).expanduser()
    if is_gguf(target):
        return decoder_config(folder) is not None
    if (folder / "config.yaml").is_file():
        if (kind := open_run(folder)[0].kind) in (GRAPH, MASKED):
            raise ConfigError(f"{target} is a run of task graph, which cannot generate text; use sansgpu eval.")
        return kind == PRETRAIN
    if folder.is_dir():
        return not (folder / "config.json").is_file() or decoder_config(folder) is not None
    return folder.is_absolute() or target.startswith((".", "runs/"))  # missing; loading it raises the error


def load_model(target: str, snapshot_name: str, warn: Callable[[str], None], remote_code: bool = False) -> LoadedModel:
    """Loads a model in fp32 and evaluation mode. Raises ConfigError if there is none.

    `remote_code` allows the model's own Python code to run.
    """
    folder = Path(target).expanduser()
    if (folder / "config.yaml").is_file():
        config, snapshot = run_snapshot(folder, snapshot_name, warn)
        model: nn.Module = TransformerLM(config.model, seed=None)
        model.load_state_dict(snapshot.weights(), assign=True)
        return LoadedModel(model.eval(), load_tokenizer(open_run(folder)[1].tokenizer), config, snapshot)
    require_latest(target, snapshot_name)
    if is_gguf(target):
        return _load_gguf(folder)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is neither a run (config.yaml) nor a Hugging Face model (config.json).")
        decoder = load_decoder(folder)
        model = decoder if decoder is not None else HuggingFaceLM(str(folder), remote_code)
        return LoadedModel(model.eval(), load_tokenizer_of_model(folder, remote_code))
    if folder.is_absolute() or target.startswith((".", "runs/")):
        raise ConfigError(f"{target} does not exist; give a run's folder or a Hugging Face model.")
    return LoadedModel(HuggingFaceLM(target, remote_code).eval(), load_tokenizer_of_model(target, remote_code))


def _load_gguf(path: Path) -> LoadedModel:
    file = open_gguf(path)
    parts, decoder = file.tokenizer, load_gguf_decoder(file)
    model = decoder if decoder is not None else HuggingFaceLM(str(path))
    tokenizer = parsed_tokenizer(parts.json, parts.token(parts.eos_id), path)
    tokenizer.prefix_ids, tokenizer.suffix_ids = special_tokens_around(tokenizer.backend)
    if parts.begins and parts.bos_id is not None and not tokenizer.prefix_ids:
        tokenizer.prefix_ids = (parts.bos_id,)
    return LoadedModel(model.eval(), tokenizer)
