"""Granite with sliding windows and attention sinks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sansgpu.models.families import granite
from sansgpu.models.families.gpt_oss import SINKS
from sansgpu.models.family import SLIDING_WINDOW, LayerTypes, Settings, windows

_ROTATES, _THETA = "{arch}.attention.rope_pattern", "{arch}.rope.freq_base"
_WINDOWS = windows(4)


def _write(settings: Settings) -> dict[str, Any]:
    thetas = settings["layer_rope_theta"]
    return {**_WINDOWS.write(settings), _ROTATES: [theta != 0 for theta in thetas], _THETA: float(max(thetas) or 1.0)}


def _read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    rotates = value_of(_ROTATES) or [True] * layers
    theta = value_of(_THETA) or 10_000.0
    return {**_WINDOWS.read(value_of, layers), "layer_rope_theta": [theta if one else 0 for one in rotates]}


def _fixed(settings: Settings) -> Settings:
    """Returns the bases of RoPE in all layers, of which llama.cpp has only one; layers without RoPE have 0."""
    theta = max(settings["layer_rope_theta"])
    return {"layer_rope_theta": [theta if one else 0 for one in settings["layer_rope_theta"]]}


FAMILY = replace(
    granite.FAMILY,
    title="Granite-SWA",
    tiny={**granite.FAMILY.tiny, "sliding_window": 32, "layer_rope_theta": [0, 10_000.0]},
    model_class="GraniteSWAForCausalLM",
    gguf_settings={**granite.FAMILY.gguf_settings, **SLIDING_WINDOW},
    gguf_fixed=_fixed,
    gguf_layers=LayerTypes(_write, _read),
    gguf_weights=SINKS,
)
