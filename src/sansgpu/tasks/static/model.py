"""A static embedding model, and its folder in the format of Sentence Transformers.

S texts, N tokens in total, D dimensions of an embedding, V rows of the table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from torch import nn

from sansgpu.config import ConfigError
from sansgpu.config.plain_data import read_text
from sansgpu.data.tokenizer import rows_needed
from sansgpu.kernels.embedding import embed
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_flaw
from sansgpu.models.formats.folders import validate_model_folder, write_folder_atomically
from sansgpu.models.formats.safetensors_file import load_weights
from sansgpu.models.huggingface.sentence_embedding import (
    EmbeddingLayout,
    pool,
    read_static_layout,
    write_static_layout,
)
from sansgpu.models.modules import Table

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
_NAMES = ("embedding.weight", "embeddings")  # names of the table in files of Sentence Transformers and model2vec


class StaticModel(nn.Module):
    """A table with one vector per token. The names of its weights are those of Sentence Transformers."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.embedding = Table(weights.shape[0], weights.shape[1], _weight=weights)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor, layout: EmbeddingLayout) -> torch.Tensor:
        """Returns the embeddings of concatenated texts, (S, D) fp32: the means of their tokens' vectors."""
        return pool(embed(tokens, self.embedding.weight), lengths, layout)

    def encode(self, tokens: torch.Tensor, lengths: torch.Tensor, layout: EmbeddingLayout) -> torch.Tensor:
        """Does the same as `forward` for inference. A text without tokens has the vector 0."""
        starts = lengths.cumsum(0) - lengths
        vectors = F.embedding_bag(tokens, self.embedding.weight, starts, mode="mean").float()
        return F.normalize(vectors, dim=-1) if layout.normalize else vectors


@dataclass(frozen=True)
class StaticFolder:
    """The contents of a static embedding model's folder."""

    weights: torch.Tensor  # (V, D) fp32
    tokenizer: Backend
    layout: EmbeddingLayout  # its max_length is that of the tokenizer's truncation


def read_static_folder(folder: Path) -> StaticFolder:
    """Reads a static embedding model of Sentence Transformers or model2vec. Raises ConfigError if it is invalid."""
    layout, inner = read_static_layout(folder)
    for path in (inner / WEIGHTS, inner / TOKENIZER):
        if not path.exists():
            raise ConfigError(f"{folder} is a static embedding model without {path.name}; download it again.")
    validate_model_folder(inner)
    tensors = load_weights(inner / WEIGHTS)
    weights = next((tensors[name] for name in _NAMES if name in tensors), None)
    if weights is None or weights.ndim != 2 or not weights.is_floating_point() or len(tensors) > 1:
        raise ConfigError(
            f"{inner / WEIGHTS} does not contain a single matrix of embeddings; save the model again without "
            "quantization."
        )
    tokenizer = read_tokenizer(inner / TOKENIZER)
    if (needed := rows_needed(tokenizer)) > len(weights):
        raise ConfigError(
            f"{folder}: the tokenizer has {needed:,} tokens, but there are only {len(weights):,} embeddings; "
            "download the model again."
        )
    length = (tokenizer.truncation or {}).get("max_length")
    layout = replace(layout, pooling="mean", max_length=length)
    return StaticFolder(weights.float(), plain_tokenizer(tokenizer), layout)


def write_static_folder(found: StaticFolder, folder: Path) -> None:
    """Writes a folder that Sentence Transformers loads, atomically."""

    def write(partial: Path) -> None:
        save_file({_NAMES[0]: found.weights.contiguous()}, partial / WEIGHTS, metadata={"format": "pt"})
        tokenizer = plain_tokenizer(found.tokenizer)
        if found.layout.max_length is not None:
            tokenizer.enable_truncation(found.layout.max_length)
        (partial / TOKENIZER).write_text(tokenizer.to_str(), encoding="utf-8")
        write_static_layout(found.layout, partial)

    write_folder_atomically(folder, write)


def plain_tokenizer(backend: Backend) -> Backend:
    """Returns a copy that adds no special tokens and neither truncates nor pads."""
    settings = json.loads(backend.to_str())
    return Backend.from_str(json.dumps({**settings, "post_processor": None, "truncation": None, "padding": None}))


def as_transformers(backend: Backend) -> Any:
    """Returns a tokenizer with the interface of transformers."""
    from transformers import PreTrainedTokenizerFast  # takes seconds to import

    return PreTrainedTokenizerFast(tokenizer_object=backend)


def read_tokenizer(file: Path) -> Backend:
    """Reads a tokenizer.json. Raises ConfigError if it is invalid."""
    text = read_text(file)
    if (flaw := tokenizer_flaw(text)) is not None:
        raise ConfigError(f"{file} is not a usable tokenizer: {flaw}; download or save it again.")
    return Backend.from_str(text)
