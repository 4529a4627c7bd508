from dataclasses import replace

from sansgpu.models.families import arcee
from sansgpu.models.families.phi import LAYER_NORM_EPS

FAMILY = replace(
    arcee.FAMILY,
    title="Jais 2",
    model_class="Jais2ForCausalLM",
    norm_eps=LAYER_NORM_EPS,
    fixed={"attention_bias": True, "mlp_bias": True},
    biases={},
    gguf_rows=lambda name, settings: None,
)
