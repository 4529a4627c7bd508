"""The names under which transformers and llama.cpp store the weights and settings of decoders.

To add an architecture, add a `Layout` here and, if `TransformerLM` computes it, a record in config/architectures.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from sansgpu.config import ConfigError, ModelConfig
from sansgpu.config.architectures import ARCHITECTURES
from sansgpu.kernels.block_quantization import Matrix, QuantizedWeight
from sansgpu.models.modules import INIT_STD

_MASK = re.compile(r"\.attn\.(masked_)?bias$")  # GPT-2's causal mask, a buffer that old checkpoints contain
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_QKV = re.compile(r"(?<=\.attention\.)[qkv](?=\.)")

Weights = dict[str, torch.Tensor]
Settings = Mapping[str, Any]  # the contents of a config.json


@dataclass(frozen=True)
class Layout:
    """How transformers and llama.cpp store an architecture."""

    model_class: str  # transformers' class
    prefix: str  # prefix of all weight names except the head's; checkpoints of a base model without head omit it
    modules: Mapping[str, str]  # TransformerLM's module -> transformers' module; `{}` is the block's number
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
    gguf_rope_scaling: bool = False  # whether llama.cpp supports Llama 3's RoPE scaling
    gguf_permutes: bool = False  # whether llama.cpp stores the two rows of a rotary pair next to each other
    gguf_needs_head: bool = False  # whether llama.cpp requires the output head even if it is tied

    @property
    def gguf_keys(self) -> dict[str, str]:
        """Maps keys of config.json to keys of GGUF."""
        return dict([*self.sizes.values(), self.norm_eps])

    def is_transposed(self, name: str) -> bool:
        """Returns True if transformers stores the transpose of a weight."""
        *_, module, parameter = name.split(".")
        return parameter == "weight" and module in self.transposed


def _modern_defaults(settings: Settings) -> dict[str, Any]:
    heads = settings["num_attention_heads"]
    return {
        "head_dim": settings["hidden_size"] // heads,
        "num_key_value_heads": heads,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def _gpt2_defaults(settings: Settings) -> dict[str, Any]:
    return {"n_inner": 4 * settings["n_embd"], "activation_function": "gelu_new", "tie_word_embeddings": True}


_ATTENTION_BIAS = {"attention_bias": ("attention", "all")}
_QWEN3 = Layout(
    model_class="Qwen3ForCausalLM",
    prefix="model.",
    modules={
        "embedding": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        "blocks.{}.attention_norm": "model.layers.{}.input_layernorm",
        "blocks.{}.feed_forward_norm": "model.layers.{}.post_attention_layernorm",
        "blocks.{}.attention.q": "model.layers.{}.self_attn.q_proj",
        "blocks.{}.attention.k": "model.layers.{}.self_attn.k_proj",
        "blocks.{}.attention.v": "model.layers.{}.self_attn.v_proj",
        "blocks.{}.attention.o": "model.layers.{}.self_attn.o_proj",
        "blocks.{}.attention.q_norm": "model.layers.{}.self_attn.q_norm",
        "blocks.{}.attention.k_norm": "model.layers.{}.self_attn.k_norm",
        "blocks.{}.feed_forward.gate": "model.layers.{}.mlp.gate_proj",
        "blocks.{}.feed_forward.up": "model.layers.{}.mlp.up_proj",
        "blocks.{}.feed_forward.down": "model.layers.{}.mlp.down_proj",
    },
    sizes={
        "d_model": ("hidden_size", "{arch}.embedding_length"),
        "n_heads": ("num_attention_heads", "{arch}.attention.head_count"),
        "kv_heads": ("num_key_value_heads", "{arch}.attention.head_count_kv"),
        "head_dim": ("head_dim", "{arch}.attention.key_length"),
        "n_layers": ("num_hidden_layers", "{arch}.block_count"),
        "d_ff": ("intermediate_size", "{arch}.feed_forward_length"),
        "max_seq_len": ("max_position_embeddings", "{arch}.context_length"),
    },
    norm_eps=("rms_norm_eps", "{arch}.attention.layer_norm_rms_epsilon"),
    activation_key="hidden_act",
    activations={"silu": "swiglu"},
    defaults=_modern_defaults,
    gguf_activations=("silu",),
    fixed={"use_sliding_window": False},
    biases=_ATTENTION_BIAS,
    dropouts={},
    rope_theta=10_000.0,
)
_GPT2 = Layout(
    model_class="GPT2LMHeadModel",
    prefix="transformer.",
    modules={
        "embedding": "transformer.wte",
        "position": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "blocks.{}.attention_norm": "transformer.h.{}.ln_1",
        "blocks.{}.feed_forward_norm": "transformer.h.{}.ln_2",
        "blocks.{}.attention.qkv": "transformer.h.{}.attn.c_attn",
        "blocks.{}.attention.o": "transformer.h.{}.attn.c_proj",
        "blocks.{}.feed_forward.up": "transformer.h.{}.mlp.c_fc",
        "blocks.{}.feed_forward.down": "transformer.h.{}.mlp.c_proj",
    },
    sizes={
        "d_model": ("n_embd", "{arch}.embedding_length"),
        "n_heads": ("n_head", "{arch}.attention.head_count"),
        "n_layers": ("n_layer", "{arch}.block_count"),
        "d_ff": ("n_inner", "{arch}.feed_forward_length"),
        "max_seq_len": ("n_positions", "{arch}.context_length"),
    },
    norm_eps=("layer_norm_epsilon", "{arch}.attention.layer_norm_epsilon"),
    activation_key="activation_function",
    activations={"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"},
    defaults=_gpt2_defaults,
    gguf_activations=("gelu_new", "gelu_pytorch_tanh"),
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    biases={},
    dropouts={"embd_pdrop": "dropout", "resid_pdrop": "dropout", "attn_pdrop": "attention_dropout"},
    transposed=("c_attn", "c_proj", "c_fc"),
    rotary=False,
)
LAYOUTS = {  # by model_type in config.json, which is also llama.cpp's name of the architecture
    "gpt2": _GPT2,
    "llama": replace(
        _QWEN3,
        model_class="LlamaForCausalLM",
        fixed={},
        biases={**_ATTENTION_BIAS, "mlp_bias": ("all",)},
        gguf_rope_scaling=True,
        gguf_permutes=True,
    ),
    "qwen2": replace(_QWEN3, model_class="Qwen2ForCausalLM"),  # for fine-tuning; TransformerLM does not compute it
    "qwen3": _QWEN3,
    "apertus": replace(
        _QWEN3,
        model_class="ApertusForCausalLM",
        modules={
            **_QWEN3.modules,
            "blocks.{}.attention_norm": "model.layers.{}.attention_layernorm",
            "blocks.{}.feed_forward_norm": "model.layers.{}.feedforward_layernorm",
        },
        activations={"relu2": "relu2"},
        defaults=lambda settings: {**_modern_defaults(settings), "hidden_act": "xielu"},
        gguf_activations=("relu2", "xielu"),
        rope_theta=None,  # no default, because transformers' default has RoPE scaling
        gguf_rope_scaling=True,
        gguf_needs_head=True,
    ),
}


def to_hugging_face(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> Weights:
    """Converts weights to transformers' names and layout. Omits a tied head, as transformers does."""
    layout = LAYOUTS[config.decoder.name]
    fused = "blocks.{}.attention.qkv" in layout.modules
    renamed: Weights = {}
    for name, tensor in weights.items():
        part = _QKV.search(name) if fused else None
        if part is not None:
            if part[0] != "q":
                continue
            tensor = torch.cat([weights[_QKV.sub(each, name)] for each in "qkv"])
            name = _QKV.sub("qkv", name)
        hf_name = _translate(name, layout.modules)
        renamed[hf_name] = (tensor.T if layout.is_transposed(hf_name) else tensor).contiguous()
    return renamed


def from_hugging_face(config: ModelConfig, weights: Mapping[str, Matrix]) -> dict[str, Matrix]:
    """Inverts `to_hugging_face`. Quantized matrices, which are always (outputs, inputs), stay quantized."""
    layout = LAYOUTS[config.decoder.name]
    modules = {hf_name: name for name, hf_name in layout.modules.items()}
    renamed: dict[str, Matrix] = {}
    for name_in_file, value in weights.items():
        hf_name = name_in_file if name_in_file.startswith((layout.prefix, "lm_head.")) else layout.prefix + name_in_file
        if _MASK.search(hf_name) or (hf_name == "lm_head.weight" and config.tie_embeddings):
            continue
        name = _translate(hf_name, modules)
        parts = "qkv" if ".qkv." in name else "q"
        is_transposed = layout.is_transposed(hf_name)
        for part, piece in zip(parts, _in_pieces(value, len(parts), is_transposed), strict=True):
            renamed[name.replace(".qkv.", f".{part}.")] = piece
    return renamed


def _in_pieces(value: Matrix, count: int, is_transposed: bool) -> list[Matrix]:
    """Splits a weight along its outputs. `is_transposed` does not apply to quantized weights."""
    if isinstance(value, QuantizedWeight):
        return [QuantizedWeight(piece.contiguous(), value.format) for piece in value.data.chunk(count)]
    return [piece.contiguous() for piece in (value.T if is_transposed else value).chunk(count)]


def _translate(name: str, modules: Mapping[str, str]) -> str:
    layer = _LAYER.search(name)
    module, _, parameter = _LAYER.sub("{}", name, count=1).rpartition(".")
    if module not in modules:
        raise ConfigError(f"this layout has no weight named {name}.")
    return f"{modules[module].format(layer[0] if layer else '')}.{parameter}"


def module_names(layout: Layout, layers: int) -> Iterator[str]:
    """Yields transformers' names of the modules with weights."""
    for pattern in layout.modules.values():
        yield from (pattern.format(layer) for layer in range(layers)) if "{}" in pattern else (pattern,)


def rope_of(settings: Settings) -> Mapping[str, Any]:
    """Returns the RoPE parameters of a config.json. Without scaling, rope_type is missing or "default"."""
    rope: Mapping[str, Any] = settings.get("rope_parameters") or settings
    return {**rope, "rope_type": "scaled"} if settings.get("rope_scaling") else rope


def with_default_settings(settings: Settings) -> dict[str, Any]:
    """Returns the settings with defaults for optional keys that are missing. Raises KeyError if a required one is."""
    present = {key: value for key, value in settings.items() if value is not None}
    layout = LAYOUTS.get(present["model_type"])
    return present if layout is None else {**layout.defaults(present), **present}


def hugging_face_config(config: ModelConfig, end_id: int) -> dict[str, Any]:
    """Returns the config.json of an exported model."""
    layout = LAYOUTS[config.decoder.name]
    theta = {"rope_theta": config.rope_theta}
    rope = {**theta, "rope_parameters": {"rope_type": "default", **theta}}
    return {
        "architectures": [layout.model_class],
        "model_type": config.decoder.name,
        **{key: getattr(config, ours) for ours, (key, _) in layout.sizes.items()},
        layout.norm_eps[0]: config.decoder.norm_eps,
        **(rope if layout.rotary else {}),
        layout.activation_key: next(key for key, ours in layout.activations.items() if ours == config.activation),
        **{key: config.biased in values for key, values in layout.biases.items()},
        **{key: getattr(config, ours) for key, ours in layout.dropouts.items()},
        **layout.fixed,
        "pad_token_id": None,  # Apertus' default is 3, and transformers does not train the padding token's embedding
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "initializer_range": INIT_STD,
        "dtype": "float32",
    }


def model_config(settings: Settings) -> ModelConfig | None:
    """Converts a config.json to a ModelConfig; returns None if `TransformerLM` does not compute the model."""
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        return None
    architecture, layout, settings = ARCHITECTURES[name], LAYOUTS[name], with_default_settings(settings)
    activation = layout.activations.get(settings[layout.activation_key])
    flags = {key: bool(settings.get(key)) for key in layout.biases}
    bias = next((b for b in architecture.bias if flags == {key: b in v for key, v in layout.biases.items()}), None)
    fixed = {layout.norm_eps[0]: architecture.norm_eps, **layout.fixed}
    if activation is None or bias is None or any(settings.get(key, value) != value for key, value in fixed.items()):
        return None
    values = {ours: settings[key] for ours, (key, _) in layout.sizes.items()}
    values |= {ours: settings.get(key, 0.0) for key, ours in layout.dropouts.items()}
    if layout.rotary:
        rope = rope_of(settings)
        values["rope_theta"] = rope.get("rope_theta", layout.rope_theta)
        if rope.get("rope_type", "default") != "default" or values["rope_theta"] is None:
            return None
        if values["d_model"] != values.pop("head_dim") * values["n_heads"]:
            return None
        values["n_kv_heads"] = values.pop("kv_heads")
    selected = {"architecture": name, "activation": activation, "bias": bias}
    tables = {"vocab_size": settings["vocab_size"], "tie_embeddings": settings["tie_word_embeddings"]}
    return ModelConfig.model_validate({**selected, **tables, **values})
