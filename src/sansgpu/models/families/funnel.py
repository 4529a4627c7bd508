from sansgpu.models.family import Family

FAMILY = Family(
    title="Funnel Transformer",
    is_encoder=True,
    tiny={
        "architectures": ["FunnelModel"],  # transformers has two classes
        "d_model": 64, "d_inner": 96, "n_head": 4, "d_head": 16, "block_sizes": [1, 1], "num_decoder_layers": 1,
    },
)  # fmt: skip
