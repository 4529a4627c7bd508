"""Falcon-Mamba, which normalizes the step sizes and the projections of the state."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sansgpu.models.families import mamba
from sansgpu.models.family import LayerTypes, Settings

_NORMALIZES = "mamba.ssm.dt_b_c_rms"


def _write(settings: Settings) -> dict[str, Any]:
    return {**mamba.write_layers(settings), _NORMALIZES: True}


def _read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    """llama.cpp has one epsilon for all norms; in the model's own config.json, that of the mixers is smaller."""
    return {"mixer_rms_eps": value_of(mamba.FAMILY.norm_eps[1])}


FAMILY = replace(
    mamba.FAMILY,
    title="Falcon-Mamba",
    tiny_exported={"mixer_rms_eps": 1e-5},
    model_class="FalconMambaForCausalLM",
    gguf_name="mamba",
    gguf_recognizes=lambda metadata: bool(metadata.get(_NORMALIZES)),
    gguf_layers=LayerTypes(_write, _read),
)
