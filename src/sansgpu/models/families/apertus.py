"""Apertus, whose xIELU (arXiv 2411.13010) has learned parameters."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from sansgpu.models.families import qwen3
from sansgpu.models.family import LearnedActivation, Metadata, Settings, Weights

# Parameters of xIELU: Hugging Face's name -> (GGUF's key, the value with which xIELU equals ReLU squared). With these
# values softplus(alpha_p) is 1 and softplus(alpha_n) is 0.
_XIELU = {
    "alpha_p": ("xielu.alpha_p", float(np.log(np.e - 1))),
    "alpha_n": ("xielu.alpha_n", -200.0),
    "beta": ("xielu.beta", 0.0),
    "eps": ("xielu.eps", -1e-6),
}


def _write(settings: Settings, value_of: Callable[[str], float]) -> dict[str, list[float]]:
    learned, layers = settings["hidden_act"] == "xielu", range(settings["num_hidden_layers"])
    return {
        key: [value_of(_weight(layer, parameter)) if learned else relu_squared for layer in layers]
        for parameter, (key, relu_squared) in _XIELU.items()
    }


def _read(metadata: Metadata) -> tuple[str, Weights]:
    """Returns relu2 without weights if the xIELU of every layer equals ReLU squared."""
    pairs = [(value, np.float32(expected)) for key, expected in _XIELU.values() for value in metadata[key]]
    if all(np.float32(value) == expected for value, expected in pairs):
        return "relu2", {}
    return "xielu", {
        _weight(layer, parameter): torch.tensor([value] if parameter.startswith("alpha") else value)
        for parameter, (key, _) in _XIELU.items()
        for layer, value in enumerate(metadata[key])
    }


def _weight(layer: int, parameter: str) -> str:
    return f"model.layers.{layer}.mlp.act_fn.{parameter}"


FAMILY = replace(
    qwen3.FAMILY,
    title="Apertus",
    model_class="ApertusForCausalLM",
    modules={
        **qwen3.FAMILY.modules,
        "blocks.{}.attention_norm": "model.layers.{}.attention_layernorm",
        "blocks.{}.feed_forward_norm": "model.layers.{}.feedforward_layernorm",
    },
    activations={"relu2": "relu2"},
    defaults=lambda settings: {**qwen3.common_defaults(settings), "hidden_act": "xielu"},
    gguf_activations=("relu2", "xielu"),
    gguf_learned_activation=LearnedActivation(_write, _read),
    rope_theta=None,  # no default, because transformers' default has RoPE scaling
    gguf_rope_types=("llama3",),
    gguf_needs_head=True,
)
