"""Text embeddings: pools a model's outputs, and reads and writes Sentence Transformers folders.

A folder may have a linear classifier of the embeddings.

S texts, N tokens in total, D width, L labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from sansgpu.config import ConfigError
from sansgpu.config.model import ModelConfig
from sansgpu.files.reading import read_json, read_object
from sansgpu.models.formats.safetensors_file import load_weights
from sansgpu.models.huggingface.source import model_file

Pooling = Literal["mean", "cls", "last"]
MODULES, POOLING, NORMALIZE = "modules.json", "1_Pooling", "2_Normalize"
VERSIONED = "config_sentence_transformers.json"
SETTINGS = "sentence_bert_config.json"  # settings of the Transformer module
LINEAR_HEAD = "head.safetensors"  # a linear classifier of the embeddings
STATIC = "StaticEmbedding"  # module without a transformer: a text's vector is the mean of its tokens' vectors
# Pooling modes in 1_Pooling/config.json: as keys, which all versions read, and as values from version 5.4 on.
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last",
    "cls": "cls", "mean": "mean", "lasttoken": "last",
}  # fmt: skip


@dataclass(frozen=True)
class EmbeddingLayout:
    """How a text is embedded."""

    pooling: Pooling
    normalize: bool
    max_length: int | None = None  # tokens to which texts are truncated
    prompts: dict[str, str] = field(default_factory=dict)  # by name; a prompt is prepended to a text
    default_prompt: str | None = None  # name of the prompt for texts if none is selected

    def prompt(self, *names: str) -> str:
        """Returns the first existing prompt of `names`, or else the default prompt, or an empty one."""
        return next((self.prompts[name] for name in (*names, self.default_prompt) if name in self.prompts), "")


def read_layout(model: ModelConfig) -> EmbeddingLayout | None:
    """Reads the layout of a Sentence Transformers model; None if the model is not one.

    Raises ConfigError if it has modules or a pooling mode that sansgpu does not support.
    """
    find = partial(model_file, model)
    if (file := find(MODULES)) is None:
        return None
    paths = _module_paths(file)
    if STATIC in paths:
        raise ConfigError(f"{model.name_or_path} is a static embedding model; set task to static to train it.")
    _require_modules(file, paths, ("Transformer", "Pooling", "Normalize"), ", or delete it to use only the transformer")
    return _layout(find, paths)


def is_static_folder(folder: Path) -> bool:
    """Returns whether a folder is a static embedding model of Sentence Transformers. Raises ConfigError."""
    return (folder / MODULES).is_file() and STATIC in _module_paths(folder / MODULES)


def read_static_layout(folder: Path) -> tuple[EmbeddingLayout, Path]:
    """Returns the layout of a static embedding model, and the folder of its weights and tokenizer.

    Raises ConfigError if the model has modules that sansgpu does not support.
    """
    paths = _module_paths(folder / MODULES)
    _require_modules(folder / MODULES, paths, (STATIC, "Normalize"))
    inner = folder / paths[STATIC]
    if not inner.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"{folder / MODULES} names the path {paths[STATIC][:100]}, which is outside its folder; choose "
            "another model."
        )

    def find(name: str) -> Path | None:
        return folder / name if (folder / name).is_file() else None

    return _layout(find, paths), inner


def _module_paths(file: Path) -> dict[str, str]:
    """Returns the folders of a model's modules by the names of their classes."""
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{file} does not contain a list of modules; fix it or choose another model.")
    return {str(module.get("type")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}


def _require_modules(file: Path, paths: dict[str, str], known: Sequence[str], remedy: str = "") -> None:
    if unknown := next((name for name in paths if name not in known), None):
        names = f"{', '.join(known[:-1])} and {known[-1]}"
        raise ConfigError(
            f"{file} names the module {unknown[:100]}, but sansgpu supports {names}; choose another model{remedy}."
        )


def _layout(find: Callable[[str], Path | None], paths: dict[str, str]) -> EmbeddingLayout:
    """Reads the files of a model that describe how it embeds texts; `find` returns the path of a file, or None."""
    pooling, settings = find(f"{paths.get('Pooling', POOLING)}/config.json"), find(SETTINGS)
    length = read_object(settings).get("max_seq_length") if settings else None
    prompts, default = _prompts_of(versioned) if (versioned := find(VERSIONED)) else ({}, None)
    return EmbeddingLayout(
        _pooling_of(pooling, with_prompts=any(prompts.values())) if pooling else "mean",
        "Normalize" in paths,
        length if isinstance(length, int) and length >= 2 else None,
        prompts,
        default,
    )


def _prompts_of(file: Path) -> tuple[dict[str, str], str | None]:
    """Returns the prompts and the name of the default one. Raises ConfigError if they are invalid."""
    found = read_object(file)
    prompts, default = found.get("prompts") or {}, found.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ConfigError(f"{file}: prompts is not an object with strings; fix or remove it.")
    if default is not None and default not in prompts:
        raise ConfigError(f"{file}: the default prompt {str(default)[:100]} is missing; add it to prompts.")
    return {name: text or "" for name, text in prompts.items()}, default


def _pooling_of(file: Path, with_prompts: bool) -> Pooling:
    found: dict[str, Any] = read_object(file)
    if with_prompts and not found.get("include_prompt", True):
        raise ConfigError(
            f"{file} excludes prompts from pooling (include_prompt: false), which sansgpu does not support; choose "
            "another model."
        )
    given = found.get("pooling_mode", [key for key, value in found.items() if key.startswith("pooling_") and value])
    modes = given if isinstance(given, list) else [given]
    if len(modes) != 1 or modes[0] not in _MODES:
        shown = ", ".join(map(str, modes))[:100] or "nothing"
        raise ConfigError(
            f"{file} sets the pooling {shown}, but sansgpu supports only one of mean, cls and lasttoken; choose "
            "another model."
        )
    return _MODES[modes[0]]


def pool(hidden: torch.Tensor, lengths: torch.Tensor, layout: EmbeddingLayout) -> torch.Tensor:
    """Pools the hidden states (N, D) of concatenated texts to one embedding per text, (S, D) fp32."""
    ends = lengths.cumsum(0)
    if layout.pooling == "mean":
        texts = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        sums = hidden.new_zeros(len(lengths), hidden.shape[1], dtype=torch.promote_types(hidden.dtype, torch.float32))
        vectors = sums.index_add(0, texts, hidden.to(sums.dtype)) / lengths[:, None]
    else:
        vectors = hidden[ends - 1 if layout.pooling == "last" else ends - lengths]
    vectors = vectors.to(torch.promote_types(hidden.dtype, torch.float32))
    return F.normalize(vectors, dim=-1) if layout.normalize else vectors


def write_layout(layout: EmbeddingLayout, width: int, folder: Path) -> None:
    """Adds the files with which Sentence Transformers 2 or later loads a folder with a transformers model."""
    modes = {key: layout.pooling == mode for key, mode in _MODES.items() if key.startswith("pooling_")}
    files: dict[str, Any] = {
        f"{POOLING}/config.json": {"word_embedding_dimension": width, **modes},
        SETTINGS: {"max_seq_length": layout.max_length, "do_lower_case": False},
        **_described([("Transformer", ""), ("Pooling", POOLING)], layout),
    }
    _write(files, folder)


def write_static_layout(layout: EmbeddingLayout, folder: Path) -> None:
    """Adds the files with which Sentence Transformers 3.2 or later loads a static embedding model."""
    _write(_described([(STATIC, "")], layout), folder)


def _described(modules: list[tuple[str, str]], layout: EmbeddingLayout) -> dict[str, Any]:
    """Returns the contents of the files that name the modules and prompts; `modules` are (class, folder)."""
    if layout.normalize:
        modules = [*modules, ("Normalize", NORMALIZE)]
    described = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (name, path) in enumerate(modules)
    ]
    versioned = {
        "prompts": layout.prompts,
        "default_prompt_name": layout.default_prompt,
        "similarity_fn_name": "cosine",
    }
    return {MODULES: described, VERSIONED: versioned}


def _write(files: dict[str, Any], folder: Path) -> None:
    for name, value in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class LinearHead:
    """A linear classifier of embeddings. Its logits are `embedding @ weight.T + bias`."""

    weight: torch.Tensor  # (L, D) float32
    bias: torch.Tensor  # (L,) float32

    def save(self, folder: Path) -> None:
        save_file({"weight": self.weight, "bias": self.bias}, folder / LINEAR_HEAD, metadata={"format": "pt"})


def read_linear_head(model: ModelConfig) -> LinearHead | None:
    """Reads the linear classifier of a model; None if it has none. Raises ConfigError if it is damaged."""
    if (file := model_file(model, LINEAR_HEAD)) is None:
        return None
    found = load_weights(file)
    weight, bias = found.get("weight"), found.get("bias")
    if weight is None or bias is None or weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise ConfigError(
            f"{file} lacks a matrix `weight` and a vector `bias` with one row per label; export it again."
        )
    return LinearHead(weight.float(), bias.float())
