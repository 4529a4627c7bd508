"""The language model inside Qwen3.5, which alternates gated delta nets with gated attention."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sansgpu.models.architectures import CONVOLUTION_WIDTH, DecoderConfig
from sansgpu.models.families import qwen3
from sansgpu.models.families.mamba import RATES, SQUEEZED
from sansgpu.models.family import TINY_HEAD_DIM, LayerTypes, Layout, PreTokenizer, RowOrder, Settings, exchanged

TINY_DELTA_NET = {
    **TINY_HEAD_DIM, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_INTERVAL, _SECTIONS = "{arch}.full_attention_interval", "{arch}.rope.dimension_sections"
_DEFAULT_SECTIONS = [11, 11, 10]  # dimensions of a head that RoPE rotates by time, height and width
_LAYER = "model.layers.{}"
_NET = f"{_LAYER}.linear_attn"
_SPLIT = (  # Qwen2's, in which words contain marks such as accents
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UNCHANGED = Layout(lambda weight: weight, lambda weight: weight)


def _value_heads(name: str, settings: Settings) -> RowOrder | None:
    """Each key head serves several value heads, which llama.cpp puts in the order of their places beside key heads."""
    keys, values = settings["linear_num_key_heads"], settings["linear_num_value_heads"]
    before = 2 * keys * settings["linear_key_head_dim"]
    heads, size = (keys, values // keys), settings["linear_value_head_dim"]
    if ".linear_attn." not in name or keys == values:
        return None
    if name.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")):
        return exchanged(heads, 0)
    if name.endswith(".in_proj_z.weight"):
        return exchanged((*heads, size), 0)
    return exchanged((*heads, size), 0, before) if name.endswith((".in_proj_qkv.weight", ".conv1d.weight")) else None


def net_layout(name: str, settings: Settings) -> Layout | None:
    """Returns the layout of a weight of a gated delta net, except for the order of its heads."""
    if name.endswith(".A_log"):
        return RATES
    return _UNCHANGED if name.endswith(".linear_attn.norm.weight") else None  # this norm alone multiplies by its weight


def _layout(name: str, settings: Settings) -> Layout | None:
    if (layout := net_layout(name, settings)) is not None:
        return layout
    order = _value_heads(name.replace(".out_proj.", ".in_proj_z."), settings)
    if ".out_proj." not in name or order is None:
        return None
    return Layout(lambda weight: order.to_file(weight.T).T, lambda weight: order.from_file(weight.T).T)


def _derived(config: DecoderConfig) -> Settings:
    pairs = config.head_dim // 2
    return {
        "layer_types": ["full_attention" if config.attends(n) else "linear_attention" for n in range(config.n_layers)],
        "linear_conv_kernel_dim": CONVOLUTION_WIDTH,
        "linear_num_key_heads": config.kv_heads,
        "linear_num_value_heads": config.n_heads,
        "linear_key_head_dim": config.head_dim,
        "linear_value_head_dim": config.head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": 1.0,
            "mrope_section": [(pairs + 2 - axis) // 3 for axis in range(3)],  # positions are equal on all axes
        },
    }


def _write(settings: Settings) -> dict[str, Any]:
    sections = settings["rope_parameters"].get("mrope_section") or _DEFAULT_SECTIONS
    return {**write_nets(settings), _SECTIONS: [*sections, 0]}


def write_nets(settings: Settings) -> dict[str, Any]:
    return {
        _INTERVAL: settings["layer_types"].index("full_attention") + 1,
        "{arch}.ssm.inner_size": settings["linear_num_value_heads"] * settings["linear_value_head_dim"],
    }


def _read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    found = read_nets(value_of, layers)
    found["rope_parameters"]["mrope_section"] = (value_of(_SECTIONS) or _DEFAULT_SECTIONS)[:3]
    return found


def read_nets(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    interval, layers = value_of(_INTERVAL) or 4, layers - (value_of("{arch}.nextn_predict_layers") or 0)
    return {
        "num_hidden_layers": layers,
        "layer_types": _types(layers, interval),
        "linear_value_head_dim": value_of("{arch}.ssm.inner_size") // value_of("{arch}.ssm.time_step_rank"),
        "rope_parameters": {"partial_rotary_factor": 1.0},
    }


def _types(layers: int, interval: int) -> list[str]:
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]


def _fixed(settings: Settings) -> Settings:
    types = settings["layer_types"]
    interval = types.index("full_attention") + 1 if "full_attention" in types else 1
    return {
        "layer_types": _types(len(types), interval),
        "linear_value_head_dim": settings["linear_key_head_dim"],
    }


FAMILY = replace(
    qwen3.FAMILY,
    title="Qwen3.5",
    tiny={
        **TINY_DELTA_NET,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        },
    },
    model_class="Qwen3_5ForCausalLM",
    modules={
        **qwen3.FAMILY.modules,
        "blocks.{}.net": _NET,
        "blocks.{}.net.qkv": f"{_NET}.in_proj_qkv",
        "blocks.{}.net.gate": f"{_NET}.in_proj_z",
        "blocks.{}.net.steps": f"{_NET}.in_proj_b",
        "blocks.{}.net.decays": f"{_NET}.in_proj_a",
        "blocks.{}.net.convolution": f"{_NET}.conv1d",
        "blocks.{}.net.norm": f"{_NET}.norm",
        "blocks.{}.net.out": f"{_NET}.out_proj",
    },
    fixed={},
    derived=_derived,
    gguf_name="qwen35",
    gguf_settings={
        "linear_conv_kernel_dim": "{arch}.ssm.conv_kernel",
        "linear_key_head_dim": "{arch}.ssm.state_size",
        "linear_num_key_heads": "{arch}.ssm.group_count",
        "linear_num_value_heads": "{arch}.ssm.time_step_rank",
    },
    gguf_fixed=_fixed,
    gguf_layers=LayerTypes(_write, _read),
    gguf_weights={f"{_NET}.A_log": "blk.{}.ssm_a", f"{_NET}.dt_bias": "blk.{}.ssm_dt.bias"},
    gguf_rows=_value_heads,
    gguf_layout=_layout,
    gguf_gated_queries=True,
    gguf_squeezed=SQUEEZED,
    gguf_precise=(".ssm_conv1d.weight",),
    gguf_norm_offset=1.0,
    pre_tokenizers={"qwen35": PreTokenizer((_SPLIT,))},
)  # fmt: skip
