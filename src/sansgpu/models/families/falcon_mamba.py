"""Falcon-Mamba, which normalizes the step sizes and the projections of the state."""

from dataclasses import replace

from sansgpu.models.families import mamba
from sansgpu.models.family import LayerTypes

_NORMALIZES = "mamba.ssm.dt_b_c_rms"
_LAYERS = mamba.FAMILY.gguf_layers
assert _LAYERS is not None
_written = _LAYERS.write
FAMILY = replace(
    mamba.FAMILY,
    title="Falcon-Mamba",
    # llama.cpp has one epsilon for all norms. That of Falcon-Mamba's mixers is smaller, which changes little.
    tiny_exported={"mixer_rms_eps": 1e-5},
    model_class="FalconMambaForCausalLM",
    gguf_name="mamba",
    gguf_recognizes=lambda metadata: bool(metadata.get(_NORMALIZES)),
    gguf_layers=LayerTypes(lambda settings: {**_written(settings), _NORMALIZES: True}, _LAYERS.read),
)
