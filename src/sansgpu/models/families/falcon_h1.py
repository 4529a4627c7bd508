"""Falcon-H1, each of whose layers adds the outputs of attention and of Mamba 2."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sansgpu.models.families import bamba, granitemoehybrid, mamba2, qwen3
from sansgpu.models.families.mamba import SQUEEZED
from sansgpu.models.family import TENSOR_NAMES, TINY_HEAD_DIM, LayerTypes, Layout, Settings

_LAYER = "model.layers.{}"
_mixer_layout = mamba2.mixer_layout("mamba_n_groups", "mamba")
# Last parts of the names of modules -> keys of the numbers by which transformers multiplies their inputs or outputs.
# Files contain weights that are multiplied by them.
_MULTIPLIERS = {
    "embed_tokens": ("embedding_multiplier",),
    "lm_head": ("lm_head_multiplier",),
    "q_proj": ("attention_in_multiplier",),
    "k_proj": ("attention_in_multiplier", "key_multiplier"),
    "v_proj": ("attention_in_multiplier",),
    "o_proj": ("attention_out_multiplier",),
    "in_proj": ("ssm_in_multiplier",),
    "out_proj": ("ssm_out_multiplier",),
}


def _layout(name: str, settings: Settings) -> Layout | None:
    factor = _factor(name, settings)
    if factor is None:
        return _mixer_layout(name, settings)
    return Layout(lambda weight: weight * factor.to(weight.device), lambda weight: weight / factor.to(weight.device))


def _factor(name: str, settings: Settings) -> torch.Tensor | None:
    """Returns what multiplies a weight in files, a number or a column; None: nothing."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    factor = torch.tensor(1.0)
    for key in _MULTIPLIERS.get(module, ()):
        factor = factor * (settings.get(key) or 1.0)
    gate, down = settings.get("mlp_multipliers") or (1.0, 1.0)
    factor = factor * {"gate_proj": gate, "down_proj": down}.get(module, 1.0)
    if module == "in_proj":
        inner, states = settings["mamba_d_ssm"], settings["mamba_n_groups"] * settings["mamba_d_state"]
        parts = [inner, inner, states, states, settings["mamba_n_heads"]]
        each = torch.tensor(settings.get("ssm_multipliers") or [1.0] * len(parts))
        factor = factor * each.repeat_interleave(torch.tensor(parts))[:, None]
    return None if bool((factor == 1).all()) else factor


def _fixed(settings: Settings) -> Settings:
    gate_first = {"mamba_norm_before_gate": False} if settings.get("mamba_rms_norm") else {}
    return {**mamba2.unlimited_steps(settings), **gate_first}


def _write(settings: Settings) -> dict[str, Any]:
    return {"{arch}.ssm.inner_size": settings["mamba_d_ssm"]}


def _read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    inner = value_of("{arch}.ssm.inner_size")
    return {
        "mamba_d_ssm": inner,
        "mamba_d_head": inner // value_of("{arch}.ssm.time_step_rank"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in value_of(TENSOR_NAMES),
    }


FAMILY = replace(
    qwen3.FAMILY,
    title="Falcon-H1",
    tiny={
        **TINY_HEAD_DIM, **granitemoehybrid.TINY_MAMBA2, "mamba_d_ssm": 64, "mamba_d_head": 8,
        "mlp_multipliers": [0.9, 1.1], "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7], "key_multiplier": 1.2,
        "attention_in_multiplier": 0.9, "ssm_out_multiplier": 1.1, "embedding_multiplier": 1.5,
        "lm_head_multiplier": 0.5,
    },
    model_class="FalconH1ForCausalLM",
    modules={
        **{ours: name for ours, name in qwen3.FAMILY.modules.items() if not ours.endswith(("q_norm", "k_norm"))},
        **bamba.LATER_MODULES,
        "blocks.{}.mixer.in": f"{_LAYER}.mamba.in_proj",
        "blocks.{}.mixer.convolution": f"{_LAYER}.mamba.conv1d",
        "blocks.{}.mixer.norm": f"{_LAYER}.mamba.norm",
        "blocks.{}.mixer.out": f"{_LAYER}.mamba.out_proj",
    },
    fixed={
        "mamba_conv_bias": True, "mamba_proj_bias": False, "projectors_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    gguf_name="falcon-h1",
    gguf_settings=granitemoehybrid.SIZES,
    gguf_fixed=_fixed,
    gguf_layers=LayerTypes(_write, _read),
    gguf_weights={
        **mamba2.mixer_weights(f"{_LAYER}.mamba"),
        f"{_LAYER}.pre_ff_layernorm.weight": "blk.{}.ffn_norm",
    },
    gguf_layout=_layout,
    gguf_squeezed=SQUEEZED,
    gguf_precise=mamba2.PRECISE,
    lora_excludes=mamba2.FAMILY.lora_excludes,
)  # fmt: skip
