"""Describes a family of models; the folder `families` has a file for each family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from sansgpu.models.relative_attention import RelativeAttention

Weights = dict[str, torch.Tensor]
Settings = Mapping[str, Any]  # the contents of a config.json
Metadata = Mapping[str, Any]  # the metadata of a GGUF file by key

CONTEXT = 512  # tokens of a tiny model
# Sizes of tiny models by their keys in most families' config.json, and with grouped queries.
LAYERED: Settings = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip
SHARED: Settings = {**LAYERED, "num_key_value_heads": 2}
GROUPED: Settings = {**SHARED, "head_dim": 16}


class LayerTypes(NamedTuple):
    """How a GGUF file says what type each layer of a model has."""

    write: Callable[[Settings], dict[str, Any]]  # settings -> metadata by key
    read: Callable[[Callable[[str], Any], int], dict[str, Any]]  # (value of a key, number of layers) -> settings


class LearnedActivation(NamedTuple):
    """How a GGUF file stores the parameters of an activation: as metadata, with a value for each layer."""

    write: Callable[[Settings, Callable[[str], float]], dict[str, list[float]]]  # (settings, value of a weight)
    read: Callable[[Metadata], tuple[str, Weights]]  # metadata -> name of the activation, and its weights


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


class PreTokenizer(NamedTuple):
    """How a byte-level tokenizer divides a text before it merges bytes."""

    patterns: tuple[str, ...]  # regular expressions, applied in this order; the last one matches every character
    ignore_merges: bool = False  # a whole word that is a token is not built by merges
    begins: bool = False  # whether texts begin with the BOS token if a GGUF file does not say


class OlderRope(NamedTuple):
    """Keys of RoPE's parameters in the config.json of transformers 4."""

    theta: str = "rope_theta"
    local_theta: str | None = None  # of layers with sliding windows
    partial: str = "partial_rotary_factor"


@dataclass(frozen=True)
class Family:
    """The models with one `model_type`. A family needs only those fields that differ from what trials find out.

    Without `modules`, its models are trained and exported to transformers' format, but not to GGUF files.
    """

    title: str = ""  # its name in docs/reference/models.md; "": not in that table
    model_type: str = ""  # only if it contains hyphens; otherwise it is the name of the file
    is_encoder: bool = False  # its models do not continue texts

    # Tiny models
    tiny: Settings = field(default_factory=dict)  # keys in config.json of a tiny model, for tests and trials
    tiny_exported: Settings = field(default_factory=dict)  # the same for exported models, if llama.cpp needs others

    # Names in transformers' files
    model_class: str = ""  # transformers' class
    prefix: str = "model."  # of all weight names except the head's; checkpoints of a base model without head omit it
    # TransformerLM's module -> transformers' module; `{}` is the block's number. The keys of families that
    # TransformerLM does not compute follow the same names.
    modules: Mapping[str, str] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()  # modules whose weight transformers stores as (in, out): Conv1D
    sizes: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # key of ModelConfig -> of config.json, of GGUF
    norm_eps: tuple[str, str] = ("rms_norm_eps", "{arch}.attention.layer_norm_rms_epsilon")  # in config.json, in GGUF
    activation_key: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=dict)  # config.json -> model.activation; exports: the first
    defaults: Callable[[Settings], Settings] = lambda settings: {}  # values of keys that config.json may lack
    fixed: Settings = field(default_factory=dict)  # keys with the only value that TransformerLM and llama.cpp support
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # key -> values of model.bias that set it
    dropouts: Mapping[str, str] = field(default_factory=dict)  # key of config.json -> key of ModelConfig
    rotary: bool = True  # whether it uses RoPE
    rope_theta: float | None = None  # default if config.json has none

    # GGUF files
    gguf_name: str | None = None  # llama.cpp's name of the architecture; None: the same as model_type
    # Tells its files from those of other families with the same `gguf_name`; None: it has those that are left.
    gguf_recognizes: Callable[[Metadata], bool] | None = None
    gguf_activations: tuple[str, ...] = ()  # activations of llama.cpp; the first is that of a file that names none
    gguf_learned_activation: LearnedActivation | None = None
    gguf_settings: Mapping[str, str] = field(default_factory=dict)  # more keys of config.json -> keys of GGUF
    gguf_optional: Mapping[str, str] = field(default_factory=dict)  # the same for keys that may be missing or null
    gguf_fixed: Callable[[Settings], Settings] = lambda settings: {}  # the values that llama.cpp assumes
    gguf_modules: Mapping[str, str] = field(default_factory=dict)  # llama.cpp's names of modules that gguf lacks
    gguf_layers: LayerTypes | None = None
    gguf_rows: Callable[[str, Settings], RowOrder | None] = lambda name, settings: None  # by a weight's name
    gguf_squeezed: Mapping[str, int] = field(default_factory=dict)  # end of a name -> dimension of size 1 to leave out
    gguf_precise: tuple[str, ...] = ()  # ends of llama.cpp's names of matrices that must not be quantized
    gguf_norm_offset: float = 0.0  # llama.cpp multiplies by w + offset where transformers multiplies by w
    gguf_rope_types: tuple[str, ...] = ()  # the types of scaled RoPE that llama.cpp supports
    gguf_local_rope: bool = False  # whether sliding_attention layers have a RoPE of their own
    gguf_local_theta: float | None = None  # its base in a file that names none; None: that of the other layers
    gguf_no_window: bool = False  # whether llama.cpp ignores sliding_window: results are equal up to that length
    gguf_needs_head: bool = False  # whether llama.cpp requires the output head even if it is tied
    pre_tokenizers: Mapping[str, PreTokenizer] = field(default_factory=dict)  # by llama.cpp's name

    # Training
    # These are tried on models of every family, because others may have the same layers.
    patches: tuple[Callable[[nn.Module], None], ...] = ()  # change a model in place so that its rows can be packed
    relative_attention: RelativeAttention | None = None
    # Layers whose weights the model reads without calling them, so that an adapter would have no effect.
    read_directly: tuple[str, ...] = ()

    # config.json for transformers 4
    older_rope: OlderRope | None = None  # None: the usual keys, and no RoPE that differs between layers
    older_settings: Callable[[Settings], Settings] = lambda settings: {}  # more keys of version 4

    @property
    def llama_cpp_name(self) -> str:
        """llama.cpp's name of the architecture."""
        return self.gguf_name or self.model_type

    @property
    def gguf_keys(self) -> dict[str, str]:
        """Maps required keys of config.json to keys of GGUF."""
        return dict([*self.sizes.values(), self.norm_eps, *self.gguf_settings.items()])

    def is_transposed(self, name: str) -> bool:
        """Returns True if transformers stores the transpose of a weight."""
        *_, module, parameter = name.split(".")
        return parameter == "weight" and module in self.transposed


def heads_as_wide_as_the_model(settings: Settings) -> Settings:
    return {"head_dim": settings["hidden_size"] // settings["num_attention_heads"]}


def windows(period: int) -> LayerTypes:
    """Sliding windows in all layers but each `period`-th, which is llama.cpp's default for a file that names none."""
    key = "{arch}.attention.sliding_window_pattern"

    def read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
        found = value_of(key) or period
        local = found if isinstance(found, list) else [(layer + 1) % found != 0 for layer in range(layers)]
        return {"layer_types": ["sliding_attention" if one else "full_attention" for one in local]}

    return LayerTypes(lambda settings: {key: [one == "sliding_attention" for one in settings["layer_types"]]}, read)


def renamed(**keys: str) -> Callable[[Settings], Settings]:
    """Returns a function that gives the values of some keys under transformers 4's names: `renamed(old="new")`."""
    return lambda settings: {old: settings[new] for old, new in keys.items() if new in settings}


def rope_of(settings: Settings) -> Mapping[str, Any]:
    """Returns the RoPE parameters of a config.json. Without scaling, rope_type is missing or "default"."""
    rope: Mapping[str, Any] = settings.get("rope_parameters") or settings
    return {**rope, "rope_type": "scaled"} if settings.get("rope_scaling") else rope
