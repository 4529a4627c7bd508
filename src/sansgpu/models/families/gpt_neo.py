from sansgpu.models.family import TINY_CONTEXT, Family

FAMILY = Family(
    title="GPT-Neo",
    tiny={
        "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4, "window_size": 32,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": TINY_CONTEXT,
    },
)  # fmt: skip
