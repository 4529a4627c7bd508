"""The language model inside Gemma 3n."""

from sansgpu.models.families import gemma3_text
from sansgpu.models.family import TINY_HEAD_DIM, Family

FAMILY = Family(
    title="Gemma 3n",
    tiny={
        **TINY_HEAD_DIM, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 32, "num_kv_shared_layers": 2, "intermediate_size": [96] * 4, "laurel_rank": 16,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 1024,
    },
    gguf_name="gemma3n",
    older_rope=gemma3_text.FAMILY.older_rope,
)  # fmt: skip
