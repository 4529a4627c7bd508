"""Mamba 2, whose states decay at one rate for each head."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import torch

from sansgpu.models.families import mamba
from sansgpu.models.family import LayerTypes, Layout, Settings

# llama.cpp stores a column for values that transformers has for each head.
COLUMN = Layout(lambda values: values[:, None], lambda column: column[:, 0])
RATES = Layout(lambda logs: mamba.RATES.to_file(logs)[:, None], lambda column: mamba.RATES.from_file(column[:, 0]))
PRECISE = (*mamba.PRECISE, ".ssm_norm.weight")


def mixer_weights(mixer: str) -> dict[str, str]:
    """Returns `gguf_weights` of the Mamba 2 layers that are modules with the name `mixer`."""
    return {**mamba.mixer_weights(mixer), f"{mixer}.dt_bias": "blk.{}.ssm_dt.bias"}


def mixer_layout(groups: str, mixer: str) -> Callable[[str, Settings], Layout | None]:
    """Returns `gguf_layout`; `groups` is the key in config.json of the number of groups that a layer normalizes."""

    def layout(name: str, settings: Settings) -> Layout | None:
        if name.endswith(".A_log"):
            return RATES
        if name.endswith(f".{mixer}.D"):
            return COLUMN
        return in_groups(int(settings[groups])) if name.endswith(f".{mixer}.norm.weight") else None

    return layout


def in_groups(count: int) -> Layout:
    """Returns the layout of a norm whose weight llama.cpp stores with a row for each group."""
    return Layout(lambda weight: weight.reshape(count, -1), torch.flatten)


def sizes(heads: str, state: str, groups: str, convolution: str) -> dict[str, str]:
    """Returns `gguf_settings` for keys of config.json: counts of heads, states, groups and inputs of a convolution."""
    return {
        heads: "{arch}.ssm.time_step_rank",
        state: "{arch}.ssm.state_size",
        groups: "{arch}.ssm.group_count",
        convolution: "{arch}.ssm.conv_kernel",
    }


def unlimited_steps(settings: Settings) -> Settings:
    """Returns the only limits of step sizes that llama.cpp supports, in the type that the settings have."""
    limits = settings.get("time_step_limit")
    return {"time_step_limit": limits if limits is not None and tuple(limits) == (0.0, inf) else (0.0, inf)}


def _write(settings: Settings) -> dict[str, Any]:
    return {**mamba.write_layers(settings), "{arch}.ssm.inner_size": settings["num_heads"] * settings["head_dim"]}


def _read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    inner = value_of("{arch}.ssm.inner_size")
    return {
        "head_dim": inner // value_of("{arch}.ssm.time_step_rank"),
        "expand": inner // value_of("{arch}.embedding_length"),
    }


_MIXER = "backbone.layers.{}.mixer"
FAMILY = replace(
    mamba.FAMILY,
    title="Mamba 2",
    tiny={
        "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2,
        "chunk_size": 16,
    },
    model_class="Mamba2ForCausalLM",
    modules={
        **{ours: theirs for ours, theirs in mamba.FAMILY.modules.items() if not ours.endswith((".inputs", ".steps"))},
        "blocks.{}.mixer.norm": f"{_MIXER}.norm",
    },
    defaults=lambda settings: {"hidden_act": "silu", "tie_word_embeddings": False},
    gguf_settings=sizes("num_heads", "state_size", "n_groups", "conv_kernel"),
    gguf_fixed=unlimited_steps,
    gguf_layers=LayerTypes(_write, _read),
    gguf_weights=mixer_weights(_MIXER),
    gguf_layout=mixer_layout("n_groups", "mixer"),
    gguf_precise=PRECISE,
)  # fmt: skip
