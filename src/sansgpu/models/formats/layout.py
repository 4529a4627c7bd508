"""Describes how transformers and llama.cpp store the weights and settings of a decoder; layouts.py has the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Weights = dict[str, torch.Tensor]
Settings = Mapping[str, Any]  # the contents of a config.json


class LayerTypes(NamedTuple):
    """How a GGUF file says what type each layer of a model has."""

    write: Callable[[Settings], dict[str, Any]]  # settings -> metadata by key
    read: Callable[[Callable[[str], Any], int], dict[str, Any]]  # (value of a key, number of layers) -> settings


class RowOrder(NamedTuple):
    """How llama.cpp reorders the rows of a matrix: reshaped to `shape`, with `axis` and the next one exchanged."""

    shape: tuple[int, ...]
    axis: int

    def to_file(self, rows: torch.Tensor) -> torch.Tensor:
        parts = rows.reshape(*self.shape, *rows.shape[1:])
        return parts.transpose(self.axis, self.axis + 1).reshape(rows.shape)

    def from_file(self, rows: torch.Tensor) -> torch.Tensor:
        exchanged = list(self.shape)
        exchanged[self.axis : self.axis + 2] = reversed(self.shape[self.axis : self.axis + 2])
        return RowOrder(tuple(exchanged), self.axis).to_file(rows)


@dataclass(frozen=True)
class Layout:
    """How transformers and llama.cpp store an architecture."""

    model_class: str  # transformers' class
    prefix: str  # prefix of all weight names except the head's; checkpoints of a base model without head omit it
    # TransformerLM's module -> transformers' module; `{}` is the block's number. The keys of architectures that
    # TransformerLM does not compute follow the same names.
    modules: Mapping[str, str]
    sizes: Mapping[str, tuple[str, str]]  # key of ModelConfig -> keys of config.json and GGUF
    norm_eps: tuple[str, str]  # keys of config.json and GGUF
    activation_key: str
    activations: Mapping[str, str]  # value in config.json -> model.activation; exports use the first that matches
    defaults: Callable[[Settings], dict[str, Any]]  # values of keys that may be missing in config.json
    gguf_activations: tuple[str, ...]  # activations of llama.cpp; the first is the default of a file that names none
    fixed: Mapping[str, Any]  # keys of config.json with the only value that TransformerLM and llama.cpp support
    biases: Mapping[str, tuple[str, ...]]  # key of config.json -> values of model.bias for which it is true
    dropouts: Mapping[str, str]  # key of config.json -> key of ModelConfig
    transposed: tuple[str, ...] = ()  # modules whose weight transformers stores as (in, out): Conv1D
    rotary: bool = True  # whether the architecture uses RoPE
    rope_theta: float | None = None  # default if config.json has none
    gguf_name: str | None = None  # llama.cpp's name of the architecture; None: the same as model_type
    gguf_settings: Mapping[str, str] = field(default_factory=dict)  # more keys of config.json -> keys of GGUF
    gguf_optional: Mapping[str, str] = field(default_factory=dict)  # the same for keys that may be missing or null
    gguf_fixed: Callable[[Settings], Settings] = lambda settings: {}  # the values that llama.cpp assumes
    gguf_modules: Mapping[str, str] = field(default_factory=dict)  # llama.cpp's names of modules that gguf lacks
    gguf_layers: LayerTypes | None = None
    gguf_rows: Callable[[str, Settings], RowOrder | None] = lambda name, settings: None  # by a weight's name
    gguf_norm_offset: float = 0.0  # llama.cpp multiplies by w + offset where transformers multiplies by w
    gguf_rope_types: tuple[str, ...] = ()  # the types of scaled RoPE that llama.cpp supports
    gguf_local_rope: bool = False  # whether sliding_attention layers have a RoPE of their own
    gguf_no_window: bool = False  # whether llama.cpp ignores sliding_window: results are equal up to that length
    gguf_needs_head: bool = False  # whether llama.cpp requires the output head even if it is tied

    @property
    def gguf_keys(self) -> dict[str, str]:
        """Maps required keys of config.json to keys of GGUF."""
        return dict([*self.sizes.values(), self.norm_eps, *self.gguf_settings.items()])

    def is_transposed(self, name: str) -> bool:
        """Returns True if transformers stores the transpose of a weight."""
        *_, module, parameter = name.split(".")
        return parameter == "weight" and module in self.transposed
