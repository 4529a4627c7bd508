"""The language model inside Qwen3.5, which alternates gated delta nets with gated attention."""

from sansgpu.models.family import TINY_HEAD_DIM, Family

# Three of four layers of the real models are recurrent. Their heads have twice as many values as keys.
TINY_DELTA_NET = {
    **TINY_HEAD_DIM, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
FAMILY = Family(
    title="Qwen3.5",
    tiny={
        **TINY_DELTA_NET,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        },
    },
)  # fmt: skip
