from sansgpu.models.family import TINY_CONTEXT, TINY_MHA, Family

FAMILY = Family(
    title="DeBERTa",
    is_encoder=True,
    tiny={
        **TINY_MHA, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": TINY_CONTEXT,
        "position_biased_input": False, "type_vocab_size": 0,
    },
)  # fmt: skip
