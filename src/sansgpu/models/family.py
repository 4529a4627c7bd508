"""Defines `Family`: what a file in `families` says about the models with one `model_type` of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from sansgpu.models.architectures import DecoderConfig
    from sansgpu.models.relative_attention import RelativeAttention

Weights = dict[str, torch.Tensor]
Settings = Mapping[str, Any]  # the contents of a config.json
Metadata = Mapping[str, Any]  # the metadata of a GGUF file by key

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # the number of the block in the name of a weight

# Sizes of tiny models in config.json, for tests and trials: with multi-head attention, with grouped-query attention
# (GQA), for families whose head_dim does not follow from the other sizes, and with multi-head latent attention (MLA).
TINY_CONTEXT = 512  # tokens
TINY_MHA: Settings = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": TINY_CONTEXT,
}  # fmt: skip
TINY_GQA: Settings = {**TINY_MHA, "num_key_value_heads": 2}
TINY_HEAD_DIM: Settings = {**TINY_GQA, "head_dim": 16}
TINY_LATENT: Settings = {
    **TINY_MHA, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip

# Settings that several families write to GGUF files: key of config.json -> key of GGUF.
SLIDING_WINDOW = {"sliding_window": "{arch}.attention.sliding_window"}
TENSOR_NAMES = "tensors"  # key with which `LayerTypes.read` gets the names of a file's tensors
LOGIT_SOFTCAP = {"final_logit_softcapping": "{arch}.final_logit_softcapping"}

NTK_ALPHA = "ntk_alpha"  # Hunyuan's "dynamic" RoPE scaling, which only enlarges its base, whatever the length


class LayerTypes(NamedTuple):
    """Converts settings that have no key of their own in GGUF, such as `layer_types`, to a file's metadata and back."""

    write: Callable[[Settings], dict[str, Any]]  # settings -> metadata by key
    read: Callable[[Callable[[str], Any], int], dict[str, Any]]  # (get(key), number of layers) -> settings


class LearnedActivation(NamedTuple):
    """Converts an activation's weights to the metadata of a GGUF file, with a value for each layer, and back."""

    write: Callable[[Settings, Callable[[str], float]], dict[str, list[float]]]  # (settings, get(weight's name))
    read: Callable[[Metadata], tuple[str, Weights]]  # metadata -> (name of the activation, its weights)


class RowOrder(NamedTuple):
    """How llama.cpp reorders the rows of a matrix, which may be quantized: `places` are those that its rows had."""

    places: torch.Tensor

    def to_file(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, self.places)

    def from_file(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, self.places.argsort())


def exchanged(shape: tuple[int, ...], axis: int, first: int = 0) -> RowOrder:
    """Reshapes rows to `shape` and exchanges `axis` and the next one. The rows before `first` keep their places."""
    places = torch.arange(prod(shape)).reshape(shape).transpose(axis, axis + 1).flatten()
    return RowOrder(torch.cat((torch.arange(first), places + first)))


def part_by_part(groups: int, sizes: Sequence[int]) -> RowOrder:
    """Divides each group of rows into parts of these sizes. All first parts come first, then all second ones, etc."""
    grouped = torch.arange(groups * sum(sizes)).reshape(groups, -1)
    return RowOrder(torch.cat([part.flatten() for part in grouped.split([*sizes], 1)]))


def adjacent_pairs(heads: int, head_dim: int, rotated: int) -> RowOrder:
    """Puts the pairs that RoPE rotates next to each other; transformers has them rotated / 2 apart in each head."""
    places = torch.arange(heads * head_dim).reshape(heads, head_dim)
    pairs = places[:, :rotated].reshape(heads, 2, rotated // 2).transpose(1, 2).flatten(1)
    return RowOrder(torch.cat((pairs, places[:, rotated:]), 1).flatten())


class Division(NamedTuple):
    """A matrix that llama.cpp stores as several: the rows of the first module, then the rows of the next module."""

    rows: Mapping[str, int]  # name of a module -> how many rows it has
    order: RowOrder | None = None  # applies to the rows before they are divided; None keeps transformers' order


class Layout(NamedTuple):
    """Converts a weight to another form in which llama.cpp stores it, and back."""

    to_file: Callable[[torch.Tensor], torch.Tensor]
    from_file: Callable[[torch.Tensor], torch.Tensor]


# Patterns equivalent to steps of tokenizer.json. Those of digits match the same text before and after bytes are mapped.
PUNCTUATION, DIGITS, THREE_DIGITS = r"[\p{P}\$\+<=>\^~\|`]+", r"\p{N}+", "[0-9][0-9][0-9]"


class PreTokenizer(NamedTuple):
    """How a byte-level BPE tokenizer splits a text before it merges bytes."""

    patterns: tuple[str, ...]  # regular expressions, applied in this order; most match every character
    ignore_merges: bool = False  # a piece that is a token is not split further, whatever the merges
    adds_bos: bool = False  # default for GGUF files that do not say whether texts start with the BOS token
    is_alias: bool = False  # only files of other programs have this name; exports write the name with the same patterns


class OlderRope(NamedTuple):
    """The keys of RoPE's parameters in the config.json of transformers 4."""

    theta: str = "rope_theta"
    local_theta: str | None = None  # base of layers with a sliding window
    partial: str = "partial_rotary_factor"


@dataclass(frozen=True)
class Family:
    """The rules for the models with one `model_type` that trials on a model cannot find.

    Every field is optional. With `title` and `tiny`, tests try all features with a tiny model, and the family has a row
    in docs/reference/models.md. With `modules`, it has GGUF files, which the next two groups of fields describe.
    Without `modules`, its models are still trained, and exported in transformers' format.

    `Settings` are the contents of a config.json, completed by `defaults`. In keys of GGUF, "{arch}" stands for
    llama.cpp's name of the architecture.
    """

    title: str = ""  # its name in docs/reference/models.md
    model_type: str = ""  # only if it contains hyphens; otherwise the name of the file is used
    is_encoder: bool = False  # its models do not generate text
    tiny: Settings = field(default_factory=dict)  # config.json of a tiny model for tests and trials
    tiny_exported: Settings = field(default_factory=dict)  # changes to `tiny` that make llama.cpp support the model

    # config.json and weights of transformers
    model_class: str = ""  # transformers' class, e.g. "LlamaForCausalLM"
    prefix: str = "model."  # before the names of all weights except those of the head; files without a head may omit it
    # Module of TransformerLM -> module of transformers; "{}" is the number of the block. Modules that TransformerLM
    # lacks are named in the same way.
    modules: Mapping[str, str] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()  # last parts of the names of Conv1D modules, whose weight is (in, out)
    sizes: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # key of DecoderConfig -> of config.json, GGUF
    norm_eps: tuple[str, str] = ("rms_norm_eps", "{arch}.attention.layer_norm_rms_epsilon")  # in config.json, in GGUF
    activation_key: str = "hidden_act"
    # Activation in config.json -> model.activation. Exports write the first one that matches.
    activations: Mapping[str, str] = field(default_factory=dict)
    defaults: Callable[[Settings], Settings] = lambda settings: {}  # values of keys that config.json may omit
    fixed: Settings = field(default_factory=dict)  # keys with the only value that TransformerLM and llama.cpp support
    # More keys of config.json that follow from the configuration of a decoder.
    derived: Callable[[DecoderConfig], Settings] = lambda config: {}
    # Boolean key of config.json -> values of model.bias with which it is true. llama.cpp requires false.
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dropouts: Mapping[str, str] = field(default_factory=dict)  # key of config.json -> key of ModelConfig
    rotary: bool = True  # it uses RoPE
    rope_theta: float | None = None  # base of RoPE if config.json has none

    # GGUF files
    gguf_name: str | None = None  # llama.cpp's name of the architecture; None: `model_type`
    # Among families with the same `gguf_name`, returns True for the metadata of its own files. The one family with None
    # has all files that no other recognizes.
    gguf_recognizes: Callable[[Metadata], bool] | None = None
    # Values of `activation_key` that llama.cpp computes. Files do not name it; they are read with the first one.
    gguf_activations: tuple[str, ...] = ()
    gguf_learned_activation: LearnedActivation | None = None
    gguf_settings: Mapping[str, str] = field(default_factory=dict)  # more required keys of config.json -> of GGUF
    gguf_optional: Mapping[str, str] = field(default_factory=dict)  # the same, for keys that may be missing or null
    gguf_fixed: Callable[[Settings], Settings] = lambda settings: {}  # values that llama.cpp assumes and files omit
    # Module of transformers -> module of llama.cpp, only for those that the package gguf does not know.
    gguf_modules: Mapping[str, str] = field(default_factory=dict)
    gguf_constants: Metadata = field(default_factory=dict)  # metadata that llama.cpp requires, but config.json lacks
    # (settings) -> the same for modules whose names in llama.cpp depend on the settings
    gguf_more_modules: Callable[[Settings], Mapping[str, str]] = lambda settings: {}
    # Weight of transformers -> weight of llama.cpp, only for those whose last parts differ, too.
    gguf_weights: Mapping[str, str] = field(default_factory=dict)
    # (settings) -> modules of transformers whose outputs llama.cpp computes with several modules
    gguf_divided: Callable[[Settings], Mapping[str, Division]] = lambda settings: {}
    gguf_alternating_experts: bool = False  # gate and up projections of experts alternate in one weight
    gguf_layers: LayerTypes | None = None
    # (name of a weight, settings) -> order of its rows in files; None: the same as in transformers.
    gguf_rows: Callable[[str, Settings], RowOrder | None] = lambda name, settings: None
    # (name of a weight, settings) -> its form in files after reordering and squeezing; None: the same
    gguf_layout: Callable[[str, Settings], Layout | None] = lambda name, settings: None
    gguf_gated_queries: bool = False  # q_proj also computes a gate of each query
    gguf_squeezed: Mapping[str, int] = field(default_factory=dict)  # end of a weight's name -> dimension to squeeze
    gguf_precise: tuple[str, ...] = ()  # ends of llama.cpp's names of matrices that must be stored as f32
    gguf_norm_offset: float = 0.0  # added to the weights of norms: 1 if transformers multiplies by 1 + weight
    gguf_yarn: bool = True  # llama.cpp computes YaRN like transformers
    gguf_rope_types: tuple[str, ...] = ()  # types of scaled RoPE that llama.cpp supports besides YaRN
    gguf_local_rope: bool = False  # sliding_attention layers have a RoPE of their own
    gguf_local_theta: float | None = None  # its base if a file has none; None: that of the other layers
    gguf_no_window: bool = False  # llama.cpp ignores sliding_window, so files get a context of at most that length
    gguf_needs_head: bool = False  # llama.cpp requires the output head even if it is tied to the embedding
    pre_tokenizers: Mapping[str, PreTokenizer] = field(default_factory=dict)  # by llama.cpp's name

    # Training. The first two are tried on the models of all families, because others may have the same layers.
    patches: tuple[Callable[[nn.Module], None], ...] = ()  # change a model in place so that it supports packed rows
    relative_attention: RelativeAttention | None = None
    # Last parts of the names of linear layers that get no adapter: the model reads their weights without calling them.
    lora_excludes: tuple[str, ...] = ()

    # Exports that transformers 4 can load
    older_rope: OlderRope | None = None  # None: the usual keys, and the same RoPE in all layers
    older_settings: Callable[[Settings], Settings] = lambda settings: {}  # more keys of version 4 for config.json

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


def block_pattern(name: str) -> tuple[str, str]:
    """Returns a weight's name with "{}" for the number of its block, and the number, which is empty outside blocks."""
    number = _NUMBER.search(name)
    return (name, "") if number is None else (_NUMBER.sub("{}", name, count=1), number[0])


def full_width_heads(settings: Settings) -> Settings:
    """Returns the head_dim with which all heads together have the width of the model."""
    return {"head_dim": settings["hidden_size"] // settings["num_attention_heads"]}


def windows(period: int) -> LayerTypes:
    """Returns layer types with sliding windows. In files that omit them, every `period`-th layer has full attention."""
    key = "{arch}.attention.sliding_window_pattern"

    def read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
        found = value_of(key) or period
        local = found if isinstance(found, list) else [(layer + 1) % found != 0 for layer in range(layers)]
        return {"layer_types": ["sliding_attention" if one else "full_attention" for one in local]}

    return LayerTypes(lambda settings: {key: [one == "sliding_attention" for one in settings["layer_types"]]}, read)


def renamed(**keys: str) -> Callable[[Settings], Settings]:
    """Returns `older_settings` that copy keys of version 5 to their names in version 4: `renamed(old="new")`."""
    return lambda settings: {old: settings[new] for old, new in keys.items() if new in settings}


def rope_of(settings: Settings) -> Mapping[str, Any]:
    """Returns the RoPE parameters of a config.json. Without scaling, rope_type is missing or "default"."""
    rope: Mapping[str, Any] = settings.get("rope_parameters") or settings
    return {**rope, "rope_type": "scaled"} if settings.get("rope_scaling") else rope
