"""Ministral 3, whose queries grow with their position beyond the context of pretraining."""

from dataclasses import replace

from sansgpu.models.families import llama
from sansgpu.models.family import TINY_HEAD_DIM

FAMILY = replace(
    llama.FAMILY,
    title="Ministral 3",
    tiny={
        **TINY_HEAD_DIM, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 16,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    model_class="Ministral3ForCausalLM",
    activations={},
    biases={},
    gguf_name="mistral3",
    gguf_rope_types=(),
    gguf_no_window=True,
    pre_tokenizers={},
)  # fmt: skip
