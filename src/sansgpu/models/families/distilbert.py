from sansgpu.models.family import TINY_CONTEXT, Family

FAMILY = Family(
    title="DistilBERT",
    is_encoder=True,
    tiny={"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "max_position_embeddings": TINY_CONTEXT},
    gguf_name="bert",
)
