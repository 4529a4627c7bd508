from sansgpu.models.family import TINY_MHA, Family

FAMILY = Family(
    title="RecurrentGemma",
    tiny={
        **TINY_MHA, "num_hidden_layers": 3, "num_key_value_heads": 1, "lru_width": 64, "attention_window_size": 32,
    },
)  # fmt: skip
