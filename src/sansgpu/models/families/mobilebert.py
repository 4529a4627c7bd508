from sansgpu.models.family import TINY_MHA, Family

FAMILY = Family(
    title="MobileBERT",
    is_encoder=True,
    tiny={**TINY_MHA, "embedding_size": 32, "intra_bottleneck_size": 32, "num_feedforward_networks": 2},
)
