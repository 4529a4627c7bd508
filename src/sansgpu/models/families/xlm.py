from sansgpu.models.family import TINY_CONTEXT, Family, renamed

FAMILY = Family(
    title="XLM",
    is_encoder=True,
    tiny={"emb_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": TINY_CONTEXT},
    older_settings=renamed(bos_index="bos_token_id", eos_index="eos_token_id", pad_index="pad_token_id"),
)
