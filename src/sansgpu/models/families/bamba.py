from sansgpu.models.families import granitemoehybrid
from sansgpu.models.family import TINY_GQA, Family

FAMILY = Family(
    title="Bamba",
    tiny={**TINY_GQA, **granitemoehybrid.TINY_MAMBA2, "attn_layer_indices": [1]},
    lora_excludes=granitemoehybrid.FAMILY.lora_excludes,
)
