from sansgpu.models.family import TINY_MHA, Family

FAMILY = Family(
    title="Megatron-BERT",
    model_type="megatron-bert",
    is_encoder=True,
    tiny=TINY_MHA,
)
